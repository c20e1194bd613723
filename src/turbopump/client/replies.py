"""Request and reply messages: pending requests, and the path of a reply back to its sender."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from uuid import UUID

from turbopump.errors import InvalidArgument
from turbopump.wire import properties, sysflag
from turbopump.wire.compression import inflate
from turbopump.wire.headers import PushReply
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

_REPLY_TOPIC_SUFFIX = "_REPLY_TOPIC"
_REPLY = "reply"


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request message.

    ::

        reply = producer.request(Message("prices", b"EUR"), timeout=2)
        print(reply.body)
    """

    body: bytes
    properties: Mapping[str, str]
    message_id: str
    born_timestamp_ms: int


class Replies:
    """Requests of one client that wait for their replies."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._waiting: dict[str, asyncio.Future[Reply]] = {}

    @contextmanager
    def expected(self) -> Iterator[tuple[str, asyncio.Future[Reply]]]:
        """Yield a new correlation id and a future of its reply, pending until the block ends."""
        correlation_id = str(UUID(int=self._random.getrandbits(128), version=4))
        promise: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = promise
        try:
            yield correlation_id, promise
        finally:
            del self._waiting[correlation_id]

    def arrived(self, header: PushReply, body: bytes) -> None:
        """Accept a reply that a broker pushed (326)."""
        named = properties.decode(header.properties or "")
        promise = self._waiting.get(named.get(properties.CORRELATION_ID, ""))
        if promise is None or promise.done():
            _log.warning("dropped a reply to %s: no pending request", header.producer_group)
            return
        compression = sysflag.compression_of(header.sys_flag)
        plain = body if compression is None else inflate(body, compression)
        unique = named.get(properties.UNIQUE_KEY, "")
        promise.set_result(Reply(plain, named, unique, header.born_timestamp))


def request_properties(correlation_id: str, client_id: str, timeout_ms: int) -> dict[str, str]:
    """Return the properties that make a message a request."""
    return {
        properties.CORRELATION_ID: correlation_id,
        properties.REPLY_TO_CLIENT: client_id,
        properties.TTL: str(timeout_ms),
    }


def reply_topic(request: MessageView) -> str:
    """Return the topic of the reply to a request; raises InvalidArgument if it is not one."""
    cluster = request.properties.get(properties.CLUSTER)
    if cluster is None or properties.CORRELATION_ID not in request.properties:
        raise InvalidArgument(
            f"message {request.message_id} is not a request: it has no CLUSTER or CORRELATION_ID"
        )
    return cluster + _REPLY_TOPIC_SUFFIX


def reply_properties(request: MessageView) -> dict[str, str]:
    """Return the properties that route a reply to its requester."""
    copied = (properties.CORRELATION_ID, properties.REPLY_TO_CLIENT, properties.TTL)
    named = request.properties
    return {
        properties.MESSAGE_TYPE: _REPLY,
        **{name: named[name] for name in copied if name in named},
    }
