"""Received pull responses: headers read in one buffer, so that columns need no further copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from turbopump.client.routes import MASTER_ID
from turbopump.core import PullResponseFrame, read_response
from turbopump.net.blocking_connection import BlockingConnection
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, decode_header
from turbopump.wire.headers import PullMessageAnswer

_SUCCESS = int(ResponseCode.SUCCESS)
_NOTHING_MATCHED = int(ResponseCode.PULL_RETRY_IMMEDIATELY)
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
    """Reads responses.

    With ``follows_suggestions``, a response that suggests a slave is unexpected. With a filter, one
    without messages is not. ``show`` is called with every response.
    """

    __slots__ = ("_follows_suggestions", "_is_filtered", "_show")

    def __init__(
        self,
        *,
        follows_suggestions: bool = True,
        is_filtered: bool = False,
        show: Callable[[Command], None] | None = None,
    ) -> None:
        self._follows_suggestions = follows_suggestions
        self._is_filtered = is_filtered
        self._show = show

    def read(self, data: memoryview, at: int, end: int) -> PullResponse | int:
        """Read the response at a position; while it is incomplete, return where it will end.

        Raises WireError, UnexpectedResponse.
        """
        found = read_response(data, at, end)
        if isinstance(found, int):
            return found
        frame, body_at, frame_end = found
        place: PullResponseFrame | PullMessageAnswer
        if not isinstance(frame, PullResponseFrame) or self._show is not None:
            command = decode_header(frame.header, frame.serialize)
            if self._show is not None:
                self._show(replace(command, body=bytes(data[body_at:frame_end])))
            if not command.is_response:
                raise UnexpectedResponse(f"frame {command.opaque} answers no pending request")
            self._require_expected(command.code, command.remark)
            place = PullMessageAnswer.from_ext_fields(command.ext_fields)
            number = command.opaque
        else:
            self._require_expected(frame.code, frame.remark)
            place, number = frame, frame.opaque
        if self._follows_suggestions and place.suggest_which_broker_id != MASTER_ID:
            raise UnexpectedResponse(
                f"the broker suggests reading from broker id {place.suggest_which_broker_id}"
            )
        return PullResponse(number, place.next_begin_offset, body_at, frame_end, place.min_offset)

    def _require_expected(self, code: int, remark: str | None) -> None:
        # With other remarks, messages were skipped that cannot be read.
        has_no_match = code == _NOTHING_MATCHED and remark == _NO_MATCH_REMARK
        if code != _SUCCESS and not (self._is_filtered and has_no_match):
            raise UnexpectedResponse(f"the broker returned {code}: {remark}")


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
        while True:
            found = self._reader.read(self.data, self._read_to, self._filled)
            if isinstance(found, int):
                self._needed = found
                return
            self._read_to = found.end
            yield found

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
