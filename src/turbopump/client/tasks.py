"""Tasks, and what is repeated, that somebody owns from its start to its close."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from turbopump.errors import TurbopumpError

T = TypeVar("T")

_log = logging.getLogger(__name__)

Action = Callable[[], Awaitable[None] | None]


class Tasks:
    """Owns tasks until `stop` ends them; one that fails by a bug is logged, not forgotten."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._timers: dict[_Repeated, asyncio.TimerHandle | None] = {}
        """Of what is repeated; None while it is being done."""

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Own something that runs until it is done or stopped."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def every(self, interval_ms: int, action: Action, *, first_ms: int | None = None) -> None:
        """Repeat an action; the pause begins when it is done. The first comes after a pause too."""
        repeated = _Repeated(interval_ms, action)
        self._timers[repeated] = None
        self._set_timer(repeated, interval_ms if first_ms is None else first_ms)

    async def wait(self) -> None:
        """Wait until all that run now are done, however they end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """End all of them, in the middle of what they wait for; not the one that asks."""
        for timer in self._timers.values():
            if timer is not None:
                timer.cancel()
        self._timers.clear()
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _set_timer(self, repeated: _Repeated, pause_ms: int) -> None:
        if repeated in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[repeated] = loop.call_later(pause_ms / 1000, self._act, repeated)

    def _act(self, repeated: _Repeated) -> None:
        """Do it once; what takes no time needs no task, which an idle client would wake in vain."""
        self._timers[repeated] = None
        pending = None
        try:
            pending = repeated.action()
        except TurbopumpError as error:
            repeated.report(error)
        if pending is None:
            self._set_timer(repeated, repeated.interval_ms)
        else:
            self.start(self._finish(repeated, pending))

    async def _finish(self, repeated: _Repeated, pending: Awaitable[None]) -> None:
        try:
            await pending
        except TurbopumpError as error:
            repeated.report(error)
        self._set_timer(repeated, repeated.interval_ms)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, TurbopumpError):
            _log.error("a task of the client failed", exc_info=error)


@dataclass(frozen=True, slots=True, eq=False)
class _Repeated:
    interval_ms: int
    action: Action

    def report(self, error: TurbopumpError) -> None:
        _log.warning("%s: %s", getattr(self.action, "__qualname__", self.action), error)
