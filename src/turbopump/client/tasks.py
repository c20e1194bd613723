"""Tasks that somebody owns, from its start to its close."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from turbopump.errors import TurbopumpError

T = TypeVar("T")

_log = logging.getLogger(__name__)

Action = Callable[[], Awaitable[None] | None]


class Tasks:
    """Owns tasks until `stop` ends them; one that fails by a bug is logged, not forgotten."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Own something that runs until it is done or stopped."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def every(self, interval_ms: int, action: Action, *, first_ms: int | None = None) -> None:
        """Repeat an action; the pause begins when it is done. The first comes after a pause too."""
        self.start(_repeat(interval_ms, action, interval_ms if first_ms is None else first_ms))

    async def wait(self) -> None:
        """Wait until all that run now are done, however they end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """End all of them, in the middle of what they wait for; not the one that asks."""
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, TurbopumpError):
            _log.error("a task of the client failed", exc_info=error)


async def _repeat(interval_ms: int, action: Action, first_ms: int) -> None:
    await asyncio.sleep(first_ms / 1000)
    while True:
        try:
            pending = action()
            if inspect.isawaitable(pending):
                await pending
        except TurbopumpError as error:
            _log.warning("%s: %s", getattr(action, "__qualname__", action), error)
        await asyncio.sleep(interval_ms / 1000)
