"""Looking for the next request instead of sleeping, while requests come one close upon the other.

A process that sleeps has to be woken, and on a virtual machine with idle processors that takes
longer than serving a request: the kernel has to wake the processor first. A client with one request
in flight pays for it each time. So after such a request the event loop goes on looking for a
moment, if the requests before it came that close, too. What looking costs is about what not being
woken saves. But a processor that others want is theirs.
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
"""What serving a request takes at most, to tell a request that came soon from one that did not."""

_CREDIT_MAX = 64
"""Requests that come soon pay for one look in vain: no more than that are taken in advance."""

_FOUND_BEFORE_DOUBT = 16
"""Requests found before asking whether the sender had to take the processor from here first."""

_STALL_NS = 500_000
_REST_NS = 100_000_000
_REST_MAX_NS = 4 * _REST_NS
"""How long not to look when the processor is wanted. When others keep it for long, each time twice
as long, until they do not want it any more; senders may be on another processor soon."""


def polling_for(poll_us: int, clock: Clock) -> Polling | None:
    """Return who looks for so long; None when it is not asked for or cannot help.

    In virtual time nothing comes without a turn of the loop, and with a single processor nobody
    else can send while this process looks. Only Linux tells whether others want the processor.
    """
    if not poll_us or not isinstance(clock, SystemClock) or sys.platform != "linux":
        return None
    return Polling(poll_us * 1000) if len(os.sched_getaffinity(0)) > 1 else None


def times_preempted() -> int:
    """Return how often the kernel has taken the processor from this thread for another one."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class Polling:
    """Decides when looking for requests is worth it, and keeps the event loop looking meanwhile.

    Of 64 requests that come soon after each other, one may be looked for in vain. With fewer, or
    requests that come now and then, there is no looking at all.
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
        self._is_looking = False
        self._served_ns = 0
        self._looked_ns = 0
        self._rests_until_ns = 0
        self._rest_ns = _REST_NS

    @property
    def is_looking(self) -> bool:
        """Whether the event loop is kept from sleeping."""
        return self._is_looking

    def served(self, requests: int) -> None:
        """Note that requests which came together have been served."""
        if requests != 1:
            # With several in flight there is mostly something to do, and few wait for a wake.
            self._served_ns = 0
            return
        now_ns = self._now_ns()
        came_soon = now_ns - self._served_ns <= self._soon_ns
        self._served_ns = now_ns
        if came_soon:
            self._credit = min(self._credit + 1, _CREDIT_MAX)
        if self._is_looking:
            self._found += 1
            if self._found == _FOUND_BEFORE_DOUBT:
                self._doubt(now_ns)
        elif self._credit > 0 and now_ns >= self._rests_until_ns:
            self._is_looking = True
            self._looked_ns = now_ns
            self._note_preempted()
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Have the loop look once more, unless it was in vain or others want the processor."""
        now_ns = self._now_ns()
        if now_ns - self._looked_ns > _STALL_NS and self._note_preempted():
            self._rests_until_ns = now_ns + self._rest_ns
            self._rest_ns = min(self._rest_ns * 2, _REST_MAX_NS)
        self._looked_ns = now_ns
        if now_ns < self._rests_until_ns:
            self._is_looking = False
        elif now_ns - self._served_ns > self._poll_ns:
            self._is_looking = False
            self._credit -= _CREDIT_MAX
        else:
            asyncio.get_running_loop().call_soon(self._look)

    def _doubt(self, now_ns: int) -> None:
        """Rest if the processor was taken from this thread for a part of what it has found."""
        if self._note_preempted() >= _FOUND_BEFORE_DOUBT // 4:
            self._rests_until_ns = now_ns + _REST_NS
        else:
            self._rest_ns = max(self._rest_ns * 15 // 16, _REST_NS)

    def _note_preempted(self) -> int:
        """Return how often the processor was taken from this thread since this was asked last."""
        before, self._preempted = self._preempted, self._times_preempted()
        self._found = 0
        return self._preempted - before
