"""The number of concurrent sends: reduced when a broker is busy, then slowly increased."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_WAITED_MS = 80
"""Responses slower than the fastest one by this much have queued at the broker.

By default brokers refuse requests that have queued for 200 ms.
"""


class SendWindow:
    """Halves when a broker is busy, shrinks when responses get slow, grows otherwise.

    Brokers refuse requests that have queued for long. Resending the same amount is refused again;
    sending less keeps a busy broker working without queueing.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._size = max(1.0, most / 2)
        self.cuts = 0
        """The argument of `busy` for a send that starts now."""
        self._active = 0
        self._changed = asyncio.Event()
        self._fastest_ms: int | None = None

    @property
    def size(self) -> int:
        """The current limit of concurrent sends."""
        return int(self._size)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[int]:
        """Wait for room and occupy it; yields the argument for `busy`."""
        while self._active >= self.size:
            self._changed.clear()
            await self._changed.wait()
        self._active += 1
        try:
            yield self.cuts
        finally:
            self._active -= 1
            self._changed.set()

    def answered(self, elapsed_ms: int | None) -> None:
        """Record a success, with its duration if known."""
        step = 1 / self._size
        if elapsed_ms is not None:
            if self._fastest_ms is None or elapsed_ms < self._fastest_ms:
                self._fastest_ms = elapsed_ms
            if elapsed_ms - self._fastest_ms > _WAITED_MS:
                step = -step
        self._size = max(1.0, min(self.most, self._size + step))
        self._changed.set()

    def busy(self, cuts: int) -> None:
        """Record a refusal; sends from before the last cut do not count again."""
        if cuts == self.cuts:
            self.cuts += 1
            self._size = max(1.0, self._size / 2)
