"""Many stored records at once: where they and their parts lie in one buffer.

One walk over the sizes finds the records; everything else is read for all of them together, so that
the cost of a record is a few array elements and not Python objects.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from isal.isal_zlib import crc32

from turbopump.errors import InvalidArgument, RecordError
from turbopump.spark.records.arrays import (
    Column,
    Encoded,
    Numbers,
    cells,
    contents,
    same_width,
    slices,
)
from turbopump.wire import sysflag
from turbopump.wire.command import Buffer
from turbopump.wire.hashing import INT_MAX
from turbopump.wire.hosts import V4_BYTES, V6_BYTES
from turbopump.wire.record import FIXED_BYTES, MAGIC, MAGIC_V2, decode_record

Mask: TypeAlias = npt.NDArray[np.bool_]
Span: TypeAlias = tuple[int, int]

_HEAD_FIELDS = (
    ("magic", ">u4", 4),
    ("crc", ">i4", 8),
    ("queue_id", ">i4", 12),
    ("queue_offset", ">i8", 20),
    ("physical_offset", ">i8", 28),
    ("sys_flag", ">i4", 36),
    ("born_time", ">i8", 40),
    ("born_host", "u8", 48),
    ("store_time", ">i8", 56),
    ("store_host", "u8", 64),
    ("reconsume", ">i4", 72),
    ("body_length", ">i4", 84),
)
"""The fields before the body and where they lie, while both hosts are IPv4 ones: address and port
together. Of an IPv6 one, everything behind the born host's address lies elsewhere."""
_HEAD_BYTES = 88
_HEAD = np.dtype(
    {
        "names": [name for name, _, _ in _HEAD_FIELDS],
        "formats": [kind for _, kind, _ in _HEAD_FIELDS],
        "offsets": [at for _, _, at in _HEAD_FIELDS],
        "itemsize": _HEAD_BYTES,
    }
)
_PHYSICAL_OFFSET_AT = 28
_BORN_HOST_AT = 48
_STORE_TIME_AT = 56
_STORE_HOST_AT = 64
_RECONSUME_AT = 72
_BODY_LENGTH_AT = 84

_PORT_BYTES = 4
_V6_EXTRA = V6_BYTES - V4_BYTES
_PROPERTIES_LENGTH_BYTES = 2
_SMALL_BYTES = 768
"""Bodies of records that are not larger on average are copied to be checked."""
_CHECKED_ROWS = 256
_SIZE = struct.Struct(">i")


