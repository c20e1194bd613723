"""Periodic work of the store, while there is any."""

from __future__ import annotations

import asyncio

from turbopump.clock import Clock
from turbopump.machine.timers import Repeated
from turbopump.store.store import Store
from turbopump.supervisor import Watch

_TICK_MS = 100
_CALM_MS = 1000
"""This long after the last message, only work due by the clock remains."""
_SURELY_DONE_MS = 5000
"""Added to the longest flush interval before the store counts as settled."""


class StoreTicker:
    """Ticks the store from each message until everything must be on disk, and while it is failing.

    Ten times a second while messages arrive, and then as often as the store's own intervals
    require. An idle broker costs nothing, and hours without messages pass immediately in virtual
    time.
    """

    def __init__(self, store: Store, clock: Clock, watch: Watch) -> None:
        flush = store.config.flush
        self._store = store
        self._clock = clock
        self._watch = watch
        self._quiet_after_ms = (
            flush.thorough_interval_ms + 2 * flush.queue_interval_ms + _SURELY_DONE_MS
        )
        self._calm_tick_ms = max(_TICK_MS, min(flush.interval_ms, flush.queue_interval_ms))
        self._message_ms = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_calm = False
        """Whether the timer has the interval used without messages."""
        self._is_stopped = False

    def note_message(self) -> None:
        """Start ticking, or keep ticking."""
        self._message_ms = self._clock.monotonic_ms()
        if self._timer is None:
            self._tick_in(_TICK_MS)
        elif self._is_calm:
            self._is_calm = False
            if self._timer.when() > asyncio.get_running_loop().time() + _TICK_MS / 1000:
                # The next tick is a long way off.
                self._timer.cancel()
                self._tick_in(_TICK_MS)

    def stop(self) -> None:
        """Stop ticking permanently, even if messages arrive."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick_in(self, wait_ms: int) -> None:
        if self._is_stopped:
            return
        if self._timer is not None:
            # A message that the tick itself made readable has already started one.
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(wait_ms / 1000, Repeated(self._tick))

    def _tick(self) -> None:
        self._timer = None
        try:
            self._store.tick()
        except Exception as error:  # noqa: BLE001 - nothing would be flushed any more
            self._is_calm = False
            self._tick_in(self._watch.failed(error))
            return
        self._watch.succeeded()
        quiet_ms = self._clock.monotonic_ms() - self._message_ms
        is_sick = self._store.refusal is not None
        if quiet_ms <= self._quiet_after_ms or is_sick:
            self._is_calm = quiet_ms >= _CALM_MS and not is_sick
            self._tick_in(self._calm_tick_ms if self._is_calm else _TICK_MS)
