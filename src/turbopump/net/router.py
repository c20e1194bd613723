"""Handlers by request code, and error answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from turbopump.errors import InvalidArgument, RemoteError, WireError, WriteRefused
from turbopump.net.hooks import Hook
from turbopump.wire.body_limits import DEFAULT_BODY_BYTES_MAX
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import NO_TYPED_HEADERS, Command, typed_headers
from turbopump.wire.schema import Header

if TYPE_CHECKING:
    from turbopump.net.connection import Connection

_log = logging.getLogger(__name__)

_REMARK_CHARS_MAX = 2000
"""Errors may quote their input, which may be large."""

Outcome = Command | Awaitable[Command | None] | None
"""The answer, an awaitable of it, or None: answered later with `Connection.answer`, or never."""

Handler = Callable[[Command, "Connection"], Outcome]
"""Serves one request. A plain function runs inline, a coroutine function as a task."""


def not_supported(request: Command, peer: Connection) -> Command:
    """Answer a request code without a handler, as a broker does."""
    _log.debug("request %d of %s is not supported", request.code, peer.peer_address)
    # Apache RocketMQ's text starts with a blank, too.
    remark = f" request type {request.code} not supported"
    return request.answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)


def _nothing_to_settle() -> None:
    """Do nothing after the requests of a chunk."""


class Router:
    """Handlers by request code, and the hooks around them.

    ``body_bytes_max`` limits bodies by request code; other codes have `DEFAULT_BODY_BYTES_MAX`, and
    without the mapping nothing is checked. A longer body is answered with an error; the connection
    stays open.

    ``header_types`` has the header types of requests that come often: their fields are typed while
    they are read (`Command.header`). With hooks they are not, since these look at the texts.

    ``settle`` is called after all requests of one chunk have been passed to their handlers and
    before the last answers are written: for handlers that work in batches.
    """

    def __init__(
        self,
        handlers: Mapping[int, Handler] | None = None,
        *,
        unknown: Handler = not_supported,
        hooks: Sequence[Hook] = (),
        settle: Callable[[], None] = _nothing_to_settle,
        body_bytes_max: Mapping[int, int] | None = None,
        header_types: Mapping[int, type[Header]] | None = None,
    ) -> None:
        self.settle = settle
        self._body_bytes_max = body_bytes_max
        self._handlers: dict[int, Handler] = {}
        self._unknown = unknown
        self.hooks = tuple(hooks)
        self.typed_headers = NO_TYPED_HEADERS if hooks else typed_headers(header_types or {})
        for code, handler in (handlers or {}).items():
            self.add(code, handler)

    def add(self, code: int, handler: Handler) -> None:
        """Register the handler of a request code; raises InvalidArgument if there is one."""
        if code in self._handlers:
            raise InvalidArgument(f"request code {code} has a handler already")
        # A plain int, because looking up an enum member hashes slowly.
        self._handlers[int(code)] = handler

    def outcome(self, request: Command, peer: Connection) -> Outcome:
        """Run the handler of a request; raises what hook and handler raise."""
        if len(request.body) > DEFAULT_BODY_BYTES_MAX:
            self._check_body(request)
        for hook in self.hooks:
            request = hook.before_request(peer.peer_address, request)
        return self._handlers.get(request.code, self._unknown)(request, peer)

    def _check_body(self, request: Command) -> None:
        if self._body_bytes_max is None:
            return
        most = self._body_bytes_max.get(request.code, DEFAULT_BODY_BYTES_MAX)
        if len(request.body) > most:
            remark = f"body of request {request.code} must be at most {most} bytes"
            raise RemoteError(ResponseCode.SYSTEM_ERROR, f"{remark}, got {len(request.body)}")


def failure(request: Command, peer: Connection, error: Exception) -> Command:
    """Return the answer to a request that failed."""
    match error:
        case RemoteError(code=code, remark=remark):
            return request.answer(code, remark=sendable(remark))
        case WriteRefused():
            _log.warning("request %d of %s: %s", request.code, peer.peer_address, error)
            return request.answer(ResponseCode.SERVICE_NOT_AVAILABLE, remark=sendable(str(error)))
        case WireError() | InvalidArgument():
            _log.info("request %d of %s: %s", request.code, peer.peer_address, error)
        case _:
            _log.error("request %d of %s failed", request.code, peer.peer_address, exc_info=error)
    remark = f"{type(error).__name__}: {error}"
    return request.answer(ResponseCode.SYSTEM_ERROR, remark=sendable(remark))


def sendable(remark: str) -> str:
    """Truncate a text, and replace what UTF-8 cannot encode, as in odd file names."""
    return remark[:_REMARK_CHARS_MAX].encode(errors="replace").decode()
