"""A batch to be stored in the log: the records of all its messages, built together.

`turbopump.wire.batch` and `turbopump.wire.record` build the same bytes one message at a time. Here
the messages stay in a few lists and arrays, and shared parts are built once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeAlias, final

import numpy as np
from isal.isal_zlib import crc32
from msgspec import Struct
from msgspec.structs import replace

from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire import properties
from turbopump.wire.aligned_properties import Ints
from turbopump.wire.hashing import INT_MAX
from turbopump.wire.property_texts import Equal, PropertyTexts
from turbopump.wire.record import PROPERTIES_BYTES_MAX, Record
from turbopump.wire.record_arrays import layout

_ENTRY_END = properties.ENTRY_END.encode()
_ZERO = b"\0"
_NAMES = (properties.TAGS.encode(), properties.KEYS.encode(), properties.UNIQUE_KEY.encode())
MESSAGES_MIN = 128
"""Fewer messages are faster one by one, see `turbopump.wire.record_list`."""

_SAME_LENGTHS_POSSIBLE_MIN = 8
"""Arrays are tried only if at least this many messages may have the same lengths."""

_SAME_LENGTHS_SEEN_MIN = 4
"""Consecutive messages of the same lengths after which arrays are tried."""

_TRIED_FIRST = 256
_TRIED_MORE = 4
"""How many messages are tried, and the growth factor while all have the same lengths."""

_TAKEN_MIN = 64
"""Fewer messages were not worth the attempt."""

_COPIED_BYTES_MAX = 448
"""Larger objects do not come from Python's own allocator."""

Messages: TypeAlias = np.ndarray[tuple[int], np.dtype[Any]]
"""Messages of a batch that have the same lengths, by field."""

_HEAD = struct.Struct(">i8xii")
_TEXT_LENGTH = struct.Struct(">h")
_BODY_AT = _HEAD.size
_OWN_BYTES = _HEAD.size + _TEXT_LENGTH.size


# Final, so that its type can be compared: that is done for each message, and isinstance takes five
# times as long.
@final
class RecordBatch(Struct, frozen=True, eq=False):
    """Messages about to be stored in one queue; they differ in body and properties only.

    ``first`` is the first of them. All properties end with the ``shared`` ones.
    """

    first: Record
    bodies: list[bytes] | Equal
    own_texts: PropertyTexts
    """Properties of each message, without the shared ones."""
    shared: bytes
    body_lengths: Ints
    text_lengths: Ints
    """With the shared ones."""
    sizes: Ints
    """Of whole records."""

    def __len__(self) -> int:
        return len(self.bodies)

    @property
    def body_bytes(self) -> int:
        return int(self.body_lengths.sum())

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())

    @property
    def largest_bytes(self) -> int:
        return int(self.sizes.max())

    @property
    def stored_texts(self) -> list[bytes]:
        """All properties of each message."""
        return [text + self.shared for text in self.own_texts.parts]

    def texts(self) -> PropertyTexts:
        """Return the properties that contain each message's tag and keys."""
        if any(name in self.shared for name in _NAMES):
            return PropertyTexts(self.stored_texts)
        return self.own_texts

    def placed(
        self, queue_offset: QueueOffset, at: PhysicalOffset, store_timestamp_ms: int
    ) -> tuple[bytes | memoryview, Ints]:
        """Return the concatenated bytes of all records, and the position of each."""
        positions = self.sizes.cumsum() - self.sizes + at
        return self.encode(queue_offset, positions, store_timestamp_ms), positions

    def records(self) -> Iterator[Record]:
        bodies = self.bodies
        parts = bodies.tolist() if isinstance(bodies, np.ndarray) else bodies
        for body, text in zip(parts, self.stored_texts, strict=True):
            yield replace(self.first, body=body, properties=text)

    def encode(
        self, queue_offset: QueueOffset, positions: Ints, store_timestamp_ms: int
    ) -> bytes | memoryview:
        """Return the concatenated bytes of all records.

        The first message gets the queue offset, the others follow.
        """
        bodies = self.bodies
        if isinstance(bodies, np.ndarray):
            return self._encode_equal(bodies, queue_offset, positions, store_timestamp_ms)
        heads = self._heads(bodies, queue_offset, positions, store_timestamp_ms)
        # The end of one record is joined to the start of the next.
        pieces = [b""] * (4 * len(bodies))
        pieces[::4], pieces[1::4] = heads, bodies
        pieces[2::4], pieces[3::4] = self._middles(), self.own_texts.parts
        pieces[0] = heads[0][len(self.shared) :]
        pieces.append(self.shared)
        return b"".join(pieces)

    def _encode_equal(
        self, bodies: Equal, queue_offset: QueueOffset, positions: Ints, time_ms: int
    ) -> memoryview:
        """Build the records of messages with the same lengths: the first one's, changed."""
        first, count, text_length = self.first, len(bodies), int(self.own_texts.lengths[0])
        end_bytes = len(self.shared)
        lengths = (len(first.body), len(self._middle()), text_length, end_bytes)
        form = _record_form(first.size - sum(lengths), *lengths)
        like = np.frombuffer(first.encode(queue_offset, PhysicalOffset(0), time_ms), form)
        made = np.empty(count, form)
        for name in ("head", "middle", "end"):
            made[name] = like[name]
        # Copying small ones is faster than creating views of them.
        parts = bodies.tolist() if bodies.itemsize <= _COPIED_BYTES_MAX else bodies
        made["body_crc"] = np.fromiter(map(crc32, parts), np.int64, count) & INT_MAX
        made["queue_offset"] = np.arange(queue_offset, queue_offset + count)
        made["physical_offset"] = positions
        made["body"] = bodies
        made["text"] = self.own_texts.given
        return made.view(np.uint8).data

    def _heads(
        self, bodies: list[bytes], queue_offset: QueueOffset, positions: Ints, time_ms: int
    ) -> list[bytes]:
        """Return the fixed parts of all records, each after the end of the previous record."""
        first, shared, count = self.first, self.shared, len(bodies)
        sample = first.encode(QueueOffset(0), PhysicalOffset(0), time_ms)
        fixed = sample[: first.size - len(first.body) - len(self._middle()) - len(first.properties)]
        made = bytearray((shared + fixed) * count)
        fields = np.frombuffer(made, _head_form(len(shared), len(fixed)))
        fields["size"] = self.sizes
        fields["body_crc"] = np.fromiter(map(crc32, bodies), np.int64, count) & INT_MAX
        fields["queue_offset"] = np.arange(queue_offset, queue_offset + count)
        fields["physical_offset"] = positions
        fields["body_length"] = self.body_lengths
        return _cut(made, fields.itemsize)

    def _middles(self) -> list[bytes]:
        """Return what separates body and properties of each record."""
        middle = self._middle()
        made = bytearray(middle * len(self.bodies))
        np.frombuffer(made, _middle_form(len(middle)))["text_length"] = self.text_lengths
        return _cut(made, len(middle))

    def _middle(self) -> bytes:
        topic = self.first.topic
        return bytes((len(topic),)) + topic + bytes(_TEXT_LENGTH.size)


