"""Reading a broker's queues in plain requests, without consumer groups or offsets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from brokers import Client
from torture.messages import identity_of
from turbopump.errors import TurbopumpError
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.names import dead_letter_topic
from turbopump.wire.record import MessageView

T = TypeVar("T")

UNREADABLE = (TurbopumpError, TimeoutError, OSError)
"""What reading raises while a broker is down, or when it answers nonsense."""


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    """Connect to a broker."""
    async with ConnectionPool(SocketNetwork()) as pool:
        yield Client(pool, address)


def ask(address: str, question: Callable[[Client], Awaitable[T]], wait_s: float = 60.0) -> T:
    """Ask a broker something, from code that has no event loop."""

    async def asked() -> T:
        async with connected(address) as client, asyncio.timeout(wait_s):
            return await question(client)

    return run(asked())


def messages_of(address: str, topic: str, queue_id: int) -> list[MessageView]:
    """Return all messages of a queue."""
    return ask(address, lambda client: client.messages(topic, queue_id))


def dead_letters(address: str, group: str) -> Counter[str]:
    """Return how many dead letters there are of each message; raises what is in `UNREADABLE`."""
    letters = messages_of(address, dead_letter_topic(group), 0)
    return Counter(identity_of(letter.body) for letter in letters)
