"""A seed decides everything, even with slaves."""

from __future__ import annotations

import pytest

from turbopump.testing.simulate.run import simulate


@pytest.mark.slow
@pytest.mark.parametrize("seed", [21, 38])
def test_the_same_seed_gives_the_same_history(seed: int) -> None:
    assert simulate(seed).digest == simulate(seed).digest