@lru_cache(maxsize=1024)
def _record_form(head: int, body: int, middle: int, text: int, end: int) -> np.dtype[Any]:
    """Return the layout of records, given the lengths of all parts."""
    places = {
        "head": (f"V{head}", 0),
        "body_crc": (">i4", 8),
        "queue_offset": (">i8", 20),
        "physical_offset": (">i8", 28),
        "body": (f"V{body}", head),
        "middle": (f"V{middle}", head + body),
        "text": (f"V{text}", head + body + middle),
        "end": (f"V{end}", head + body + middle + text),
    }
    return layout(places, head + body + middle + text + end)


@lru_cache(maxsize=1024)
def _head_form(before_bytes: int, fixed_bytes: int) -> np.dtype[Any]:
    """Return the layout of what differs within a batch in a record's fixed part."""
    places = {
        "size": (">i4", 0),
        "body_crc": (">i4", 8),
        "queue_offset": (">i8", 20),
        "physical_offset": (">i8", 28),
        "body_length": (">i4", fixed_bytes - 4),
    }
    return layout(places, before_bytes + fixed_bytes, before_bytes)


@lru_cache(maxsize=256)
def _middle_form(size: int) -> np.dtype[Any]:
    return layout({"text_length": (">i2", size - _TEXT_LENGTH.size)}, size)


def _cut(data: bytearray, size: int) -> list[bytes]:
    parts: list[bytes] = np.frombuffer(data, f"V{size}").tolist()
    return parts


def record_batch(like: Record, body: bytes | memoryview, shared: bytes) -> RecordBatch | None:
    """Build a batch from what was sent; None if its messages must be examined one by one.

    ``like`` has what they share, ``shared`` the properties that each of them gets besides its own.
    Messages that must be examined may be invalid.
    """
    if _are_few(body):
        return None
    taken = _taken_apart_equal(body) or _taken_apart(bytes(body))
    if taken is None:
        return None
    bodies, given, flag = taken
    texts, count = PropertyTexts(given), len(bodies)
    ended = texts.ending_with_mark()
    if not ended.any():
        shared = _ENTRY_END + shared
    elif not ended.all() or not texts.lengths.all():
        return None
    text_lengths = texts.lengths + len(shared)
    if text_lengths.max() > PROPERTIES_BYTES_MAX or texts.has_zero() or _ZERO in shared:
        return None
    first = replace(like, body=bytes(bodies[0]), properties=bytes(given[0]) + shared, flag=flag)
    body_lengths = (
        np.full(count, bodies.itemsize)
        if isinstance(bodies, np.ndarray)
        else np.fromiter(map(len, bodies), np.int64, count)
    )
    own_bytes = first.size - len(first.body) - len(first.properties)
    sizes = body_lengths + text_lengths + own_bytes
    return RecordBatch(first, bodies, texts, shared, body_lengths, text_lengths, sizes)


