"""Searches of the store that wait for the disk, or take long: no request stops the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from enum import Enum, auto
from typing import TypeVar

from turbopump.errors import DiskFailed
from turbopump.store.outcomes import Cold

T = TypeVar("T")


class Searches:
    """Runs searches to their first result.

    They yield None before each slice, and before they read what is not in memory, what to fetch.
    However many clients search, there is one slice in a turn of the loop. What a search does before
    its first slice must be cheap: most end there, and need not wait for the others.
    """

    def __init__(self, fetch: Callable[[Cold], Future[None]]) -> None:
        self._fetch = fetch
        self._turn = asyncio.Lock()

    async def result(self, search: Iterator[T | Cold | None]) -> T | None:
        """Return what a search finds; None if it ends without a result."""
        found = next(search, _Ended.ENDED)
        if found is None or isinstance(found, Cold):
            return await self.rest(search, found)
        return None if found is _Ended.ENDED else found

    async def found(self, search: Iterator[T | Cold | None]) -> T:
        """Do the same for a search that always has a result."""
        found = await self.result(search)
        assert found is not None, "the search ends with its result"
        return found

    async def rest(self, search: Iterator[T | Cold | None], paused: Cold | None) -> T | None:
        """Return what a search finds that has yielded ``paused`` before."""
        found: T | Cold | _Ended | None = paused
        while found is None or isinstance(found, Cold):
            if found is not None:
                await self.fetched(found)
            async with self._turn:
                found = next(search, _Ended.ENDED)
                await asyncio.sleep(0)
        return None if found is _Ended.ENDED else found

    async def fetched(self, cold: Cold) -> None:
        """Wait until parts of files are in memory; raises DiskFailed."""
        try:
            await asyncio.wrap_future(self._fetch(cold))
        except OSError as error:
            # Not read all the same: a page that the disk cannot read would end the process.
            raise DiskFailed(f"the store's files cannot be read: {error}") from error


class _Ended(Enum):
    ENDED = auto()
