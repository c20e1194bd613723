"""Things that a broker does again and again, each in a task that somebody owns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)

Action = Callable[[], Awaitable[None] | None]

Interval = int | Callable[[], int]
"""Milliseconds; a function is asked again before each pause, as settings may change."""


class Periodic:
    """Owns what is repeated, and tasks, until they are stopped."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[_Repeated, asyncio.TimerHandle] = {}
        self._is_stopped = False

    def every(self, interval: Interval, action: Action, *, first_ms: int | None = None) -> None:
        """Repeat an action; the pause begins when it is done. The first comes after a pause too."""
        repeated = _Repeated(interval, action)
        self._set_timer(repeated, _interval_ms(interval) if first_ms is None else first_ms)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Own something that runs until it is stopped."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """End all of them, in the middle of what they wait for."""
        self._is_stopped = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _set_timer(self, repeated: _Repeated, pause_ms: int) -> None:
        if self._is_stopped:
            return
        loop = asyncio.get_running_loop()
        self._timers[repeated] = loop.call_later(pause_ms / 1000, self._act, repeated)

    def _act(self, repeated: _Repeated) -> None:
        """Do it once; what takes no time needs no task, which an idle broker would wake in vain."""
        del self._timers[repeated]
        try:
            pending = repeated.action()
        except Exception:  # noqa: BLE001 - one failure must not end what keeps the broker tidy
            repeated.report()
            pending = None
        if pending is None:
            self._set_timer(repeated, _interval_ms(repeated.interval))
        else:
            self.keep(self._finish(repeated, pending))

    async def _finish(self, repeated: _Repeated, pending: Awaitable[None]) -> None:
        try:
            await pending
        except Exception:  # noqa: BLE001 - as above
            repeated.report()
        self._set_timer(repeated, _interval_ms(repeated.interval))


@dataclass(frozen=True, slots=True, eq=False)
class _Repeated:
    interval: Interval
    action: Action

    def report(self) -> None:
        _log.exception("%s failed", getattr(self.action, "__qualname__", self.action))


def _interval_ms(interval: Interval) -> int:
    return interval if isinstance(interval, int) else interval()
