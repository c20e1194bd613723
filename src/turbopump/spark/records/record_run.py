"""Many stored records at once: where they and their parts lie in one buffer.

One walk over the sizes finds the records; everything else is read for all of them together, so that
the cost of a record is a few array elements and not Python objects.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from isal.isal_zlib import crc32

from turbopump.errors import InvalidArgument, RecordError
from turbopump.spark.records.arrays import Column, Numbers, cells, slices
from turbopump.wire import sysflag
from turbopump.wire.hashing import INT_MAX
from turbopump.wire.hosts import V4_BYTES, V6_BYTES
from turbopump.wire.record import FIXED_BYTES, MAGIC, MAGIC_V2, decode_record

Mask: TypeAlias = npt.NDArray[np.bool_]

# Where the fields of a record lie; behind the born host they move when a host is an IPv6 one.
_MAGIC_AT = 4
_CRC_AT = 8
_QUEUE_ID_AT = 12
_QUEUE_OFFSET_AT = 20
_PHYSICAL_OFFSET_AT = 28
_SYS_FLAG_AT = 36
_BORN_TIME_AT = 40
_BORN_HOST_AT = 48
_STORE_TIME_AT = 56
_STORE_HOST_AT = 64
_RECONSUME_AT = 72
_BODY_LENGTH_AT = 84
_BODY_AT = 88

_PORT_BYTES = 4
_V6_EXTRA = V6_BYTES - V4_BYTES
_PROPERTIES_LENGTH_BYTES = 2
_SIZE = struct.Struct(">i")


class RecordRun:
    """Records of one buffer, in order; their parts are checked to lie within them."""

    __slots__ = ("_buffer", "body", "data", "properties", "sizes", "starts", "topic", "v6_shifts")

    def __init__(
        self,
        data: memoryview,
        buffer: pa.Buffer,
        starts: Numbers,
        sizes: Numbers,
        v6_shifts: tuple[Numbers, Numbers],
        parts: tuple[Parts, Parts, Parts],
    ) -> None:
        self.data = data
        self.starts = starts
        self.sizes = sizes
        self.v6_shifts = v6_shifts
        """How far what follows the born host and the store host is moved by IPv6 addresses."""
        self.body, self.topic, self.properties = parts
        self._buffer = buffer

    def __len__(self) -> int:
        return len(self.starts)

    def where(self, wanted: Mask | slice) -> RecordRun:
        """Return the records that are wanted."""
        return RecordRun(
            self.data,
            self._buffer,
            self.starts[wanted],
            self.sizes[wanted],
            (self.v6_shifts[0][wanted], self.v6_shifts[1][wanted]),
            (self.body.where(wanted), self.topic.where(wanted), self.properties.where(wanted)),
        )

    def queue_ids(self) -> npt.NDArray[np.int32]:
        return _read(self.data, ">i4", self.starts + _QUEUE_ID_AT).astype(np.int32)

    def queue_offsets(self) -> npt.NDArray[np.int64]:
        return _read(self.data, ">i8", self.starts + _QUEUE_OFFSET_AT).astype(np.int64)

    def physical_offsets(self) -> npt.NDArray[np.int64]:
        return _read(self.data, ">i8", self.starts + _PHYSICAL_OFFSET_AT).astype(np.int64)

    def sys_flags(self) -> npt.NDArray[np.int32]:
        return _read(self.data, ">i4", self.starts + _SYS_FLAG_AT).astype(np.int32)

    def compressed_rows(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the records whose bodies are compressed."""
        return np.flatnonzero((self.sys_flags() & sysflag.COMPRESSED) != 0)

    def born_times_ms(self) -> npt.NDArray[np.int64]:
        return _read(self.data, ">i8", self.starts + _BORN_TIME_AT).astype(np.int64)

    def store_times_ms(self) -> npt.NDArray[np.int64]:
        at = self.starts + self.v6_shifts[0] + _STORE_TIME_AT
        return _read(self.data, ">i8", at).astype(np.int64)

    def reconsume_times(self) -> npt.NDArray[np.int32]:
        at = self.starts + self.v6_shifts[1] + _RECONSUME_AT
        return _read(self.data, ">i4", at).astype(np.int32)

    def born_hosts(self) -> Parts:
        """Where the born hosts lie: address and port together."""
        start = self.starts + _BORN_HOST_AT
        return Parts(start, start + self.v6_shifts[0] + V4_BYTES + _PORT_BYTES)

    def store_hosts(self) -> Parts:
        """Where the store hosts lie: address and port together."""
        start = self.starts + self.v6_shifts[0] + _STORE_HOST_AT
        end = self.starts + self.v6_shifts[1] + _STORE_HOST_AT + V4_BYTES + _PORT_BYTES
        return Parts(start, end)

    def matrix(self, start: Numbers, width: int) -> npt.NDArray[np.uint8]:
        """Return ``width`` bytes from each position, one row for each."""
        found = _read(self.data, f"V{width}", start)
        return found.view(np.uint8).reshape(len(start), width)

    def offset_bytes(self) -> npt.NDArray[np.uint8]:
        """Return the physical offsets as they are written, one row of eight bytes for each."""
        return self.matrix(self.starts + _PHYSICAL_OFFSET_AT, 8)

    def binary(self, parts: Parts) -> Column:
        """Return a part of each record."""
        return slices(self._buffer, parts.start, parts.end)

    def topics(self) -> tuple[list[bytes], npt.NDArray[np.int32]]:
        """Return the different topics, and for each record which one it has."""
        found = self.binary(self.topic).dictionary_encode()
        return cells(found.dictionary), found.indices.to_numpy()

    def first_damaged_body(self) -> int | None:
        """Return the first record whose body is not what its checksum says, None if all are."""
        # As `body_crc` has it, without a call for each message.
        data = self.data
        spans = zip(self.body.start.tolist(), self.body.end.tolist(), strict=True)
        found = np.array([crc32(data[start:end]) for start, end in spans], np.int64) & INT_MAX
        told = _read(data, ">i4", self.starts + _CRC_AT).astype(np.int64)
        return _first(found != told)


