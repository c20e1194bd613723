"""Decodes the headers of pull responses in a buffer: next offset and position of the records."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from msgspec import Struct

from turbopump.client.routes import MASTER_ID
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command, decode_header
from turbopump.wire.frame_template import FrameTemplate, Numbers, VaryingFields
from turbopump.wire.framing import read_header
from turbopump.wire.headers import PullMessageAnswer

_SUCCESS = int(ResponseCode.SUCCESS)
_LENGTH = struct.Struct(">i")
_MARK_BYTES = 4
"""How the header is encoded, and its length; stands before it."""
_WITHOUT_VALUES = bytes.maketrans(b"123456789", b"0" * 9)
"""Makes all numbers the same that have as many digits."""


class UnexpectedResponse(Exception):
    """A response without messages, or one that suggests another replica."""


class PullResponse(Struct, frozen=True, gc=False):
    """The request answered, the next offset, and where the records are, or a copy of them."""

    number: int
    next_offset: int
    start: int
    end: int
    kept: bytes | None = None


def _place(command: Command) -> PullMessageAnswer:
    """Return the offsets of a response; raises UnexpectedResponse."""
    if not command.is_response:
        raise UnexpectedResponse(f"frame {command.opaque} answers no pending request")
    if command.code != _SUCCESS:
        raise UnexpectedResponse(f"the broker returned {command.code}: {command.remark}")
    return PullMessageAnswer.from_ext_fields(command.ext_fields)


def _numbers(header: bytes) -> Numbers:
    command = decode_header(header[_MARK_BYTES:], header[0])
    place = _place(command)
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
"""What differs from answer to answer: the last two while the queue is written to and cleaned up. No
one asks for these, but answers with other ones are alike all the same."""


class PullResponseReader:
    """Reads one answer after the other; those that are like the one before cost less."""

    __slots__ = ("_alike", "_form", "follows_suggestions")

    def __init__(self) -> None:
        self._alike: FrameTemplate | None = None
        self.follows_suggestions = True
        """Whether an answer that suggests a slave is unexpected."""
        self._form = b""

    def row(self, data: memoryview, at: int, end: int) -> Iterator[PullResponse]:
        """Yield consecutive responses whose headers have the layout of the last one.

        2 µs each instead of 22: at 32 messages per response, as Apache RocketMQ brokers return,
        0.6 µs less per row; with bulk pulls hardly anything.
        """
        alike = self._alike
        if alike is None:
            return
        numbers_of, prefix_bytes = alike.numbers, _LENGTH.size + alike.size
        while end - at >= prefix_bytes:
            numbers = numbers_of(data, at + _LENGTH.size)
            body_at = at + prefix_bytes
            frame_end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
            if numbers is None or not body_at <= frame_end <= end:
                return
            yield PullResponse(numbers[0], numbers[1], body_at, frame_end)
            at = frame_end

    def read(self, data: memoryview, at: int, end: int) -> PullResponse | int:
        """Read any answer at a position; while it is not whole, return where it will end.

        Raises WireError, UnexpectedResponse.
        """
        found = read_header(data, at, end)
        if isinstance(found, int):
            return found
        command, body_at, frame_end = found
        place = _place(command)
        if self.follows_suggestions and place.suggest_which_broker_id != MASTER_ID:
            raise UnexpectedResponse(
                f"the broker suggests reading from broker id {place.suggest_which_broker_id}"
            )
        header = bytes(data[at + _LENGTH.size : body_at])
        form = header.translate(_WITHOUT_VALUES)
        if form == self._form:
            # Else each may differ from the one before: then it is not worth the time.
            self._alike = FrameTemplate.from_sample(header, header, _VARYING)
        self._form = form
        return PullResponse(command.opaque, place.next_begin_offset, body_at, frame_end)
