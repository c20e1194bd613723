"""How many sends may be on their way at a time: fewer when a broker is busy, then slowly more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_WAITED_MS = 80
"""Answers that take so much longer than the fastest one have waited at the broker.

Brokers refuse what has waited for 200 ms, as they are set up normally.
"""


class SendWindow:
    """Halves when a broker says that it is busy, shrinks when answers get slow, grows otherwise.

    Brokers refuse what has waited for long. Who sends the same amount again at once is refused
    again; who sends less keeps a busy broker at work without waiting in its queue.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._size = max(1.0, most / 2)
        self._active = 0
        self._cuts = 0
        self._changed = asyncio.Event()
        self._fastest_ms: int | None = None

    @property
    def size(self) -> int:
        """How many may be on their way now."""
        return int(self._size)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[int]:
        """Wait for a place and hold it; gives what `busy` has to be told."""
        while self._active >= self.size:
            self._changed.clear()
            await self._changed.wait()
        self._active += 1
        try:
            yield self._cuts
        finally:
            self._active -= 1
            self._changed.set()

    @property
    def cuts(self) -> int:
        """What `busy` has to be told of a send that begins now."""
        return self._cuts

    def answered(self, elapsed_ms: int | None) -> None:
        """Note that a broker took what it was sent, and how long that took if anybody knows."""
        step = 1 / self._size
        if elapsed_ms is not None:
            if self._fastest_ms is None or elapsed_ms < self._fastest_ms:
                self._fastest_ms = elapsed_ms
            if elapsed_ms - self._fastest_ms > _WAITED_MS:
                step = -step
        self._size = max(1.0, min(self.most, self._size + step))
        self._changed.set()

    def busy(self, cuts: int) -> None:
        """Note that a broker refused; those sent before the last cut tell nothing new."""
        if cuts == self._cuts:
            self._cuts += 1
            self._size = max(1.0, self._size / 2)
