"""The body of a batch send: several small messages for one topic, one after the other."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from msgspec import Struct

from turbopump.errors import BodyError, InvalidArgument
from turbopump.wire import properties

_HEAD = struct.Struct(">iiiii")
_PROPERTIES_LENGTH = struct.Struct(">h")
_SMALLEST = _HEAD.size + _PROPERTIES_LENGTH.size


class BatchEntry(Struct, frozen=True):
    """One message of a batch; ``properties`` in their text form, encoded."""

    body: bytes
    properties: bytes = b""
    flag: int = 0


def encode_batch(entries: Iterable[BatchEntry]) -> bytes:
    """Return the batch body."""
    parts: list[bytes] = []
    for entry in entries:
        if len(entry.properties) > properties.BYTES_MAX:
            raise InvalidArgument(
                f"properties of {len(entry.properties)} bytes: at most {properties.BYTES_MAX}"
            )
        if not -(2**31) <= entry.flag < 2**31:
            raise InvalidArgument(f"flag {entry.flag}: must fit into 32 bits")
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
    at = 0
    while at < len(body):
        entry, size = _decode_entry(body, at)
        yield entry
        at += size


def _decode_entry(body: bytes, at: int) -> tuple[BatchEntry, int]:
    if len(body) - at < _SMALLEST:
        raise BodyError("batch ends inside a message", at)
    size, _magic, _crc, flag, body_length = _HEAD.unpack_from(body, at)
    body_at = at + _HEAD.size
    properties_at = body_at + body_length + _PROPERTIES_LENGTH.size
    if body_length < 0 or size < _SMALLEST + body_length or at + size > len(body):
        raise BodyError(f"batch message of {size} bytes with a body of {body_length}", at)
    (properties_length,) = _PROPERTIES_LENGTH.unpack_from(body, body_at + body_length)
    if properties_at + properties_length != at + size or properties_length < 0:
        raise BodyError(f"batch message of {size} bytes with {properties_length} of properties", at)
    entry = BatchEntry(
        body=body[body_at : body_at + body_length],
        properties=body[properties_at : properties_at + properties_length],
        flag=flag,
    )
    return entry, size
