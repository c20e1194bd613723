"""Many concurrent calls, but not all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K")

IN_FLIGHT_MAX = 256
"""Concurrent calls: of thousands, those waiting for the others would time out."""


async def gather_by_key(
    keys: Iterable[K], ask: Callable[[K], Awaitable[T]], in_flight_max: int = IN_FLIGHT_MAX
) -> dict[K, T]:
    """Call ``ask`` for all keys, many concurrently; raises the first error."""
    wanted, ask = list(keys), limited(ask, in_flight_max)
    tasks = [asyncio.ensure_future(ask(key)) for key in wanted]
    try:
        return dict(zip(wanted, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()


def limited(ask: Callable[[K], Awaitable[T]], in_flight_max: int) -> Callable[[K], Awaitable[T]]:
    """Return a function that calls another one, but not more often at the same time."""
    room = asyncio.Semaphore(in_flight_max)

    async def asked(key: K) -> T:
        async with room:
            return await ask(key)

    return asked
