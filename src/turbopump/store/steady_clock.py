"""Ages of stored messages by elapsed time, regardless of wall clock changes.

Store timestamps follow the wall clock, since people and tools read them. While the store is open,
it remembers from which position on they come from a changed clock. Of messages stored before the
start, only the timestamp is known.
"""

from __future__ import annotations

import logging
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from turbopump.clock import Clock
from turbopump.message import PhysicalOffset

_log = logging.getLogger(__name__)

CLOCK_SET_MS = 100
"""Smaller steps of the wall clock are ignored."""

_STEPS_MAX = 64


class SteadyClock:
    """The wall clock's time at the start, plus the time elapsed since."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_ms = clock.now_ms() - clock.uptime_ms()
        self.shift_ms = 0
        """How far the wall clock was set since the start; negative if it was set back."""
        # For each position, how far the clock had been set for messages from there on.
        self._positions = [PhysicalOffset(0)]
        self._shifts_ms = [0]

    def begin(self, position: PhysicalOffset) -> None:
        """Set the end of the log at the start."""
        self._positions = [position]

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch, ignoring changes of the clock.

        Never ahead of the wall clock by less than a step: timestamps are the wall clock's, which is
        rounded differently and may be slowed down, and by them no message may be early.
        """
        elapsed_ms, wall_ms = self._elapsed_ms(), self._clock.now_ms() - self.shift_ms
        return wall_ms if 0 < elapsed_ms - wall_ms < CLOCK_SET_MS else elapsed_ms

    def check(self, position: PhysicalOffset, wall_ms: int) -> None:
        """Note the wall clock's time, which messages from a position on have or will have."""
        shift_ms = wall_ms - self._elapsed_ms()
        step_ms = shift_ms - self.shift_ms
        if abs(step_ms) >= CLOCK_SET_MS:
            self.shift_ms = shift_ms
            _log.warning(
                "the clock was set %s by %.1f s: delays and retention use elapsed time",
                "forward" if step_ms > 0 else "back",
                abs(step_ms) / 1000,
            )
        elif position >= self._positions[-1]:
            return
        # Otherwise the log was cut, and earlier positions are reused.
        while len(self._positions) > 1 and self._positions[-1] >= position:
            del self._positions[-1], self._shifts_ms[-1]
        if position > self._positions[-1]:
            self._positions.append(position)
            self._shifts_ms.append(self.shift_ms)
        else:
            self._shifts_ms[-1] = self.shift_ms
        if len(self._positions) > _STEPS_MAX:
            # Messages before the oldest step may count as younger than they are, never as older.
            self._shifts_ms[1] = min(self._shifts_ms[:2])
            del self._positions[1], self._shifts_ms[0]

    def _elapsed_ms(self) -> int:
        return self._start_ms + self._clock.uptime_ms()

    def stored_ms(self, position: PhysicalOffset, timestamp_ms: int) -> int:
        """Return when the message at a position was stored, in terms of `now_ms`."""
        number = bisect_right(self._positions, position)
        return timestamp_ms - (self._shifts_ms[number - 1] if number else self._before_start_ms)

    def shifts_ms(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what to subtract from the timestamps at positions, as `stored_ms` does."""
        shifts = np.array([self._before_start_ms, *self._shifts_ms])
        found: NDArray[np.int64] = shifts[np.searchsorted(self._positions, positions, side="right")]
        return found

    @property
    def _before_start_ms(self) -> int:
        # A clock that is set back may have been ahead at the start. Set forward, it may have been
        # behind, or is ahead now; which is unknown. So these messages count as young as possible.
        return min(self.shift_ms, 0)
