"""Hours in which nothing happens pass at once.

A cluster that is left alone still pulls, beats and looks around, thousands of times in an hour, and
nothing comes of it. Once that has gone on for longer than anything takes to be noticed, the loop
leaves the rest of it out: it goes to the next moment at which something is to happen. Whoever only
repeats what he does hears nothing of the time left out, as if he had been asleep.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TypeVarTuple

from turbopump.machine.timers import Repeated
from turbopump.testing.clock import VirtualClock

QUIET_S = 150.0
"""Longer than it takes brokers and name servers to miss somebody, which is 120 s and a look."""

_LOOK_EVERY_S = 5.0
_BUSY_S = 0.5
"""What is under way for no longer than this only repeats what was before."""
_STEP_MS = 60_000
"""So much is left out at once: then those who wait for a fact look whether it is so by now."""

_HOUR_MS = 3_600_000
_AWAKE_S = 30.0
"""So much of each hour is not left out: what is due at an hour of the day is done in it."""

Ts = TypeVarTuple("Ts")

Timer = tuple[float, int, asyncio.TimerHandle]
Marks = Callable[[], object]
"""What changes with everything that happens; None while something is under way."""


class RepeatingTimer(asyncio.TimerHandle):
    """One of those that are put off when time is left out."""

    __slots__ = ()


class InfrequentTimer(asyncio.TimerHandle):
    """One of those that repeat something after longer than is quiet: it is not put off."""

    __slots__ = ()


class InFlightTimer(asyncio.TimerHandle):
    """Bytes on their way; as long as there are any, no time is left out."""

    __slots__ = ()


class InFlight(Repeated[*Ts]):
    """A callback that bytes arrive with."""

    __slots__ = ()


class BusyTimeClock:
    """The time of those who only repeat what they do: without what was left out, for durations."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.skipped_ms = 0

    def now_ms(self) -> int:
        """Return what the wall shows, which jumps where time is left out."""
        return self._clock.now_ms()

    def monotonic_ms(self) -> int:
        """Return milliseconds since virtual time began in which something may have happened."""
        return self._clock.monotonic_ms() - self.skipped_ms

    def uptime_ms(self) -> int:
        """Return milliseconds since virtual time began, with what was left out."""
        return self._clock.monotonic_ms()


class IdleTime:
    """Tells how much time can be left out; whose ``marks`` these are lives by ``clock``."""

    def __init__(self, clock: BusyTimeClock, marks: Marks) -> None:
        self._clock = clock
        self._marks = marks
        self._seen: object = None
        self._quiet_from_s = 0.0
        self._look_from_s = 0.0
        self._busy_from_s = math.inf

    def note_event(self, now_s: float) -> None:
        """Note that something happens that is not only repeated."""
        self._quiet_from_s = now_s

    def skip_ms(self, now_s: float, timers: list[Timer]) -> int:
        """Leave out some of the time from now on, and return how much; it may not be all yet.

        Timers that only repeat are put off by it.
        """
        if now_s < self._look_from_s:
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
            self._look_from_s = now_s + _LOOK_EVERY_S
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
    """Return which kind of timer somebody sets; by what he says himself of what it calls."""
    kind = type(callback)
    if kind is Repeated:
        return RepeatingTimer if delay_s < QUIET_S else InfrequentTimer
    return InFlightTimer if kind is InFlight else asyncio.TimerHandle


def _free_ms(now_s: float, timers: list[Timer]) -> int:
    """Return how long nothing but repetition is to come; 0 if nothing else is to come at all."""
    next_s = math.inf
    for when, _, timer in timers:
        if not timer.cancelled():
            if type(timer) is InFlightTimer:
                return 0
            if type(timer) is not RepeatingTimer:
                next_s = min(next_s, when)
    return 0 if next_s == math.inf else max(0, math.floor((next_s - now_s) * 1000))
