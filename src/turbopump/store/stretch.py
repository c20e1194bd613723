"""A stretch of a queue that is read in several parts at once: its units are looked up only once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct

from turbopump.message import QueueOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import UNIT_BYTES, ReadLimits
from turbopump.store.consume_queue import UNIT, ConsumeQueue
from turbopump.store.reading import (
    bytes_and_count_max,
    checked_units,
    fitting,
    pieces_of,
    positions_and_sizes,
)

_UNITS = 512
"""Looked up at once, unless a single answer may have more."""

_NEAR_BYTES = 256 * 1024

Part = tuple[Sequence[memoryview], int, int]
"""Messages, as views into the log; the bytes of all of them, and how many they are."""


class Stretch(Struct, frozen=True):
    """Reads for those who want everything; to be used at once, before anything else happens.

    What it reads is what `read_queue` finds. Whatever is not simple it leaves to that.
    """

    log: CommitLog
    min_offset: QueueOffset
    max_offset: QueueOffset
    first: QueueOffset
    data: bytes
    units: int
    """How many of those in ``data`` have the same limits."""
    is_recent: bool
    bytes_max: int
    count_max: int
    file_start: int
    file: memoryview
    """The file of the log that the first message is in."""

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
        # With one more than can be in an answer, that tells where to stop.
        data = queue.units(first, min(left, max(_UNITS, most + 1)))
        if not data:
            return None
        units, position = len(data) // UNIT_BYTES, _position(data, 0)
        recent_from = log.written - limits.recent_bytes
        is_recent = position >= recent_from
        if not is_recent:
            # Positions ascend; where other limits begin, this ends.
            units = bisect_left(range(units), recent_from, key=lambda at: _position(data, at))
        chosen = data[: units * UNIT_BYTES]
        chosen = chosen if is_recent else _near(chosen, most + 1)
        units = checked_units(log, queue, first, chosen, recent_from)
        if units == 0:
            return None
        bytes_max, most = bytes_and_count_max(limits, is_recent=is_recent)
        # Finding a file costs more than cutting messages out of it; nearly all are in the same one.
        start, end, file = log.window(position) or (0, 0, memoryview(b""))
        return cls(
            log=log,
            min_offset=queue.min_offset,
            max_offset=queue.max_offset,
            first=first,
            data=data,
            units=units,
            is_recent=is_recent,
            bytes_max=bytes_max,
            count_max=most,
            file_start=start,
            file=file[: end - start],
        )

    def part(self, offset: int, count_max: int) -> Part | None:
        """Return the messages from an offset on that fit into one answer.

        None if not all of them can be in this stretch.
        """
        at, count = offset - self.first, min(count_max, self.count_max)
        # More recent messages may be added where the limits of older ones are reached already.
        is_stopped = self.is_recent or count == count_max
        if at < 0 or count < 1 or at + count + (not is_stopped) > self.units:
            return None
        units = positions_and_sizes(self.data, at, count)
        units, sizes, size = fitting(units, self.bytes_max, count)
        count = len(sizes)
        begin = units[0] - self.file_start
        if units[-2] + units[-1] - units[0] == size and begin + size <= len(self.file):
            # Without a gap in all, there is none between two.
            return (self.file[begin : begin + size],), size, count
        pieces = pieces_of(self.log, units, sizes, size)
        return None if pieces is None else (pieces, size, count)


def _near(data: bytes, count_min: int) -> bytes:
    """Return the units of old messages that lie close together: comparing others reads the disk."""
    last = _position(data, 0) + _NEAR_BYTES
    count = bisect_left(range(len(data) // UNIT_BYTES), last, key=lambda at: _position(data, at))
    return data[: max(count, count_min) * UNIT_BYTES]


def _position(data: bytes, number: int) -> int:
    position: int = UNIT.unpack_from(data, number * UNIT_BYTES)[0]
    return position
