"""Thousands of deadlines on a single timer of the event loop."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.machine.timers import Repeated

GRANULARITY_MS = 50

Bucket = dict[Any, Callable[[Any], None]]
"""What falls due in the same 50 ms, each with what to call with it."""


class Deadline:
    """A call that runs at a deadline unless it is cancelled before."""

    __slots__ = ("_bucket", "_on_due")

    def __init__(self, on_due: Callable[[], None], bucket: Bucket) -> None:
        self._on_due = on_due
        self._bucket = bucket

    def fall_due(self) -> None:
        self._on_due()

    def cancel(self) -> None:
        """Cancel the call; does nothing if it has run or is already cancelled."""
        self._bucket.pop(self, None)


class Deadlines:
    """Calls functions at deadlines: never early, late by up to the granularity.

    Most deadlines of requests are cancelled, so adding and cancelling must be cheap: deadlines of
    the same 50 ms share a bucket, and only the earliest bucket has a timer. All connections of a
    server or a pool share one instance, which belongs to one event loop.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK, granularity_ms: int = GRANULARITY_MS) -> None:
        self.clock = clock
        self._granularity_ms = granularity_ms
        # Dicts keep their order: calls of one bucket run in the order they were added.
        self._buckets: dict[int, Bucket] = {}
        self._order: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_bucket = 0

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def add(self, timeout_ms: int, on_due: Callable[[], None]) -> Deadline:
        """Call ``on_due`` after ``timeout_ms``."""
        bucket = self.bucket(timeout_ms)
        deadline = Deadline(on_due, bucket)
        bucket[deadline] = Deadline.fall_due
        return deadline

    def bucket(self, timeout_ms: int) -> Bucket:
        """Return where a thing is put, with what to call with it after ``timeout_ms``.

        Taking it out again cancels the call. This is `add` without an object for each deadline.
        """
        # Rounded up: the clock counts whole milliseconds, and no call may be early.
        number = (self.clock.monotonic_ms() + timeout_ms) // self._granularity_ms + 1
        bucket = self._buckets.get(number)
        return self._open_bucket(number) if bucket is None else bucket

    def close(self) -> None:
        for bucket in self._buckets.values():
            bucket.clear()
        self._buckets.clear()
        self._order.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _open_bucket(self, number: int) -> Bucket:
        # An empty bucket stays until it is due, so that each number enters the heap once.
        bucket = self._buckets[number] = {}
        heapq.heappush(self._order, number)
        if self._timer is None or number < self._timer_bucket:
            self._arm()
        return bucket

    def _arm(self) -> None:
        """Set the timer to the earliest bucket."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._order:
            self._timer_bucket = self._order[0]
            wait_ms = self._timer_bucket * self._granularity_ms - self.clock.monotonic_ms()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(wait_ms, 0) / 1000, Repeated(self._on_timer))

    def _on_timer(self) -> None:
        self._timer = None
        now = self.clock.monotonic_ms() // self._granularity_ms
        try:
            while self._order and (self._order[0] <= now or not self._buckets[self._order[0]]):
                number = self._order[0]
                self._call_all(self._buckets[number])
                # Afterwards: if a call raises, the others of its bucket run next. A call may also
                # have closed everything.
                if self._buckets.pop(number, None) is not None:
                    heapq.heappop(self._order)
        finally:
            self._arm()

    def _call_all(self, bucket: Bucket) -> None:
        # By a copy: searching for the first of a dict that shrinks costs more with each one gone.
        for due in list(bucket):
            call = bucket.pop(due, None)
            # A call may cancel others of the same bucket.
            if call is not None:
                call(due)
