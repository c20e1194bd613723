"""A connection for a thread that waits itself: requests go out, answers are read when it wants.

A task of Spark has one thread and a few large requests at a time. Handing each of them to an event
loop in another thread costs more than the request: the two threads take turns, and what does not
fit into the socket at once is written piece by piece. Here the thread writes from the memory that
it was given and sleeps in the kernel. There is no TLS, there are no hooks, and requests of the peer
are not answered: who needs those takes a `Session`.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
from collections import deque
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from turbopump.clock import SYSTEM_CLOCK
from turbopump.errors import ConnectFailed, ConnectionLost, RequestTimeout, WireError
from turbopump.wire.command import Buffer, Command
from turbopump.wire.framing import FrameDecoder, encode_parts
from turbopump.wire.hosts import split_address

CONNECT_TIMEOUT_MS = 3000
IDLE_MAX_MS = 60_000
"""How long an unused connection is kept; brokers close theirs after twice that time."""

_RECEIVED_BYTES = 256 * 1024
_OPAQUE_BITS = 0x7FFF_FFFF


class PlainConnection:
    """One connection of one thread; after an error it is closed, and of no more use."""

    def __init__(self, address: str, connected: socket.socket) -> None:
        self.address = address
        self._socket = connected
        self._decoder = FrameDecoder()
        self._next_opaque = 0
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
        opaque = self._next_opaque
        self._next_opaque = (opaque + 1) & _OPAQUE_BITS
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

    def is_fresh(self) -> bool:
        """Whether it can be used again: not old, not closed, and the peer has nothing to say."""
        if SYSTEM_CLOCK.monotonic_ms() - self.heard_ms > IDLE_MAX_MS:
            return False
        # What is there to read now is the end of the connection, or an answer that came too late.
        return self.fileno() >= 0 and not readable([self], 0)

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


def connected(address: str, timeout_ms: int = CONNECT_TIMEOUT_MS) -> PlainConnection:
    """Connect; raises ConnectFailed."""
    host, port = split_address(address)
    try:
        made = socket.create_connection((host, port), timeout_ms / 1000)
    except TimeoutError as error:
        raise ConnectFailed(f"{address}: no answer within {timeout_ms} ms") from error
    except (OSError, UnicodeError) as error:
        # A host name that cannot even be asked for is a UnicodeError.
        raise ConnectFailed(f"{address}: {error}") from error
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return PlainConnection(address, made)


def readable(
    connections: Iterable[PlainConnection], timeout_ms: int | None
) -> list[PlainConnection]:
    """Wait until some of the connections have something to read, and return those."""
    by_number = {connection.fileno(): connection for connection in connections}
    waiting = select.poll()
    for number in by_number:
        waiting.register(number, select.POLLIN)
    return [by_number[number] for number, _ in waiting.poll(timeout_ms)]


# --- kept between tasks ---------------------------------------------------------------------------

_idle: dict[str, PlainConnection] = {}
"""One for each address: a worker runs one task at a time."""


def borrowed(address: str, timeout_ms: int = CONNECT_TIMEOUT_MS) -> PlainConnection:
    """Return a connection that nobody else uses, kept from before or new; raises ConnectFailed."""
    kept = _idle.pop(address, None)
    if kept is not None:
        if kept.is_fresh():
            return kept
        kept.close()
    return connected(address, timeout_ms)


def give_back(connection: PlainConnection) -> None:
    """Keep a connection for whoever comes next, if all its requests are answered."""
    before = _idle.pop(connection.address, None)
    if before is not None:
        before.close()
    if connection.fileno() >= 0:
        _idle[connection.address] = connection


def close_idle() -> None:
    """Close all that nobody uses."""
    while _idle:
        _idle.popitem()[1].close()


# A child closes what it has inherited: the parent's connections live on.
os.register_at_fork(after_in_child=close_idle)
atexit.register(close_idle)
