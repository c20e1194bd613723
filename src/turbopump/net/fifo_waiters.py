"""Order among waiters for the same thing, such as a connection that is being opened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class FifoWaiters:
    """Lets waiters continue in the order in which they came.

    What they wait for is available before the first of them runs again; without this, a caller that
    arrives in between would overtake them.
    """

    def __init__(self) -> None:
        self._last: asyncio.Future[None] | None = None
        self.is_empty = True

    async def after(self, work: Awaitable[T]) -> T:
        """Await work, and return its result when all earlier waiters have continued."""
        before, done = self._last, asyncio.get_running_loop().create_future()
        self._last, self.is_empty = done, False
        try:
            result = await work
            if before is not None and not before.done():
                await asyncio.wait([before])
            return result
        finally:
            if before is None or before.done():
                self._release(done)
            else:
                # Failed or cancelled: later waiters still have to wait for earlier ones.
                before.add_done_callback(lambda _: self._release(done))

    def _release(self, done: asyncio.Future[None]) -> None:
        done.set_result(None)
        if self._last is done:
            self._last, self.is_empty = None, True
