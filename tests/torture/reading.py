"""Reads a broker's queues with plain requests, without consumer groups or offsets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from brokers import Client, views
from torture.messages import WORK, identity_of
from turbopump.errors import TurbopumpError
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.wire.codes import ResponseCode
from turbopump.wire.names import dead_letter_topic
from turbopump.wire.record import MessageView

T = TypeVar("T")


class Unexpected(Exception):
    """A broker gave an invalid answer to a pull."""


UNREADABLE = (TurbopumpError, TimeoutError, OSError, Unexpected)
"""What reading raises if a broker is down or answers nonsense."""


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    """Connect to a broker."""
    async with ConnectionPool(SocketNetwork()) as pool:
        yield Client(pool, address)


def ask(address: str, question: Callable[[Client], Awaitable[T]], wait_s: float = 60.0) -> T:
    """Run requests against a broker, from code without an event loop."""

    async def asked() -> T:
        async with connected(address) as client, asyncio.timeout(wait_s):
            return await question(client)

    return run(asked())


def messages_of(address: str, topic: str, queue_id: int) -> list[MessageView]:
    """Return all messages of a queue; none if the topic does not exist."""
    return ask(address, lambda client: _read(client, topic, queue_id))


async def _read(client: Client, topic: str, queue_id: int) -> list[MessageView]:
    found: list[MessageView] = []
    while True:
        answer = await client.pull(len(found), topic, queue_id, consumer_group=WORK)
        if answer.code in (ResponseCode.PULL_NOT_FOUND, ResponseCode.TOPIC_NOT_EXIST):
            return found
        if answer.code != ResponseCode.SUCCESS:
            raise Unexpected(f"{topic} {queue_id} at {len(found)}: {answer.code} {answer.remark}")
        found += views(answer)


def dead_letters(address: str, group: str) -> Counter[str]:
    """Return the number of dead letters of each message; raises the errors in `UNREADABLE`."""
    letters = messages_of(address, dead_letter_topic(group), 0)
    return Counter(identity_of(letter.body) for letter in letters)
