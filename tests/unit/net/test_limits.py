from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from turbopump.errors import InvalidArgument
from turbopump.net.limits import DEFAULT_LIMITS, ConnectionLimits
from turbopump.net.pool_config import PoolConfig
from turbopump.net.server import ServerConfig


@pytest.mark.parametrize("name", [field.name for field in fields(ConnectionLimits)])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "7", None])
def test_an_invalid_limit_is_rejected_with_name_value_and_range(name: str, value: object) -> None:
    changes: dict[str, Any] = {name: value}
    with pytest.raises(
        InvalidArgument, match=f"{name} must be a whole number of at least 1, got {value!r}"
    ):
        replace(DEFAULT_LIMITS, **changes)


def test_the_hard_limit_leaves_room_for_the_largest_frame() -> None:
    with pytest.raises(InvalidArgument, match=r"unwritten_bytes_max must be .*, got 16777216"):
        ConnectionLimits(unwritten_bytes_max=16 * 1024 * 1024)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"port": -1}, "port must be a whole number of at least 0, got -1"),
        ({"port": 65_536}, "port must be 0–65535, got 65536"),
        ({"connections_max": 0}, "connections_max must be .*, got 0"),
        ({"drain_timeout_ms": -1}, "drain_timeout_ms must be .*, got -1"),
        ({"poll_us": -1}, "poll_us must be .*, got -1"),
    ],
)
def test_an_invalid_server_setting_is_rejected(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        replace(ServerConfig(), **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"backoff_first_ms": 0}, "backoff_first_ms must be .*, got 0"),
        ({"backoff_max_ms": 99}, "backoff_max_ms must be a whole number of at least 100, got 99"),
        ({"drain_timeout_ms": -1}, "drain_timeout_ms must be .*, got -1"),
    ],
)
def test_an_invalid_pool_setting_is_rejected(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        replace(PoolConfig(), **changes)
