"""Reading a commit log file in chunks, up to anything that is not a message."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

from turbopump.core import RecordTable, scan_records
from turbopump.errors import RecordError
from turbopump.spark.offline.store_files import LogFile
from turbopump.spark.records.record_columns import DAMAGED_TOPIC, damage_at, damaged_topics
from turbopump.wire.record import (
    BLANK_BYTES,
    BLANK_MAGIC,
    MAGIC,
    MAGIC_V2,
    decode_record,
    encode_blank,
)

READ_BYTES = 4 * 1024 * 1024
_PREFIX = struct.Struct(">iI")
_HEAD = struct.Struct(">iI20xq")
"""Size, magic number, and the log position that a record claims to have."""
_MAGIC_AT = 4
_MAGIC_START = MAGIC.to_bytes(4, "big")[:3]
"""The common prefix of the magic numbers of all releases."""
_BLANK_MAGIC = BLANK_MAGIC.to_bytes(4, "big")
_FILLER_BYTES_MAX = 16 * 1024 * 1024
"""How far from the end of a file its filler is searched for: farther than any message."""
_UNWRITTEN = b"\0" * BLANK_BYTES


class End(Enum):
    """What a walk ended at."""

    REACHED = auto()
    """The requested end, or the end of the file."""
    BLANK = auto()
    """The filler that ends a file."""
    UNWRITTEN = auto()
    """Zeros: not written yet."""
    DAMAGED = auto()


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a walk ended, as a position in the file, and why."""

    at: int
    end: End
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """Intact records, back to back, from a position in the file."""

    at: int
    records: RecordTable

    @property
    def end(self) -> int:
        return (
            self.at
            + self.records.starts()[-1]
            - self.records.starts()[0]
            + (self.records.sizes()[-1])
        )


@dataclass(frozen=True, slots=True)
class LogReader:
    """An open commit log file."""

    file: LogFile
    fd: int

    def walk(self, start: int, end: int, *, may_be_torn: bool = False) -> Iterator[Found | Stop]:
        """Walk the records that start in a part of the file; the last item is a `Stop`.

        A record must start at ``start``. With ``may_be_torn``, the last record also counts as
        damaged if only its checksum, which covers just the body, speaks for it.
        """
        # Zeros in its properties may be data that never reached the disk.
        at, doubtful = start, None
        while True:
            found = self._records_at(at, end, READ_BYTES)
            if doubtful is not None:
                if isinstance(found, Stop) and found.end is not End.BLANK:
                    yield Stop(doubtful.at, End.DAMAGED, "properties were not written completely")
                    return
                yield doubtful
                doubtful = None
            if isinstance(found, Stop):
                yield found
                return
            at = found.end
            if may_be_torn and b"\0" in found.records.text(-1):
                found, doubtful = _split_last(found)
            if len(found.records):
                yield found

    def next_record(self, at: int, end: int) -> int | None:
        """Return the first position in a part of the file where a record certainly starts.

        A body may contain something like a record, but cannot know its own position in the log.
        """
        at += _MAGIC_AT
        while at < end + _MAGIC_AT:
            data = os.pread(self.fd, READ_BYTES, at)
            place = data.find(_MAGIC_START)
            if place < 0:
                if len(data) < READ_BYTES:
                    return None
                at += len(data) - len(_MAGIC_START) + 1
                continue
            start = at + place - _MAGIC_AT
            if start < end and self._is_record(start):
                return start
            at += place + 1
        return None

    def filler(self) -> int | None:
        """Return where the filler at the end of the file starts, or None if there seems to be none.

        Data behind it may be left over from earlier and look like messages. Of several candidates,
        the first counts: everything before the filler was overwritten.
        """
        base = max(0, self.file.size - _FILLER_BYTES_MAX)
        data = os.pread(self.fd, _FILLER_BYTES_MAX, base)
        place = data.find(_BLANK_MAGIC)
        while place >= 0:
            start = place - _MAGIC_AT
            left = self.file.size - base - start
            if start >= 0 and data[start : start + BLANK_BYTES] == encode_blank(left):
                return base + start
            place = data.find(_BLANK_MAGIC, place + 1)
        return None

    def data(self, start: int, end: int) -> bytes:
        """Return the bytes of a damaged range, up to the size of a message."""
        return os.pread(self.fd, min(end - start, READ_BYTES), start)

    def first_store_time_ms(self) -> int | None:
        """Return when the first message of the file was stored."""
        found = self._records_at(0, 1, 64 * 1024)
        return None if isinstance(found, Stop) else found.records.store_times_ms()[0]

    def _is_record(self, at: int) -> bool:
        head = os.pread(self.fd, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return False
        size, magic, position = _HEAD.unpack(head)
        if magic not in (MAGIC, MAGIC_V2) or position != self.file.start + at:
            return False
        if not 0 < size <= self.file.size - at:
            return False
        try:
            view = decode_record(os.pread(self.fd, size, at), check_crc=True)
        except RecordError:
            return False
        return bool(view.size == size)

    def _records_at(self, at: int, end: int, read_bytes: int) -> Found | Stop:
        if at >= min(end, self.file.size):
            return Stop(at, End.REACHED)
        data = os.pread(self.fd, max(min(read_bytes, end - at), _PREFIX.size), at)
        size, magic = _PREFIX.unpack(data[:8].ljust(8, b"\0"))
        if magic in (MAGIC, MAGIC_V2) and len(data) < size <= self.file.size - at:
            data = os.pread(self.fd, size, at)
        records, _ = scan_records(data)
        good, damage = self._good(records, at)
        if len(good):
            return Found(at, good)
        if damage is not None:
            return Stop(at, End.DAMAGED, damage)
        return self._stop(at, data)

    def _good(self, records: RecordTable, at: int) -> tuple[RecordTable, str | None]:
        """Return the records before the first damaged one, and what is wrong with that."""
        base = self.file.start + at
        wrong = [
            (row, f"message claims position {position}")
            for row, position in _misplaced(records.physical_offsets(), records.starts(), base)
        ]
        wrong += [(row, "body does not match its checksum") for row in records.damaged_bodies()]
        wrong += [(row, DAMAGED_TOPIC) for row in damaged_topics(records)]
        if not wrong:
            return records, None
        row, reason = min(wrong, key=lambda one: one[0])
        return records[:row], reason

    def _stop(self, at: int, data: bytes) -> Stop:
        left = self.file.size - at
        if left >= BLANK_BYTES and data[:BLANK_BYTES] == encode_blank(left):
            return Stop(at, End.BLANK)
        if data[:BLANK_BYTES] == _UNWRITTEN[: len(data)]:
            return Stop(at, End.UNWRITTEN)
        return Stop(at, End.DAMAGED, damage_at(data, 0).reason)


@contextmanager
def opened(file: LogFile) -> Iterator[LogReader]:
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield LogReader(file, fd)
    finally:
        os.close(fd)


def _misplaced(
    positions: Sequence[int], starts: Sequence[int], base: int
) -> Iterator[tuple[int, int]]:
    """Yield the records that are not where they claim to be in the log, and their claims."""
    pairs = enumerate(zip(positions, starts, strict=True))
    return ((row, claimed) for row, (claimed, start) in pairs if claimed != base + start)


def _split_last(found: Found) -> tuple[Found, Found]:
    records = found.records
    last = Found(found.end - records.sizes()[-1], records[-1:])
    return Found(found.at, records[:-1]), last
