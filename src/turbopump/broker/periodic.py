"""Things that a broker does again and again, each in a task that somebody owns."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)

Action = Callable[[], Awaitable[None] | None]

Interval = int | Callable[[], int]
"""Milliseconds; a function is asked again before each pause, as settings may change."""


class Periodic:
    """Owns tasks that repeat an action until they are stopped."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def every(self, interval: Interval, action: Action, *, first_ms: int | None = None) -> None:
        """Repeat an action; the pause begins when it is done. The first comes after a pause too."""
        pause_ms = _interval_ms(interval) if first_ms is None else first_ms
        self.keep(_repeat(interval, action, pause_ms))

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Own something that runs until it is stopped."""
        self._tasks.append(asyncio.create_task(work))

    async def stop(self) -> None:
        """End all of them, in the middle of what they wait for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()


def _interval_ms(interval: Interval) -> int:
    return interval if isinstance(interval, int) else interval()


async def _repeat(interval: Interval, action: Action, first_ms: int) -> None:
    await asyncio.sleep(first_ms / 1000)
    while True:
        try:
            pending = action()
            if inspect.isawaitable(pending):
                await pending
        except Exception:  # noqa: BLE001 - one failure must not end what keeps the broker tidy
            _log.exception("%s failed", getattr(action, "__qualname__", action))
        await asyncio.sleep(_interval_ms(interval) / 1000)
