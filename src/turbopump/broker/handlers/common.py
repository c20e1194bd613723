"""What handlers share: bodies of requests and answers, refusals, and clients to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from turbopump.broker.clients import AbsentPeer, Peer
from turbopump.core import TypedFrame
from turbopump.errors import BodyError, ConnectionLost, InvalidArgument, RemoteError, WriteRefused
from turbopump.net.connection import Connection
from turbopump.net.router import FrameHandler, Handler, Outcome
from turbopump.wire.bodies import QueuePositions
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.schema import Body, Header

B = TypeVar("B", bound=Body)
F = TypeVar("F", bound=Any)
H = TypeVar("H", bound=Callable[[Any, Command, Connection], Outcome])

_CODES = "request_codes"


class Requests:
    """Handlers that belong together: methods marked with `serves`."""

    __slots__ = ()

    def handlers(self) -> dict[int, Handler]:
        return {
            code: getattr(self, name)
            for name, method in vars(type(self)).items()
            for code in getattr(method, _CODES, ())
        }

    def frame_handlers(self) -> dict[type[TypedFrame], FrameHandler]:
        """Return the handlers of requests whose headers the core reads."""
        return {
            method.frame_kind: getattr(self, name)
            for name, method in vars(type(self)).items()
            if hasattr(method, "frame_kind")
        }


def serves(*codes: RequestCode) -> Callable[[H], H]:
    """Mark a method as the handler of requests."""

    def mark(method: H) -> H:
        setattr(method, _CODES, codes)
        return method

    return mark


def serves_frames(kind: type[TypedFrame]) -> Callable[[F], F]:
    """Mark a method as the handler of requests whose headers the core reads."""

    def mark(method: F) -> F:
        method.frame_kind = kind
        return method

    return mark


def handler_table(served: Iterable[Requests]) -> dict[int, Handler]:
    """Join the handlers of several parts."""
    return {code: serve for requests in served for code, serve in requests.handlers().items()}


def body_of(request: Command, kind: type[B]) -> B:
    """Read a request's body; raises BodyError, which becomes the answer."""
    return kind.decode(whole_body(request))


def answer_with(request: Command, body: Body) -> Command:
    """Answer with a body, its keys unquoted as Java writes them: some clients require it."""
    return request.answer(ResponseCode.SUCCESS, body=body.encode(bare_keys=True))


def answer_fast(request: Command, body: Body, header: Header | None = None) -> Command:
    """Answer one of Turbopump's own requests with standard JSON, even for many numbers."""
    return request.answer(ResponseCode.SUCCESS, header, body=msgspec.json.encode(body))


def positions_of(request: Command) -> tuple[list[int], list[int]]:
    """Return the queue ids and offsets of a request's body."""
    named = body_of(request, QueuePositions)
    if len(named.queue_ids) != len(named.offsets):
        raise BodyError(
            f"queueIds and offsets must be as many, got {len(named.queue_ids)} and"
            f" {len(named.offsets)}"
        )
    return named.queue_ids, named.offsets


@contextmanager
def as_remote_error() -> Iterator[None]:
    """Turn the error of an invalid or unsaved change into an answer."""
    try:
        yield
    except InvalidArgument as error:
        raise RemoteError.system(str(error)) from error
    except WriteRefused as error:
        raise RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, str(error)) from error


@runtime_checkable
class CommandPeer(Protocol):
    """A client that takes commands: a connection."""

    def oneway(self, command: Command) -> None: ...

    async def request(self, command: Command, timeout_ms: int) -> Command: ...


def commands_to(peer: Peer) -> CommandPeer:
    """Return the connection of a client; raises ConnectionLost if it has none for commands."""
    if isinstance(peer, CommandPeer):
        return peer
    if isinstance(peer, AbsentPeer):
        raise ConnectionLost("the client has not reconnected since the broker restarted")
    raise ConnectionLost(f"{peer.peer_address} does not accept commands")
