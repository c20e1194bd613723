"""How long to wait before a retry."""

from __future__ import annotations

import pytest

from turbopump.errors import ConnectFailed
from turbopump.spark.reading.retry import BACKOFF_MAX_S, backoff_s, with_retries
from turbopump.testing import virtual_time


def test_pauses_grow_to_the_longest_and_stay_there() -> None:
    assert [backoff_s(attempt) for attempt in (0, 1, 5)] == pytest.approx([0.1, 0.2, 3.2])
    assert {backoff_s(attempt) for attempt in (6, 7, 1023, 1024, 10**6)} == {BACKOFF_MAX_S}


@virtual_time()
async def test_many_retries() -> None:
    left = 1100

    async def call() -> str:
        nonlocal left
        left -= 1
        if left:
            raise ConnectFailed("away")
        return "there"

    assert await with_retries(call, 2000, "it") == "there"
