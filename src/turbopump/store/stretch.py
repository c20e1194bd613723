"""A stretch of a queue that is read in several parts at once: its units are looked up only once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from turbopump.message import QueueOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import UNIT_BYTES, ReadLimits
from turbopump.store.consume_queue import UNIT, ConsumeQueue
from turbopump.store.reading import pieces_of, positions_and_sizes

_UNITS = 512
"""Looked up at once, unless a single answer may have more."""

Part = tuple[Sequence[memoryview], int, int]
"""Messages, as views into the log; the bytes of all of them, and how many they are."""


class Stretch:
    """Reads for those who want everything; to be used at once, before anything else happens.

    What it reads is what `read_queue` finds. Whatever is not simple it leaves to that.
    """

    __slots__ = (
        "_bytes_max", "_count_max", "_data", "_file", "_first", "_log", "_start", "_units",
        "max_offset", "min_offset",
    )  # fmt: skip

    def __init__(
        self,
        log: CommitLog,
        queue: ConsumeQueue,
        first: QueueOffset,
        units: bytes,
        limits: ReadLimits,
    ) -> None:
        self.min_offset = queue.min_offset
        self.max_offset = queue.max_offset
        self._log = log
        self._first = first
        self._data = units
        self._units = len(units) // UNIT_BYTES
        # Finding a file costs more than cutting messages out of it; nearly all are in the same one.
        self._start, end, file = log.window(self._position(0)) or (0, 0, memoryview(b""))
        self._file = file[: end - self._start]
        recent_from = log.written - limits.recent_bytes
        if self._position(0) >= recent_from:
            self._bytes_max, self._count_max = limits.memory_bytes_max, limits.memory_count_max
        else:
            self._bytes_max, self._count_max = limits.disk_bytes_max, limits.disk_count_max
            # Positions ascend; where other limits begin, this ends.
            self._units = bisect_left(range(self._units), recent_from, key=self._position)

    @classmethod
    def at(
        cls,
        log: CommitLog,
        queue: ConsumeQueue,
        first: QueueOffset,
        count_max: int,
        limits: ReadLimits,
    ) -> Stretch | None:
        """Look up what follows an offset in one file of a queue, None if that is nothing."""
        left = queue.max_offset - first
        if first < queue.min_offset or left <= 0:
            return None
        most = min(count_max, max(limits.memory_count_max, limits.disk_count_max))
        units = queue.units(first, min(left, max(_UNITS, most)))
        return cls(log, queue, first, units, limits) if units else None

    def part(self, offset: int, count_max: int) -> Part | None:
        """Return the messages from an offset on that fit into one answer.

        None if not all of them can be in this stretch.
        """
        at, count = offset - self._first, min(count_max, self._count_max)
        if at < 0 or count < 1 or at + count > self._units:
            return None
        units = positions_and_sizes(count).unpack_from(self._data, at * UNIT_BYTES)
        sizes = units[1::2]
        size = sum(sizes)
        if size > self._bytes_max:
            count = max(1, bisect_right(list(accumulate(sizes)), self._bytes_max))
            units, sizes = units[: 2 * count], sizes[:count]
            size = sum(sizes)
        begin = units[0] - self._start
        if units[-2] + units[-1] - units[0] == size and begin + size <= len(self._file):
            # Without a gap in all, there is none between two.
            return (self._file[begin : begin + size],), size, count
        pieces = pieces_of(self._log, units, sizes, size)
        return None if pieces is None else (pieces, size, count)

    def _position(self, number: int) -> int:
        position: int = UNIT.unpack_from(self._data, number * UNIT_BYTES)[0]
        return position
