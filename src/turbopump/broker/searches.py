"""Long searches of the store, one slice at a time, so that no request stops the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from enum import Enum, auto
from typing import TypeVar

T = TypeVar("T")


class Searches:
    """Runs searches, which yield None before each slice, to their first result.

    However many clients search, there is one slice in a turn of the loop. What a search does before
    its first slice must be cheap: most end there, and need not wait for the others.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def result(self, search: Iterator[T | None]) -> T | None:
        """Return what a search finds; None if it ends without a result."""
        found = next(search, _Ended.ENDED)
        if found is None:
            return await self.rest(search)
        return None if found is _Ended.ENDED else found

    async def rest(self, search: Iterator[T | None]) -> T | None:
        """Return what a search finds that has yielded None before."""
        found: T | _Ended | None = None
        while found is None:
            async with self._turn:
                found = next(search, _Ended.ENDED)
                await asyncio.sleep(0)
        return None if found is _Ended.ENDED else found


class _Ended(Enum):
    ENDED = auto()
