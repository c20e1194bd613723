"""What handlers have in common: reading a request's body, writing an answer's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec

from turbopump.broker.config import IdentityConfig
from turbopump.errors import BodyError, InvalidArgument, RemoteError, WriteRefused
from turbopump.message import QueueOffset
from turbopump.net.router import Handler
from turbopump.wire.bodies import QueuePositions
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.schema import Body, Header

B = TypeVar("B", bound=Body)

_CLIENT_LIMITS_RETRIES_SINCE = 121
"""From this version number on, a client's own limit of retries counts."""


class Requests(Protocol):
    """Handlers that belong together, by request code."""

    def handlers(self) -> dict[int, Handler]: ...


def handler_table(served: Iterable[Requests]) -> dict[int, Handler]:
    """Join the handlers of several parts."""
    return {code: serve for requests in served for code, serve in requests.handlers().items()}


def body_of(request: Command, kind: type[B]) -> B:
    """Read a request's body; raises BodyError, which becomes the answer."""
    return kind.decode(whole_body(request))


def answer_with(request: Command, body: Body) -> Command:
    """Answer with a body, its keys bare as Java writes them: some clients insist on it."""
    return request.answer(ResponseCode.SUCCESS, body=body.encode(bare_keys=True))


def answer_fast(request: Command, body: Body, header: Header | None = None) -> Command:
    """Answer one of Turbopump's own requests: proper JSON, also of many numbers."""
    return request.answer(ResponseCode.SUCCESS, header, body=msgspec.json.encode(body))


def positions_of(request: Command) -> list[tuple[int, QueueOffset]]:
    """Return the queue ids and offsets of a request's body."""
    named = body_of(request, QueuePositions)
    if len(named.queue_ids) != len(named.offsets):
        raise BodyError(
            f"queueIds and offsets must be as many, got {len(named.queue_ids)} and"
            f" {len(named.offsets)}"
        )
    return list(zip(named.queue_ids, map(QueueOffset, named.offsets), strict=True))


@contextmanager
def as_remote_error() -> Iterator[None]:
    """Turn what is wrong with a change, or keeps it from being saved, into an answer."""
    try:
        yield
    except InvalidArgument as error:
        raise RemoteError(ResponseCode.SYSTEM_ERROR, str(error)) from error
    except WriteRefused as error:
        raise RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, str(error)) from error


def refuse_on_slave(identity: IdentityConfig) -> None:
    """Let topics and groups be changed on a master only, from which slaves copy them."""
    if identity.is_slave:
        raise RemoteError(
            ResponseCode.SYSTEM_ERROR,
            "Can't modify topic or subscription group from slave broker,"
            " please execute it from master broker.",
        )


def topic_missing(topic: str) -> RemoteError:
    return RemoteError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")


def retries_max_of(request: Command, wanted: int | None) -> int | None:
    """Return how often a client lets a message be retried; None if its group decides."""
    return (
        wanted if wanted is not None and request.version >= _CLIENT_LIMITS_RETRIES_SINCE else None
    )
