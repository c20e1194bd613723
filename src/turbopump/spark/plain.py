"""A connection for a thread that waits itself: requests go out, answers are read when it wants.

A task of Spark has one thread and a few large requests at a time. Handing each of them to an event
loop in another thread costs more than the request: the two threads take turns, and what does not
fit into the socket at once is written piece by piece. Here the thread writes from the memory that
it was given and sleeps in the kernel. There is no TLS, there are no hooks, and requests of the peer
are not answered: who needs those takes a `Session`.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from turbopump.clock import SYSTEM_CLOCK
from turbopump.errors import ConnectionLost, RequestTimeout, WireError
from turbopump.spark.kept import KEPT_MS, KeptConnections, connected_socket, request_numbers
from turbopump.wire.command import Buffer, Command
from turbopump.wire.framing import FrameDecoder, encode_parts

_RECEIVED_BYTES = 256 * 1024


class PlainConnection:
    """One connection of one thread; after an error it is closed, and of no more use."""

    def __init__(self, address: str, connected: socket.socket) -> None:
        self.address = address
        self._socket = connected
        self._decoder = FrameDecoder()
        self._numbers = request_numbers()
        self.heard_ms = SYSTEM_CLOCK.monotonic_ms()
        """When the peer has last said anything, or taken the connection."""

    def __repr__(self) -> str:
        return f"<PlainConnection to {self.address}>"

    def fileno(self) -> int:
        """Return what `select` wants to know of a socket."""
        return self._socket.fileno()

    def send(self, command: Command, timeout_ms: int) -> int:
        """Write a request and return the number that its answer will have.

        Raises RequestTimeout when the peer does not take it in time, ConnectionLost when it cannot.
        """
        opaque = next(self._numbers)
        parts = encode_parts(replace(command, opaque=opaque))
        try:
            self._write(parts, timeout_ms)
        except TimeoutError as error:
            self.close()
            raise RequestTimeout(
                f"{self.address} did not take request {command.code} within {timeout_ms} ms"
            ) from error
        except OSError as error:
            raise self._lost(f"lost: {error}") from error
        return opaque

    def received(self) -> list[Command]:
        """Return the answers that are complete with what is there to read, waiting for some."""
        try:
            self._socket.settimeout(None)
            data = self._socket.recv(_RECEIVED_BYTES)
            if not data:
                raise self._lost("closed by the peer")
            answers = [each for each in self._decoder.feed(data) if each.is_response]
        except OSError as error:
            raise self._lost(f"lost: {error}") from error
        except WireError as error:
            raise self._lost(f"malformed frame: {error}") from error
        self.heard_ms = SYSTEM_CLOCK.monotonic_ms()
        return answers

    def is_silent(self) -> bool:
        """Whether it is open, and nothing has come: the end, or an answer that came too late."""
        return self.fileno() >= 0 and not readable([self], 0)

    def is_fresh(self) -> bool:
        """Whether it can be used again after a pause."""
        return SYSTEM_CLOCK.monotonic_ms() - self.heard_ms <= KEPT_MS and self.is_silent()

    def close(self) -> None:
        """Close it; may be called twice."""
        self._socket.close()

    def _write(self, parts: Sequence[Buffer], timeout_ms: int) -> None:
        end_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_ms
        unwritten = deque(memoryview(part) for part in parts)
        self._socket.settimeout(timeout_ms / 1000)
        while unwritten:
            written = self._socket.sendmsg(unwritten)
            while unwritten and written >= len(unwritten[0]):
                written -= len(unwritten.popleft())
            if unwritten:
                unwritten[0] = unwritten[0][written:]
                left_ms = end_ms - SYSTEM_CLOCK.monotonic_ms()
                if left_ms <= 0:
                    raise TimeoutError
                self._socket.settimeout(left_ms / 1000)

    def _lost(self, reason: str) -> ConnectionLost:
        self.close()
        return ConnectionLost(f"connection to {self.address}: {reason}")


def connected(address: str) -> PlainConnection:
    """Connect; raises ConnectFailed."""
    return PlainConnection(address, connected_socket(address))


def readable(
    connections: Iterable[PlainConnection], timeout_ms: int | None
) -> list[PlainConnection]:
    """Wait until some of the connections have something to read, and return those."""
    by_number = {connection.fileno(): connection for connection in connections}
    waiting = select.poll()
    for number in by_number:
        waiting.register(number, select.POLLIN)
    return [by_number[number] for number, _ in waiting.poll(timeout_ms)]


connections = KeptConnections(connected).lasting()
