"""One connection, used alike by both sides: requests, answers, one-way requests, each way."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from msgspec.structs import replace

from turbopump.errors import ConnectionLost, Overloaded, RequestTimeout, WireError
from turbopump.net.admission import Admission
from turbopump.net.deadlines import Deadline, Deadlines
from turbopump.net.hooks import Hook
from turbopump.net.limits import DEFAULT_LIMITS, ConnectionLimits
from turbopump.net.network import address_text
from turbopump.net.outbox import Outbox
from turbopump.net.request_row import RequestRow
from turbopump.net.router import Router
from turbopump.net.serving import Serving
from turbopump.net.turn import LARGE_CHUNK_BYTES, Turn
from turbopump.wire.command import FLAG_ONEWAY, FLAG_RESPONSE, Buffer, Command
from turbopump.wire.framing import FrameDecoder, encode_parts, frame_length, too_long

_log = logging.getLogger(__name__)

_OPAQUE_BITS = 0x7FFF_FFFF
_CANCEL_GRACE_S = 0.25
"""How long cancelled handlers may take to end once the time of a drain is over."""

_REASON_CHARS_MAX = 200

OnChange = Callable[["Connection"], None]
OnServed = Callable[[int], None]


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
    both would wait for each other. ``aborts_silent`` gives the connection up when a request times
    out and nothing at all was heard since it was sent: the peer, or the way to it, is gone.
    ``on_served`` is told how many frames of the peer came together, after they have been served.
    """

    _loop: asyncio.AbstractEventLoop
    _transport: asyncio.Transport
    _outbox: Outbox
    _turn: Turn

    def __init__(
        self,
        router: Router,
        deadlines: Deadlines,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        *,
        accepted: bool = False,
        aborts_silent: bool = False,
        hooks: Sequence[Hook] = (),
        on_open: OnChange = no_notice,
        on_closed: OnChange = no_notice,
        on_served: OnServed | None = None,
    ) -> None:
        self.peer_address = "unknown"
        self.local_address = "unknown"
        self._deadlines = deadlines
        self._clock = deadlines.clock
        self._limits = limits
        self._accepted = accepted
        self._aborts_silent = aborts_silent
        self._hooks = tuple(hooks)
        self._on_open = on_open
        self._on_closed = on_closed
        self._on_served = on_served
        self._frames_taken = 0
        self._admission = Admission(limits.requests_in_flight_max, deadlines)
        self._decoder = FrameDecoder(limits.frame_bytes_max)
        self.row = RequestRow(self._decoder, limits.frame_bytes_max, self._send_parts)
        """For handlers that do better with many requests that are alike."""
        self._frames: Iterator[Command] = iter(())
        self._chunks: deque[bytes] = deque()
        self._reading = True
        # Answered with None when no answer will come: whoever waits knows best what to raise.
        self._pending: dict[int, asyncio.Future[Command | None]] = {}
        self._next_opaque = 0
        self._serving = Serving(self, router, self._send, self._note_serving)
        self.is_observed = bool(router.hooks)
        """Whether hooks want to see each answer, so that `answer_encoded` must not be used."""
        self._idle: Deadline | None = None
        self._touched_ms = 0
        self._close_reason: str | None = None
        self._closed = asyncio.Event()
        self._draining = False
        self._quiet = asyncio.Event()
        self._chunks_heard = 0

    def __repr__(self) -> str:
        return f"<Connection {self.local_address} to {self.peer_address}>"

    # --- for those who send -----------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._close_reason is None and not self._draining

    @property
    def has_heard(self) -> bool:
        """Whether the peer has ever sent anything."""
        return self._chunks_heard > 0

    @property
    def requests_in_flight(self) -> int:
        """Own requests that wait for their answer."""
        return len(self._pending)

    @property
    def handlers_running(self) -> int:
        """Requests of the peer that coroutine handlers are serving."""
        return self._serving.running

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
        if self._draining:
            raise self._lost()
        for hook in self._hooks:
            command = hook.before_request(self.peer_address, command)
        if not self._admission.try_enter():
            timeout_ms = await self._enter(timeout_ms)
        opaque = self._unused_opaque()
        future: asyncio.Future[Command | None] = self._loop.create_future()
        self._pending[opaque] = future
        deadline = self._deadlines.add(timeout_ms, _give_up, future)
        chunks_heard = self._chunks_heard
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
            if self._aborts_silent:
                await self._abort_if_silent(chunks_heard, timeout_ms)
            text = f"no answer to request {command.code} of {self.peer_address}"
            raise RequestTimeout(f"{text} within {timeout_ms} ms")
        for hook in self._hooks:
            hook.after_response(self.peer_address, command, response)
        return response

    def oneway(self, command: Command) -> None:
        """Send a request that is never answered; raises Overloaded while the peer does not read."""
        self._require_open()
        if self._draining:
            raise self._lost()
        if not self._admission.writable:
            raise Overloaded(f"{self.peer_address} does not read: {self.unwritten_bytes} unwritten")
        for hook in self._hooks:
            command = hook.before_request(self.peer_address, command)
        self._send_oneway(command)

    async def oneway_in_time(self, command: Command, timeout_ms: int) -> None:
        """Send a request that is never answered, after waiting until the peer reads."""
        if self._draining:
            raise self._lost()
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
        know that it is. What hooks raise, and why an answer cannot be sent, is answered instead.
        """
        self._serving.answer(request, response)

    def answer_encoded(self, request: Command, *parts: Buffer) -> None:
        """Answer a request of the peer with a frame that is encoded already, past the hooks.

        It may come in several parts. As with `answer`, nothing is sent for one-way requests, nor
        to a peer that is gone, and that it is too long is answered instead.
        """
        if not self._serving.is_answerable(request):
            return
        if len(parts) > 1 and frame_length(parts) > self._limits.frame_bytes_max:
            error = too_long(frame_length(parts), self._limits.frame_bytes_max)
            self._serving.answer_failure(request, error)
        else:
            self._send_parts(parts)

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
        await self._serving.wait_ended()

    async def drain(self, timeout_ms: int) -> None:
        """Finish what runs in both directions, write everything, then close; after the time, abort.

        New requests of the peer are refused meanwhile with an answer that lets it go elsewhere, and
        those of this side with ConnectionLost.
        """
        self._draining = True
        self._serving.refuse_new()
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
            await self._wait_cut_off()

    async def _wait_cut_off(self) -> None:
        """Wait for cancelled handlers, but not for those that do not let themselves be ended."""
        try:
            async with asyncio.timeout(_CANCEL_GRACE_S):
                await self.wait_closed()
        except TimeoutError:
            self._serving.log_running()

    async def _abort_if_silent(self, chunks_heard: int, timeout_ms: int) -> None:
        # After a turn of the loop: one that was held up sees timers first and what came second.
        await asyncio.sleep(0)
        if self._chunks_heard == chunks_heard and self._reading:
            reason = f"nothing heard for {timeout_ms} ms"
            _log.warning("%s: given up, %s", self, reason)
            self.abort(reason)

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
        self._send_parts(encode_parts(command, self._limits.frame_bytes_max))

    def _send_parts(self, parts: Sequence[Buffer], frames: int = 1) -> None:
        if not self._outbox.is_held:
            # Else something has just been received, which counts as much.
            self._touched_ms = self._clock.monotonic_ms()
        self._outbox.put(parts, frames)
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
        reason = self._close_reason or "is being closed by this side"
        return ConnectionLost(f"connection to {self.peer_address}: {reason}")

    # --- called by the transport ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(self._limits.write_pause_bytes)
        self._turn = Turn(self._loop, self._adjust_reading)
        self._outbox = Outbox(self._transport, self._limits, self._loop, self._turn.note_written)
        self.peer_address = address_text(transport.get_extra_info("peername"))
        self.local_address = address_text(transport.get_extra_info("sockname"))
        self._touched_ms = self._clock.monotonic_ms()
        self._idle = self._deadlines.add(self._limits.idle_ms, self._check_idle)
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        self._touched_ms = self._clock.monotonic_ms()
        self._chunks_heard += 1
        if self._reading and not self._chunks:
            self._frames = self._decoder.feed(data)
            self._read()
            if self._on_served is not None:
                self._on_served(self._frames_taken)
        else:
            # Reading paused, yet the transport had this in hand already.
            self._chunks.append(data)
        if len(data) >= LARGE_CHUNK_BYTES:
            self._turn.note_large()

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
        self._serving.cancel_all()
        self._closed.set()
        self._on_closed(self)

    def _stop(self, reason: str) -> None:
        """Let nothing more in or out, and tell everybody who waits; the first reason stays."""
        if self._close_reason is not None:
            return
        self._close_reason = reason
        self._reading = False
        self._serving.stop()
        self._chunks.clear()
        self._frames = iter(())
        for future in self._pending.values():
            _give_up(future)
        self._admission.fail_all(self._lost())
        self._note_quiet()

    def _check_idle(self) -> None:
        left_ms = self._touched_ms + self._limits.idle_ms - self._clock.monotonic_ms()
        if left_ms > 0:
            self._idle = self._deadlines.add(left_ms, self._check_idle)
            return
        reason = f"idle for {self._limits.idle_ms} ms"
        _log.info("%s: closed, %s", self, reason)
        if self._outbox.unwritten_bytes or self._close_reason is not None:
            # The peer does not read: waiting for it to take the rest would be for ever.
            self.abort(reason)
        else:
            self.close(reason)

    # --- reading ----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Act on the frames that came, until there are no more or reading must pause."""
        self._outbox.hold()
        try:
            self._take_chunks()
        except WireError as error:
            self._close_unread(f"malformed frame: {error}")
        except Exception as error:  # noqa: BLE001 - the transport does not know what to do with it
            self._close_unread(f"reading failed: {error!r}"[:_REASON_CHARS_MAX])
        finally:
            self._outbox.release()

    def _close_unread(self, reason: str) -> None:
        _log.warning("%s: closed, %s", self, reason)
        self.close(reason)

    def _take_chunks(self) -> None:
        try:
            self._take_frames()
            while self._reading and self._chunks:
                self._frames = self._decoder.feed(self._chunks.popleft())
                self._take_frames()
        finally:
            # Also when the next frame cannot be read: those before it are answered.
            self._serving.settle()

    def _take_frames(self) -> None:
        taken, row = 0, self.row
        for command in self._frames:
            taken += 1
            self._take(command)
            while row.begun is not None and self._reading:
                taken += row.take(self._outbox.room_bytes)
            if not self._reading:
                # What is left of the chunk stays in the iterator.
                row.end()
                break
        self._frames_taken = taken

    def _take(self, command: Command) -> None:
        if not command.flag & FLAG_RESPONSE:
            self._serving.serve(command)
            return
        future = self._pending.get(command.opaque)
        if future is None or future.done():
            _log.debug("%s: answer to unknown request %d dropped", self, command.opaque)
        else:
            future.set_result(command)

    @property
    def _is_quiet(self) -> bool:
        # While reading pauses, requests may be left that have come and are not refused yet.
        is_read = self._reading or self._close_reason is not None
        return is_read and not self._serving.running and self._admission.is_idle

    def _note_serving(self) -> None:
        self._adjust_reading()
        self._note_quiet()

    def _note_quiet(self) -> None:
        if self._draining and self._is_quiet:
            self._quiet.set()

    def _should_read(self) -> bool:
        """Not while answers cannot be written, too many handlers run, or it is others' turn."""
        return (
            self._close_reason is None
            and not self._turn.is_over
            and self._serving.running < self._limits.handlers_running_max
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
        self._note_quiet()
