"""Clusters with an admin client, and groups with committed offsets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clusters import Cluster, cluster
from turbopump.aio import Admin
from turbopump.client.calls import commit_offset
from turbopump.message import MessageQueue, QueueOffset
from turbopump.testing import virtual_loop
from turbopump.wire.record import MessageView


@asynccontextmanager
async def administered(
    directory: Path, names: str = "ab", hooks: Any = (), **settings: Any
) -> AsyncIterator[tuple[Cluster, Admin]]:
    """Run brokers with these names, and an admin client for them."""
    async with cluster(directory, tuple(names), **settings) as world:
        session = world.session("10.0.3.1", hooks=hooks)
        async with Admin(session=session) as admin:
            yield world, admin


def queue(number: int, broker: str = "a", topic: str = "T") -> MessageQueue:
    return MessageQueue(topic, broker, number)


async def commit(world: Cluster, offsets: dict[MessageQueue, int], group: str = "g") -> None:
    """Commit offsets for a group that has never had a member."""
    async with world.session("10.0.3.2") as session:
        for each, offset in offsets.items():
            address = world.brokers[each.broker].address
            await commit_offset(
                session, address, group, each, QueueOffset(offset), 3000, is_oneway=False
            )


async def virtual_sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


def now() -> datetime:
    """Return the current virtual time."""
    return datetime.fromtimestamp(virtual_loop().clock.now_ms() / 1000, UTC)


async def bodies(messages: AsyncIterator[MessageView]) -> list[bytes]:
    return [message.body async for message in messages]
