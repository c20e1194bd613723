"""How long requests wait behind those before them."""

from __future__ import annotations

import asyncio

from turbopump.clock import Clock

_MEASURE_MS = 50
_BACKLOG_MS = 10
"""After a long loop iteration, waiting requests are read within this time."""

_CHUNK_MS_MAX = 20
"""Most that one chunk of requests counts for: their work rarely takes longer. If it does, the
process was stopped, suspended or not scheduled, or the disk stalled. Refusing the few requests in
flight would not help against that."""


class QueueingDelay:
    """Measures the work that requests wait behind, rather than how late the event loop is.

    While requests arrive, a timer is due every 50 ms. What is served before the loop reaches the
    timer was ahead of the requests that are read afterwards. After a stall of the process with few
    requests in flight the timer is late as well, but hardly anything has been served meanwhile.
    Without requests there is no timer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counted_ms = 0
        self._work_ms = 0
        self._last_ms = 0
        self._asked = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def wait_ms(self) -> int:
        """Milliseconds that requests now being served have waited behind others."""
        self._asked = True
        if self._timer is None:
            self._measure_later()
            return 0
        return max(self._last_ms, self._work_ms - _MEASURE_MS)

    def note_served(self) -> None:
        """Count the work since the last call or timer; call it after each chunk of requests."""
        now_ms = self._clock.monotonic_ms()
        self._work_ms += min(now_ms - self._counted_ms, _CHUNK_MS_MAX)
        self._counted_ms = now_ms

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _measure_later(self) -> None:
        self._asked = False
        self._counted_ms, self._work_ms = self._clock.monotonic_ms(), 0
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_MEASURE_MS / 1000, self._measure)

    def _measure(self) -> None:
        self._last_ms = max(self._work_ms - _MEASURE_MS, 0)
        self._timer = None
        if self._last_ms > 0:
            loop = asyncio.get_running_loop()
            loop.call_later(_BACKLOG_MS / 1000, self._forget)
        if self._asked or self._last_ms > 0:
            self._measure_later()

    def _forget(self) -> None:
        self._last_ms = 0
