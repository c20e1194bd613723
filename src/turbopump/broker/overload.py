"""How long requests wait before anybody looks at them."""

from __future__ import annotations

import asyncio

from turbopump.clock import Clock

_INTERVAL_MS = 100


class LoopLag:
    """Measures how late the event loop is: what a request waits that arrived in the meantime.

    While requests come, it looks every 100 ms; `lag_ms` is what the last look found, and it grows
    while the next one is overdue, so a stalled loop is noticed by the first request after the
    stall. Without requests there are no looks.
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
        # After a stall once more: the requests that waited are only served now.
        if self._asked or self._last_ms > 0:
            self._look_later()
