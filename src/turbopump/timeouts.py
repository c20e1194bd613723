"""`asyncio.timeout` that also works in tasks that are being cancelled."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from types import TracebackType


class CorrectedTimeout(AbstractAsyncContextManager[asyncio.Timeout]):
    """Limits the time of a block, as `asyncio.timeout` does.

    Before Python 3.11.3, a block that takes too long raises CancelledError in a task that was
    cancelled before, such as one that closes a client after Ctrl-C: the rest of the closing would
    be left out.
    """

    def __init__(self, delay_s: float | None) -> None:
        self._limit = asyncio.timeout(delay_s)

    async def __aenter__(self) -> asyncio.Timeout:
        self._cancelling = _cancelling()
        return await self._limit.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._limit.__aexit__(kind, error, trace)
        is_cancelled = kind is asyncio.CancelledError
        if is_cancelled and self._limit.expired() and _cancelling() <= self._cancelling:
            raise TimeoutError from error


def _cancelling() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def timeout(delay_s: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
    """Limit the time of a block: what takes longer raises TimeoutError."""
    if sys.version_info < (3, 11, 3):
        return CorrectedTimeout(delay_s)
    return asyncio.timeout(delay_s)
