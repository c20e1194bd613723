"""Things that a broker does again and again, with one owner for all their timers and tasks.

What is due at about the same time is done together in one turn of the loop; only what waits for
something has a task.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)

_MOMENTS_PER_S = 20
"""What is due between two of them is done together: an idle broker wakes once, not six times."""

Action = Callable[[], Awaitable[None] | None]

Interval = int | Callable[[], int]
"""Milliseconds; a function is asked again before each pause, as settings may change."""


class Periodic:
    """Owns what is repeated, and tasks, until they are stopped."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._due: dict[int, list[_Repeated]] = {}
        """By the moment, each of which has a timer."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._is_stopped = False

    def every(self, interval: Interval, action: Action, *, first_ms: int | None = None) -> None:
        """Repeat an action; the pause begins when it is done. The first comes after a pause too."""
        pause_ms = _interval_ms(interval) if first_ms is None else first_ms
        self._set_timer(_Repeated(interval, action, pause_ms), pause_ms)

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
        self._due.clear()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _set_timer(self, repeated: _Repeated, pause_ms: int) -> None:
        loop = asyncio.get_running_loop()
        # Never early; rounded before, since seconds as floats may lie a hair behind the moment.
        self._set_at(
            math.ceil(round((loop.time() + pause_ms / 1000) * _MOMENTS_PER_S, 6)), repeated
        )

    def _set_at(self, moment: int, repeated: _Repeated) -> None:
        if self._is_stopped:
            return
        together = self._due.get(moment)
        if together is None:
            together = self._due[moment] = []
            loop = asyncio.get_running_loop()
            self._timers[moment] = loop.call_at(moment / _MOMENTS_PER_S, self._act_all, moment)
        together.append(repeated)

    def _act_all(self, moment: int) -> None:
        del self._timers[moment]
        together = self._due.pop(moment)
        moment = self._caught_up(moment)
        for repeated in together:
            pending = self._act(repeated)
            if pending is None:
                pause = repeated.pause_ms() * _MOMENTS_PER_S / 1000
                self._set_at(moment + math.ceil(pause), repeated)
            else:
                self.keep(self._finish(repeated, pending))

    def _caught_up(self, moment: int) -> int:
        """Return from when to count on: a machine that was asleep need not make up for it."""
        now = math.floor(asyncio.get_running_loop().time() * _MOMENTS_PER_S)
        return now if now > moment + _MOMENTS_PER_S else moment

    def _act(self, repeated: _Repeated) -> Awaitable[None] | None:
        """Do it once; what takes no time needs no task, which an idle broker would wake in vain."""
        try:
            return repeated.action()
        except Exception:  # noqa: BLE001 - one failure must not end what keeps the broker tidy
            repeated.report()
            return None

    async def _finish(self, repeated: _Repeated, pending: Awaitable[None]) -> None:
        try:
            await pending
        except Exception:  # noqa: BLE001 - as above
            repeated.report()
        self._set_timer(repeated, repeated.pause_ms())


class _Repeated:
    """An action, and its pauses."""

    __slots__ = ("_interval", "_last_ms", "action")

    def __init__(self, interval: Interval, action: Action, first_ms: int) -> None:
        self._interval = interval
        self._last_ms = first_ms
        self.action = action

    def pause_ms(self) -> int:
        """Return the next pause: as long as the last one, if that is all that can be found out."""
        try:
            self._last_ms = _interval_ms(self._interval)
        except Exception:  # noqa: BLE001 - neither this action may end by it, nor those after it
            _log.exception("%s: its pause stays at %d ms", self._name, self._last_ms)
        return self._last_ms

    def report(self) -> None:
        _log.exception("%s failed", self._name)

    @property
    def _name(self) -> str:
        return getattr(self.action, "__qualname__", repr(self.action))


def _interval_ms(interval: Interval) -> int:
    return interval if isinstance(interval, int) else interval()
