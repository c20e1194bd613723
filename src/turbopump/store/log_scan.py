"""Walks the log's records: from a position to the first bytes that are none."""

from __future__ import annotations

from collections.abc import Iterator

from turbopump.core import RecordEntry, Records, find_records
from turbopump.message import PhysicalOffset
from turbopump.store.commit_log import CommitLog
from turbopump.wire.record import BLANK_BYTES, MAGIC, encode_blank

_UNWRITTEN = b"\0"
_MAGIC_BYTES = MAGIC.to_bytes(4, "big")
_MAGIC_AT = 4

_PIECE_BYTES = 4 * 1024 * 1024
_PIECE_RECORDS = 2048
"""How much of the log is examined in one step."""


def scan(
    log: CommitLog,
    start: PhysicalOffset,
    *,
    check_crc: bool,
    end: PhysicalOffset | None = None,
    synced_to: PhysicalOffset | None = None,
) -> Iterator[Records | PhysicalOffset]:
    """Walk the records from a position on; finally yield the position after the last intact one.

    Stops at ``end``, or at the first bytes that are no record: unwritten, torn, damaged, or
    incomplete at ``end``. Any page of any record after ``synced_to`` may be missing.
    """
    position = int(start)
    limit = log.starts[-1] + log.segment_bytes if log.starts else 0
    if end is not None:
        limit = min(limit, end)
    while position < limit:
        view = log.rest_of_segment(position)
        if not view:
            # Truncated by another process: it cannot be read.
            break
        base, at, file_end = position, 0, min(len(view), limit - position)
        # Not beyond what was written: to read a hole through the map takes space on a tmpfs, and
        # kills the process where there is none.
        data_end = min(file_end, log.data_end(base) - base)
        while at < file_end:
            found = find_records(
                view,
                at,
                min(at + _PIECE_BYTES, data_end),
                base,
                check_crc=check_crc,
                stop_at_zero=end is None,
                count_max=_PIECE_RECORDS,
            )
            if not found:
                # A large one, one with a hole, or one with zeros, which may be torn.
                found = find_records(view, at, file_end, base, check_crc=check_crc, count_max=1)
                if not found or (end is None and may_be_torn(view, base, found[0], synced_to)):
                    break
            yield found
            at = found.end_at
        position = base + at
        if at < len(view) and not is_blank(view, at):
            break
        position = base + len(view)
        if position >= limit and end is None:
            # The last file is full and ends with its filler.
            break
    yield PhysicalOffset(min(position, limit))


def next_record(log: CommitLog, position: int, end: int) -> tuple[RecordEntry | None, int]:
    """Return the record at a position, or None, and where to continue.

    After damage, that is where the next record begins, or the end of the searched range.
    """
    start = log.start_at(position)
    if start is None:
        # A file is missing: continue after it, or after all.
        later = [start for start in log.starts if start > position]
        return None, min(later[0], end) if later else end
    view, at = log.rest_of_segment(start), position - start
    if at >= len(view):
        return None, start + log.segment_bytes
    entry = good_entry(view, at, start, check_crc=False)
    if entry is not None:
        return entry, position + entry.size
    if is_blank(view, at):
        return None, start + log.segment_bytes
    found = next_magic(view, at, min(end - start, len(view)), start)
    return None, start + found


def next_magic(view: memoryview, at: int, end: int, start: int) -> int:
    """Return the next place that may begin a record and names its own position, or the end."""
    data = bytes(view[at:end])
    found = data.find(_MAGIC_BYTES, _MAGIC_AT + 1)
    while found >= 0:
        record_at = at + found - _MAGIC_AT
        if good_entry(view, record_at, start, check_crc=False) is not None:
            return record_at
        found = data.find(_MAGIC_BYTES, found + 1)
    # The magic number may lie across the end: search the last bytes again next time.
    return max(at + 1, end - _MAGIC_AT - len(_MAGIC_BYTES) + 1)


def is_blank(view: memoryview, at: int) -> bool:
    """Whether the filler that ends a file begins here."""
    return len(view) - at >= BLANK_BYTES and view[at : at + BLANK_BYTES] == encode_blank(
        len(view) - at
    )


def good_entry(view: memoryview, at: int, base: int, *, check_crc: bool) -> RecordEntry | None:
    """Return the record at a place in a view whose first byte has a position; None if none is."""
    found = find_records(view, at, len(view), base, check_crc=check_crc, count_max=1)
    return found[0] if found else None


def may_be_torn(view: memoryview, base: int, entry: RecordEntry, synced_to: int | None) -> bool:
    """Whether pages of a record may never have reached the disk.

    The checksum covers the body only. Missing pages read as zeros, which our properties never
    contain. Those of others may: followed by an intact record or filler, a record counts as
    written.
    """
    if _UNWRITTEN not in entry.properties:
        return False
    if synced_to is not None and entry.physical_offset >= synced_to:
        return True
    behind = entry.physical_offset + entry.size - base
    return not is_blank(view, behind) and good_entry(view, behind, base, check_crc=False) is None
