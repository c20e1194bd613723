"""Received pull responses in one buffer, so that columns need no further copy."""

from __future__ import annotations

from collections.abc import Iterator

from turbopump.net.blocking_connection import BlockingConnection
from turbopump.spark.reading.pull_responses import PullResponse, PullResponseReader

BUFFER_BYTES = 8 * 1024 * 1024
_RECEIVE_BYTES = 1024 * 1024
"""Bytes per call: data that arrives together is decoded together."""
_FREE_MAX = 4

_free: list[memoryview] = []
"""Buffers of finished tasks: their pages are already mapped."""


class ResponseBuffer:
    """Responses from one connection; they stay in the buffer until `forget`."""

    def __init__(self, connection: BlockingConnection, reader: PullResponseReader) -> None:
        self._connection = connection
        self._reader = reader
        self.data = _buffer(BUFFER_BYTES)
        self._read_to = 0
        self._filled = 0
        self._needed = 0

    def receive(self, wait_ms: int) -> bool:
        """Receive more, waiting if necessary; return whether anything arrived.

        Raises ConnectionLost, and RequestTimeout after a wait.
        """
        room = self.data[self._filled : self._filled + _RECEIVE_BYTES]
        count = self._connection.receive_into(room, wait_ms)
        self._filled += count
        return count > 0

    def responses(self) -> Iterator[PullResponse]:
        """Yield complete responses not yet read; raises WireError, UnexpectedResponse."""
        reader, data, end = self._reader, self.data, self._filled
        while True:
            row = reader.row(data, self._read_to, end)
            if row:
                self._read_to = row[-1].end
                yield from row
            other = reader.read(data, self._read_to, end)
            if isinstance(other, int):
                self._needed = other
                return
            self._read_to = other.end
            yield other

    @property
    def is_full(self) -> bool:
        """Whether the next frame does not fit until something is forgotten."""
        return max(self._needed, self._filled + 1) > len(self.data)

    def forget(self) -> None:
        """Drop the responses that were read, and move the rest to the front."""
        rest = self.data[self._read_to : self._filled]
        needed = self._needed - self._read_to
        if needed > len(self.data):
            self.data = memoryview(bytearray(needed))
            self.data[: len(rest)] = rest
        else:
            self.data[: len(rest)] = bytes(rest)
        self._read_to, self._filled, self._needed = 0, len(rest), max(0, needed)

    def free(self) -> None:
        """Release the memory to the next task."""
        if len(self.data) == BUFFER_BYTES and len(_free) < _FREE_MAX:
            _free.append(self.data)


def _buffer(size: int) -> memoryview:
    found = _free.pop() if _free else None
    return found if found is not None and len(found) == size else memoryview(bytearray(size))
