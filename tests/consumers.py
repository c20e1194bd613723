"""Push consumers in virtual time, and listeners that record what they receive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from clusters import Cluster
from turbopump.client.calls import committed_offset
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.producer import Producer
from turbopump.client.push_consumer import PushConsumer
from turbopump.client.session import Session
from turbopump.message import Message, MessageQueue, QueueOffset
from turbopump.testing import virtual_loop
from turbopump.wire.record import MessageView

Decide = Callable[[Sequence[MessageView], ConsumeContext], ConsumeResult | None]


def always(result: ConsumeResult | None) -> Decide:
    return lambda messages, context: result


@dataclass
class Seen:
    """A listener on the event loop; ``decide`` sets the result, ``hold`` delays it."""

    decide: Decide = field(default_factory=lambda: always(ConsumeResult.SUCCESS))
    messages: list[MessageView] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    times_ms: list[int] = field(default_factory=list)
    contexts: list[ConsumeContext] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    running_max: int = 0

    def __post_init__(self) -> None:
        self.hold.set()

    async def __call__(
        self, messages: Sequence[MessageView], context: ConsumeContext
    ) -> ConsumeResult:
        self.messages += messages
        self.batches.append(len(messages))
        self.contexts.append(context)
        self.times_ms.append(virtual_loop().clock.monotonic_ms())
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await self.hold.wait()
        finally:
            self.running -= 1
        # None too: what a listener with a forgotten return returns.
        return cast(ConsumeResult, self.decide(messages, context))

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    @property
    def count(self) -> int:
        return len(self.messages)


@asynccontextmanager
async def consuming(
    world: Cluster, listener: Any, host: str = "10.0.1.1", group: str = "g", **settings: Any
) -> AsyncIterator[PushConsumer]:
    """Run a consumer of topic T on its own host, from the first message on."""
    session = settings.pop("session", None) or world.session(host)
    defaults: dict[str, Any] = {"subscriptions": {"T": "*"}, "start_from": "first"}
    async with PushConsumer(
        group, listener, session=session, **{**defaults, **settings}
    ) as consumer:
        yield consumer


async def make_topic(world: Cluster, topic: str = "T", tags: str | None = None) -> None:
    """Create a topic by sending one message to it."""
    await send(world, [b"first"], topic, tags)


async def send(
    world: Cluster,
    bodies: Sequence[bytes],
    topic: str = "T",
    tags: str | None = None,
    to: MessageQueue | None = None,
) -> None:
    session = world.session("10.0.9.9", instance="producer")
    async with Producer("pg", session=session) as producer:
        await session.route_to_send(topic, 4)
        for body in bodies:
            await producer.send(Message(topic, body, tags=tags), to=to)


async def committed(
    world: Cluster, queue_id: int = 0, topic: str = "T", group: str = "g", broker: str = "a"
) -> QueueOffset | None:
    """Return a group's committed offset on a broker."""
    async with world.session("10.0.9.8") as session:
        address = world.brokers[broker].address
        queue = MessageQueue(topic, broker, queue_id)
        return await committed_offset(session, address, group, queue, 3000)


def session_of(consumer: PushConsumer) -> Session:
    session = consumer._session
    assert session is not None
    return session


async def sleep_ms(time_ms: int) -> None:
    """Sleep in virtual time, which is free."""
    await asyncio.sleep(time_ms / 1000)
