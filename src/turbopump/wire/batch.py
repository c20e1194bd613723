"""The body of a batch send: several small messages for one topic, one after the other."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from msgspec import Struct

from turbopump.errors import BodyError, InvalidArgument
from turbopump.wire import properties

_HEAD = struct.Struct(">iiiii")
_PROPERTIES_LENGTH = struct.Struct(">h")
_HEAD_BYTES = _HEAD.size
_PROPERTIES_LENGTH_BYTES = _PROPERTIES_LENGTH.size
_SMALLEST = _HEAD_BYTES + _PROPERTIES_LENGTH_BYTES


class BatchEntry(Struct, frozen=True):
    """One message of a batch; ``properties`` in their text form, encoded."""

    body: bytes
    properties: bytes = b""
    flag: int = 0


def encode_batch(entries: Iterable[BatchEntry]) -> bytes:
    return encode_entries((entry.body, entry.properties, entry.flag) for entry in entries)


def encode_entries(entries: Iterable[tuple[bytes, bytes, int]]) -> bytes:
    """Return the batch body of bodies with their properties and flags."""
    parts: list[bytes] = []
    # Messages of a batch mostly have the same lengths.
    head = middle = b""
    before: tuple[int, int, int] | None = None
    for body, text, flag in entries:
        lengths = (len(body), len(text), flag)
        if lengths != before:
            head, middle = _between(*lengths)
            before = lengths
        parts += (head, body, middle, text)
    return b"".join(parts)


def _between(body_length: int, length: int, flag: int) -> tuple[bytes, bytes]:
    """Return what precedes the body of a message, and what separates it from its properties."""
    if length > properties.BYTES_MAX:
        raise InvalidArgument(
            f"properties must be at most {properties.BYTES_MAX} bytes, got {length}"
        )
    if not -(2**31) <= flag < 2**31:
        raise InvalidArgument(f"flag must fit into 32 bits, got {flag}")
    head = _HEAD.pack(_SMALLEST + body_length + length, 0, 0, flag, body_length)
    return head, _PROPERTIES_LENGTH.pack(length)


def decode_batch(body: bytes) -> Iterator[BatchEntry]:
    at, end = 0, len(body)
    head_of, properties_length_of = _HEAD.unpack_from, _PROPERTIES_LENGTH.unpack_from
    while at < end:
        if end - at < _SMALLEST:
            raise BodyError("batch ends inside a message", at)
        size, _magic, _crc, flag, body_length = head_of(body, at)
        next_at = at + size
        if body_length < 0 or size < _SMALLEST + body_length or next_at > end:
            raise BodyError(f"batch message of {size} bytes with a body of {body_length}", at)
        body_at = at + _HEAD_BYTES
        body_end = body_at + body_length
        (length,) = properties_length_of(body, body_end)
        properties_at = body_end + _PROPERTIES_LENGTH_BYTES
        if properties_at + length != next_at or length < 0:
            raise BodyError(f"batch message of {size} bytes with {length} of properties", at)
        yield BatchEntry(body[body_at:body_end], body[properties_at:next_at], flag)
        at = next_at
