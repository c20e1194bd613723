"""Brings what a reader needs into memory before the owner's thread touches it.

A page of a mapped file that is not in memory stops the whole thread until the disk has read it.
What was written last is in memory; for the rest the system is asked, and workers read what is
missing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby

import numpy as np

from turbopump.machine import Machine
from turbopump.machine.files import closing
from turbopump.message import QueueOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import UNIT_BYTES, ReadLimits
from turbopump.store.consume_queue import UNIT, ConsumeQueue, as_units
from turbopump.store.outcomes import EVERYTHING, Cold, FilePart, Filter, Ints, Units
from turbopump.wire.record import FIXED_BYTES, MAGIC

_WORKERS = 4
"""Slow reads of different readers overlap."""
_AHEAD_BYTES = 1024 * 1024
"""What one job reads at least for consecutive messages: the next ones are needed soon."""
_GAP_BYTES = 64 * 1024
"""Reading across a gap this small takes less than another access to the disk."""
_RANGES_MAX = 256
"""Separate parts of the log that one read may need: asking for each takes about 1 µs."""
_UNITS_AHEAD_BYTES = 64 * 1024
_RECORD_BYTES = 64 * 1024
"""What is read first for a single record: mostly all of it, and its neighbors on both sides, which
searches by time need next."""
_END_BYTES = 40 * 1024
"""Enough for what follows a record's body: topic and properties."""
_RECORD_HEAD = struct.Struct(">iI")
_WRITTEN_LAST_BYTES = 64 * 1024 * 1024
"""How much written last is taken to be in memory, on any machine."""


