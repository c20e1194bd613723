"""Distinguishes records from bodies that contain the bytes of one.

Clients name messages by their positions in the log, and anybody can send a body that looks like a
record at its own position. Only where a record begins is there a message.
"""

from __future__ import annotations

from collections.abc import Iterator

from turbopump.core import RecordEntry
from turbopump.message import PhysicalOffset
from turbopump.store.cold_reads import ColdReads
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import ReadLimits
from turbopump.store.consume_queue import ConsumeQueue
from turbopump.store.log_scan import scan
from turbopump.store.outcomes import Cold
from turbopump.store.unit_check import unit_matches

SLICE_BYTES = 1024 * 1024
"""Bytes of the log that are searched before others get their turn."""


def begins_record(
    log: CommitLog,
    queue: ConsumeQueue | None,
    entry: RecordEntry,
    cold_reads: ColdReads,
    limits: ReadLimits,
) -> Iterator[bool | Cold | None]:
    """Find out whether what looks like a record of a queue is one.

    Yields None before each slice of a search, or what to fetch before it, and finally the result.
    Mostly the queue has a unit for it, so that there is no search. Without one, as in deleted
    topics, the log is searched from the last known record on.
    """
    position, known = entry.physical_offset, None
    if queue is not None:
        unit = queue.unit(entry.queue_offset)
        if unit is not None and unit[:2] == (position, entry.size):
            yield True
            return
        # By position: if gaps were closed, records have other offsets than their units.
        offset = queue.last_before(PhysicalOffset(position + 1))
        known = queue.unit(offset)
        if known is not None:
            yield from cold_reads.record(known[0], known[1], limits)
        if known is not None and not unit_matches(log, queue, offset, known[0], known[1]):
            known = None
    file_start = position - position % log.segment_bytes
    at = PhysicalOffset(file_start if known is None else max(file_start, known[0]))
    while at < position:
        yield cold_reads.raw(at, SLICE_BYTES, limits)
        following = _following(log, at, position)
        if following is None:
            yield False
            return
        at = following
    yield at == position


def _following(
    log: CommitLog, at: PhysicalOffset, position: PhysicalOffset
) -> PhysicalOffset | None:
    """Return where a record begins, some records later but not after a position if possible.

    None if the log was deleted meanwhile, or is damaged.
    """
    if log.start_at(at) is None:
        return None
    end = PhysicalOffset(min(position, at + SLICE_BYTES))
    *_, last = scan(log, at, check_crc=False, end=end)
    assert isinstance(last, int), "a scan ends with a position"
    if last > at:
        return PhysicalOffset(last)
    # It is larger than a slice, or the position lies within it.
    large = log.entry_at(at)
    return None if large is None else PhysicalOffset(at + large.size)
