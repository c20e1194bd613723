"""Skipping idle time: hours in which nothing happens pass immediately.

An idle cluster still pulls, sends heartbeats and polls, thousands of times in an hour, without
effect. Once that has lasted longer than anything takes to be noticed, the loop skips the rest: it
jumps to the next time at which something is due. Periodic work does not see the skipped time, as if
it had been asleep.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TypeVarTuple

from turbopump.durations import Duration, as_milliseconds
from turbopump.machine.timers import Repeated
from turbopump.testing.clock import VirtualClock

QUIET_S = 150.0
"""Longer than it takes brokers and name servers to miss a peer, which is 120 s and a check."""

_POLL_INTERVAL_S = 5.0
_BUSY_S = 0.5
"""Activity no longer than this only repeats earlier activity."""
_STEP_MS = 60_000
"""Time skipped in one step; after it, waiters check their conditions."""

_HOUR_MS = 3_600_000
_AWAKE_S = 30.0
"""Part of each hour that is not skipped: work due at an hour of the day is done in it."""

Ts = TypeVarTuple("Ts")

Timer = tuple[float, int, asyncio.TimerHandle]
Marks = Callable[[], object]
"""Changes with everything that happens; None while something is in progress."""


class RepeatingTimer(asyncio.TimerHandle):
    """A timer that is postponed when time is skipped."""

    __slots__ = ()


class InfrequentTimer(asyncio.TimerHandle):
    """A timer that repeats after longer than the quiet time: it is not postponed."""

    __slots__ = ()


class InFlightTimer(asyncio.TimerHandle):
    """Bytes in flight; while there are any, no time is skipped."""

    __slots__ = ()


class InFlight(Repeated[*Ts]):
    """A callback by which bytes arrive."""

    __slots__ = ()


class BusyTimeClock:
    """The clock of a machine: its durations exclude skipped time, and it can be set by itself."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._wall_offset_ms = 0
        self.skipped_ms = 0

    def now_ms(self) -> int:
        """Return the wall-clock time, which jumps where time is skipped."""
        return self._clock.now_ms() + self._wall_offset_ms

    def jump_wall(self, by: Duration) -> None:
        """Set the wall clock forward or, with a negative duration, back."""
        self._wall_offset_ms += round(as_milliseconds(by))

    def monotonic_ms(self) -> int:
        """Return milliseconds since virtual time began, without what was skipped."""
        return self._clock.monotonic_ms() - self.skipped_ms

    def uptime_ms(self) -> int:
        """Return milliseconds since virtual time began, including what was skipped."""
        return self._clock.monotonic_ms()


class IdleSkipping:
    """Decides how much time can be skipped; the owner of ``marks`` runs by ``clock``."""

    def __init__(self, clock: BusyTimeClock, marks: Marks) -> None:
        self._clock = clock
        self._marks = marks
        self._seen: object = None
        self._quiet_from_s = 0.0
        self._poll_from_s = 0.0
        self._busy_from_s = math.inf

    def note_event(self, now_s: float) -> None:
        """Note an event that is not only a repetition."""
        self._quiet_from_s = now_s

    def skip_ms(self, now_s: float, timers: list[Timer]) -> int:
        """Skip some of the time ahead, and return how much; it may not be all yet.

        Timers that only repeat are postponed by it.
        """
        if now_s < self._poll_from_s:
            return 0
        marks = self._marks()
        if marks is not None:
            self._busy_from_s = math.inf
        elif now_s - self._busy_from_s < _BUSY_S:
            # Perhaps only a pull that is about to be held again.
            self._busy_from_s = min(self._busy_from_s, now_s)
            return 0
        if marks is None or marks != self._seen:
            self._seen = marks
            self._quiet_from_s = now_s
        if now_s - self._quiet_from_s < QUIET_S:
            self._poll_from_s = now_s + _POLL_INTERVAL_S
            return 0
        hour_ms = _HOUR_MS - self._clock.now_ms() % _HOUR_MS
        skip_ms = min(_free_ms(now_s, timers), _STEP_MS, hour_ms)
        if skip_ms == hour_ms:
            self._quiet_from_s = now_s + skip_ms / 1000 - QUIET_S + _AWAKE_S
        self._clock.skipped_ms += skip_ms
        timers[:] = [
            (when + skip_ms / 1000, number, timer)
            if type(timer) is RepeatingTimer
            else (when, number, timer)
            for when, number, timer in timers
        ]
        return skip_ms


def kind_of_timer(callback: object, delay_s: float) -> type[asyncio.TimerHandle]:
    """Return the kind of timer for a callback, as the callback itself declares."""
    kind = type(callback)
    if kind is Repeated:
        return RepeatingTimer if delay_s < QUIET_S else InfrequentTimer
    return InFlightTimer if kind is InFlight else asyncio.TimerHandle


def _free_ms(now_s: float, timers: list[Timer]) -> int:
    """Return how long only repetition is ahead; 0 if nothing else is scheduled at all."""
    next_s = math.inf
    for when, _, timer in timers:
        if not timer.cancelled():
            if type(timer) is InFlightTimer:
                return 0
            if type(timer) is not RepeatingTimer:
                next_s = min(next_s, when)
    return 0 if next_s == math.inf else max(0, math.floor((next_s - now_s) * 1000))
