"""How long requests wait before anybody looks at them."""

from __future__ import annotations

import asyncio

from turbopump.clock import Clock

_INTERVAL_MS = 100


class LoopLag:
    """Measures how late the event loop is: what a request waits that arrived in the meantime.

    A look every 100 ms; ``lag_ms`` is what the last one found, and it grows while the next one is
    overdue, so a stalled loop is noticed by the first request after the stall.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_ms = 0
        self._last_ms = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def lag_ms(self) -> int:
        """Milliseconds that requests had to wait lately."""
        if self._timer is None:
            return 0
        return max(self._last_ms, self._clock.monotonic_ms() - self._due_ms, 0)

    def start(self) -> None:
        """Begin to look; needs a running loop."""
        self._due_ms = self._clock.monotonic_ms() + _INTERVAL_MS
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_INTERVAL_MS / 1000, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._last_ms = max(self._clock.monotonic_ms() - self._due_ms, 0)
        self.start()
