"""Logging at most once a minute."""

from __future__ import annotations

import logging

import pytest

from turbopump.machine.log_limit import KEYS_MAX, LOGGED_AGAIN_MS, LogLimit
from turbopump.testing import VirtualClock


def test_something_is_logged_once_a_minute_by_its_key(caplog: pytest.LogCaptureFixture) -> None:
    clock, log = VirtualClock(), logging.getLogger("once")
    limit = LogLimit(clock)
    caplog.set_level(logging.DEBUG, "once")

    def levels(*keys: str) -> list[str]:
        caplog.clear()
        for key in keys:
            limit.log(key, log, logging.WARNING, "%s is down", key)
        return [record.levelname for record in caplog.records]

    assert levels("a", "a", "b") == ["WARNING", "DEBUG", "WARNING"]
    clock.advance_ns((LOGGED_AGAIN_MS - 1) * 1_000_000)
    assert levels("a") == ["DEBUG"]
    clock.advance_ns(1_000_000)
    assert levels("a", "a") == ["WARNING", "DEBUG"]


def test_a_log_limit_tells_a_limited_number_of_keys_apart() -> None:
    clock = VirtualClock()
    limit = LogLimit(clock)
    assert all(limit.is_due(number) for number in range(KEYS_MAX))
    assert not limit.is_due("one more")
    clock.advance_ns(LOGGED_AGAIN_MS * 1_000_000)
    assert limit.is_due("one more")
    assert limit.is_due(0)


class CountedKey:
    """Counts how often keys are looked up or copied."""

    lookups = 0

    def __hash__(self) -> int:
        CountedKey.lookups += 1
        return id(self)


def test_further_keys_cost_no_more_than_the_first() -> None:
    clock = VirtualClock()
    limit, keys = LogLimit(clock), [CountedKey() for _ in range(KEYS_MAX)]
    assert all(map(limit.is_due, keys))
    CountedKey.lookups = 0
    further = [CountedKey() for _ in range(100)]
    assert not any(map(limit.is_due, further))
    assert CountedKey.lookups <= 5 * len(further)
