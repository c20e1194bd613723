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
    """Return the batch body."""
    parts: list[bytes] = []
    for entry in entries:
        size, most = len(entry.properties), properties.BYTES_MAX
        if size > most:
            raise InvalidArgument(f"properties must be at most {most} bytes, got {size}")
        if not -(2**31) <= entry.flag < 2**31:
            raise InvalidArgument(f"flag must fit into 32 bits, got {entry.flag}")
        size = _SMALLEST + len(entry.body) + len(entry.properties)
        parts += (
            _HEAD.pack(size, 0, 0, entry.flag, len(entry.body)),
            entry.body,
            _PROPERTIES_LENGTH.pack(len(entry.properties)),
            entry.properties,
        )
    return b"".join(parts)


def decode_batch(body: bytes) -> Iterator[BatchEntry]:
    """Take a batch body apart."""
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