class ColdReads:
    """Reports what is not in memory, and has workers read it."""

    def __init__(self, machine: Machine, log: CommitLog) -> None:
        self._files = machine.files
        self._log = log
        self._workers = [machine.background.worker("store-reader") for _ in range(_WORKERS)]
        self._submitted = 0
        self._is_closing = False
        self.stored_from = 0
        """Position from which on this process has written the log."""

    def close(self) -> None:
        """Finish the reads in progress, and skip those that have not begun."""
        self._is_closing = True
        for worker in self._workers:
            worker.close()

    def fetch(self, cold: Cold) -> Future[None]:
        """Read parts of files into memory; fails with the disk's error."""
        self._submitted += 1
        worker = self._workers[self._submitted % _WORKERS]
        return worker.submit(partial(self._read_all, cold.parts))

    def _read_all(self, parts: Sequence[FilePart]) -> None:
        """Read parts of files into memory; on a worker."""
        for path, own in groupby(parts, lambda part: part.path):
            if self._is_closing:
                return
            try:
                fd = self._files.open_to_read(path)
            except FileNotFoundError:
                # Deleted meanwhile, as expired files are: the reader finds out.
                continue
            with closing(self._files, fd):
                for part in own:
                    self._files.fetch(fd, part.at, part.size)

    def is_warm(self, position: int, limits: ReadLimits) -> bool:
        """Whether the log is certainly in memory from a position on."""
        kept = min(_WRITTEN_LAST_BYTES, limits.recent_bytes)
        return position >= max(self.stored_from, self._log.written - kept)

    def raw(self, position: int, size: int, limits: ReadLimits) -> Cold | None:
        """Return what to fetch before reading bytes of the log; None if they are in memory."""
        log = self._log
        if self.is_warm(position, limits) or log.is_in_memory(position, position + size):
            return None
        return Cold(tuple(self._parts(position, position + max(size, _AHEAD_BYTES))))

    def record(self, position: int, size_max: int, limits: ReadLimits) -> Iterator[Cold]:
        """Yield what to fetch before a record is read, if there is one: its beginning, then all."""
        log, start = self._log, self._log.start_at(position)
        if start is None or self.is_warm(position, limits):
            return
        head_end = position + _RECORD_HEAD.size
        if not log.is_in_memory(position, head_end):
            begin = position - position % _RECORD_BYTES
            end = max(begin + _RECORD_BYTES, head_end)
            yield Cold(tuple(self._parts(max(start, begin), end)))
        head = log.view(position, _RECORD_HEAD.size)
        size, magic = (0, 0) if head is None else _RECORD_HEAD.unpack(head)
        if magic != MAGIC or not 0 < size <= size_max:
            return
        if not log.is_in_memory(position, position + size):
            yield Cold(tuple(self._parts(position, position + size)))

    def around_bodies(self, units: Units, limits: ReadLimits) -> Iterator[Cold]:
        """Yield what to fetch before all but the bodies of units' records is read, if anything.

        In parts: while a worker reads one, the other requests that it got have to wait.
        """
        log, parts = self._log, list[FilePart]()
        positions, sizes = units["physical_offset"].astype(np.int64), units["size"]
        # Damaged ones are no reason to read anything.
        considered = (sizes > 0) & (positions >= log.min_offset)
        considered &= positions + sizes <= log.written
        numbers = np.flatnonzero(considered)
        for number in numbers[np.argsort(positions[numbers])].tolist():
            begin = int(positions[number])
            if self.is_warm(begin, limits):
                continue
            end = begin + int(sizes[number])
            ranges = [(begin, end)]
            if end - begin > _RECORD_BYTES:
                ranges = [(begin, begin + FIXED_BYTES), (end - _END_BYTES, end)]
            for missing in ranges:
                if not log.is_in_memory(*missing):
                    parts += self._parts(*missing)
            if len(parts) >= _RANGES_MAX:
                yield Cold(tuple(parts))
                parts = []
        if parts:
            yield Cold(tuple(parts))

    def prepare(
        self,
        queue: ConsumeQueue,
        offset: QueueOffset,
        data: bytes,
        bytes_max: int,
        wanted: Filter,
    ) -> Cold | bytes:
        """Return the units of a queue that may be examined now, or what to fetch first.

        ``data`` has those that an answer may need; it is cut after those whose records are in
        memory.
        """
        bytes_max = max(bytes_max, _AHEAD_BYTES)
        first, last = UNIT.unpack_from(data), UNIT.unpack_from(data, len(data) - UNIT_BYTES)
        end = last[0] + last[1]
        is_short = first[0] <= last[0] and end - first[0] <= bytes_max
        if wanted == EVERYTHING and is_short and self._log.is_in_memory(first[0], end):
            return data
        ranges, count = self._needed(data, bytes_max, wanted)
        missing = [each for each in ranges if not self._log.is_in_memory(*each)]
        if not missing:
            return data[: count * UNIT_BYTES]
        if len(ranges) == 1:
            begin, end = ranges[0]
            missing = [(begin, max(end, begin + _AHEAD_BYTES))]
        parts = [part for each in missing for part in self._parts(*each)]
        return Cold((*parts, *queue.part_from(offset, _UNITS_AHEAD_BYTES)))

    def _needed(
        self, data: bytes, bytes_max: int, wanted: Filter
    ) -> tuple[list[tuple[int, int]], int]:
        """Return the parts of the log that units need, and how many of the units these are for."""
        units = as_units(data)
        begins = units["physical_offset"].astype(np.int64)
        ends = begins + units["size"]
        # Damaged ones are no reason to read anything.
        considered = (begins >= self._log.min_offset) & (ends <= self._log.written)
        considered &= begins < ends
        if wanted.tags_codes is not None:
            # The hash is the lower half of the field; units of delayed messages hold a time there.
            codes = units["tags_code"].astype(np.int64).astype(np.int32)
            considered &= np.isin(codes, np.array(sorted(wanted.tags_codes), np.int64))
        if wanted.units is not None:
            considered &= wanted.units(units)
        numbers = np.flatnonzero(considered)
        if not len(numbers):
            return [], len(units)
        begins, ends = begins[numbers], ends[numbers]
        fitting = max(1, int(np.searchsorted(np.cumsum(ends - begins), bytes_max, "right")))
        ranges, fitting = _ranges(begins[:fitting], ends[:fitting])
        return ranges, int(numbers[fitting]) if fitting < len(numbers) else len(units)

    def _parts(self, begin: int, end: int) -> Iterator[FilePart]:
        """Yield the parts of the log's files between two positions."""
        end = min(end, self._log.written)
        while begin < end and (path := self._log.path_at(begin)) is not None:
            file_end = self._log.next_start(begin)
            at = begin - (file_end - self._log.segment_bytes)
            yield FilePart(path, at, min(end, file_end) - begin)
            begin = file_end


def _ranges(begins: Ints, ends: Ints) -> tuple[list[tuple[int, int]], int]:
    """Join records that are close together; return the ranges, and how many records they cover."""
    splits = np.flatnonzero(np.abs(begins[1:] - ends[:-1]) > _GAP_BYTES) + 1
    count = int(splits[_RANGES_MAX - 1]) if len(splits) >= _RANGES_MAX else len(begins)
    firsts = [0, *splits[: _RANGES_MAX - 1].tolist()]
    lasts = [*(number - 1 for number in firsts[1:]), count - 1]
    return [
        (int(begins[one]), int(ends[other])) for one, other in zip(firsts, lasts, strict=True)
    ], count
