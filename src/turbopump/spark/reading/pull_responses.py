"""Decodes the headers of pull responses in a buffer: next offset and position of the records."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from turbopump.client.routes import MASTER_ID
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, decode_header
from turbopump.wire.frame_template import FrameTemplate, Numbers, VaryingFields
from turbopump.wire.framing import read_header
from turbopump.wire.headers import PullMessageAnswer

_SUCCESS = int(ResponseCode.SUCCESS)
_NOTHING_MATCHED = int(ResponseCode.PULL_RETRY_IMMEDIATELY)
_LENGTH = struct.Struct(">i")
_PREFIX = struct.Struct(">iI")
_HEADER_BYTES_MAX = 0xFFFFFF
_LAYOUTS_MAX = 256
_MARK_BYTES = 4
"""The encoding and the length of the header; precedes it."""
_WITHOUT_VALUES = bytes.maketrans(b"123456789", b"0" * 9)
"""Maps all numbers with the same count of digits to the same value."""


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


def _place(command: Command, *, is_filtered: bool) -> PullMessageAnswer:
    """Return the offsets of a response; raises UnexpectedResponse."""
    if not command.is_response:
        raise UnexpectedResponse(f"frame {command.opaque} answers no pending request")
    # With other remarks, messages were skipped that cannot be read.
    has_no_match = command.code == _NOTHING_MATCHED and command.remark == _NO_MATCH_REMARK
    if command.code != _SUCCESS and not (is_filtered and has_no_match):
        raise UnexpectedResponse(f"the broker returned {command.code}: {command.remark}")
    return PullMessageAnswer.from_ext_fields(command.ext_fields)


def _numbers(header: bytes) -> Numbers:
    command = decode_header(header[_MARK_BYTES:], header[0])
    # Unexpected responses are not learned, so they never get here.
    place = _place(command, is_filtered=True)
    return command.opaque, place.next_begin_offset, place.max_offset, place.min_offset


_VARYING = VaryingFields(
    (
        re.compile(rb'"opaque":([0-9]+)'),
        re.compile(rb'"nextBeginOffset":"([0-9]+)'),
        re.compile(rb'"maxOffset":"([0-9]+)'),
        re.compile(rb'"minOffset":"([0-9]+)'),
    ),
    _numbers,
)
"""What differs between responses: the last two while the queue is written to and cleaned up. They
are unused, but responses that differ in them still have the same layout."""


class PullResponseReader:
    """Reads successive responses; a header with a known layout costs less.

    Responses for many queues alternate between layouts: their offsets differ in length. With
    ``follows_suggestions``, a response that suggests a slave is unexpected. With a filter, one
    without messages is not. ``show`` is called with every response.
    """

    __slots__ = ("_follows_suggestions", "_is_filtered", "_seen", "_show", "_templates")

    def __init__(
        self,
        *,
        follows_suggestions: bool = True,
        is_filtered: bool = False,
        show: Callable[[Command], None] | None = None,
    ) -> None:
        self._templates: dict[bytes, FrameTemplate | None] = {}
        self._seen: set[bytes] = set()
        self._follows_suggestions = follows_suggestions
        self._is_filtered = is_filtered
        self._show = show

    def row(self, data: memoryview, at: int, end: int) -> Iterator[PullResponse]:
        """Yield consecutive responses whose headers have known layouts.

        3 µs each instead of 22: at 32 messages per response, as Apache RocketMQ brokers return,
        0.6 µs less per row; with bulk pulls of long ranges hardly anything.
        """
        templates = self._templates
        while end - at >= _PREFIX.size:
            frame_bytes, header_bytes = _PREFIX.unpack_from(data, at)
            header_at, frame_end = at + _LENGTH.size, at + _LENGTH.size + frame_bytes
            # The first byte of the header's length is its encoding.
            body_at = at + _PREFIX.size + (header_bytes & _HEADER_BYTES_MAX)
            if not body_at <= frame_end <= end:
                return
            template = templates.get(_layout(data, header_at, body_at))
            numbers = None if template is None else template.numbers(data, header_at)
            if numbers is None:
                return
            yield PullResponse(numbers[0], numbers[1], body_at, frame_end, numbers[3])
            at = frame_end

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
        place = _place(command, is_filtered=self._is_filtered)
        if self._follows_suggestions and place.suggest_which_broker_id != MASTER_ID:
            raise UnexpectedResponse(
                f"the broker suggests reading from broker id {place.suggest_which_broker_id}"
            )
        if self._show is None:
            self._learn(data, at + _LENGTH.size, body_at)
        return PullResponse(
            command.opaque, place.next_begin_offset, body_at, frame_end, place.min_offset
        )

    def _learn(self, data: memoryview, start: int, end: int) -> None:
        """Make a template of a layout that was seen before: for others it is not worth the time."""
        layout = _layout(data, start, end)
        if layout not in self._seen:
            if len(self._seen) < _LAYOUTS_MAX:
                self._seen.add(layout)
        elif layout not in self._templates:
            header = bytes(data[start:end])
            self._templates[layout] = FrameTemplate.from_sample(header, header, _VARYING)


def _layout(data: memoryview, start: int, end: int) -> bytes:
    return bytes(data[start:end]).translate(_WITHOUT_VALUES)
