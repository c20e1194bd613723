"""One connection, used alike by both sides: requests, answers, one-way requests, each way."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import cast

from msgspec.structs import replace

from turbopump.errors import ConnectionLost, Overloaded, RequestTimeout, WireError
from turbopump.net.admission import Admission
from turbopump.net.deadlines import Deadline, Deadlines
from turbopump.net.hooks import Hook
from turbopump.net.limits import DEFAULT_LIMITS, ConnectionLimits
from turbopump.net.network import address_text
from turbopump.net.outbox import Outbox
from turbopump.net.router import Router, failure
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import FLAG_ONEWAY, FLAG_RESPONSE, Command
from turbopump.wire.framing import FrameDecoder

_log = logging.getLogger(__name__)

_OPAQUE_BITS = 0x7FFF_FFFF

OnChange = Callable[["Connection"], None]


def no_notice(_: Connection) -> None:
    """Do nothing about a connection that opens or closes."""


def _give_up(future: asyncio.Future[Command | None]) -> None:
    if not future.done():
        future.set_result(None)


class Connection(asyncio.Protocol):
    """A stream of frames to and from one peer.

    Either side may send requests; answers are matched to them by the number in the frame and by
    nothing else. The connection owns the tasks of the coroutine handlers that serve its peer, and
    ends them when it closes. ``accepted`` says that the peer opened the connection: then this side
    stops reading while the peer does not read its answers. The other side must go on reading, or
    both would wait for each other.
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
        hooks: Sequence[Hook] = (),
        on_open: OnChange = no_notice,
        on_closed: OnChange = no_notice,
    ) -> None:
        self.peer_address = "unknown"
        self.local_address = "unknown"
        self._router = router
        self._deadlines = deadlines
        self._clock = deadlines.clock
        self._limits = limits
        self._accepted = accepted
        self._hooks = tuple(hooks)
        self._on_open = on_open
        self._on_closed = on_closed
        self._admission = Admission(limits.requests_in_flight_max, deadlines)
        self._decoder = FrameDecoder(limits.frame_bytes_max)
        self._frames: Iterator[Command] = iter(())
        self._chunks: deque[bytes] = deque()
        self._reading = True
        # Answered with None when no answer will come: whoever waits knows best what to raise.
        self._pending: dict[int, asyncio.Future[Command | None]] = {}
        self._next_opaque = 0
        # A dict as an ordered set: handlers are cancelled in the order they were started.
        self._running: dict[asyncio.Future[Command | None], None] = {}
        self._idle: Deadline | None = None
        self._touched_ms = 0
        self._close_reason: str | None = None
        self._closed = asyncio.Event()
        self._draining = False
        self._quiet = asyncio.Event()
        self.has_heard = False
        """Whether the peer has ever sent anything."""

    def __repr__(self) -> str:
        return f"<Connection {self.local_address} to {self.peer_address}>"

    # --- for those who send -----------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._close_reason is None

    @property
    def requests_in_flight(self) -> int:
        """Own requests that wait for their answer."""
        return len(self._pending)

    @property
    def handlers_running(self) -> int:
        """Requests of the peer that coroutine handlers are serving."""
        return len(self._running)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes held in memory because the peer has not taken them yet."""
        return self._outbox.unwritten_bytes

    async def request(self, command: Command, timeout_ms: int) -> Command:
        """Send a request and return its answer, whatever its code.

        ``timeout_ms`` covers waiting for a place as well as for the answer. Raises Overloaded when
        nothing could be sent in time, RequestTimeout when no answer came, ConnectionLost when the
        connection closed before.
        """
        for hook in self._hooks:
            command = hook.before_request(self.peer_address, command)
        if not self._admission.try_enter():
            timeout_ms = await self._enter(timeout_ms)
        opaque = self._unused_opaque()
        future: asyncio.Future[Command | None] = self._loop.create_future()
        self._pending[opaque] = future
        deadline = self._deadlines.add(timeout_ms, _give_up, future)
        try:
            self._require_open()
            self._send(replace(command, opaque=opaque))
            response = await future
        finally:
            deadline.cancel()
            del self._pending[opaque]
            self._leave()
        if response is None:
            self._require_open()
            text = f"no answer to request {command.code} of {self.peer_address}"
            raise RequestTimeout(f"{text} within {timeout_ms} ms")
        for hook in self._hooks:
            hook.after_response(self.peer_address, command, response)
        return response

    def oneway(self, command: Command) -> None:
        """Send a request that is never answered; raises Overloaded while the peer does not read."""
        self._require_open()
        if not self._admission.writable:
            raise Overloaded(f"{self.peer_address} does not read: {self.unwritten_bytes} unwritten")
        for hook in self._hooks:
            command = hook.before_request(self.peer_address, command)
        self._send_oneway(command)

    async def oneway_in_time(self, command: Command, timeout_ms: int) -> None:
        """Send a request that is never answered, after waiting until the peer reads."""
        for hook in self._hooks:
            command = hook.before_request(self.peer_address, command)
        if not self._admission.try_enter():
            await self._enter(timeout_ms)
        try:
            self._require_open()
            self._send_oneway(command)
        finally:
            self._leave()

    def answer(self, request: Command, response: Command) -> None:
        """Answer a request of the peer, now or long after its handler returned None.

        Nothing is sent for one-way requests, nor to a peer that is gone: who answers late cannot
        know that it is.
        """
        assert response.flag & FLAG_RESPONSE, "an answer is made with Command.answer"
        if self._is_answerable(request):
            for hook in self._router.hooks:
                hook.after_response(self.peer_address, request, response)
            self._send(response)

    def close(self, reason: str = "closed by this side") -> None:
        """Write what is unwritten, then close; requests in flight fail at once."""
        if self._close_reason is None:
            self._outbox.flush()
            self._stop(reason)
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close without writing what is unwritten."""
        if self._close_reason is None:
            self._stop(reason)
        self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the connection is gone and its handlers have ended."""
        await self._closed.wait()
        running = [task for task in self._running if task is not asyncio.current_task()]
        if running:
            await asyncio.wait(running)

    async def drain(self, timeout_ms: int) -> None:
        """Finish what runs in both directions, write everything, then close; after the time, abort.

        New requests of the peer are refused meanwhile with an answer that lets it go elsewhere.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while not self._is_quiet:
                    self._quiet.clear()
                    await self._quiet.wait()
                self.close("drained")
                await self.wait_closed()
        except TimeoutError:
            _log.warning("%s: not drained within %d ms, aborted", self, timeout_ms)
            self.abort("not drained in time")
            await self.wait_closed()

    async def _enter(self, timeout_ms: int) -> int:
        """Wait for a place; return the time that is left, of which there is some."""
        self._require_open()
        start_ms = self._clock.monotonic_ms()
        await self._admission.enter(timeout_ms, self.peer_address)
        left_ms = timeout_ms - (self._clock.monotonic_ms() - start_ms)
        if left_ms <= 0:
            self._leave()
            raise Overloaded(
                f"{self.peer_address}: no place within {timeout_ms} ms, one came later"
            )
        return left_ms

    def _leave(self) -> None:
        self._admission.leave()
        if self._draining:
            self._note_quiet()

    def _unused_opaque(self) -> int:
        opaque = self._next_opaque
        while opaque in self._pending:
            opaque = (opaque + 1) & _OPAQUE_BITS
        self._next_opaque = (opaque + 1) & _OPAQUE_BITS
        return opaque

    def _send_oneway(self, command: Command) -> None:
        opaque = self._unused_opaque()
        self._send(replace(command, opaque=opaque, flag=command.flag | FLAG_ONEWAY))

    def _send(self, command: Command) -> None:
        self._touched_ms = self._clock.monotonic_ms()
        self._outbox.put(command)
        if not self._admission.writable:
            self._check_unwritten()

    def _check_unwritten(self) -> None:
        unwritten = self._outbox.unwritten_bytes
        if unwritten > self._limits.unwritten_bytes_max and self._close_reason is None:
            reason = f"{unwritten} bytes unwritten, at most {self._limits.unwritten_bytes_max}"
            _log.warning("%s: aborted, %s", self, reason)
            self.abort(reason)

    def _require_open(self) -> None:
        if self._close_reason is not None:
            raise self._lost()

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"connection to {self.peer_address}: {self._close_reason}")

    # --- called by the transport ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(self._limits.write_pause_bytes)
        self._outbox = Outbox(self._transport, self._limits, self._loop)
        self.peer_address = address_text(transport.get_extra_info("peername"))
        self.local_address = address_text(transport.get_extra_info("sockname"))
        self._touched_ms = self._clock.monotonic_ms()
        self._idle = self._deadlines.add(self._limits.idle_ms, self._check_idle)
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        self._touched_ms = self._clock.monotonic_ms()
        self.has_heard = True
        if self._reading and not self._chunks:
            self._frames = self._decoder.feed(data)
            self._read()
        else:
            # Reading paused, yet the transport had this in hand already.
            self._chunks.append(data)

    def pause_writing(self) -> None:
        self._admission.pause()
        self._adjust_reading()

    def resume_writing(self) -> None:
        # A peer that reads slowly is not idle.
        self._touched_ms = self._clock.monotonic_ms()
        self._admission.resume()
        self._adjust_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(f"lost: {exc}" if exc else "closed by the peer")
        _log.debug("%s: %s", self, self._close_reason)
        if self._idle is not None:
            self._idle.cancel()
        for running in tuple(self._running):
            running.cancel()
        self._closed.set()
        self._on_closed(self)

    def _stop(self, reason: str) -> None:
        """Let nothing more in or out, and tell everybody who waits; the first reason stays."""
        if self._close_reason is not None:
            return
        self._close_reason = reason
        self._reading = False
        self._chunks.clear()
        self._frames = iter(())
        for future in self._pending.values():
            _give_up(future)
        self._admission.fail_all(self._lost())

    def _check_idle(self) -> None:
        left_ms = self._touched_ms + self._limits.idle_ms - self._clock.monotonic_ms()
        if left_ms > 0:
            self._idle = self._deadlines.add(left_ms, self._check_idle)
            return
        reason = f"idle for {self._limits.idle_ms} ms"
        _log.info("%s: closed, %s", self, reason)
        if self._outbox.unwritten_bytes or not self.is_open:
            # The peer does not read: waiting for it to take the rest would be for ever.
            self.abort(reason)
        else:
            self.close(reason)

    # --- reading and serving ----------------------------------------------------------------------

    def _read(self) -> None:
        """Act on the frames that came, until there are no more or reading must pause."""
        self._outbox.hold()
        try:
            self._take_frames()
            while self._reading and self._chunks:
                self._frames = self._decoder.feed(self._chunks.popleft())
                self._take_frames()
        except WireError as error:
            _log.warning("%s: closed, malformed frame: %s", self, error)
            self.close(f"malformed frame: {error}")
        finally:
            self._router.settle()
            self._outbox.release()

    def _take_frames(self) -> None:
        for command in self._frames:
            self._take(command)
            if not self._reading:
                # What is left of the chunk stays in the iterator.
                return

    def _take(self, command: Command) -> None:
        if not command.flag & FLAG_RESPONSE:
            self._serve(command)
            return
        future = self._pending.get(command.opaque)
        if future is None or future.done():
            _log.debug("%s: answer to unknown request %d dropped", self, command.opaque)
        else:
            future.set_result(command)

    def _serve(self, request: Command) -> None:
        if self._draining:
            remark = "this side is closing the connection"
            refusal = request.answer(ResponseCode.SERVICE_NOT_AVAILABLE, remark=remark)
            self._answer_past_hooks(request, refusal)
            return
        try:
            outcome = self._router.outcome(request, self)
            if isinstance(outcome, Command):
                self.answer(request, outcome)
            elif outcome is not None:
                self._run(request, outcome)
        except Exception as error:  # noqa: BLE001 - a handler's bug must not close the connection
            self._answer_past_hooks(request, failure(request, self, error))

    def _run(self, request: Command, outcome: Awaitable[Command | None]) -> None:
        running = asyncio.ensure_future(outcome)
        self._running[running] = None
        running.add_done_callback(functools.partial(self._finished, request))
        self._adjust_reading()

    def _finished(self, request: Command, done: asyncio.Future[Command | None]) -> None:
        del self._running[done]
        try:
            response = done.result()
            if response is not None:
                self.answer(request, response)
        except asyncio.CancelledError:
            cancelled = RuntimeError("the handler was cancelled")
            if self.is_open:
                self._answer_past_hooks(request, failure(request, self, cancelled))
        except Exception as error:  # noqa: BLE001 - as in _serve
            self._answer_past_hooks(request, failure(request, self, error))
        self._adjust_reading()
        self._note_quiet()

    def _is_answerable(self, request: Command) -> bool:
        return not request.flag & FLAG_ONEWAY and self._close_reason is None

    def _answer_past_hooks(self, request: Command, response: Command) -> None:
        """Send an answer that no hook sees: what it reports may be a hook's own error."""
        if self._is_answerable(request):
            self._send(response)

    @property
    def _is_quiet(self) -> bool:
        return not self._running and self._admission.is_idle

    def _note_quiet(self) -> None:
        if self._draining and self._is_quiet:
            self._quiet.set()

    def _should_read(self) -> bool:
        """Not while answers cannot be written or too many handlers run."""
        return (
            self._close_reason is None
            and len(self._running) < self._limits.handlers_running_max
            and (self._admission.writable or not self._accepted)
        )

    def _adjust_reading(self) -> None:
        """Pause reading at once, or resume it soon, when it is time to."""
        should_read = self._should_read()
        if self._reading and not should_read:
            self._reading = False
            if not self._transport.is_closing():
                self._transport.pause_reading()
        elif should_read and not self._reading:
            # Not from here: the transport or a handler may be in the middle of something.
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        """Go on with frames that were left, then let new ones come."""
        if self._reading or not self._should_read():
            return
        self._reading = True
        self._read()
        if self._reading and not self._transport.is_closing():
            self._transport.resume_reading()
