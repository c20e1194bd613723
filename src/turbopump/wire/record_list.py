"""The records of a batch of few messages: one loop parses it, and one builds all records.

`turbopump.wire.record_batch` does the same for many messages with arrays, whose fixed cost is that
of about a hundred messages here. An object for each message would take twice as long as all else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias, final

from isal.isal_zlib import crc32
from msgspec import Struct
from msgspec.structs import replace

from turbopump.errors import BodyError, InvalidArgument
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire import properties
from turbopump.wire.hashing import INT_MAX
from turbopump.wire.property_texts import PropertyTexts
from turbopump.wire.record import MAGIC, PROPERTIES_BYTES_MAX, Record

_ENTRY_END = properties.ENTRY_END.encode()
_MARK = _ENTRY_END[0]
_ZERO = b"\0"
_HEAD = struct.Struct(">i8xii")
_TEXT_LENGTH = struct.Struct(">h")
_BODY_AT = _HEAD.size
_OWN_BYTES = _HEAD.size + _TEXT_LENGTH.size
_COMMON_AT = 36
"""Offset in a record of the fields that all messages of a batch share."""
_BODY_LENGTH_BYTES = 4


# Final, so that its type can be compared, as with RecordBatch.
@final
class RecordList(Struct, frozen=True, eq=False):
    """Messages about to be stored in one queue; see `turbopump.wire.record_batch.RecordBatch`."""

    first: Record
    """What all share: its flag, body and properties do not count."""
    flags: Sequence[int]
    bodies: Sequence[bytes]
    stored_texts: list[bytes]
    """All properties of each message."""
    sizes: list[int]
    """Of whole records."""

    def __len__(self) -> int:
        return len(self.bodies)

    @property
    def body_bytes(self) -> int:
        return sum(map(len, self.bodies))

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def largest_bytes(self) -> int:
        return max(self.sizes)

    def texts(self) -> PropertyTexts:
        """Return the properties that contain each message's tag and keys."""
        return PropertyTexts(self.stored_texts)

    def records(self) -> Iterator[Record]:
        for flag, body, text in zip(self.flags, self.bodies, self.stored_texts, strict=True):
            yield replace(self.first, body=body, properties=text, flag=flag)

    def placed(
        self, queue_offset: QueueOffset, at: PhysicalOffset, store_timestamp_ms: int
    ) -> tuple[bytes, list[int]]:
        """Return the concatenated bytes of all records, and the position of each."""
        first, position, offset = self.first, int(at), int(queue_offset)
        sample = first.encode(queue_offset, at, store_timestamp_ms)
        queue_id, topic = first.queue_id, bytes((len(first.topic),)) + first.topic
        behind = len(first.body) + len(topic) + _TEXT_LENGTH.size + len(first.properties)
        common = sample[_COMMON_AT : -behind - _BODY_LENGTH_BYTES]
        pack = _fixed_layout(len(common)).pack
        parts: list[bytes] = []
        positions: list[int] = []
        text_bytes, middle = -1, b""
        for size, flag, body, text in zip(
            self.sizes, self.flags, self.bodies, self.stored_texts, strict=True
        ):
            if len(text) != text_bytes:
                text_bytes = len(text)
                middle = topic + _TEXT_LENGTH.pack(text_bytes)
            crc = crc32(body) & INT_MAX
            fixed = pack(size, MAGIC, crc, queue_id, flag, offset, position, common, len(body))
            parts += (fixed, body, middle, text)
            positions.append(position)
            position += size
            offset += 1
        return b"".join(parts), positions


@lru_cache(maxsize=4)
def _fixed_layout(common_bytes: int) -> struct.Struct:
    """Return the layout of a record's fixed part; what all messages share depends on the hosts."""
    return struct.Struct(f">iIiiiqq{common_bytes}si")


def record_list(like: Record, body: bytes, shared: bytes) -> RecordList:
    """Parse a batch; each message gets the shared properties after its own.

    Raises BodyError if it is malformed, InvalidArgument if a message cannot be stored.
    """
    flags, bodies, own_texts = _taken_apart_equal(body) or _taken_apart(body)
    later = _ENTRY_END + shared
    texts = [text + (later if text and text[-1] != _MARK else shared) for text in own_texts]
    _check_texts(texts)
    own_bytes = like.size - len(like.body) - len(like.properties)
    sizes = [own_bytes + len(each) + len(text) for each, text in zip(bodies, texts, strict=True)]
    return RecordList(like, flags, bodies, texts, sizes)


_Messages: TypeAlias = tuple[Sequence[int], Sequence[bytes], Sequence[bytes]]
"""Flags, bodies and properties."""


def _taken_apart_equal(body: bytes) -> _Messages | None:
    """Return the same as `_taken_apart` if all messages have the same lengths, None if not.

    Most batches do; parsing them takes a third of the time.
    """
    if len(body) < _OWN_BYTES:
        return None
    size, _, length = _HEAD.unpack_from(body)
    text_length = size - _OWN_BYTES - length
    if length < 0 or text_length < 0 or len(body) % size:
        return None
    count, messages = len(body) // size, _message_layout(length, text_length).iter_unpack(body)
    sizes, flags, lengths, bodies, text_lengths, texts = zip(*messages, strict=True)
    is_same = sizes.count(size) == lengths.count(length) == text_lengths.count(text_length) == count
    return (flags, bodies, texts) if is_same else None


@lru_cache(maxsize=1024)
def _message_layout(length: int, text_length: int) -> struct.Struct:
    """Return the layout of a message of a batch: size, flag, body and properties."""
    return struct.Struct(f">i8xii{length}sh{text_length}s")


def _taken_apart(body: bytes) -> _Messages:
    """Return the flags, bodies and properties of messages of any lengths."""
    flags: list[int] = []
    bodies: list[bytes] = []
    texts: list[bytes] = []
    at, end, head_of = 0, len(body), _HEAD.unpack_from
    while at < end:
        if end - at < _OWN_BYTES:
            raise BodyError("batch ends inside a message", at)
        size, flag, length = head_of(body, at)
        after, body_end = at + size, at + _BODY_AT + length
        text_length = size - _OWN_BYTES - length
        if length < 0 or text_length < 0 or after > end:
            raise BodyError(f"batch message of {size} bytes with a body of {length}", at)
        if body[body_end] << 8 | body[body_end + 1] != text_length:
            raise BodyError(f"batch message of {size} bytes with other lengths in it", at)
        flags.append(flag)
        bodies.append(body[at + _BODY_AT : body_end])
        texts.append(body[body_end + _TEXT_LENGTH.size : after])
        at = after
    return flags, bodies, texts


def _check_texts(texts: list[bytes]) -> None:
    longest = max(map(len, texts))
    if longest > PROPERTIES_BYTES_MAX:
        raise InvalidArgument(
            f"properties must be at most {PROPERTIES_BYTES_MAX} bytes, got {longest}"
        )
    if _ZERO in b"".join(texts):
        wrong = next(text for text in texts if _ZERO in text)
        raise InvalidArgument(f"properties must not contain a zero byte, got {wrong!r}")
