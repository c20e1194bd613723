"""Replies: answers to messages, pushed to the requesting client, and stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from msgspec import Struct

from turbopump.broker.clients import Member, Producers
from turbopump.broker.durability import Late, Outcome, Promise, set_outcome
from turbopump.broker.message_writer import Draft, MessageWriter, waits_for_disk
from turbopump.broker.send import Sends, host_of
from turbopump.clock import Clock
from turbopump.core import SendFrame, parse_properties
from turbopump.errors import RemoteError
from turbopump.store.outcomes import Appended
from turbopump.wire import properties as names
from turbopump.wire.hosts import Host


class PushedReply(Struct, frozen=True):
    """A reply as the requesting client gets it."""

    reply: SendFrame
    client: str
    """Who sent it, as ``host:port``."""
    properties: str
    """The reply's, and when it was pushed; in their text form."""
    store_host: Host
    store_timestamp_ms: int


Push = Callable[[Member, PushedReply], Awaitable[str | None]]
"""Pushes a reply to the requesting client; returns why that failed, or None."""


class Replied(Struct, frozen=True):
    """A reply is stored; it may have failed to reach the requesting client."""

    kept: Appended | Late
    queue_id: int
    push_failure: str | None


@dataclass(slots=True, eq=False, kw_only=True)
class Replies:
    """Delivers replies to the clients that sent the requests."""

    store_host: Host
    sends: Sends
    writer: MessageWriter
    producers: Producers
    push: Push
    clock: Clock

    async def accept(self, reply: SendFrame, client: str) -> Replied:
        """Push a client's reply and store it; raises RemoteError if it is not stored."""
        self.sends.admit(reply, client)
        properties = parse_properties(reply.properties)
        push_failure = await self._push(reply, client, properties)
        queue_id = max(reply.queue_id, 0)
        kept = await self._keep(reply, client, queue_id, properties)
        if isinstance(kept, RemoteError):
            raise kept
        return Replied(kept, queue_id, push_failure)

    async def _push(self, reply: SendFrame, client: str, properties: dict[str, str]) -> str | None:
        """Return why the reply did not reach the requesting client; None if it did."""
        client_id = properties.get(names.REPLY_TO_CLIENT)
        if client_id is None:
            return f"reply message properties[{names.REPLY_TO_CLIENT}] is null"
        asker = self.producers.by_client_id(client_id)
        if asker is None:
            return f"push reply message fail, channel of <{client_id}> not found."
        now_ms = self.clock.now_ms()
        timed = names.encode({**properties, names.PUSH_REPLY_TIME: str(now_ms)})
        return await self.push(asker, PushedReply(reply, client, timed, self.store_host, now_ms))

    async def _keep(
        self, reply: SendFrame, client: str, queue_id: int, properties: dict[str, str]
    ) -> Outcome:
        draft = Draft(
            topic=reply.topic,
            queue_id=queue_id,
            properties=properties,
            body=bytes(reply.body),
            flag=reply.message_flag,
            born_timestamp_ms=reply.born_timestamp,
            born_host=host_of(client),
            store_host=self.store_host,
            reconsume_times=reply.reconsume_times,
        )
        kept: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        promise = Promise.DURABLE if waits_for_disk(properties) else Promise.WRITTEN
        outcome = partial(set_outcome, future=kept)
        self.writer.append_soon(self.writer.record(draft), promise, outcome)
        return await kept
