"""Compares units of a queue with the records they point to."""

from __future__ import annotations

from collections.abc import Sequence

from turbopump.core import UnitLimits, take_units, unit_times
from turbopump.store.commit_log import CommitLog
from turbopump.store.consume_queue import UNIT, ConsumeQueue

_UNLIMITED = UnitLimits(0, 1 << 62, 1 << 62, 1 << 62, 1 << 62)


def unit_matches(
    log: CommitLog, queue: ConsumeQueue, offset: int, position: int, size: int
) -> bool:
    """Whether the record at a position is the message of a queue at an offset."""
    view = log.view(position, size) if size > 0 else None
    if view is None:
        return False
    unit, topic = UNIT.pack(position, size, 0), queue.stored_topic
    found = take_units(
        unit,
        0,
        view,
        position,
        topic,
        queue.queue_id,
        offset,
        _UNLIMITED,
        is_shifted=queue.is_shifted,
    )
    return not found.is_mismatch


def store_timestamps_at(
    log: CommitLog, topic: bytes, queue_ids: Sequence[int], offsets: Sequence[int], units: bytes
) -> Sequence[int]:
    """Return when messages of a topic were stored, -1 where a record has to be read alone.

    It reads those in the file of the last one. ``topic`` has a length prefix.
    """
    position, _, _ = UNIT.unpack_from(units, len(units) - UNIT.size)
    window = log.window(position)
    if window is None:
        return [-1] * len(offsets)
    start, end, view = window
    return unit_times(units, view[: end - start], start, topic, queue_ids, offsets)