class RecordRun:
    """Records of one buffer, in order; their parts are checked to lie within them."""

    __slots__ = (
        "_bodies",
        "_buffer",
        "_heads",
        "body",
        "data",
        "properties",
        "sizes",
        "starts",
        "topic",
        "v6_shifts",
    )

    def __init__(
        self,
        data: memoryview,
        buffer: pa.Buffer,
        starts: Numbers,
        sizes: Numbers,
        heads: npt.NDArray[Any],
        v6_shifts: tuple[Numbers, Numbers] | None,
        parts: tuple[Parts, Parts, Parts],
    ) -> None:
        self.data = data
        self.starts = starts
        self.sizes = sizes
        self.v6_shifts = v6_shifts
        """How far what follows the born host and the store host is moved by IPv6 addresses; None
        where all are IPv4."""
        self.body, self.topic, self.properties = parts
        self._buffer = buffer
        self._heads = heads
        self._bodies: Column | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def where(self, wanted: Mask | slice) -> RecordRun:
        """Return the records that are wanted."""
        shifts = self.v6_shifts
        return RecordRun(
            self.data,
            self._buffer,
            self.starts[wanted],
            self.sizes[wanted],
            self._heads[wanted],
            None if shifts is None else (shifts[0][wanted], shifts[1][wanted]),
            (self.body.where(wanted), self.topic.where(wanted), self.properties.where(wanted)),
        )

    def queue_ids(self) -> npt.NDArray[np.int32]:
        return self._heads["queue_id"].astype(np.int32)

    def queue_offsets(self) -> npt.NDArray[np.int64]:
        return self._heads["queue_offset"].astype(np.int64)

    def physical_offsets(self) -> npt.NDArray[np.int64]:
        return self._heads["physical_offset"].astype(np.int64)

    def sys_flags(self) -> npt.NDArray[np.int32]:
        return self._heads["sys_flag"].astype(np.int32)

    def compressed_rows(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the records whose bodies are compressed."""
        return np.flatnonzero((self.sys_flags() & sysflag.COMPRESSED) != 0)

    def born_times_ms(self) -> npt.NDArray[np.int64]:
        return self._heads["born_time"].astype(np.int64)

    def store_times_ms(self) -> npt.NDArray[np.int64]:
        if self.v6_shifts is None:
            return self._heads["store_time"].astype(np.int64)
        at = self.starts + self.v6_shifts[0] + _STORE_TIME_AT
        return _read(self.data, ">i8", at).astype(np.int64)

    def reconsume_times(self) -> npt.NDArray[np.int32]:
        if self.v6_shifts is None:
            return self._heads["reconsume"].astype(np.int32)
        at = self.starts + self.v6_shifts[1] + _RECONSUME_AT
        return _read(self.data, ">i4", at).astype(np.int32)

    def born_hosts(self) -> Encoded:
        """Return the born hosts: address and port together, as numbers if all are IPv4."""
        if self.v6_shifts is None:
            return _few(self._heads["born_host"])
        start = self.starts + _BORN_HOST_AT
        end = start + self.v6_shifts[0] + V4_BYTES + _PORT_BYTES
        return self.binary(Parts(start, end)).dictionary_encode()

    def store_hosts(self) -> Encoded:
        """Return the store hosts in the same way."""
        if self.v6_shifts is None:
            return _few(self._heads["store_host"])
        return self.binary(self._store_host_parts(self.v6_shifts)).dictionary_encode()

    def _store_host_parts(self, v6_shifts: tuple[Numbers, Numbers]) -> Parts:
        start = self.starts + v6_shifts[0] + _STORE_HOST_AT
        end = self.starts + v6_shifts[1] + _STORE_HOST_AT + V4_BYTES + _PORT_BYTES
        return Parts(start, end)

    def offset_ids(self) -> Iterator[tuple[Numbers | None, npt.NDArray[np.uint8]]]:
        """Yield the bytes of offset ids, store host and physical offset, one row for each.

        Ids are of two widths: the first of each pair tells which records have them, None for all.
        """
        heads = self._heads.view(np.uint8).reshape(len(self), _HEAD_BYTES)
        offsets = heads[:, _PHYSICAL_OFFSET_AT : _PHYSICAL_OFFSET_AT + 8]
        if self.v6_shifts is None:
            hosts = heads[:, _STORE_HOST_AT : _STORE_HOST_AT + V4_BYTES + _PORT_BYTES]
            yield None, np.concatenate((hosts, offsets), axis=1)
            return
        parts = self._store_host_parts(self.v6_shifts)
        widths = parts.end - parts.start
        for width in np.unique(widths):
            rows = np.flatnonzero(widths == width)
            found = _read(self.data, f"V{width}", parts.start[rows])
            hosts = found.view(np.uint8).reshape(len(rows), int(width))
            yield rows, np.concatenate((hosts, offsets[rows]), axis=1)

    def binary(self, parts: Parts) -> Column:
        """Return a part of each record."""
        return slices(self._buffer, parts.start, parts.end)

    def of_same_width(self, parts: Parts) -> npt.NDArray[np.void] | None:
        """Return a part of each record, None if they differ in length or are empty."""
        width = parts.width()
        return None if width is None else _read(self.data, f"V{width}", parts.start)

    def bodies(self) -> Column:
        """Return the bodies as they are stored."""
        if self._bodies is None:
            alike = self.of_same_width(self.body)
            self._bodies = self.binary(self.body) if alike is None else same_width(alike)
        return self._bodies

    def only_topic(self) -> bytes | None:
        """Return the topic that all records have, None if there are several, or no record."""
        found = self.of_same_width(self.topic)
        if found is None:
            return None
        raw, width = found.view(np.uint8), found.dtype.itemsize
        return raw[:width].tobytes() if (raw[width:] == raw[:-width]).all() else None

    def topics(self) -> tuple[list[bytes], npt.NDArray[np.int32]]:
        """Return the different topics, and for each record which one it has."""
        found = self.binary(self.topic).dictionary_encode()
        return cells(found.dictionary), found.indices.to_numpy()

    def first_damaged_body(self) -> int | None:
        """Return the first record whose body is not what its checksum says, None if all are."""
        # As `body_crc` has it, without a call for each message.
        sums = array("I")
        for bodies in self._bodies_to_check():
            sums.extend(map(crc32, bodies))
        return _first((np.array(sums, np.int64) & INT_MAX) != self._heads["crc"])

    def _bodies_to_check(self) -> Iterator[Iterable[Buffer]]:
        """Yield bodies in the form that is made fastest, a few at a time."""
        count = len(self)
        if int(self.sizes.sum()) <= _SMALL_BYTES * count:
            # A column is made of them in any case. Short ones are copied faster than views are made
            # of them, and few at a time use the same memory again.
            column = self.bodies()
            for start in range(0, count, _CHECKED_ROWS):
                yield column.slice(start, _CHECKED_ROWS).to_numpy(zero_copy_only=False)
        elif (width := self.body.width()) is not None:
            _, data = contents(self.bodies())
            yield data.reshape(count, width)
        else:
            view = self.data
            spans = zip(self.body.start.tolist(), self.body.end.tolist(), strict=True)
            yield [view[start:end] for start, end in spans]


class Parts:
    """One stretch of bytes for each record."""

    __slots__ = ("end", "start")

    def __init__(self, start: Numbers, end: Numbers) -> None:
        self.start = start
        self.end = end

    def width(self) -> int | None:
        """Return how long all are, None if they differ or are empty."""
        widths = self.end - self.start
        if not len(widths) or not widths[0] or (widths != widths[0]).any():
            return None
        return int(widths[0])

    def where(self, wanted: Mask | slice) -> Parts:
        return Parts(self.start[wanted], self.end[wanted])


def find_records(data: bytes | memoryview) -> tuple[RecordRun, int]:
    """Find records that lie back to back from the start of a buffer.

    Returns them and the position behind the last good one, which is the buffer's end unless
    something else than a whole record lies there: `damage_at` tells what.
    """
    run, damaged_at = find_in_spans(data, [(0, len(data))])
    return run, len(data) if damaged_at is None else damaged_at


def find_in_spans(data: bytes | memoryview, spans: Sequence[Span]) -> tuple[RecordRun, int | None]:
    """Find records that lie back to back in stretches of a buffer, which are in its order.

    Returns those before the first one that is damaged, and where that lies, if there is one.
    """
    view = memoryview(data).cast("B") if isinstance(data, memoryview) else memoryview(data)
    if len(view) > INT_MAX:
        raise InvalidArgument(f"{len(view)} bytes of records at once: at most {INT_MAX}")
    starts, sizes, damaged_at = _found(view, spans)
    run, first = _checked(view, starts, sizes)
    return run, damaged_at if first is None else first


def damage_at(data: bytes | memoryview, at: int) -> RecordError:
    """Return what keeps the bytes at a position from being a record."""
    try:
        decode_record(data, at, check_crc=True)
    except RecordError as error:
        return error
    return RecordError("not a whole record", at)


def _found(view: memoryview, spans: Sequence[Span]) -> tuple[Numbers, Numbers, int | None]:
    """Return where records begin, how long they are, and where something else lies."""
    starts, sizes, counts, is_even = _evenly(view, np.array(spans, np.int64).reshape(-1, 2))
    if is_even.all():
        return starts, sizes, None
    found: list[Numbers] = []
    measured: list[Numbers] = []
    row, damaged_at = 0, None
    for (at, end), count, even in zip(spans, counts.tolist(), is_even.tolist(), strict=True):
        if even:
            found.append(starts[row : row + count])
            measured.append(sizes[row : row + count])
        else:
            walked, reached = _walk(view, at, end)
            # By way of an array, which takes half the time.
            found.append(np.frombuffer(array("q", walked), np.int64))
            measured.append(np.diff(found[-1], append=reached))
            if reached < end:
                damaged_at = reached
                break
        row += count
    return np.concatenate(found), np.concatenate(measured), damaged_at


def _evenly(view: memoryview, spans: Numbers) -> tuple[Numbers, Numbers, Numbers, Mask]:
    """Find the records of all spans at once, as if those of a span were all of the same size.

    Returns their starts and sizes, how many of them are of each span, and for which ones it holds.
    """
    begin, length = spans[:, 0], spans[:, 1] - spans[:, 0]
    is_even = length >= FIXED_BYTES
    size = _read(view, ">i4", np.where(is_even, begin, 0)).astype(np.int64) if is_even.any() else 0
    is_even &= size >= FIXED_BYTES
    size = np.where(is_even, size, FIXED_BYTES)
    is_even &= length % size == 0
    counts = np.where(is_even, length // size, 0)
    sizes = np.repeat(size, counts)
    starts = _laid_out(begin[is_even], size[is_even], counts[is_even], sizes)
    differ = np.flatnonzero(_read(view, ">i4", starts) != sizes)
    is_even[np.searchsorted(np.cumsum(counts), differ, side="right")] = False
    return starts, sizes, counts, is_even


def _laid_out(begin: Numbers, size: Numbers, count: Numbers, sizes: Numbers) -> Numbers:
    """Return where records start that lie back to back from each beginning on."""
    # From one start to the next it is the record's size, from span to span something else.
    distance = np.empty(len(sizes), np.int64)
    distance[1:] = sizes[:-1]
    first = np.cumsum(count) - count
    distance[first] = begin
    distance[first[1:]] -= (begin + (count - 1) * size)[:-1]
    return np.cumsum(distance)


def _walk(view: memoryview, at: int, end: int) -> tuple[list[int], int]:
    """Follow the sizes; the last record found may have any of its other parts damaged."""
    starts: list[int] = []
    found = starts.append
    size_at = _SIZE.unpack_from
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


def _checked(view: memoryview, starts: Numbers, sizes: Numbers) -> tuple[RecordRun, int | None]:
    """Find the parts of each record, up to the first one that is damaged; return where it is."""
    heads = _read(view, f"V{_HEAD_BYTES}", starts).view(_HEAD)
    bad = heads["magic"] != MAGIC
    two_bytes = bad & (heads["magic"] == MAGIC_V2) if bad.any() else None
    if two_bytes is not None:
        bad ^= two_bytes
    shifts = _v6_shifts(heads)
    if shifts is not None:
        bad |= sizes < FIXED_BYTES + shifts[1]
    ends = starts + sizes

    body = _bodies(view, starts, heads, None if shifts is None else shifts[1], bad)
    topic_start = body.end + (1 if two_bytes is None else np.where(two_bytes, 2, 1))
    bad |= (body.end < body.start) | (topic_start > ends)

    topic_length = _read(view, "u1", _within(topic_start - 1, bad)).astype(np.int64)
    if two_bytes is not None:
        long_length = _read(view, ">i2", _within(topic_start - 2, bad)).astype(np.int64)
        topic_length = np.where(two_bytes, long_length, topic_length)
    topic = Parts(topic_start, topic_start + topic_length)
    properties = Parts(topic.end + _PROPERTIES_LENGTH_BYTES, ends)
    bad |= (topic_length < 0) | (properties.start > ends)

    told = _read(view, ">i2", _within(topic.end, bad))
    bad |= told != ends - properties.start
    parts = (body, topic, properties)
    run = RecordRun(view, pa.py_buffer(view), starts, sizes, heads, shifts, parts)
    first = _first(bad)
    return (run, None) if first is None else (run.where(slice(first)), int(starts[first]))


def _v6_shifts(heads: npt.NDArray[Any]) -> tuple[Numbers, Numbers] | None:
    flags = heads["sys_flag"].astype(np.int32)
    if not (flags & (sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6)).any():
        return None
    born = np.where(flags & sysflag.BORN_HOST_V6, _V6_EXTRA, 0)
    return born, born + np.where(flags & sysflag.STORE_HOST_V6, _V6_EXTRA, 0)


def _bodies(
    view: memoryview, starts: Numbers, heads: npt.NDArray[Any], shift: Numbers | None, bad: Mask
) -> Parts:
    if shift is None:
        length, start = heads["body_length"].astype(np.int64), starts + _HEAD_BYTES
    else:
        at = _within(starts + shift + _BODY_LENGTH_AT, bad)
        length = _read(view, ">i4", at).astype(np.int64)
        start = starts + shift + _HEAD_BYTES
    return Parts(start, start + length)


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


def _few(values: npt.NDArray[Any]) -> Encoded:
    """Return values of which there are few different ones."""
    if len(values) and (values == values[0]).all():
        same = np.zeros(len(values), np.int32)
        return pa.DictionaryArray.from_arrays(same, pa.array(values[:1]))
    found: Encoded = pa.array(np.ascontiguousarray(values)).dictionary_encode()
    return found


def _first(mask: Mask) -> int | None:
    """Return the first row that is marked."""
    return int(mask.argmax()) if mask.any() else None
