"""Busy polling: keep the event loop awake for the next request while requests come in quick order.

A sleeping process has to be woken, and on a virtual machine with idle processors that takes longer
than serving a request: the kernel has to wake the processor first. A client with one request in
flight pays for it each time. So after such a request the event loop polls for a short time, if the
requests before it came in quick order, too. Polling costs about what the wake-up would. It stops
when other processes want the processor.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections.abc import Callable

from turbopump.clock import Clock, SystemClock

_SERVING_NS = 50_000
"""Longest time to serve a request, to tell whether the next one came soon after it."""

_CREDIT_MAX = 64
"""Credit limit: this many requests that came soon pay for one poll without result."""

_FOUND_BEFORE_CHECK = 16
"""Requests found before checking whether the sender had to preempt this thread first."""

_STALL_NS = 500_000
_REST_NS = 100_000_000
_REST_MAX_NS = 4 * _REST_NS
"""How long not to poll when the processor is wanted: doubled each time that others keep it for
long, until they stop; senders may move to another processor."""


def busy_poller(poll_us: int, clock: Clock) -> BusyPoller | None:
    """Return a poller, or None if polling is off or cannot help.

    In virtual time nothing arrives without a turn of the loop, and with a single processor no other
    process can send while this one polls. Only Linux tells whether others want the processor.
    """
    if not poll_us or not isinstance(clock, SystemClock) or sys.platform != "linux":
        return None
    return BusyPoller(poll_us * 1000) if len(os.sched_getaffinity(0)) > 1 else None


def times_preempted() -> int:
    """Return how often the kernel has preempted this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class BusyPoller:
    """Decides when polling pays off, and keeps the event loop awake meanwhile.

    Of 64 requests that come soon after one another, one may be polled for without result. With
    fewer, or with occasional requests, there is no polling at all.
    """

    def __init__(
        self,
        poll_ns: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
        times_preempted: Callable[[], int] = times_preempted,
    ) -> None:
        self._poll_ns = poll_ns
        self._soon_ns = poll_ns + _SERVING_NS
        self._now_ns = now_ns
        self._times_preempted = times_preempted
        self._preempted = 0
        self._credit = 0
        self._found = 0
        self.is_polling = False
        """Whether the event loop is kept from sleeping."""
        self._served_ns = 0
        self._polled_ns = 0
        self._rests_until_ns = 0
        self._rest_ns = _REST_NS

    def served(self, requests: int) -> None:
        """Note that requests which arrived together have been served."""
        if requests != 1:
            # With several in flight there is mostly something to do, and few need a wake-up.
            self._served_ns = 0
            return
        now_ns = self._now_ns()
        came_soon = now_ns - self._served_ns <= self._soon_ns
        self._served_ns = now_ns
        if came_soon:
            self._credit = min(self._credit + 1, _CREDIT_MAX)
        if self.is_polling:
            self._found += 1
            if self._found == _FOUND_BEFORE_CHECK:
                self._check_preempted(now_ns)
        elif self._credit > 0 and now_ns >= self._rests_until_ns:
            self.is_polling = True
            self._polled_ns = now_ns
            self._note_preempted()
            asyncio.get_running_loop().call_soon(self._poll)

    def _poll(self) -> None:
        """Keep the loop awake once more, unless nothing came or others want the processor."""
        now_ns = self._now_ns()
        if now_ns - self._polled_ns > _STALL_NS and self._note_preempted():
            self._rests_until_ns = now_ns + self._rest_ns
            self._rest_ns = min(self._rest_ns * 2, _REST_MAX_NS)
        self._polled_ns = now_ns
        if now_ns < self._rests_until_ns:
            self.is_polling = False
        elif now_ns - self._served_ns > self._poll_ns:
            self.is_polling = False
            self._credit -= _CREDIT_MAX
        else:
            asyncio.get_running_loop().call_soon(self._poll)

    def _check_preempted(self, now_ns: int) -> None:
        """Stop polling for a while if a part of the requests cost a preemption."""
        if self._note_preempted() >= _FOUND_BEFORE_CHECK // 4:
            self._rests_until_ns = now_ns + _REST_NS
        else:
            self._rest_ns = max(self._rest_ns * 15 // 16, _REST_NS)

    def _note_preempted(self) -> int:
        """Return how often this thread was preempted since the last call."""
        before, self._preempted = self._preempted, self._times_preempted()
        self._found = 0
        return self._preempted - before
