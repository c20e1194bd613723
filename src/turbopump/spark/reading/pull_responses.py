"""Received pull responses: headers decoded in one buffer, so that columns need no further copy."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from turbopump.client.routes import MASTER_ID
from turbopump.errors import WireError
from turbopump.net.blocking_connection import BlockingConnection
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, Serialize, decode_header
from turbopump.wire.framing import read_header
from turbopump.wire.headers import PullMessageAnswer

_SUCCESS = int(ResponseCode.SUCCESS)
_NOTHING_MATCHED = int(ResponseCode.PULL_RETRY_IMMEDIATELY)
_PREFIX = struct.Struct(">iI")
_LENGTH_BYTES = 4
_LAYOUTS_MAX = 4

_VARYING = re.compile(rb'("opaque":|"(?:nextBegin|max|min)Offset":")([0-9]+)')
"""What differs between responses: the last two while the queue is written to and cleaned up."""
_OFFSET = rb"0|[1-9][0-9]{0,17})"
_NUMBERS = {
    b'"opaque":': rb"(?P<number>0|[1-9][0-9]{0,8})",
    b'"nextBeginOffset":"': rb"(?P<next>" + _OFFSET,
    b'"maxOffset":"': rb"(?:" + _OFFSET,
    b'"minOffset":"': rb"(?P<min>" + _OFFSET,
}
_PROBES = (99999, 88888)
"""Written in place of numbers to verify what they mean. Two, as a number that also occurs elsewhere
may happen to have the same digits there."""

_NO_MATCH_REMARK = "NO_MATCHED_MESSAGE"


class UnexpectedResponse(Exception):
    """A response without messages, or one that suggests another replica."""


class PullResponse(Struct, frozen=True, gc=False):
    """The request number, the next offset, and the position of the records, or a copy of them."""

    number: int
    next_offset: int
    start: int
    end: int
    min_offset: int = 0
    kept: bytes | None = None


class PullResponseReader:
    """Reads successive responses; a header that differs from others only in numbers costs less.

    With ``follows_suggestions``, a response that suggests a slave is unexpected. With a filter, one
    without messages is not. ``show`` is called with every response.
    """

    __slots__ = ("_follows_suggestions", "_is_filtered", "_layouts", "_show")

    def __init__(
        self,
        *,
        follows_suggestions: bool = True,
        is_filtered: bool = False,
        show: Callable[[Command], None] | None = None,
    ) -> None:
        self._layouts: list[re.Pattern[bytes]] = []
        self._follows_suggestions = follows_suggestions
        self._is_filtered = is_filtered
        self._show = show

    def row(self, data: memoryview, at: int, end: int) -> list[PullResponse]:
        """Return consecutive responses whose headers have known layouts.

        Each takes a quarter to a third of the time of `read`, which counts for small responses.
        """
        found: list[PullResponse] = []
        while end - at >= _PREFIX.size:
            frame_bytes, header_bytes = _PREFIX.unpack_from(data, at)
            # The first byte of the header's length is its encoding, 0 for JSON.
            header_at, frame_end = at + _PREFIX.size, at + _LENGTH_BYTES + frame_bytes
            body_at = header_at + header_bytes
            if not body_at <= frame_end <= end:
                break
            same = None
            for layout in self._layouts:
                same = layout.fullmatch(data, header_at, body_at)
                if same is not None:
                    break
            if same is None:
                break
            number, next_offset, min_offset = map(int, same.group("number", "next", "min"))
            found.append(PullResponse(number, next_offset, body_at, frame_end, min_offset))
            at = frame_end
        return found

    def read(self, data: memoryview, at: int, end: int) -> PullResponse | int:
        """Read any response at a position; while it is incomplete, return where it will end.

        Raises WireError, UnexpectedResponse.
        """
        found = read_header(data, at, end)
        if isinstance(found, int):
            return found
        command, body_at, frame_end = found
        if self._show is not None:
            self._show(replace(command, body=bytes(data[body_at:frame_end])))
        if not command.is_response:
            raise UnexpectedResponse(f"frame {command.opaque} answers no pending request")
        # With other remarks, messages were skipped that cannot be read.
        has_no_match = command.code == _NOTHING_MATCHED and command.remark == _NO_MATCH_REMARK
        if command.code != _SUCCESS and not (self._is_filtered and has_no_match):
            raise UnexpectedResponse(f"the broker returned {command.code}: {command.remark}")
        place = PullMessageAnswer.from_ext_fields(command.ext_fields)
        if self._follows_suggestions and place.suggest_which_broker_id != MASTER_ID:
            raise UnexpectedResponse(
                f"the broker suggests reading from broker id {place.suggest_which_broker_id}"
            )
        if self._show is None and command.serialize is Serialize.JSON:
            self._learn(bytes(data[at + _PREFIX.size : body_at]))
        return PullResponse(
            command.opaque, place.next_begin_offset, body_at, frame_end, place.min_offset
        )

    def _learn(self, header: bytes) -> None:
        parts = _VARYING.split(header)
        del parts[2::3]
        layout = _layout(tuple(parts))
        if layout is not None and layout not in self._layouts:
            self._layouts = [layout, *self._layouts][:_LAYOUTS_MAX]


@lru_cache(maxsize=64)
def _layout(parts: tuple[bytes, ...]) -> re.Pattern[bytes] | None:
    """Return a pattern for headers that consist of a text, the name of a number, a text, ...

    None if the numbers are not read from there: names may occur twice, or be written differently.
    """
    if sorted(parts[1::2]) != sorted(_NUMBERS):
        return None
    for number in _PROBES:
        header = b"".join(part + b"%d" % number * (at % 2) for at, part in enumerate(parts))
        try:
            command = decode_header(header, Serialize.JSON)
            place = PullMessageAnswer.from_ext_fields(command.ext_fields)
        except WireError:
            return None
        read = command.opaque, place.next_begin_offset, place.max_offset, place.min_offset
        if set(read) != {number}:
            return None
    return re.compile(b"".join(re.escape(part) + _NUMBERS.get(part, b"") for part in parts))


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
