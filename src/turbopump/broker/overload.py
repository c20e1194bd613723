"""How long requests wait before anybody looks at them."""

from __future__ import annotations

import asyncio

from turbopump.clock import Clock

_INTERVAL_MS = 100
_BACKLOG_MS = 10
"""After a stall, what waited is read within so long; what comes later has not waited."""


class LoopLag:
    """Measures how late the event loop is: what a request waits that arrived in the meantime.

    While requests come, it looks every 100 ms. `lag_ms` grows while a look is overdue, so a stalled
    loop is noticed by the first request after the stall, and keeps what the look found until the
    requests that waited have been read. Without requests there are no looks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_ms = 0
        self._last_ms = 0
        self._asked = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def lag_ms(self) -> int:
        """Milliseconds that requests had to wait lately."""
        self._asked = True
        if self._timer is None:
            self._look_later()
            return 0
        return max(self._last_ms, self._clock.monotonic_ms() - self._due_ms)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._asked = False
        self._due_ms = self._clock.monotonic_ms() + _INTERVAL_MS
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_INTERVAL_MS / 1000, self._look)

    def _look(self) -> None:
        self._last_ms = max(self._clock.monotonic_ms() - self._due_ms, 0)
        self._timer = None
        if self._last_ms > 0:
            loop = asyncio.get_running_loop()
            loop.call_later(_BACKLOG_MS / 1000, self._forget_lag)
        if self._asked or self._last_ms > 0:
            self._look_later()

    def _forget_lag(self) -> None:
        self._last_ms = 0