class Parts:
    """One stretch of bytes for each record."""

    __slots__ = ("end", "start")

    def __init__(self, start: Numbers, end: Numbers) -> None:
        self.start = start
        self.end = end

    def where(self, wanted: Mask | slice) -> Parts:
        return Parts(self.start[wanted], self.end[wanted])


def find_records(data: bytes | memoryview) -> tuple[RecordRun, int]:
    """Find records that lie back to back from the start of a buffer.

    Returns them and the position behind the last good one, which is the buffer's end unless
    something else than a whole record lies there: `damage_at` tells what.
    """
    view = memoryview(data).cast("B") if isinstance(data, memoryview) else memoryview(data)
    if len(view) > INT_MAX:
        raise InvalidArgument(f"{len(view)} bytes of records at once: at most {INT_MAX}")
    positions, end = _walk(view)
    starts = np.array(positions, np.int64)
    sizes = np.diff(starts, append=end)
    return _checked(view, starts, sizes, end)


def damage_at(data: bytes | memoryview, at: int) -> RecordError:
    """Return what keeps the bytes at a position from being a record."""
    try:
        decode_record(data, at, check_crc=True)
    except RecordError as error:
        return error
    return RecordError("not a whole record", at)


def _walk(view: memoryview) -> tuple[list[int], int]:
    """Follow the sizes; the last record found may have any of its other parts damaged."""
    starts: list[int] = []
    found = starts.append
    size_at = _SIZE.unpack_from
    at, end = 0, len(view)
    last = end - FIXED_BYTES
    while at <= last:
        size = size_at(view, at)[0]
        if size < FIXED_BYTES:
            break
        found(at)
        at += size
    if at > end:
        at = starts.pop()
    return starts, at


def _checked(view: memoryview, starts: Numbers, sizes: Numbers, end: int) -> tuple[RecordRun, int]:
    """Find the parts of each record, up to the first one that is damaged."""
    magic = _read(view, ">u4", starts + _MAGIC_AT)
    low_flags = _read(view, "u1", starts + _SYS_FLAG_AT + 3)
    born_shift = np.where(low_flags & sysflag.BORN_HOST_V6, _V6_EXTRA, 0)
    shift = born_shift + np.where(low_flags & sysflag.STORE_HOST_V6, _V6_EXTRA, 0)
    two_bytes = magic == MAGIC_V2
    bad = ~((magic == MAGIC) | two_bytes) | (sizes < FIXED_BYTES + shift)
    ends = starts + sizes

    body_length = _read(view, ">i4", _within(starts + shift + _BODY_LENGTH_AT, bad))
    body = Parts(starts + shift + _BODY_AT, starts + shift + _BODY_AT + body_length)
    topic_start = body.end + np.where(two_bytes, 2, 1)
    bad |= (body_length < 0) | (topic_start > ends)

    short_length = _read(view, "u1", _within(topic_start - 1, bad)).astype(np.int64)
    if two_bytes.any():
        long_length = _read(view, ">i2", _within(topic_start - 2, bad)).astype(np.int64)
        short_length = np.where(two_bytes, long_length, short_length)
    topic = Parts(topic_start, topic_start + short_length)
    properties = Parts(topic.end + _PROPERTIES_LENGTH_BYTES, ends)
    bad |= (short_length < 0) | (properties.start > ends)

    told = _read(view, ">i2", _within(topic.end, bad))
    bad |= told != ends - properties.start
    run = RecordRun(
        view, pa.py_buffer(view), starts, sizes, (born_shift, shift), (body, topic, properties)
    )
    first = _first(bad)
    return (run, end) if first is None else (run.where(slice(first)), int(starts[first]))


def _within(positions: Numbers, bad: Mask) -> Numbers:
    """Lead the positions of damaged records, which may point anywhere, to the buffer's start."""
    return np.where(bad, 0, positions) if bad.any() else positions


def _read(view: memoryview, kind: str, positions: Numbers) -> npt.NDArray[Any]:
    """Return what lies at each position."""
    if not len(positions):
        return np.empty(0, kind)
    # Every position of the buffer is an element, so that any of them can be asked for.
    width = np.dtype(kind).itemsize
    elements: npt.NDArray[Any] = np.ndarray(
        (len(view) - width + 1,), kind, buffer=view, strides=(1,)
    )
    return elements[positions]


def _first(mask: Mask) -> int | None:
    """Return the first row that is marked."""
    return int(mask.argmax()) if mask.any() else None
