"""The one source of time: everything that asks what time it is, asks a `Clock`.

Timers are the event loop's; a loop in virtual time (`turbopump.testing`) moves its clock along with
its timers, so both always agree.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CALENDAR_END_MS = 253_402_000_000_000
"""Late in the year 9999: any later clock is wrong, and calendars end soon after."""


class Clock(Protocol):
    """What time it is, for people and for durations."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch; jumps when the clock is set."""
        ...

    def monotonic_ms(self) -> int:
        """Return milliseconds since an arbitrary start; monotonic, for durations."""
        ...

    def uptime_ms(self) -> int:
        """Do as `monotonic_ms`, but count the time too that the machine was suspended."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def uptime_ms(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


SYSTEM_CLOCK: Clock = SystemClock()


def utc_time(time_ms: int) -> datetime:
    """Return a timestamp as a time in UTC, clamped to what calendars can express."""
    return _EPOCH + timedelta(milliseconds=min(max(time_ms, 0), _CALENDAR_END_MS))


def local_time(time_ms: int) -> datetime:
    """Return a timestamp in the operator's local time, clamped to what calendars can express."""
    return utc_time(time_ms).astimezone()
