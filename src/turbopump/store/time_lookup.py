"""Finds messages by store timestamp."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.consume_queue import ConsumeQueue
from turbopump.store.unit_check import properties_at
from turbopump.wire.hosts import V4_BYTES, V6_BYTES
from turbopump.wire.sysflag import BORN_HOST_V6

_QUEUE_OFFSET_AND_FLAGS = struct.Struct(">20xq8xi")
_STORE_TIME = struct.Struct(">q")
_STORE_TIME_AT = 56


def marks_at(
    log: CommitLog, asked: Iterable[tuple[ConsumeQueue | None, QueueOffset]]
) -> Iterator[tuple[int, PhysicalOffset, QueueOffset] | None]:
    """Yield when and where messages were stored, and their own offsets.

    None for those that do not exist. One call for many: finding a file of the log costs more than
    reading a message of it.
    """
    start = end = 0
    view = memoryview(b"")
    for queue, offset in asked:
        unit = None if queue is None else queue.unit(offset)
        if queue is None or unit is None:
            yield None
            continue
        position, size, _ = unit
        if not start <= position < end:
            start, end, view = log.window(position) or (0, 0, view)
        at = position - start
        if position + size > end or properties_at(view, at, position, size, queue, offset) is None:
            yield None
            continue
        own_offset, flags = _QUEUE_OFFSET_AND_FLAGS.unpack_from(view, at)
        time_at = at + _STORE_TIME_AT + (V6_BYTES - V4_BYTES if flags & BORN_HOST_V6 else 0)
        yield _STORE_TIME.unpack_from(view, time_at)[0], position, own_offset


def store_timestamp_at(log: CommitLog, queue: ConsumeQueue, offset: QueueOffset) -> int | None:
    """Return the store timestamp of the message at an offset; None if there is none."""
    mark = next(marks_at(log, [(queue, offset)]))
    return None if mark is None else mark[0]


def offset_by_time(log: CommitLog, queue: ConsumeQueue, timestamp_ms: int) -> QueueOffset:
    """Return the offset of the message stored nearest to a timestamp; 0 for an empty queue.

    As in Apache RocketMQ, the search is confined to one file, so that next to a file's end the
    nearest message within that file is found. The file is the first whose last message is not
    older. Apache RocketMQ uses the file's modification time instead, which lags behind what is
    written through a map and is lost when a store is copied: it then skips messages that were asked
    for.
    """
    ranges = queue.file_ranges()
    if not ranges:
        return QueueOffset(0)
    for low, high in ranges:
        last = _first_with_time(log, queue, range(high - 1, low - 1, -1))
        if last is not None and last[0] >= timestamp_ms:
            return nearest_between(log, queue, low, high, timestamp_ms)
    return nearest_between(log, queue, *ranges[-1], timestamp_ms)


def nearest_between(
    log: CommitLog, queue: ConsumeQueue, low: QueueOffset, high: QueueOffset, timestamp_ms: int
) -> QueueOffset:
    """Search a range of offsets; between two messages the nearer counts, the earlier on a tie."""
    earlier: tuple[int, QueueOffset] | None = None
    later: tuple[int, QueueOffset] | None = None
    while low < high:
        middle = QueueOffset((low + high - 1) // 2)
        found = _first_with_time(log, queue, range(middle, high))
        if found is None:
            high = middle
        elif found[0] == timestamp_ms:
            return found[1]
        elif found[0] > timestamp_ms:
            high, later = middle, found
        else:
            low, earlier = QueueOffset(found[1] + 1), found
    if earlier is None:
        return later[1] if later is not None else QueueOffset(0)
    if later is None:
        return earlier[1]
    nearer_later = timestamp_ms - earlier[0] > later[0] - timestamp_ms
    return later[1] if nearer_later else earlier[1]


def _first_with_time(
    log: CommitLog, queue: ConsumeQueue, offsets: range
) -> tuple[int, QueueOffset] | None:
    """Return store timestamp and offset of the first message that is not lost."""
    for offset in offsets:
        time_ms = store_timestamp_at(log, queue, QueueOffset(offset))
        if time_ms is not None:
            return time_ms, QueueOffset(offset)
    return None
