"""The protocol of one side's requests on a connection: request ids, frames, hooks, matching.

There is no I/O here. `Connection` drives it from an event loop, `BlockingConnection` from the
caller's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from turbopump.clock import Clock
from turbopump.core import FrameDecoder
from turbopump.errors import ConnectionLost, InvalidArgument, RequestTimeout
from turbopump.net.limits import ConnectionLimits
from turbopump.wire.command import FLAG_ONEWAY, Buffer, Command, Response, command_of
from turbopump.wire.framing import encode_parts
from turbopump.wire.prepared_requests import PullRequest, SendRequest

W = TypeVar("W")

_OPAQUE_BITS = 0x7FFF_FFFF

Prepared = SendRequest | PullRequest
"""A request that makes its own frame, and takes its response as the core has read it."""

Request = Command | Prepared


class RequestHook(Protocol):
    """Called around every request, on the sending or on the serving side.

    ::

        class Signer:
            def before_request(self, address, command):
                fields = {**(command.ext_fields or {}), "token": token}
                return msgspec.structs.replace(command, ext_fields=fields)

            def after_response(self, address, request, response): ...

    A hook of a connection or a pool sees the requests that are sent, a hook of a router those that
    are served. What it raises becomes the outcome of the request: on the serving side, the answer.
    Hooks do not see error answers made from an exception. Hooks of a `BlockingPool` are called on
    the threads that send, several at a time.
    """

    def before_request(self, address: str, command: Command) -> Command:
        """Return the request to send or serve; ``address`` is the peer's.

        Return a copy to change it: the request passed in may be sent again.
        """

    def after_response(self, address: str, request: Command, response: Command) -> None:
        """See a response that was received, or is about to be sent; one-way requests have none."""


class RequestProtocol(Generic[W]):
    """Requests in flight on one connection, each with the driver's waiter ``W``.

    The driver writes the frames, feeds what it reads to ``decoder`` and waits in its own way. Every
    request passes `prepare`, in both drivers: that is where hooks, such as one that signs requests
    with credentials, change it.
    """

    def __init__(
        self,
        clock: Clock,
        limits: ConnectionLimits,
        hooks: Sequence[RequestHook],
        *,
        typed_requests: bool = False,
    ) -> None:
        self.clock = clock
        self.limits = limits
        self.hooks = tuple(hooks)
        # Hooks see responses as commands.
        self.decoder = FrameDecoder(
            limits.frame_bytes_max, typed_requests=typed_requests, typed_responses=not hooks
        )
        self.peer_address = "unknown"
        self.close_reason: str | None = None
        """Why the connection is closed; None while it is open."""
        self.received_ms = clock.monotonic_ms()
        """When the peer last sent anything, or accepted the connection."""
        self.chunks_received = 0
        self.in_flight: dict[int, W] = {}
        """Waiters by request id."""
        self._next_opaque = 0

    # --- requests ---------------------------------------------------------------------------------

    def prepare(self, request: Request) -> Request:
        """Return the request as hooks want it sent."""
        if not self.hooks:
            return request
        command = request if isinstance(request, Command) else request.command()
        for hook in self.hooks:
            changed: object = hook.before_request(self.peer_address, command)
            if not isinstance(changed, Command):
                raise InvalidArgument(
                    f"{type(hook).__name__}.before_request must return the request, got {changed!r}"
                )
            command = changed
        return command

    def begin(self, waiter: W) -> int:
        """Reserve a request id, and register the waiter for its response."""
        opaque = self.unused_opaque() if self._next_opaque in self.in_flight else self._next_opaque
        self._next_opaque = (opaque + 1) & _OPAQUE_BITS
        self.in_flight[opaque] = waiter
        return opaque

    def unused_opaque(self) -> int:
        """Return the next request id that no request in flight has."""
        opaque = self._next_opaque
        while opaque in self.in_flight:
            opaque = (opaque + 1) & _OPAQUE_BITS
        self._next_opaque = (opaque + 1) & _OPAQUE_BITS
        return opaque

    def frame(self, request: Request, opaque: int) -> list[Buffer]:
        """Encode a request; raises InvalidArgument if it exceeds the frame limit."""
        bytes_max = self.limits.frame_bytes_max
        if isinstance(request, Command):
            return encode_parts(replace(request, opaque=opaque), bytes_max)
        return request.frame_parts(opaque, 0, bytes_max)

    def oneway_frame(self, request: Request) -> list[Buffer]:
        opaque = self.unused_opaque()
        if isinstance(request, Command):
            return self.frame(replace(request, flag=request.flag | FLAG_ONEWAY), opaque)
        return request.frame_parts(opaque, FLAG_ONEWAY, self.limits.frame_bytes_max)

    # --- responses --------------------------------------------------------------------------------

    def note_received(self) -> None:
        self.received_ms = self.clock.monotonic_ms()
        self.chunks_received += 1

    def finish(self, request: Request, response: Response) -> Response:
        """Show a response to hooks and return it, in the form that suits the request."""
        if not isinstance(request, Command):
            return response
        if not isinstance(response, Command):
            return command_of(response)
        for hook in self.hooks:
            hook.after_response(self.peer_address, request, response)
        return response

    # --- failures ---------------------------------------------------------------------------------

    def timed_out(self, request: Request, timeout_ms: int) -> RequestTimeout:
        text = f"no answer to request {request.code} of {self.peer_address} within {timeout_ms} ms"
        return RequestTimeout(text)

    def lost(self) -> ConnectionLost:
        reason = self.close_reason or "is being closed by this side"
        return ConnectionLost(f"connection to {self.peer_address}: {reason}")

    def require_open(self) -> None:
        """Raise ConnectionLost if the connection is closed."""
        if self.close_reason is not None:
            raise self.lost()
