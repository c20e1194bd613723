"""Finds messages by store timestamp."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import UNIT_BYTES
from turbopump.store.consume_queue import ConsumeQueue, as_units
from turbopump.store.unit_check import properties_at, store_timestamps_at
from turbopump.wire.hosts import V4_BYTES, V6_BYTES
from turbopump.wire.sysflag import BORN_HOST_V6

_QUEUE_OFFSET_AND_FLAGS = struct.Struct(">20xq8xi")
_STORE_TIME = struct.Struct(">q")
_STORE_TIME_AT = 56
_NO_UNIT = bytes(UNIT_BYTES)


def marks_at(
    log: CommitLog, queues: Sequence[ConsumeQueue | None], offsets: Sequence[QueueOffset]
) -> list[tuple[int, PhysicalOffset] | None]:
    """Return when and where messages of one topic were stored; None for those that do not exist."""
    topic = next((queue.stored_topic for queue in queues if queue is not None), None)
    if topic is None:
        return [None] * len(offsets)
    units = [
        _NO_UNIT if queue is None else queue.unit_bytes(offset) or _NO_UNIT
        for queue, offset in zip(queues, offsets, strict=True)
    ]
    queue_ids = np.array([-1 if queue is None else queue.queue_id for queue in queues])
    places = as_units(b"".join(units))
    times = store_timestamps_at(log, topic, queue_ids, np.array(offsets), places)
    marks = zip(times.tolist(), places["physical_offset"].tolist(), strict=True)
    return [
        mark if mark[0] >= 0 else _mark_at(log, queue, offset)
        for mark, queue, offset in zip(marks, queues, offsets, strict=True)
    ]


def _mark_at(
    log: CommitLog, queue: ConsumeQueue | None, offset: QueueOffset
) -> tuple[int, PhysicalOffset] | None:
    found = None if queue is None else _stored_at(log, queue, offset)
    # Where units were missing, a message's own offset differs from that of its unit.
    return found[:2] if found is not None and found[2] == offset else None


def _stored_at(
    log: CommitLog, queue: ConsumeQueue, offset: QueueOffset
) -> tuple[int, PhysicalOffset, QueueOffset] | None:
    """Return when and where a message was stored, and its own offset; None if it does not exist."""
    unit = queue.unit(offset)
    window = None if unit is None else log.window(unit[0])
    if unit is None or window is None:
        return None
    (position, size, _), (start, end, view) = unit, window
    at = position - start
    if position + size > end or properties_at(view, at, position, size, queue, offset) is None:
        return None
    own_offset, flags = _QUEUE_OFFSET_AND_FLAGS.unpack_from(view, at)
    time_at = at + _STORE_TIME_AT + (V6_BYTES - V4_BYTES if flags & BORN_HOST_V6 else 0)
    return _STORE_TIME.unpack_from(view, time_at)[0], position, own_offset


def store_timestamp_at(log: CommitLog, queue: ConsumeQueue, offset: QueueOffset) -> int | None:
    """Return the store timestamp of the message at an offset; None if there is none."""
    found = _stored_at(log, queue, offset)
    return None if found is None else found[0]


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
