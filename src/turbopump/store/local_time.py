"""The operator's local time, for file names and deletion hours."""

from __future__ import annotations

import datetime

_TIMESTAMP_MAX_MS = 253_402_000_000_000
"""Late in the year 9999: any later clock is wrong, and calendars end soon after."""


def local_time(time_ms: int) -> datetime.datetime:
    """Return a timestamp in local time, clamped to what calendars can express."""
    within_ms = min(max(time_ms, 0), _TIMESTAMP_MAX_MS)
    return datetime.datetime.fromtimestamp(within_ms / 1000).astimezone()
