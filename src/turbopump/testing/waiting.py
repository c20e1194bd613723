"""Waiting for conditions in virtual time, without polling, and never forever."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from turbopump.errors import InvalidArgument
from turbopump.testing.loop import virtual_loop
from turbopump.testing.stack_dump import described, where

T = TypeVar("T")
Fact = Callable[[], object]

_CANCEL_WAIT_S = 60.0
"""Virtual time that a test has for its `finally` after a timeout."""


async def quiet() -> None:
    """Return when nothing more can run without the clock advancing."""
    await _seen(lambda: True)


async def until(
    fact: Fact,
    timeout_s: float,
    state: Callable[[], Sequence[str]] = lambda: (),
    *,
    what: str = "",
    pause_s: float = 0,
) -> None:
    """Return as soon as a condition is true; raises AssertionError on timeout.

    It is checked whenever everything else waits for time to pass, so no lasting state is missed,
    but not again before a pause. ``state`` describes the situation, and ``what`` the condition
    itself, for the error.
    """
    if fact():
        return
    try:
        async with asyncio.timeout(timeout_s):
            await _seen(fact, pause_s)
    except TimeoutError:
        if not fact():
            first = (
                f"not so within {duration(timeout_s)} of virtual time: {what or described(fact)}"
            )
            raise AssertionError("\n  ".join([first, *state()])) from None


async def _seen(fact: Fact, pause_s: float = 0) -> None:
    loop = virtual_loop()
    seen = loop.create_future()
    next_s = loop.time()

    def look() -> bool:
        nonlocal next_s
        if seen.done() or loop.time() < next_s:
            return False
        next_s = loop.time() + pause_s
        try:
            if not fact():
                return False
            seen.set_result(None)
        except Exception as error:  # noqa: BLE001 - the test's own, which it is to see
            seen.set_exception(error)
        return True

    with loop.watched(look, pause_s):
        await seen


class TimeLimit:
    """Ends what waits for something that never happens; waits with a timeout are not limited."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._end_s = 0.0
        self._work: asyncio.Task[Any] | None = None
        self.is_deaf = False
        """Whether something was late and is still running."""

    @contextmanager
    def lifted(self, time_s: float) -> Iterator[None]:
        """Let up to this much time pass inside without counting it."""
        start_s = virtual_loop().time()
        self._end_s += time_s
        try:
            yield
        finally:
            self._end_s -= max(0, start_s + time_s - virtual_loop().time())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine; raises AssertionError if it takes too long."""
        loop = virtual_loop()
        self._end_s = loop.time() + self._limit_s
        self._work = task = asyncio.create_task(work)
        try:
            while not task.done() and loop.time() < self._end_s:
                await asyncio.wait({task}, timeout=self._end_s - loop.time())
        finally:
            place = where(task)
            is_late = task.cancel()
        if is_late:
            _, deaf = await asyncio.wait({task}, timeout=_CANCEL_WAIT_S)
            self.is_deaf = bool(deaf)
            more = ", and does not let itself be cancelled" if deaf else ""
            raise AssertionError(
                f"still waiting after {duration(self._limit_s)} of virtual time{more}: {place}"
            )
        return task.result()

    def abandon(self) -> None:
        """End what was not done when the loop stopped, as soon as it runs again."""
        if self._work is not None:
            self._work.cancel()


def total_seconds(days: float, hours: float, minutes: float, seconds: float) -> float:
    """Return a duration in seconds."""
    total_s = days * 86_400 + hours * 3600 + minutes * 60 + seconds
    if not math.isfinite(total_s):
        raise InvalidArgument(f"seconds must be finite, got {total_s}")
    if total_s < 0:
        raise InvalidArgument(f"seconds must not be negative, got {total_s}")
    return total_s


def duration(seconds: float) -> str:
    """Format a duration for people."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{round(seconds / size, 2):g} {unit}"
    return f"{round(seconds, 3):g} s"
