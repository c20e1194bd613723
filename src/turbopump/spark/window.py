"""How many sends may be on their way at a time: fewer when a broker is busy, then slowly more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Window:
    """Halves when a broker says that it is busy, and grows by one for each full window answered.

    Brokers refuse what has waited for long. Who sends the same amount again at once is refused
    again; who sends less keeps a busy broker at work without waiting in its queue.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._size = float(most)
        self._active = 0
        self._cuts = 0
        self._changed = asyncio.Event()

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

    def answered(self) -> None:
        """Note that a broker took what it was sent."""
        self._size = min(self.most, self._size + 1 / self._size)
        self._changed.set()

    def busy(self, cuts: int) -> None:
        """Note that a broker refused; those sent before the last cut tell nothing new."""
        if cuts == self._cuts:
            self._cuts += 1
            self._size = max(1.0, self._size / 2)
