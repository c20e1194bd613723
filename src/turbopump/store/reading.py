"""Reads a queue: from an offset to messages, or to the reason why there are none."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, compress
from operator import add, ne
from typing import cast

import numpy as np

from turbopump.message import QueueOffset
from turbopump.store.cold_reads import ColdReads
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import UNIT_BYTES, ReadLimits
from turbopump.store.consume_queue import UNIT, ConsumeQueue, as_units
from turbopump.store.entry_run import is_topic_name
from turbopump.store.outcomes import (
    EVERYTHING,
    UNIT_DTYPE,
    Cold,
    Filter,
    Found,
    OffsetTooLarge,
    OffsetTooSmall,
    QueueEmpty,
    QueueUnknown,
    ReadOutcome,
    UnitsMissing,
    UpToDate,
)
from turbopump.store.unit_check import matching_units
from turbopump.store.unit_repair import UnitRepair
from turbopump.store.unit_scan import Scan, has_code

_FEW_UNITS = 128


def read_queue(
    log: CommitLog,
    queue: ConsumeQueue,
    offset: QueueOffset,
    count_max: int,
    limits: ReadLimits,
    wanted: Filter,
    repair: UnitRepair,
    cold_reads: ColdReads | None = None,
) -> ReadOutcome | Cold:
    """Answer a read of a queue that exists.

    With ``cold_reads``, nothing of the log is read that is not in memory: that is fetched first.
    """
    low, high = queue.min_offset, queue.max_offset
    if not low <= offset < high:
        return _outside(offset, low, high)
    is_everything = wanted is EVERYTHING or wanted == EVERYTHING
    few = _units_of_answer(count_max, limits)
    data = queue.units(offset, few if is_everything else max(limits.scan_units_max, count_max))
    if not data:
        per_file = queue.units_per_segment
        following = QueueOffset((offset + per_file) // per_file * per_file)
        return UnitsMissing(next_offset=following, min_offset=low, max_offset=high)
    recent_from, ahead = log.written - limits.recent_bytes, None
    if cold_reads is not None and not cold_reads.is_warm(UNIT.unpack_from(data)[0], limits):
        count = len(data) // UNIT_BYTES
        is_checking = (
            is_everything
            and UNIT.unpack_from(data)[0] >= recent_from
            and not queue.is_checked(offset, offset + count)
        )
        ahead = _ahead_of(queue, offset, data) if is_checking else data
        bytes_max = max(limits.memory_bytes_max, limits.disk_bytes_max)
        prepared = cold_reads.prepare(
            queue, offset, data, ahead, bytes_max, None if is_everything else wanted
        )
        if isinstance(prepared, Cold):
            return prepared
        data, ahead = prepared
    if is_everything:
        good = checked_units(log, queue, offset, data, recent_from, ahead)
        if good < len(data) // UNIT_BYTES:
            # The next read handles the rest, which begins with damage.
            data = data[: max(1, good) * UNIT_BYTES]
        if good:
            found = _run_of_all(log, queue, data, offset, count_max, limits)
            if found is not None:
                return found
    else:
        found = _run_of_tagged(log, queue, data, offset, count_max, limits, wanted, ahead)
        if found is not None:
            return found
    scan = Scan(log, queue, offset, count_max, limits, wanted, repair)
    return scan.run(data)


def _outside(offset: QueueOffset, low: QueueOffset, high: QueueOffset) -> ReadOutcome:
    """Answer a read where the queue has no messages (any more, or yet)."""
    if high == 0:
        return QueueEmpty(next_offset=QueueOffset(0), min_offset=low, max_offset=high)
    if offset < low:
        return OffsetTooSmall(next_offset=low, min_offset=low, max_offset=high)
    if offset == high:
        return UpToDate(next_offset=offset, min_offset=low, max_offset=high)
    return OffsetTooLarge(next_offset=high, min_offset=low, max_offset=high)


def checked_units(
    log: CommitLog,
    queue: ConsumeQueue,
    offset: QueueOffset,
    data: bytes,
    recent_from: int,
    ahead: bytes | None = None,
) -> int:
    """Return how many of the units from an offset on match their records.

    Messages recent enough to be in memory are compared once, and not at all if this process has
    stored them; together with the following ones, unless ``ahead`` says with which. Older ones are
    read from disk, and compared, at every read.
    """
    count = len(data) // UNIT_BYTES
    if UNIT.unpack_from(data)[0] < recent_from:
        return matching_units(log, queue, offset, data)
    if queue.is_checked(offset, offset + count):
        return count
    good = matching_units(log, queue, offset, ahead or _ahead_of(queue, offset, data))
    queue.note_checked(offset, offset + good)
    return min(count, good)


def _ahead_of(queue: ConsumeQueue, offset: QueueOffset, data: bytes) -> bytes:
    """Return units with the following ones, as far as these are in memory."""
    ahead = queue.read_ahead_from(offset)
    return ahead if len(ahead) > len(data) else data


def _units_of_answer(count_max: int, limits: ReadLimits) -> int:
    """Return how many units to examine if every one yields a message.

    One more than can be returned shows where to stop.
    """
    return min(max(1, count_max), max(limits.memory_count_max, limits.disk_count_max)) + 1


def _run_of_all(
    log: CommitLog,
    queue: ConsumeQueue,
    data: bytes,
    offset: QueueOffset,
    count_max: int,
    limits: ReadLimits,
) -> Found | None:
    """Collect messages until the limits are reached, all being wanted; None if that is not simple.

    Does what `Scan` does at a tenth of the cost: most pulls want everything.
    """
    units = positions_and_sizes(data, 0, len(data) // UNIT_BYTES)
    recent_from = log.written - limits.recent_bytes
    first, last = units[0], units[-2]
    is_recent = first >= recent_from
    if is_recent != (last >= recent_from):
        return None
    if is_recent:
        bytes_max, most = limits.memory_bytes_max, limits.memory_count_max
    else:
        bytes_max, most = limits.disk_bytes_max, limits.disk_count_max
    units, sizes, size = fitting(units, bytes_max, min(most, count_max))
    pieces = pieces_of(log, units, sizes, size)
    if pieces is None:
        return None
    following = QueueOffset(offset + len(sizes))
    return Found(
        pieces=pieces,
        sizes=sizes,
        queue_offsets=cast(Sequence[QueueOffset], range(offset, following)),
        size=size,
        suggest_slave=not is_recent,
        next_offset=following,
        min_offset=queue.min_offset,
        max_offset=queue.max_offset,
    )


def _run_of_tagged(
    log: CommitLog,
    queue: ConsumeQueue,
    data: bytes,
    offset: QueueOffset,
    count_max: int,
    limits: ReadLimits,
    wanted: Filter,
    ahead: bytes | None,
) -> Found | None:
    """Do the same if all messages of an answer have a wanted tag, as in topics with few tags."""
    if wanted.tags_codes is None or wanted.units is not None or wanted.properties is not None:
        return None
    data = data[: _units_of_answer(count_max, limits) * UNIT_BYTES]
    ahead = None if ahead is None else data
    if not has_code(as_units(data), wanted.tags_codes).all():
        return None
    good = checked_units(log, queue, offset, data, log.written - limits.recent_bytes, ahead)
    if good < len(data) // UNIT_BYTES:
        return None
    return _run_of_all(log, queue, data, offset, count_max, limits)


def fitting(
    units: Sequence[int], bytes_max: int, count_max: int
) -> tuple[Sequence[int], Sequence[int], int]:
    """Return the first units that fit into an answer, at least one; their sizes and bytes."""
    sizes = units[1::2]
    size = sum(sizes)
    if size > bytes_max:
        count_max = min(count_max, bisect_right(list(accumulate(sizes)), bytes_max))
    count = max(1, count_max)
    if len(sizes) > count:
        units, sizes = units[: 2 * count], sizes[:count]
        size = sum(sizes)
    return units, sizes, size


def positions_and_sizes(data: bytes, first: int, count: int) -> Sequence[int]:
    """Return position and size of consecutive units."""
    if count <= _FEW_UNITS:
        return _few_units(count).unpack_from(data, first * UNIT_BYTES)
    # As fast, and nothing is cached for each number of units requested.
    units = np.frombuffer(data, UNIT_DTYPE, count, first * UNIT_BYTES)
    both = np.empty((count, 2), np.int64)
    both[:, 0], both[:, 1] = units["physical_offset"], units["size"]
    found: list[int] = both.ravel().tolist()
    return found


@lru_cache(maxsize=_FEW_UNITS + 1)
def _few_units(count: int) -> struct.Struct:
    """Return the format of ``count`` units without their tag codes."""
    return struct.Struct(">" + "qi8x" * count)


def pieces_of(
    log: CommitLog, units: Sequence[int], sizes: Sequence[int], size: int
) -> list[memoryview] | None:
    """Slice messages from the log, contiguous ones in one piece; None if one is not available.

    ``units`` has position and size of each message.
    """
    first = units[0]
    if units[-2] + units[-1] - first == size:
        # Positions ascend: if the total has no gap, there is none between two.
        piece = log.view(first, size)
        return None if piece is None else [piece]
    positions = units[::2]
    ends = list(map(add, positions, sizes))
    behind = list(compress(range(1, len(ends)), map(ne, ends, positions[1:])))
    begins = [positions[number] for number in (0, *behind)]
    stops = [*(ends[number - 1] for number in behind), ends[-1]]
    window = log.window(begins[0])
    if window is not None and stops[-1] <= window[1]:
        # All in one file, as nearly always: finding it costs more than slicing a message.
        start, _, data = window
        pieces = [
            data[begin - start : stop - start] for begin, stop in zip(begins, stops, strict=True)
        ]
        # An answer must have as many bytes as it announces, whatever the units say.
        return pieces if sum(map(len, pieces)) == sum(sizes) else None
    pieces = []
    for begin, stop in zip(begins, stops, strict=True):
        piece = log.view(begin, stop - begin)
        if piece is None:
            return None
        pieces.append(piece)
    return pieces


def unknown_queue(topic: str, queue_id: int) -> ReadOutcome:
    """Return the outcome of reading a queue that has no messages, or cannot have any."""
    zero = QueueOffset(0)
    try:
        possible = queue_id >= 0 and is_topic_name(topic.encode())
    except UnicodeEncodeError:
        possible = False
    kind = QueueEmpty if possible else QueueUnknown
    return kind(next_offset=zero, min_offset=zero, max_offset=zero)
