"""One connection for threads, with or without TLS: the caller writes, waits and reads.

Handing a request to an event loop in another thread costs more than the request itself. A blocking
connection belongs to one thread at a time. It does not serve requests of the peer.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from threading import get_ident, main_thread
from typing import overload

from turbopump.errors import ConnectionLost, Overloaded, RequestTimeout, WireError
from turbopump.net.outbox import coalesced
from turbopump.net.request_protocol import Prepared, Request, RequestProtocol
from turbopump.wire.command import (
    FLAG_RESPONSE,
    RESPONSE_FRAMES,
    Buffer,
    Command,
    Response,
    command_of,
)

_RECEIVE_BYTES = 64 * 1024
TRUSTED_MS = 100
"""How long after its last use a connection is not suspected to have received anything."""

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_ESTABLISHED = b"\x01"
"""How `TCP_INFO` of a connection begins that neither side has closed."""

_TIME_VALUE = struct.Struct("@ll")
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class BlockingConnection:
    """One connection driven by the caller's thread; after an error it is closed and useless."""

    def __init__(
        self, address: str, connected: socket.socket, protocol: RequestProtocol[Request]
    ) -> None:
        protocol.peer_address = address
        self.address = address
        self._socket = connected
        self._is_encrypted = isinstance(connected, ssl.SSLSocket)
        # Otherwise the kernel limits how long it waits. With a Python timeout, each call polls
        # first, which releases the interpreter lock once more.
        self._has_python_timeout = True
        is_tcp = connected.family in {socket.AF_INET, socket.AF_INET6}
        self._tells_state = _TCP_INFO is not None and is_tcp
        self._protocol = protocol
        self._clock = protocol.clock
        self._timeout_ms: int | None = -1
        """What the socket has; None for none."""
        self._written_ms = 0
        self._unsent = bytearray()
        self._arrivals = select.poll()
        self._arrivals.register(connected, select.POLLIN)

    def __repr__(self) -> str:
        return f"<BlockingConnection to {self.address}>"

    def fileno(self) -> int:
        """Return the socket's file descriptor, -1 when closed."""
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        return self._protocol.close_reason is None

    @property
    def has_received(self) -> bool:
        """Whether the peer has ever sent anything."""
        return self._protocol.chunks_received > 0

    @property
    def is_clean(self) -> bool:
        """Whether it is open with nothing in flight in either direction, as far as is known."""
        protocol = self._protocol
        is_between_frames = not (protocol.in_flight or self._unsent)
        is_open = protocol.close_reason is None
        return is_open and is_between_frames and not protocol.decoder.pending_bytes

    @property
    def received_ms(self) -> int:
        """When the peer last sent anything, or accepted the connection."""
        return self._protocol.received_ms

    def close(self, reason: str = "closed by this side") -> None:
        """Close it; may be called twice."""
        if self._protocol.close_reason is None:
            self._protocol.close_reason = reason
        self._socket.close()

    @property
    def is_idle_for_long(self) -> bool:
        """Whether the peer may be about to close it."""
        used_ms = max(self._written_ms, self._protocol.received_ms)
        return self._clock.monotonic_ms() - used_ms > self._protocol.limits.idle_ms // 2

    def is_usable(self) -> bool:
        """Return whether it can be used after a pause: still clean, and not closed by the peer."""
        if not self.is_clean:
            return False
        unused_ms = self._clock.monotonic_ms() - max(self._written_ms, self._protocol.received_ms)
        if self._tells_state and unused_ms < TRUSTED_MS:
            return self._is_established()
        if unused_ms > self._protocol.limits.idle_ms // 2:
            return False
        try:
            # TLS sends more than data: a session ticket may have arrived.
            return not self._arrivals.poll(0) or self._receive(0) is None
        except ConnectionLost:
            return False

    def _is_established(self) -> bool:
        """Return whether the peer has not closed it.

        Unlike polling it, this does not release the interpreter lock.
        """
        assert _TCP_INFO is not None
        return self._socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1) == _ESTABLISHED

    # --- requests ---------------------------------------------------------------------------------

    @overload
    def request(self, request: Command, timeout_ms: int) -> Command: ...
    @overload
    def request(self, request: Prepared, timeout_ms: int) -> Response: ...
    def request(self, request: Request, timeout_ms: int) -> Response:
        """Send a request and return its response, whatever its code.

        Raises Overloaded when the peer did not take the whole request, so that it cannot have acted
        on it; RequestTimeout when no response came in time; ConnectionLost.
        """
        opaque = self.send(request, timeout_ms)
        end_ms = self._written_ms + timeout_ms
        while True:
            left_ms = max(end_ms - self._clock.monotonic_ms(), 0)
            for response in self._receive(left_ms) or ():
                if response.opaque == opaque:
                    return response
            if not left_ms:
                self.close(f"request {request.code} timed out")
                raise self._protocol.timed_out(request, timeout_ms)

    def oneway(self, request: Request, timeout_ms: int) -> None:
        """Send a request that is never answered; raises Overloaded, ConnectionLost."""
        self._protocol.require_open()
        request = self._protocol.prepare(request)
        self._write(self._protocol.oneway_frame(request), timeout_ms)

    def send(self, request: Request, timeout_ms: int) -> int:
        """Write a request, return the id that its response will have; raises as `oneway`."""
        protocol = self._protocol
        protocol.require_open()
        if protocol.hooks:
            request = protocol.prepare(request)
        opaque = protocol.begin(request)
        try:
            self._write(protocol.frame(request, opaque), timeout_ms)
        except BaseException:
            del protocol.in_flight[opaque]
            raise
        return opaque

    def responses(self) -> list[Response]:
        """Wait until something arrives; return the responses that it completes, perhaps none."""
        return self._receive(None) or []

    def _write(self, parts: Sequence[Buffer], timeout_ms: int) -> None:
        """Write a whole frame; a partial one closes the connection, as the peer cannot skip it."""
        self._written_ms = self._clock.monotonic_ms()
        pieces = parts if len(parts) == 1 else coalesced(parts)
        try:
            self._set_timeout(timeout_ms)
            written = self._write_some(pieces)
            if len(pieces) > 1 or written < len(pieces[0]):
                self._write_rest(pieces, written, self._written_ms + timeout_ms)
        except (*_NOT_YET, TimeoutError) as error:
            self.close("the peer does not read")
            raise Overloaded(f"{self.address} read too little for {timeout_ms} ms") from error
        except OSError as error:
            raise self._lost(f"lost: {error}") from error
        except BaseException:
            self.close("writing was interrupted")
            raise

    def _write_rest(self, pieces: Sequence[Buffer], written: int, end_ms: int) -> None:
        """Write the rest of pieces after ``written`` bytes."""
        unwritten = deque(memoryview(piece) for piece in pieces)
        while True:
            while unwritten and written >= len(unwritten[0]):
                written -= len(unwritten.popleft())
            if not unwritten:
                return
            unwritten[0] = unwritten[0][written:]
            self._set_timeout(max(end_ms - self._clock.monotonic_ms(), 1))
            written = self._write_some(unwritten)

    def _write_some(self, pieces: Sequence[Buffer]) -> int:
        # TLS has no gathering write.
        if self._is_encrypted or len(pieces) == 1:
            return self._socket.send(pieces[0])
        return self._socket.sendmsg(pieces)

    def _receive(self, wait_ms: int | None) -> list[Response] | None:
        """Read once; return the responses that this completes, None if nothing came in time."""
        try:
            if wait_ms != 0:
                self._set_timeout(wait_ms)
                data = self._socket.recv(_RECEIVE_BYTES)
            else:
                data = self._socket.recv(_RECEIVE_BYTES, self._no_wait())
        except (*_NOT_YET, TimeoutError):
            return None
        except OSError as error:
            raise self._lost(f"lost: {error}") from error
        if not data:
            raise self._lost("closed by the peer")
        protocol = self._protocol
        protocol.note_received()
        try:
            responses: list[Response] = [
                frame if type(frame) in RESPONSE_FRAMES else command_of(frame)  # type: ignore[misc]
                for frame in protocol.decoder.feed(data)
            ]
        except WireError as error:
            raise self._lost(f"malformed frame: {error}") from error
        in_flight = protocol.in_flight
        return [
            protocol.finish(request, response)
            for response in responses
            if response.flag & FLAG_RESPONSE
            and (request := in_flight.pop(response.opaque, None)) is not None
        ]

    # --- encoded requests, responses into the caller's memory -------------------------------------

    def unused_opaque(self) -> int:
        """Return the id for the next encoded request."""
        return self._protocol.unused_opaque()

    @property
    def has_hooks(self) -> bool:
        """Whether hooks must see each request and response: then use `put_request`, not `put`."""
        return bool(self._protocol.hooks)

    def put(self, frame: bytes) -> None:
        """Add an encoded request to those that leave with the next `flush`."""
        self._unsent += frame

    def put_request(self, command: Command) -> int:
        """Add a request as hooks want it; return its id. `show` takes its response."""
        protocol = self._protocol
        request = protocol.prepare(command)
        opaque = protocol.begin(request)
        self._unsent += b"".join(protocol.frame(request, opaque))
        return opaque

    def show(self, response: Command) -> None:
        """Show hooks a response that the caller has read from its own memory."""
        asked = self._protocol.in_flight.pop(response.opaque, None)
        if asked is not None:
            self._protocol.finish(asked, response)

    def flush(self) -> None:
        """Write what can be written without waiting; `receive_into` writes the rest."""
        flags = self._no_wait()
        while self._unsent:
            try:
                written = self._socket.send(self._unsent, flags)
            except _NOT_YET:
                return
            except OSError as error:
                raise self._lost(f"lost: {error}") from error
            del self._unsent[:written]

    def receive_into(self, room: memoryview, wait_ms: int) -> int:
        """Read into memory, return how many bytes came; 0 only if it must not wait.

        Raises RequestTimeout after a wait, ConnectionLost.
        """
        flags = self._no_wait()
        while True:
            try:
                count = self._socket.recv_into(room, 0, flags)
            except _NOT_YET:
                if not wait_ms:
                    return 0
                self._wait(wait_ms)
                continue
            except OSError as error:
                raise self._lost(f"lost: {error}") from error
            if not count:
                raise self._lost("closed by the peer")
            self._protocol.note_received()
            return count

    def _wait(self, wait_ms: int) -> None:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        found = waiting.poll(wait_ms)
        if not found:
            raise RequestTimeout(f"no data from {self.address} within {wait_ms} ms")
        if found[0][1] & select.POLLOUT:
            self.flush()

    # --- the socket -------------------------------------------------------------------------------

    def has_decrypted(self) -> bool:
        """Return whether TLS holds bytes that `select` does not know of."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _set_timeout(self, timeout_ms: int | None) -> None:
        """Limit waits roughly: callers check the clock afterwards."""
        # In the main thread, handlers of signals run: after each, the kernel would wait as long as
        # at the beginning, while Python counts what is left.
        has_python_timeout = self._is_encrypted or get_ident() == main_thread().ident
        if has_python_timeout != self._has_python_timeout:
            self._has_python_timeout, self._timeout_ms = has_python_timeout, -1
            if not has_python_timeout:
                self._socket.settimeout(None)
        present_ms = self._timeout_ms
        # Each change is a system call or two, and most waits are about as long as the one before.
        is_near = present_ms and timeout_ms and abs(present_ms - timeout_ms) <= timeout_ms >> 6
        if is_near or timeout_ms == present_ms:
            return
        if has_python_timeout:
            self._socket.settimeout(None if timeout_ms is None else timeout_ms / 1000)
        else:
            # 0 waits without a limit.
            value = _TIME_VALUE.pack(*divmod((timeout_ms or 0) * 1000, 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._timeout_ms = timeout_ms

    def _no_wait(self) -> int:
        """Return the flag for calls that do not wait."""
        if not self._is_encrypted and not self._has_python_timeout:
            return socket.MSG_DONTWAIT
        # TLS supports no flags, and Python waits for a socket with a timeout before it uses them.
        self._socket.settimeout(0)
        self._timeout_ms = 0
        return 0

    def _lost(self, reason: str) -> ConnectionLost:
        self.close(reason)
        return self._protocol.lost()


def readable(
    connections: Iterable[BlockingConnection], timeout_ms: int | None
) -> list[BlockingConnection]:
    """Wait until some of the connections have something to read, and return those."""
    by_number = {connection.fileno(): connection for connection in connections}
    decrypted = [each for each in by_number.values() if each.has_decrypted()]
    if decrypted:
        return decrypted
    waiting = select.poll()
    for number in by_number:
        waiting.register(number, select.POLLIN)
    return [by_number[number] for number, _ in waiting.poll(timeout_ms)]
