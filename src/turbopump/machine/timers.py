"""Timers that say of themselves that what they call is only repeated.

A cluster in which nothing happens still beats, pulls and looks around. Virtual time may leave that
out (`turbopump.testing`), so whoever repeats something says so when setting the timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVarTuple

Ts = TypeVarTuple("Ts")


class Repeated(Generic[*Ts]):
    """A callback of work that is done again and again.

    ::

        loop.call_later(30, Repeated(self._look_around))
    """

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[*Ts], object]) -> None:
        self._callback = callback

    def __call__(self, *args: *Ts) -> object:
        return self._callback(*args)


async def set_within(event: asyncio.Event, timeout_ms: int) -> bool:
    """Wait for an event; whether it came in time."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit:
            end = Repeated(lambda: limit.reschedule(loop.time()))
            timer = loop.call_later(timeout_ms / 1000, end)
            try:
                await event.wait()
            finally:
                timer.cancel()
    except TimeoutError:
        return False
    return True
