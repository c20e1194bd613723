"""Answers that wait until what they promise is on disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future

from turbopump.errors import StoreClosed
from turbopump.net.deadlines import Deadline, Deadlines

OnDone = Callable[[BaseException | None], None]
"""Told once: None when the message is durable, else why it is not."""


class NotDurableYet(Exception):
    """The flush takes longer than a sender should wait; the message is stored all the same."""


class Durability:
    """Waits for flushes without blocking the loop: one wake-up a flush, however many wait for it.

    ``after_flush`` runs on the loop after each flush, before anybody is told: the messages are
    readable from then on. ``waiting_max`` bounds how many sends may wait; `is_full` says that the
    disk does not keep up.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        after_flush: Callable[[], None],
        timeout_ms: int,
        waiting_max: int,
    ) -> None:
        self._deadlines = deadlines
        self._after_flush = after_flush
        self._timeout_ms = timeout_ms
        self._waiting_max = waiting_max
        self._by_flush: dict[Future[None], list[OnDone]] = {}
        self._count = 0
        self._settled = asyncio.Event()

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether no more sends may wait."""
        return self._count >= self._waiting_max

    async def settle(self, timeout_ms: int) -> None:
        """Wait until nobody waits any more, but no longer than that."""
        if self._by_flush:
            self._settled.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), timeout_ms / 1000)

    def watch(self, durable: Future[None], on_done: OnDone | None = None) -> None:
        """Take notice of a flush, and call back on the loop when it is done or has failed."""
        waiting = self._by_flush.get(durable)
        if waiting is None:
            waiting = self._by_flush[durable] = []
            loop = asyncio.get_running_loop()
            durable.add_done_callback(lambda flush: _tell(loop, self._done, flush))
        if on_done is not None:
            waiting.append(on_done)

    def when_done(self, durable: Future[None], on_done: OnDone) -> None:
        """Call back for a sender: when the flush is done, has failed, or takes too long."""
        self.watch(durable, self._bounded(on_done))

    def _bounded(self, on_done: OnDone) -> OnDone:
        self._count += 1
        told = False

        def once(error: BaseException | None) -> None:
            nonlocal told
            if not told:
                told = True
                self._count -= 1
                deadline.cancel()
                on_done(error)

        deadline: Deadline = self._deadlines.add(self._timeout_ms, lambda: once(NotDurableYet()))
        return once

    def _done(self, flush: Future[None]) -> None:
        error = flush.exception()
        if error is None:
            # A flush that ends after the store is closed has nobody left to read.
            with contextlib.suppress(StoreClosed):
                self._after_flush()
        for on_done in self._by_flush.pop(flush):
            on_done(error)
        if not self._by_flush:
            self._settled.set()


def _tell(
    loop: asyncio.AbstractEventLoop, done: Callable[[Future[None]], None], flush: Future[None]
) -> None:
    # The loop may be gone when a flush ends after the broker: then nobody waits any more.
    if not loop.is_closed():
        loop.call_soon_threadsafe(done, flush)
