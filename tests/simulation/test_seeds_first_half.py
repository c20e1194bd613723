"""The first half of the seeds that every test run simulates."""

from __future__ import annotations

import pytest

from simulations import check_seeds, chunks


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(range(100), 20), ids=str)
def test_seeds(seeds: range) -> None:
    check_seeds(seeds)


@pytest.mark.long
@pytest.mark.parametrize("seeds", chunks(range(1000, 3500), 250), ids=str)
def test_many_seeds(seeds: range) -> None:
    check_seeds(seeds)
