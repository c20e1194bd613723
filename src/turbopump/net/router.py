"""Serving the peer's requests: handlers by request code, hooks around them, and answers."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from turbopump.core import Frame, TypedFrame
from turbopump.errors import InvalidArgument, RemoteError, WireError, WriteRefused
from turbopump.net.request_protocol import RequestHook
from turbopump.wire.body_limits import DEFAULT_BODY_BYTES_MAX
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    RESPONSE_FRAMES,
    Command,
    Request,
    answer_to,
    command_of,
)

if TYPE_CHECKING:
    from turbopump.net.connection import Connection

_log = logging.getLogger(__name__)

_REMARK_CHARS_MAX = 2000
"""Errors may quote their input, which may be large."""

Outcome = Command | Awaitable[Command | None] | None
"""The answer, an awaitable of it, or None: answered later with `Connection.answer`, or never."""

Handler = Callable[[Command, "Connection"], Outcome]
"""Serves one request. A plain function runs inline, a coroutine function as a task."""

FrameHandler = Callable[[Any, "Connection"], None]
"""Serves a request whose header the core has read; it answers by itself, now or later."""


def not_supported(request: Command, peer: Connection) -> Command:
    """Answer a request code without a handler, as a broker does."""
    _log.debug("request %d of %s is not supported", request.code, peer.peer_address)
    # Apache RocketMQ's text starts with a blank, too.
    remark = f" request type {request.code} not supported"
    return request.answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)


class Router:
    """Handlers by request code, and the hooks around them.

    ``body_bytes_max`` limits bodies by request code; other codes have `DEFAULT_BODY_BYTES_MAX`, and
    without the mapping nothing is checked. A longer body is answered with an error; the connection
    stays open.

    ``settle`` is called after all requests of one chunk have been passed to their handlers and
    before the last answers are written: for handlers that work in batches.
    """

    def __init__(
        self,
        handlers: Mapping[int, Handler] | None = None,
        *,
        unknown: Handler = not_supported,
        hooks: Sequence[RequestHook] = (),
        body_bytes_max: Mapping[int, int] | None = None,
    ) -> None:
        self.settle: Callable[[], object] = lambda: None
        self._body_bytes_max = body_bytes_max
        self._handlers: dict[int, Handler] = {}
        self._unknown = unknown
        self.hooks = tuple(hooks)
        self._frame_handlers: dict[type[Frame], FrameHandler] = {}
        for code, handler in (handlers or {}).items():
            self.add(code, handler)

    def add(self, code: int, handler: Handler) -> None:
        """Register the handler of a request code; raises InvalidArgument if there is one."""
        if code in self._handlers:
            raise InvalidArgument(f"request code {code} has a handler already")
        # A plain int, because looking up an enum member hashes slowly.
        self._handlers[int(code)] = handler

    def add_frames(self, kind: type[TypedFrame], handler: FrameHandler) -> None:
        """Register the handler of requests whose headers the core reads, the most frequent ones.

        All others reach the handler of their code: those of an unusual form, and with hooks, which
        see commands.
        """
        self._frame_handlers[kind] = handler

    def frame_handler(self, frame: Frame) -> FrameHandler | None:
        """Return the handler of a frame with a header that was read; None for all others."""
        return self._frame_handlers.get(type(frame))

    def outcome(self, request: Command, peer: Connection) -> Outcome:
        """Run the handler of a request; raises what hook and handler raise."""
        self.check_body(request)
        for hook in self.hooks:
            request = hook.before_request(peer.peer_address, request)
        return self._handlers.get(request.code, self._unknown)(request, peer)

    def check_body(self, request: Request) -> None:
        """Raise RemoteError if a request has a longer body than others of its code may have."""
        if self._body_bytes_max is None or request.body_length <= DEFAULT_BODY_BYTES_MAX:
            return
        most = self._body_bytes_max.get(request.code, DEFAULT_BODY_BYTES_MAX)
        if request.body_length > most:
            remark = f"body of request {request.code} must be at most {most} bytes"
            raise RemoteError(ResponseCode.SYSTEM_ERROR, f"{remark}, got {request.body_length}")


def failure(request: Request, peer: Connection, error: Exception) -> Command:
    """Return the answer to a request that failed."""
    match error:
        case RemoteError(code=code, remark=remark):
            return answer_to(request, code, remark=sendable(remark))
        case WriteRefused():
            _log.warning("request %d of %s: %s", request.code, peer.peer_address, error)
            code = ResponseCode.SERVICE_NOT_AVAILABLE
            return answer_to(request, code, remark=sendable(str(error)))
        case WireError() | InvalidArgument():
            _log.info("request %d of %s: %s", request.code, peer.peer_address, error)
        case _:
            _log.error("request %d of %s failed", request.code, peer.peer_address, exc_info=error)
    remark = f"{type(error).__name__}: {error}"
    return answer_to(request, ResponseCode.SYSTEM_ERROR, remark=sendable(remark))


def sendable(remark: str) -> str:
    """Truncate a text, and replace what UTF-8 cannot encode, as in odd file names."""
    return remark[:_REMARK_CHARS_MAX].encode(errors="replace").decode()


class Serving:
    """Serves the requests of one connection and owns the tasks of their coroutine handlers.

    Every request that expects an answer gets one, as long as ``send`` accepts it. ``on_change`` is
    called whenever a coroutine handler starts or ends.
    """

    def __init__(
        self,
        peer: Connection,
        router: Router,
        send: Callable[[Command], None],
        on_change: Callable[[], None],
    ) -> None:
        self._peer = peer
        self._router = router
        self._send = send
        self._on_change = on_change
        # A dict as an ordered set: handlers are cancelled in the order they were started.
        self._running: dict[asyncio.Future[Command | None], None] = {}
        self.is_refusing = False
        """Whether new requests are refused; running handlers continue."""
        self.is_stopped = False
        """Whether nothing is answered any more."""

    @property
    def running(self) -> int:
        """Coroutine handlers that have not ended."""
        return len(self._running)

    def take(self, frame: Frame) -> None:
        """Serve a request of the peer, or pass its response on; raises WireError if malformed."""
        if type(frame) in RESPONSE_FRAMES:
            self._peer.take_response(frame)  # type: ignore[arg-type]
            return
        handler = self._router.frame_handler(frame)
        if handler is None or self.is_refusing or not isinstance(frame, TypedFrame):
            command = command_of(frame)
            if command.flag & FLAG_RESPONSE:
                self._peer.take_response(command)
            else:
                self._serve(command)
            return
        try:
            self._router.check_body(frame)
            handler(frame, self._peer)
        except Exception as error:  # noqa: BLE001 - a handler's bug must not close the connection
            self.answer_failure(frame, error)

    def _serve(self, request: Command) -> None:
        if self.is_refusing:
            self._refuse(request)
            return
        try:
            outcome = self._router.outcome(request, self._peer)
            if outcome is None:
                return
            if isinstance(outcome, Command):
                self.answer(request, outcome)
            else:
                self._run(request, outcome)
        except Exception as error:  # noqa: BLE001 - a handler's bug must not close the connection
            self.answer_failure(request, error)

    def answer(self, request: Request, response: Command) -> None:
        """Answer a request, unless it is one-way or the peer is gone.

        If a hook raises, or the answer cannot be sent, the peer gets that error as the answer.
        """
        if not self.is_answerable(request):
            return
        try:
            assert response.flag & FLAG_RESPONSE, "create responses with Command.answer"
            if response.opaque != request.opaque:
                # Requests that share a future get the answer that was created for one of them.
                response = replace(response, opaque=request.opaque)
            for hook in self._router.hooks:
                assert isinstance(request, Command), "hooks have seen the request"
                hook.after_response(self._peer.peer_address, request, response)
            self._send(response)
        except Exception as error:  # noqa: BLE001 - whatever it is, the peer waits for an answer
            self.answer_failure(request, error)

    def settle(self) -> None:
        """Note that all requests of a chunk have been passed in."""
        self._router.settle()

    def cancel_all(self) -> None:
        for running in tuple(self._running):
            running.cancel()

    async def wait_ended(self) -> None:
        """Wait until all handlers have ended, except the caller."""
        running = [task for task in self._running if task is not asyncio.current_task()]
        if running:
            await asyncio.wait(running)

    def log_running(self) -> None:
        """Log the handlers that ignore cancellation."""
        for task in self._running:
            _log.error("%s: %r keeps running after its connection was closed", self._peer, task)

    def _refuse(self, request: Command) -> None:
        if self.is_answerable(request):
            remark = "this side is closing the connection"
            self._send(request.answer(ResponseCode.SERVICE_NOT_AVAILABLE, remark=remark))

    def _run(self, request: Command, outcome: Awaitable[Command | None]) -> None:
        own = _share(outcome) if asyncio.isfuture(outcome) else outcome
        running = asyncio.ensure_future(own)
        self._running[running] = None
        running.add_done_callback(functools.partial(self._finished, request))
        self._on_change()

    def _finished(self, request: Command, done: asyncio.Future[Command | None]) -> None:
        del self._running[done]
        try:
            response = done.result()
            if response is not None:
                self.answer(request, response)
        except asyncio.CancelledError:
            if not self.is_stopped:
                self.answer_failure(request, RuntimeError("the handler was cancelled"))
        except Exception as error:  # noqa: BLE001 - as in serve
            self.answer_failure(request, error)
        self._on_change()

    def is_answerable(self, request: Request) -> bool:
        """Return whether the peer is connected and expects an answer."""
        return not request.flag & FLAG_ONEWAY and not self.is_stopped

    def answer_failure(self, request: Request, error: Exception) -> None:
        """Answer with an error, past the hooks: it may be a hook's own."""
        try:
            response = failure(request, self._peer, error)
            if self.is_answerable(request):
                self._send(response)
        except Exception as odd:  # noqa: BLE001 - an error with an impossible code, or without text
            _log.error("request %d of %s: %r", request.code, self._peer.peer_address, odd)
            if self.is_answerable(request):
                remark = "the answer cannot be sent"
                self._send(answer_to(request, ResponseCode.SYSTEM_ERROR, remark=remark))


async def _share(future: asyncio.Future[Command | None]) -> Command | None:
    """Wait for a future that other peers may share: it outlives this one."""
    return await asyncio.shield(future)
