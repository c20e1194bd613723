"""Serving the peer's requests: from the frame to the answer, through hooks and handlers."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from turbopump.net.router import Router, failure
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import FLAG_ONEWAY, FLAG_RESPONSE, Command

if TYPE_CHECKING:
    from turbopump.net.connection import Connection

_log = logging.getLogger(__name__)


async def _share(future: asyncio.Future[Command | None]) -> Command | None:
    """Wait for a future that other peers may share: it outlives this one."""
    return await asyncio.shield(future)


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

    def serve(self, request: Command) -> None:
        """Serve a request of the peer; raises nothing."""
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

    def answer(self, request: Command, response: Command) -> None:
        """Answer a request, unless it is one-way or the peer is gone.

        If a hook raises, or the answer cannot be sent, the peer gets that error as the answer.
        """
        if not self.is_answerable(request):
            return
        try:
            assert response.flag & FLAG_RESPONSE, "an answer is made with Command.answer"
            if response.opaque != request.opaque:
                # Requests that share a future get the answer that was created for one of them.
                response = replace(response, opaque=request.opaque)
            for hook in self._router.hooks:
                hook.after_response(self._peer.peer_address, request, response)
            self._send(response)
        except Exception as error:  # noqa: BLE001 - whatever it is, the peer waits for an answer
            self.answer_failure(request, error)

    def settle(self) -> None:
        """Note that all requests of a chunk have been passed in."""
        self._router.settle()

    def cancel_all(self) -> None:
        """Cancel running handlers."""
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

    def is_answerable(self, request: Command) -> bool:
        """Return whether the peer is connected and expects an answer."""
        return not request.flag & FLAG_ONEWAY and not self.is_stopped

    def answer_failure(self, request: Command, error: Exception) -> None:
        """Answer with an error, past the hooks: it may be a hook's own."""
        try:
            response = failure(request, self._peer, error)
            if self.is_answerable(request):
                self._send(response)
        except Exception as odd:  # noqa: BLE001 - an error with an impossible code, or without text
            _log.error("request %d of %s: %r", request.code, self._peer.peer_address, odd)
            if self.is_answerable(request):
                remark = "the answer cannot be sent"
                self._send(request.answer(ResponseCode.SYSTEM_ERROR, remark=remark))
