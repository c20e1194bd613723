"""One connection on an event loop: both sides send requests and answer those of the peer."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from typing import cast, overload

from turbopump.errors import Overloaded
from turbopump.net.admission import Admission
from turbopump.net.deadlines import Bucket, Deadline, Deadlines
from turbopump.net.inbox import Inbox, ReceiveBudget, hang_up_check, unread_chunks
from turbopump.net.limits import DEFAULT_LIMITS, ConnectionLimits
from turbopump.net.network import address_text
from turbopump.net.outbox import Outbox
from turbopump.net.request_protocol import Prepared, Request, RequestHook, RequestProtocol
from turbopump.net.router import Router, Serving
from turbopump.net.thread_request import UNHEARD, Outcome, ThreadRequest
from turbopump.net.turn_budget import TurnBudget
from turbopump.timeouts import timeout
from turbopump.wire.command import FLAG_ONEWAY, Buffer, Command, Response
from turbopump.wire.command import Request as ServedRequest
from turbopump.wire.framing import encode_parts, frame_length, too_long

_log = logging.getLogger(__name__)

_CANCEL_GRACE_S = 0.25
"""How long cancelled handlers may take to end after a drain has timed out."""

OnChange = Callable[["Connection"], None]
OnServed = Callable[[int], None]
Waiter = asyncio.Future[Response | None] | ThreadRequest


def no_notice(_: Connection) -> None:
    """Ignore that a connection opens or closes."""


def _give_up(waiter: Waiter) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Connection(asyncio.Protocol):
    """A stream of frames to and from one peer, driven by an event loop.

    `RequestProtocol` numbers the requests of this side and matches the responses. The connection
    owns the tasks of the coroutine handlers that serve its peer, and cancels them when it closes.
    ``accepted`` means that the peer opened the connection: then this side stops reading while the
    peer does not read its answers. The connecting side must keep reading, or both would wait for
    each other. ``aborts_silent`` aborts the connection when a request times out and nothing was
    received since it was sent: the peer, or the path to it, is gone. ``on_closed`` is called when
    everything received before the end has been handed to handlers, ``on_ended`` when the last of
    these has ended. ``on_served`` gets the number of frames in each chunk, after they were served.
    """

    _loop: asyncio.AbstractEventLoop
    _transport: asyncio.Transport
    _outbox: Outbox

    def __init__(
        self,
        router: Router,
        deadlines: Deadlines,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        *,
        accepted: bool = False,
        aborts_silent: bool = False,
        hooks: Sequence[RequestHook] = (),
        on_open: OnChange = no_notice,
        on_closed: OnChange = no_notice,
        on_ended: OnChange = no_notice,
        on_served: OnServed | None = None,
        budget: ReceiveBudget | None = None,
    ) -> None:
        self.peer_address = "unknown"
        self.local_address = "unknown"
        self._deadlines = deadlines
        self._clock = deadlines.clock
        self._limits = limits
        # A waiter gets None when no response will come: it knows best what to raise.
        self._protocol: RequestProtocol[Waiter] = RequestProtocol(
            deadlines.clock, limits, hooks, typed_requests=not router.hooks
        )
        self._accepted = accepted
        self._aborts_silent = aborts_silent
        self._on_open = on_open
        self._on_closed = on_closed
        self._on_ended = on_ended
        self._on_served = on_served
        self._admission = Admission(limits.requests_in_flight_max, deadlines)
        self._serving = Serving(self, router, self._send, self._note_serving)
        self._inbox = Inbox(self, self._serving, self._protocol.decoder, budget)
        self._ends_handlers = True
        self.is_observed = bool(router.hooks)
        """Whether hooks must see each answer, which rules out `answer_encoded`."""
        self._idle: Deadline | None = None
        self._written_ms = 0
        self.is_open = True
        """Whether requests can be sent."""
        self._closed = asyncio.Event()
        self._draining = False
        self._quiet = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Connection {self.local_address} to {self.peer_address}>"

    # --- sending ----------------------------------------------------------------------------------

    @property
    def has_received(self) -> bool:
        """Whether the peer has ever sent anything."""
        return self._protocol.chunks_received > 0

    @property
    def unwritten_bytes(self) -> int:
        """Bytes buffered until the peer reads."""
        return self._outbox.unwritten_bytes

    @overload
    async def request(self, request: Command, timeout_ms: int) -> Command: ...
    @overload
    async def request(self, request: Prepared, timeout_ms: int) -> Response: ...
    async def request(self, request: Request, timeout_ms: int) -> Response:
        """Send a request and return its answer, whatever its code.

        ``timeout_ms`` covers waiting for a place as well as for the answer. Raises Overloaded when
        nothing could be sent in time, RequestTimeout when no answer came, ConnectionLost when the
        connection closed before.
        """
        protocol = self._protocol
        if self._draining:
            raise protocol.lost()
        if protocol.hooks:
            request = protocol.prepare(request)
        if not self._admission.try_enter():
            timeout_ms = await self._enter(timeout_ms)
        future: asyncio.Future[Response | None] = self._loop.create_future()
        opaque = protocol.begin(future)
        bucket = self._deadlines.bucket(timeout_ms)
        bucket[future] = _give_up
        chunks_received = protocol.chunks_received
        try:
            if protocol.close_reason is not None:
                raise protocol.lost()
            self._send_parts(protocol.frame(request, opaque))
            response = await future
        finally:
            bucket.pop(future, None)
            del protocol.in_flight[opaque]
            self._admission.leave()
            if self._draining:
                self.note_quiet()
        if response is None:
            protocol.require_open()
            if self._aborts_silent:
                # A turn later: a delayed loop sees timers before data that has arrived.
                await asyncio.sleep(0)
                self._abort_if_silent(chunks_received, timeout_ms)
            raise protocol.timed_out(request, timeout_ms)
        # Nothing is to be done after prepared requests.
        return protocol.finish(request, response) if isinstance(request, Command) else response

    def start_request(self, waiting: ThreadRequest) -> bool:
        """Send a request that a thread waits for, as `request` does.

        Returns False if it has to wait for a place, or hooks must see it: then nothing was done.
        """
        protocol = self._protocol
        if protocol.hooks or not self.is_open or not self._admission.try_enter():
            return False
        opaque = protocol.begin(waiting)
        bucket = self._deadlines.bucket(waiting.timeout_ms)
        bucket[waiting] = ThreadRequest.give_up
        waiting.on_answer = functools.partial(
            self._end_request, opaque, bucket, protocol.chunks_received
        )
        try:
            self._send_parts(protocol.frame(waiting.request, opaque))
        except BaseException:
            waiting.on_answer(waiting, UNHEARD)
            waiting.on_answer = None
            raise
        return True

    def _end_request(
        self,
        opaque: int,
        bucket: Bucket,
        chunks_received: int,
        waiting: ThreadRequest,
        response: Response | None,
    ) -> Outcome:
        """Return what becomes of a request that a thread waits for."""
        protocol = self._protocol
        bucket.pop(waiting, None)
        del protocol.in_flight[opaque]
        self._leave()
        if response is not None:
            return protocol.finish(waiting.request, response)
        if protocol.close_reason is not None:
            return protocol.lost()
        if self._aborts_silent:
            self._loop.call_soon(self._abort_if_silent, chunks_received, waiting.timeout_ms)
        return protocol.timed_out(waiting.request, waiting.timeout_ms)

    def oneway(self, request: Request) -> None:
        """Send a one-way request; raises Overloaded while the peer does not read."""
        protocol = self._protocol
        protocol.require_open()
        if self._draining:
            raise protocol.lost()
        if not self._admission.writable:
            raise Overloaded(f"{self.peer_address} does not read: {self.unwritten_bytes} unwritten")
        self._send_parts(protocol.oneway_frame(protocol.prepare(request)))

    async def oneway_in_time(self, request: Request, timeout_ms: int) -> None:
        """Send a one-way request after waiting until the peer reads."""
        protocol = self._protocol
        if self._draining:
            raise protocol.lost()
        request = protocol.prepare(request)
        if not self._admission.try_enter():
            await self._enter(timeout_ms)
        try:
            protocol.require_open()
            self._send_parts(protocol.oneway_frame(request))
        finally:
            self._leave()

    def answer(self, request: ServedRequest, response: Command) -> None:
        """Answer a request of the peer, now or after its handler returned None.

        Nothing is sent for one-way requests, nor to a peer that is gone: a late caller cannot know.
        If a hook raises, or the answer cannot be sent, the peer gets that error as the answer.
        """
        self._serving.answer(request, response)

    def answer_encoded(self, request: ServedRequest, *parts: Buffer) -> None:
        """Answer a request of the peer with an encoded frame, in one or more parts, past the hooks.

        As with `answer`, nothing is sent for one-way requests, nor to a peer that is gone, and a
        frame above the limit is replaced by an error.
        """
        # As Serving.is_answerable, without a call for each message.
        if request.flag & FLAG_ONEWAY or self._serving.is_stopped:
            return
        if len(parts) > 1 and frame_length(parts) > self._limits.frame_bytes_max:
            error = too_long(frame_length(parts), self._limits.frame_bytes_max)
            self._serving.answer_failure(request, error)
        else:
            self._send_parts(parts)

    def close(self, reason: str = "closed by this side") -> None:
        """Write what is unwritten, then close; requests in flight fail immediately."""
        if self._protocol.close_reason is None:
            self._outbox.flush()
            self._stop(reason)
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close without writing what is unwritten."""
        if self._protocol.close_reason is None:
            self._stop(reason)
        self._transport.abort()
        self._ends_handlers = True
        if self._closed.is_set():
            self._serving.cancel_all()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed and its handlers have ended."""
        await self._closed.wait()
        await self._serving.wait_ended()

    async def drain(self, timeout_ms: int) -> None:
        """Finish requests in both directions, write everything, then close; abort on timeout.

        Meanwhile new requests of the peer get an answer that sends it elsewhere, and those of this
        side raise ConnectionLost.
        """
        self._draining = True
        self.is_open = False
        self._serving.is_refusing = True
        try:
            async with timeout(timeout_ms / 1000):
                while not self._is_quiet:
                    self._quiet.clear()
                    await self._quiet.wait()
                self.close("drained")
                await self.wait_closed()
        except TimeoutError:
            _log.warning("%s: not drained within %d ms, aborted", self, timeout_ms)
            self.abort("not drained in time")
            await self._wait_cut_off()

    async def _wait_cut_off(self) -> None:
        """Wait for cancelled handlers, but not for those that ignore cancellation."""
        try:
            async with timeout(_CANCEL_GRACE_S):
                await self.wait_closed()
        except TimeoutError:
            self._serving.log_running()

    def _abort_if_silent(self, chunks_received: int, timeout_ms: int) -> None:
        if self._protocol.chunks_received == chunks_received and self._inbox.is_reading:
            reason = f"nothing received for {timeout_ms} ms"
            _log.warning("%s: aborted, %s", self, reason)
            self.abort(reason)

    async def _enter(self, timeout_ms: int) -> int:
        """Wait for a place; return the remaining time, at least 1 ms."""
        self._protocol.require_open()
        start_ms = self._clock.monotonic_ms()
        await self._admission.enter(timeout_ms, self.peer_address)
        left_ms = timeout_ms - (self._clock.monotonic_ms() - start_ms)
        if left_ms <= 0:
            self._leave()
            raise Overloaded(
                f"{self.peer_address}: no request in flight finished for {timeout_ms} ms"
            )
        return left_ms

    def _leave(self) -> None:
        self._admission.leave()
        if self._draining:
            self.note_quiet()

    def _send(self, command: Command) -> None:
        self._send_parts(encode_parts(command, self._limits.frame_bytes_max))

    def _send_parts(self, parts: Sequence[Buffer]) -> None:
        if self._inbox.is_finishing:
            return
        outbox = self._outbox
        if not outbox.is_held:
            # Otherwise something has just been received, which counts too.
            self._written_ms = self._clock.monotonic_ms()
        outbox.put(parts)
        if not self._admission.writable:
            self._check_unwritten()

    def _check_unwritten(self) -> None:
        unwritten = self._outbox.unwritten_bytes
        if unwritten > self._limits.unwritten_bytes_max and self._protocol.close_reason is None:
            reason = f"{unwritten} bytes unwritten, at most {self._limits.unwritten_bytes_max}"
            _log.warning("%s: aborted, %s", self, reason)
            self.abort(reason)

    # --- called by the transport ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(self._limits.write_pause_bytes)
        turn = TurnBudget(self._loop, self._inbox.adjust)
        has_hung_up = hang_up_check(transport) if self._accepted else None
        self._outbox = Outbox(
            self._transport, self._limits, self._loop, turn.note_written, has_hung_up
        )
        self._inbox.open(self._transport, self._outbox, turn)
        self.peer_address = address_text(transport.get_extra_info("peername"))
        self._protocol.peer_address = self.peer_address
        self.local_address = address_text(transport.get_extra_info("sockname"))
        self._written_ms = self._clock.monotonic_ms()
        self._idle = self._deadlines.add(self._limits.idle_ms, self._check_idle)
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        self._protocol.note_received()
        taken = self._inbox.receive(data)
        if self._on_served is not None:
            self._on_served(taken)

    def pause_writing(self) -> None:
        self._admission.writable = False
        self._inbox.adjust()

    def resume_writing(self) -> None:
        # A peer that reads slowly is not idle.
        self._written_ms = self._clock.monotonic_ms()
        self._admission.resume()
        self._inbox.adjust()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._protocol.close_reason is None:
            # The peer closed it: what it sent before is carried out, only answers are dropped.
            self._protocol.close_reason = f"lost: {exc}" if exc else "closed by the peer"
            self.is_open = False
            self._ends_handlers = not self._accepted
            self._serving.is_stopped = True
            self._admission.fail_all(self._protocol.lost())
            self._inbox.finish(unread_chunks(self._transport), self._end)
        else:
            self._end()

    def _end(self) -> None:
        """Report that nothing more will be read, and cancel handlers unless the peer closed."""
        _log.debug("%s: %s", self, self._protocol.close_reason)
        self._discard()
        self._closed.set()
        self._on_closed(self)
        if self._ends_handlers:
            self._serving.cancel_all()
        if not self._serving.running:
            self._on_ended(self)
        elif not self._ends_handlers:
            limit_ms = self._limits.orphaned_handlers_ms
            self._idle = self._deadlines.add(limit_ms, self._serving.cancel_all)

    def _stop(self, reason: str) -> None:
        """Stop reading and sending and fail all waiters; the first reason stays."""
        if self._protocol.close_reason is not None:
            return
        self._protocol.close_reason = reason
        self.is_open = False
        self._serving.is_stopped = True
        self._discard()
        self._admission.fail_all(self._protocol.lost())
        self.note_quiet()

    def _discard(self) -> None:
        """Drop what was received and not served, and fail requests in flight."""
        self._inbox.clear()
        for waiter in tuple(self._protocol.in_flight.values()):
            _give_up(waiter)

    def _check_idle(self) -> None:
        used_ms = max(self._written_ms, self._protocol.received_ms)
        left_ms = used_ms + self._limits.idle_ms - self._clock.monotonic_ms()
        if left_ms > 0:
            self._idle = self._deadlines.add(left_ms, self._check_idle)
            return
        reason = f"idle for {self._limits.idle_ms} ms"
        _log.info("%s: closed, %s", self, reason)
        if self._outbox.unwritten_bytes or self._protocol.close_reason is not None:
            # The peer does not read: waiting until it takes the rest would never end.
            self.abort(reason)
        else:
            self.close(reason)

    # --- reading ----------------------------------------------------------------------------------

    def close_unread(self, reason: str) -> None:
        """Close because of what the peer sent; its requests before that are carried out."""
        _log.warning("%s: closed, %s", self, reason)
        self._ends_handlers = not self._accepted
        self._inbox.clear()
        self.close(reason)

    def take_response(self, response: Response) -> None:
        """Give a response to the waiter of its request."""
        waiter = self._protocol.in_flight.get(response.opaque)
        if waiter is None or waiter.done():
            _log.debug("%s: answer to unknown request %d dropped", self, response.opaque)
        else:
            waiter.set_result(response)

    @property
    def _is_quiet(self) -> bool:
        # While reading is paused, received requests may not have been refused yet.
        is_stopped = self._protocol.close_reason is not None and not self._inbox.is_finishing
        is_read = self._inbox.is_reading or is_stopped
        return is_read and not self._serving.running and self._admission.is_idle

    def _note_serving(self) -> None:
        self._inbox.adjust()
        self.note_quiet()
        if self._closed.is_set() and not self._serving.running:
            if self._idle is not None:
                self._idle.cancel()
            self._on_ended(self)

    def note_quiet(self) -> None:
        """Wake `drain` if nothing is in progress."""
        if self._draining and self._is_quiet:
            self._quiet.set()

    def may_read(self) -> bool:
        """Whether answers can be written and not too many handlers run."""
        if self._serving.running >= self._limits.handlers_running_max:
            return False
        if self._protocol.close_reason is not None:
            return self._inbox.is_finishing
        return self._admission.writable or not self._accepted