def _are_few(body: bytes | memoryview) -> bool:
    """Whether messages like the first are too few to be worth it."""
    size = int.from_bytes(body[:4], "big", signed=True)
    return size < _OWN_BYTES or len(body) < size * MESSAGES_MIN


def _taken_apart_equal(body: bytes | memoryview) -> tuple[Equal, Equal, int] | None:
    """Return the same as `_taken_apart` if all messages have the same lengths, None if not."""
    size, flag, length = _HEAD.unpack_from(body)
    text_length = size - length - _OWN_BYTES
    if length <= 0 or text_length <= 0 or len(body) % size:
        return None
    count = len(body) // size
    messages = _same_lengths_prefix(body, 0, (size, flag, length, text_length), count)
    if len(messages) < count:
        return None
    # Properties are kept longer than all the rest, and processed contiguously.
    return messages["body"], messages["text"].copy(), flag


def _taken_apart(body: bytes) -> tuple[list[bytes], list[bytes], int] | None:
    """Return bodies, properties and the common flag; None if a message is malformed."""
    bodies: list[bytes] = []
    texts: list[bytes] = []
    at, end, flag = 0, len(body), None
    before, repeats, repeats_min = (-1, -1), 1, _SAME_LENGTHS_SEEN_MIN
    try:
        while at < end:
            size, own_flag, length = _HEAD.unpack_from(body, at)
            text_at = at + length + _OWN_BYTES
            (text_length,) = _TEXT_LENGTH.unpack_from(body, text_at - _TEXT_LENGTH.size)
            wrong = length < 0 or text_length < 0 or at + size != text_at + text_length
            if wrong or (flag is not None and flag != own_flag):
                return None
            bodies.append(body[at + _BODY_AT : text_at - _TEXT_LENGTH.size])
            at, flag = at + size, own_flag
            texts.append(body[text_at:at])
            lengths = (length, text_length)
            repeats = repeats + 1 if lengths == before else 1
            before = lengths
            if repeats >= repeats_min and end - at > _SAME_LENGTHS_POSSIBLE_MIN * size:
                start = at
                at = _take_equal(body, at, (size, flag, length, text_length), bodies, texts)
                repeats = 0
                if at - start < _TAKEN_MIN * size:
                    # Where lengths vary, attempts become ever rarer: in total they cost little.
                    repeats_min *= 2
    except struct.error:
        return None
    return (bodies, texts, flag or 0) if bodies and at == end else None


def _take_equal(
    body: bytes, at: int, like: tuple[int, int, int, int], bodies: list[bytes], texts: list[bytes]
) -> int:
    """Take all messages with the same lengths; return where the next one begins.

    Mostly nearly all have: numbers with as many digits, ids. They are sliced in one step. The
    number tried grows only while all match, so little more is examined than taken.
    """
    size, _, length, text_length = like
    tried = _TRIED_FIRST
    while at < len(body):
        tried = min(tried, (len(body) - at) // size)
        messages = _same_lengths_prefix(body, at, like, tried)
        count = len(messages)
        bodies += messages["body"].tolist() if length else [b""] * count
        texts += messages["text"].tolist() if text_length else [b""] * count
        at += size * count
        if count < tried or not tried:
            break
        tried *= _TRIED_MORE
    return at


def _same_lengths_prefix(
    body: bytes | memoryview, at: int, like: tuple[int, int, int, int], tried: int
) -> Messages:
    """Return the messages before the first that has other lengths, of ``tried`` ones."""
    _, _, length, text_length = like
    messages = np.frombuffer(body, _message_form(length, text_length), tried, at)
    is_like = np.ones(tried, np.bool_)
    for name, value in zip(("size", "flag", "length", "text_length"), like, strict=True):
        is_like &= messages[name] == value
    return messages if is_like.all() else messages[: int(is_like.argmin())]


@lru_cache(maxsize=1024)
def _message_form(length: int, text_length: int) -> np.dtype[Any]:
    places = {
        "size": (">i4", 0),
        "flag": (">i4", 12),
        "length": (">i4", 16),
        "text_length": (">i2", _BODY_AT + length),
    }
    if length:
        places["body"] = (f"V{length}", _BODY_AT)
    if text_length:
        places["text"] = (f"V{text_length}", _OWN_BYTES + length)
    return layout(places, _OWN_BYTES + length + text_length)
