"""Timers of periodic work, marked as such.

An idle cluster still sends heartbeats, pulls and polls. Virtual time may skip that
(`turbopump.testing`), so periodic work marks its timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVarTuple

from turbopump.timeouts import timeout

Ts = TypeVarTuple("Ts")


class Repeated(Generic[*Ts]):
    """A callback of periodic work.

    ::

        loop.call_later(30, Repeated(self._poll))
    """

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[*Ts], object]) -> None:
        self._callback = callback

    def __call__(self, *args: *Ts) -> object:
        return self._callback(*args)


async def set_within(event: asyncio.Event, timeout_ms: int) -> bool:
    """Wait for an event; return whether it was set in time."""
    loop = asyncio.get_running_loop()
    try:
        async with timeout(None) as limit:
            end = Repeated(lambda: limit.reschedule(loop.time()))
            timer = loop.call_later(timeout_ms / 1000, end)
            try:
                await event.wait()
            finally:
                timer.cancel()
    except TimeoutError:
        return False
    return True
