"""Many stored records of one buffer, with the known positions of their parts.

Each field is read for all of them together, so that a record costs a few array elements and no
Python objects. `record_finder` creates such runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from isal.isal_zlib import crc32

from turbopump.spark.records.arrow_arrays import (
    Column,
    Encoded,
    Int64s,
    cells,
    contents,
    of_widths,
    slices,
)
from turbopump.wire import sysflag
from turbopump.wire.command import Buffer
from turbopump.wire.hashing import INT_MAX
from turbopump.wire.hosts import V4_BYTES
from turbopump.wire.record_arrays import are_same, read_at

Mask: TypeAlias = npt.NDArray[np.bool_]
Span: TypeAlias = tuple[int, int]
"""The start and the end of a range of bytes."""
Hosts: TypeAlias = "tuple[list[bytes], Column | None]"
"""The distinct values, and each record's index into them; None if there is only one."""

_BORN_HOST_AT = 48
_STORE_TIME_AT = 56
_STORE_HOST_AT = 64
_RECONSUME_AT = 72

DAMAGED_TOPIC = "topic is not UTF-8"
_PORT_BYTES = 4
_SMALL_BYTES = 768
"""Bodies up to this average size are copied for checking."""
_CHECKED_ROWS = 256
_NO_ROWS: Int64s = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class RecordRun:
    """Records of one buffer, in order; their parts are known to lie within them."""

    data: memoryview
    _buffer: pa.Buffer
    starts: Int64s
    sizes: Int64s
    _heads: npt.NDArray[Any]
    v6_shifts: tuple[Int64s, Int64s] | None
    """How far IPv6 addresses shift what follows the born host and the store host; None if all are
    IPv4."""
    body: FieldSpans
    topic: FieldSpans
    properties: FieldSpans
    _topic: bytes | None = None
    """The topic of all records, if known."""
    _bodies: Column | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def where(self, wanted: Mask | slice) -> RecordRun:
        """Return the selected records."""
        shifts = self.v6_shifts
        return RecordRun(
            self.data,
            self._buffer,
            self.starts[wanted],
            self.sizes[wanted],
            self._heads[wanted],
            None if shifts is None else (shifts[0][wanted], shifts[1][wanted]),
            self.body.where(wanted),
            self.topic.where(wanted),
            self.properties.where(wanted),
            self._topic,
        )

    def between(self, start: Int64s | int, end: Int64s | int) -> RecordRun:
        """Return the records with queue offsets from ``start`` to before ``end``."""
        offsets = self.queue_offsets()
        wanted = (start <= offsets) & (offsets < end)
        return self if wanted.all() else self.where(wanted)

    def queue_ids(self) -> npt.NDArray[np.int32]:
        return self._heads["queue_id"].astype(np.int32)

    def queue_offsets(self) -> npt.NDArray[np.int64]:
        return self._heads["queue_offset"].astype(np.int64)

    def physical_offsets(self) -> npt.NDArray[np.int64]:
        return self._heads["physical_offset"].astype(np.int64)

    def sys_flags(self) -> npt.NDArray[np.int32]:
        return self._heads["sys_flag"].astype(np.int32)

    def compressed_rows(self) -> npt.NDArray[np.int64]:
        """Return the row numbers of records with compressed bodies."""
        if not np.bitwise_or.reduce(self._heads["sys_flag"]) & sysflag.COMPRESSED:
            return _NO_ROWS
        return np.flatnonzero((self.sys_flags() & sysflag.COMPRESSED) != 0)

    def born_times_ms(self) -> npt.NDArray[np.int64]:
        return self._heads["born_time"].astype(np.int64)

    def store_times_ms(self) -> npt.NDArray[np.int64]:
        if self.v6_shifts is None:
            return self._heads["store_time"].astype(np.int64)
        at = self.starts + self.v6_shifts[0] + _STORE_TIME_AT
        return read_at(self.data, ">i8", at).astype(np.int64)

    def reconsume_times(self) -> npt.NDArray[np.int32]:
        if self.v6_shifts is None:
            return self._heads["reconsume"].astype(np.int32)
        at = self.starts + self.v6_shifts[1] + _RECONSUME_AT
        return read_at(self.data, ">i4", at).astype(np.int32)

    def born_hosts(self) -> Hosts:
        """Return the born hosts: address and port together."""
        if self.v6_shifts is None:
            return _few(self._heads["born_host"])
        start = self.starts + _BORN_HOST_AT
        return self._different(FieldSpans(start, self.v6_shifts[0] + (V4_BYTES + _PORT_BYTES)))

    def store_hosts(self) -> Hosts:
        """Return the store hosts in the same way."""
        if self.v6_shifts is None:
            return _few(self._heads["store_host"])
        return self._different(self._store_host_parts(self.v6_shifts))

    def _different(self, parts: FieldSpans) -> Hosts:
        found: Encoded = self.binary(parts).dictionary_encode()
        return cells(found.dictionary), found.indices

    def _store_host_parts(self, v6_shifts: tuple[Int64s, Int64s]) -> FieldSpans:
        start = self.starts + v6_shifts[0] + _STORE_HOST_AT
        return FieldSpans(start, v6_shifts[1] - v6_shifts[0] + (V4_BYTES + _PORT_BYTES))

    def offset_ids(self) -> Iterator[tuple[Int64s | None, npt.NDArray[np.uint8]]]:
        """Yield the bytes of offset ids, store host and physical offset, one row for each.

        Ids have two widths: the first of each pair selects the records with it, None for all.
        """
        offsets = self._heads["physical_offset"].view(np.uint64)
        if self.v6_shifts is None:
            ids = np.empty((len(self), 2), np.uint64)
            ids[:, 0] = self._heads["store_host"]
            ids[:, 1] = offsets
            yield None, ids.view(np.uint8)
            return
        parts = self._store_host_parts(self.v6_shifts)
        widths = parts.end - parts.start
        for width in np.unique(widths):
            rows = np.flatnonzero(widths == width)
            found = read_at(self.data, f"V{width}", parts.start[rows])
            hosts = found.view(np.uint8).reshape(len(rows), int(width))
            placed = offsets[rows].view(np.uint8).reshape(len(rows), 8)
            yield rows, np.concatenate((hosts, placed), axis=1)

    def binary(self, parts: FieldSpans) -> Column:
        """Return a part of each record."""
        return slices(self._buffer, parts.start, parts.end)

    def of_same_width(self, parts: FieldSpans) -> npt.NDArray[np.void] | None:
        """Return a part of each record, None if they differ in length or are empty."""
        width = parts.width()
        return None if width is None else read_at(self.data, f"V{width}", parts.start)

    def bodies(self) -> Column:
        """Return the bodies as they are stored."""
        if self._bodies is None:
            found = self.of_same_width(self.body)
            self._bodies = (
                self.binary(self.body) if found is None else of_widths(pa.binary(), found)
            )
        return self._bodies

    def only_topic(self) -> bytes | None:
        """Return the topic of all records, None if there are several, or no records."""
        if self._topic is not None and len(self):
            return self._topic
        found = self.of_same_width(self.topic)
        return found[0].tobytes() if found is not None and are_same(found) else None

    def topics(self) -> tuple[list[bytes], npt.NDArray[np.int32]]:
        """Return the distinct topics, and each record's index into them."""
        found = self.binary(self.topic).dictionary_encode()
        return cells(found.dictionary), found.indices.to_numpy()

    def damaged_topics(self) -> list[int]:
        """Return the records whose topics are not UTF-8."""
        only = self.only_topic()
        if only is not None and _is_utf8(only):
            return []
        topics, codes = self.topics()
        wrong = [code for code, topic in enumerate(topics) if not _is_utf8(topic)]
        return np.flatnonzero(np.isin(codes, wrong)).tolist() if wrong else []

    def damaged_bodies(self) -> list[int]:
        """Return the records whose bodies do not match their checksums."""
        # Same as `body_crc`, without a call per message.
        sums = array("I")
        for bodies in self._bodies_to_check():
            sums.extend(map(crc32, bodies))
        is_damaged = (np.array(sums, np.int64) & INT_MAX) != self._heads["crc"]
        return np.flatnonzero(is_damaged).tolist() if is_damaged.any() else []

    def _bodies_to_check(self) -> Iterator[Iterable[Buffer]]:
        """Yield bodies in the form that is fastest to create, a few at a time."""
        count, width = len(self), self.body.width()
        if int(self.sizes.sum()) <= _SMALL_BYTES * count:
            # A column of them is needed anyway. Copying short ones is faster than creating views,
            # and a few at a time reuse the same memory.
            column = self.bodies()
            for start in range(0, count, _CHECKED_ROWS):
                yield _copies(column.slice(start, _CHECKED_ROWS), width)
        elif width is not None:
            _, data = contents(self.bodies())
            yield data.reshape(count, width)
        else:
            view = self.data
            spans = zip(self.body.start.tolist(), self.body.end.tolist(), strict=True)
            yield [view[start:end] for start, end in spans]


