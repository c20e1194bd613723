"""A plain connection to a broker for one thread that waits: requests out, frames into one buffer.

What has been received stays in the buffer until `forget`, so that columns are made from it without
another copy. Connections outlive the tasks of a process.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

from turbopump.errors import ConnectionLost, RequestTimeout
from turbopump.spark.kept import KeptConnections, connected_socket, request_numbers
from turbopump.spark.reading.pull_responses import PullResponse, PullResponseReader

BUFFER_BYTES = 8 * 1024 * 1024
_RECEIVE_BYTES = 1024 * 1024
"""At a time: what comes at once is also decoded at once."""


class DirectConnection:
    """One socket and the buffer that it fills; belongs to one thread at a time."""

    def __init__(self, address: str, connected: socket.socket) -> None:
        self.address = address
        self._socket = connected
        self._socket.setblocking(False)
        self._unsent = bytearray()
        self._numbers = request_numbers()
        self._reader = PullResponseReader()
        self._begin_anew(BUFFER_BYTES)

    def _begin_anew(self, size: int) -> None:
        self.buffer = memoryview(bytearray(size))
        self._read_to = 0
        self._filled = 0
        self._needed = 0

    @classmethod
    def to(cls, address: str) -> DirectConnection:
        """Connect; raises ConnectFailed."""
        return cls(address, connected_socket(address))

    def close(self) -> None:
        self._socket.close()

    def next_opaque(self) -> int:
        """Return the number of the next request."""
        return next(self._numbers)

    def put(self, frame: bytes) -> None:
        """Add a request to those that leave with the next `flush`."""
        self._unsent += frame

    def flush(self) -> None:
        """Send what can be sent without waiting; `receive` sends the rest."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def receive(self, wait_ms: int) -> bool:
        """Take what has come; return whether anything has, after waiting for it if need be.

        Raises OSError, ConnectionLost at the end of the stream, RequestTimeout after a wait.
        """
        room = self.buffer[self._filled : self._filled + _RECEIVE_BYTES]
        while True:
            try:
                count = self._socket.recv_into(room)
            except BlockingIOError:
                if not wait_ms:
                    return False
                self._wait(wait_ms)
                continue
            if not count:
                raise ConnectionLost(f"connection to {self.address}: closed by the peer")
            self._filled += count
            return True

    def _wait(self, wait_ms: int) -> None:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        found = waiting.poll(wait_ms)
        if not found:
            raise RequestTimeout(f"no data from {self.address} within {wait_ms} ms")
        if found[0][1] & select.POLLOUT:
            self.flush()

    def follow_suggestions(self, *, is_followed: bool) -> None:
        """Say whether an answer that suggests a slave is unexpected."""
        if self._reader.follows_suggestions is not is_followed:
            # Answers like an earlier one are not looked at: that one may have suggested a slave.
            self._reader = PullResponseReader()
            self._reader.follows_suggestions = is_followed

    def answers(self) -> Iterator[PullResponse]:
        """Yield complete responses not read yet; raises WireError, UnexpectedResponse."""
        reader, data, end = self._reader, self.buffer, self._filled
        while True:
            for found in reader.row(data, self._read_to, end):
                self._read_to = found.end
                yield found
            other = reader.read(data, self._read_to, end)
            if isinstance(other, int):
                self._needed = other
                return
            self._read_to = other.end
            yield other

    @property
    def is_full(self) -> bool:
        """Whether the next frame does not fit before something is forgotten."""
        return max(self._needed, self._filled + 1) > len(self.buffer)

    def forget(self) -> None:
        """Let go of all frames that were read; what has come of the next one goes to the front."""
        rest = self.buffer[self._read_to : self._filled]
        needed = self._needed - self._read_to
        if needed > len(self.buffer):
            old = rest
            self._begin_anew(needed)
            self.buffer[: len(old)] = old
        else:
            self.buffer[: len(rest)] = bytes(rest)
        self._read_to, self._filled, self._needed = 0, len(rest), max(0, needed)

    def is_silent(self) -> bool:
        """Whether nothing has come that nobody asked for, not even the end."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._filled - self._read_to
        except OSError:
            return False
        return False

    def rest(self) -> None:
        """Keep no more memory than before the first use."""
        self.forget()
        if len(self.buffer) > BUFFER_BYTES:
            self._begin_anew(BUFFER_BYTES)


connections = KeptConnections(DirectConnection.to).lasting()
