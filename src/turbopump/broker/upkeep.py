"""Keeping the store tidy while there is something to tidy."""

from __future__ import annotations

import asyncio

from turbopump.clock import Clock
from turbopump.store.store import Store

_TICK_MS = 100
_SURELY_DONE_MS = 5000
"""What comes on top of the longest flush interval before the store counts as settled."""


class Upkeep:
    """Ticks the store from each message until everything must be on disk, and while it is sick.

    An idle broker costs nothing, and hours without messages pass at once in virtual time.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        flush = store.config.flush
        self._store = store
        self._clock = clock
        self._quiet_after_ms = (
            flush.thorough_interval_ms + 2 * flush.queue_interval_ms + _SURELY_DONE_MS
        )
        self._message_ms = 0
        self._timer: asyncio.TimerHandle | None = None

    def note_message(self) -> None:
        """Begin to tick, or go on."""
        self._message_ms = self._clock.monotonic_ms()
        if self._timer is None:
            self._tick_later()

    def stop(self) -> None:
        """Tick no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_TICK_MS / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._store.tick()
        quiet_ms = self._clock.monotonic_ms() - self._message_ms
        if quiet_ms <= self._quiet_after_ms or self._store.refusal is not None:
            self._tick_later()