@dataclass(slots=True, eq=False)
class FieldSpans:
    """One range of bytes for each record."""

    start: Int64s
    length: Int64s | int
    """The length of each, or of all."""

    @property
    def end(self) -> Int64s:
        return self.start + self.length

    def width(self) -> int | None:
        """Return the length of all, None if they differ or are empty."""
        length = self.length
        if not len(self.start):
            return None
        if not isinstance(length, int):
            if (length != length[0]).any():
                return None
            length = int(length[0])
        return length or None

    def where(self, wanted: Mask | slice) -> FieldSpans:
        length = self.length
        return FieldSpans(self.start[wanted], length if isinstance(length, int) else length[wanted])


def _copies(column: Column, width: int | None) -> Iterable[bytes]:
    """Return binaries as objects, all of the same width if it is known."""
    if width is None:
        found: npt.NDArray[np.object_] = column.to_numpy(zero_copy_only=False)
        return found
    ends, data = contents(column)
    rows: list[bytes] = data[ends[0] :].view(f"V{width}").tolist()
    return rows


def _few(values: npt.NDArray[Any]) -> Hosts:
    """Return values of which few are distinct."""
    if len(values) and (values == values[0]).all():
        return [values[0].tobytes()], None
    found: Encoded = pa.array(np.ascontiguousarray(values)).dictionary_encode()
    return [value.tobytes() for value in found.dictionary.to_numpy()], found.indices


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
