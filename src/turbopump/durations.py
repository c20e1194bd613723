"""Durations of the public API: seconds, or a timedelta."""

from __future__ import annotations

from datetime import timedelta
from math import nan
from typing import Any, TypeAlias

from turbopump.errors import InvalidArgument

Duration: TypeAlias = float | timedelta
"""Seconds, or a timedelta."""

_MS_MAX = 2**31 - 1


def as_milliseconds(value: Duration) -> float:
    """Convert a duration; anything else is not a number."""
    if isinstance(value, timedelta):
        return value / timedelta(milliseconds=1)
    given: object = value
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return value * 1000 if is_number else nan


def milliseconds(name: str, value: Duration, least_ms: int = 1, most_ms: int = _MS_MAX) -> int:
    """Convert a duration; raises InvalidArgument if it is none, or out of range."""
    # Not in full: as floats, 1.001 s are a little less than 1001 ms.
    found = round(as_milliseconds(value), 3)
    if not least_ms <= found <= most_ms:
        least, most = f"{least_ms / 1000:.10g}", f"{most_ms / 1000:.10g}"
        is_open = most_ms == _MS_MAX and not found > most_ms
        limits = f"at least {least}" if is_open else f"{least}–{most}"
        raise InvalidArgument(
            f"{name} must be {limits} seconds, as a number or a timedelta, got {value!r}"
        )
    return round(found)


def seconds(value: Duration, name: str = "timeout") -> float:
    """Convert a duration, 0 included; raises InvalidArgument if it is none."""
    return milliseconds(name, value, 0) / 1000


def set_duration(config: Any, name: str, least_ms: int = 1, most_ms: int = _MS_MAX) -> int:
    """Check a duration of a frozen dataclass; store it in seconds, and as ``<name>_ms``."""
    found_ms = milliseconds(name, getattr(config, name), least_ms, most_ms)
    object.__setattr__(config, name, found_ms / 1000)
    object.__setattr__(config, f"{name}_ms", found_ms)
    return found_ms
