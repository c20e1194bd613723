"""When to send which rows: original spacing, sped up or not, and a limit on the rate.

Rows are sent in slices. The bounds of a slice depend only on the rows, never on the clock: a
retried task makes the same slices, and so the same stamps. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from turbopump.errors import InvalidArgument

Times: TypeAlias = npt.NDArray[np.int64]

SLICE_MS = 50
"""Rows due within this time are sent together."""

ROWS_MAX = 10_000

SPEED_MIN = 0.001
"""A day then takes three years; much slower, and wait times exceed what machines support."""

_WAIT_MAX_S = 1e9
"""Far longer than any useful wait, and near the longest that machines support."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast to send; as fast as possible by default."""

    rate_per_s: float | None = None
    """Maximum messages per second, over all tasks."""

    speed: float | None = None
    """1.0 keeps the original time between messages, 10.0 makes it a tenth."""

    def __post_init__(self) -> None:
        rate, speed = self.rate_per_s, self.speed
        if rate is not None and not (isinstance(rate, Real) and 0 < rate < float("inf")):
            raise InvalidArgument(f"rate_per_s must be a number above 0, got {rate!r}")
        if speed is not None and not (
            isinstance(speed, Real) and SPEED_MIN <= speed < float("inf")
        ):
            raise InvalidArgument(f"speed must be a number, {SPEED_MIN} or more, got {speed!r}")

    def duration_s(self, rows: int, span_ms: int) -> float:
        """Return the minimum duration of sending."""
        by_rate = rows / self.rate_per_s if self.rate_per_s else 0.0
        by_speed = span_ms / 1000 / self.speed if self.speed else 0.0
        return max(by_rate, by_speed)

    def shared(self, part: float) -> Pace:
        """Return the pace of a task with a share of all rows."""
        return Pace(self.rate_per_s * part if self.rate_per_s else None, self.speed)


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows from ``start`` to before ``end`` of a batch, due ``offset_s`` after the beginning."""

    start: int
    end: int
    offset_s: float


def slices(times_ms: Times, first_ms: int, pace: Pace, rows_max: int = ROWS_MAX) -> Iterator[Slice]:
    """Cut rows, sorted by time, into slices; ``first_ms`` is the earliest time of all tasks."""
    count = len(times_ms)
    if pace.rate_per_s is not None:
        rows_max = max(1, min(rows_max, int(pace.rate_per_s * SLICE_MS / 1000)))
    if pace.speed is None:
        for start in range(0, count, rows_max):
            yield Slice(start, min(count, start + rows_max), 0.0)
        return
    passed_ms = np.maximum(times_ms - first_ms, 0)
    ticks = (passed_ms / (pace.speed * SLICE_MS)).astype(np.int64)
    edges = np.flatnonzero(np.diff(ticks, prepend=-1, append=-1))
    for begin, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        offset_s = float(ticks[begin]) * SLICE_MS / 1000
        for start in range(begin, stop, rows_max):
            yield Slice(start, min(stop, start + rows_max), offset_s)


class Pacer:
    """Computes the wait before a slice; tracks what was sent, not the time."""

    def __init__(self, pace: Pace, start_s: float) -> None:
        self._rate_per_s = pace.rate_per_s
        self._start_s = start_s
        self._free_s = 0.0
        """When the rate permits the next rows."""

    def wait_s(self, due: Slice, now_s: float) -> float:
        """Return how long to wait before a slice may be sent."""
        wait_s = max(0.0, self._start_s + due.offset_s - now_s, self._free_s - now_s)
        return min(wait_s, _WAIT_MAX_S)

    def sent(self, rows: int, now_s: float) -> None:
        """Record that sending of rows has started.

        Lost time is not made up for: a burst after a pause would exceed the rate.
        """
        if self._rate_per_s is not None:
            self._free_s = max(self._free_s, now_s) + rows / self._rate_per_s
