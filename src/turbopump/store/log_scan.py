"""Walks the log's records: from a position to the first bytes that are none."""

from __future__ import annotations

from collections.abc import Iterator

from turbopump.message import PhysicalOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.entry_run import EntryRun, find_run, is_topic_name
from turbopump.wire.record import BLANK_BYTES, MAGIC, RecordEntry, decode_entry, encode_blank

UNWRITTEN = b"\0"
_MAGIC_BYTES = MAGIC.to_bytes(4, "big")
_MAGIC_AT = 4

_PIECE_BYTES = 16 * 1024 * 1024
_PIECE_BYTES_MIN = 32 * 1024
"""Bytes of the log that are read by column in one step; less is read record by record."""

_ALONE_MAX = 4096
"""Most records that are read one by one before a run is tried again."""


def scan(
    log: CommitLog, start: PhysicalOffset, *, check_crc: bool, end: PhysicalOffset
) -> Iterator[RecordEntry | PhysicalOffset]:
    """Walk the records up to an end one by one, as `scan_runs` does."""
    for found in scan_runs(log, start, check_crc=check_crc, end=end):
        if isinstance(found, EntryRun):
            yield from found.entries()
        else:
            yield found


def scan_runs(
    log: CommitLog,
    start: PhysicalOffset,
    *,
    check_crc: bool,
    end: PhysicalOffset | None = None,
    synced_to: PhysicalOffset | None = None,
) -> Iterator[EntryRun | RecordEntry | PhysicalOffset]:
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
        base, at, runs = position, 0, _Runs(view, position, check_crc, is_open=end is None)
        # Not beyond what was written: to read a hole through the map takes space on a tmpfs, and
        # kills the process where there is none.
        runs_end = min(len(view), limit - base, log.data_end(base) - base)
        while base + at < limit:
            run = runs.next(at, runs_end)
            if run is not None:
                yield run
                at = run.end - base
                continue
            entry = good_entry(view, at, base, check_crc)
            if entry is None or base + at + entry.size > limit:
                break
            if end is None and may_be_torn(view, at, base, entry, synced_to):
                break
            yield entry
            at += entry.size
        position = base + at
        if at < len(view) and not is_blank(view, at):
            break
        position = base + len(view)
        if position >= limit and end is None:
            # The last file is full and ends with its filler.
            break
    yield PhysicalOffset(min(position, limit))


class _Runs:
    """Finds runs in one file, in pieces that grow while all of their records are ordinary."""

    def __init__(self, view: memoryview, base: int, check_crc: bool, *, is_open: bool) -> None:
        self._view = view
        self._base = base
        self._check_crc = check_crc
        self._is_open = is_open
        """Whether the scan searches for the end of the log: a record with zeros may be torn."""
        self._piece_bytes = _PIECE_BYTES
        self._alone = 0
        self._alone_next = 1

    def next(self, at: int, end: int) -> EntryRun | None:
        """Return the run that begins at a place; None to read its record individually."""
        if self._alone:
            self._alone -= 1
            return None
        if end - at < _PIECE_BYTES_MIN:
            return None
        size = min(self._piece_bytes, end - at)
        run = find_run(
            self._view,
            at,
            at + size,
            self._base,
            check_crc=self._check_crc,
            stop_at_zero=self._is_open,
        )
        if run is None:
            # Unusual records mostly come together: try ever more rarely, with smaller pieces.
            self._alone, self._alone_next = self._alone_next, min(2 * self._alone_next, _ALONE_MAX)
            self._piece_bytes = _PIECE_BYTES_MIN
            return None
        self._alone_next = 1
        found_bytes = run.end - self._base - at
        self._piece_bytes = min(max(2 * found_bytes, _PIECE_BYTES_MIN), _PIECE_BYTES)
        return run


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
    entry = good_entry(view, at, start, False)
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
        if good_entry(view, record_at, start, False) is not None:
            return record_at
        found = data.find(_MAGIC_BYTES, found + 1)
    # The magic number may lie across the end: search the last bytes again next time.
    return max(at + 1, end - _MAGIC_AT - len(_MAGIC_BYTES) + 1)


def is_blank(view: memoryview, at: int) -> bool:
    """Whether the filler that ends a file begins here."""
    return len(view) - at >= BLANK_BYTES and view[at : at + BLANK_BYTES] == encode_blank(
        len(view) - at
    )


def good_entry(view: memoryview, at: int, base: int, check_crc: bool) -> RecordEntry | None:
    entry = decode_entry(view, at, check_crc=check_crc)
    if entry is None or entry.physical_offset != base + at or entry.queue_id < 0:
        return None
    return entry if is_topic_name(entry.topic) else None


def may_be_torn(
    view: memoryview, at: int, base: int, entry: RecordEntry, synced_to: int | None
) -> bool:
    """Whether pages of a record may never have reached the disk.

    The checksum covers the body only. Missing pages read as zeros, which our properties never
    contain. Those of others may: followed by an intact record or filler, a record counts as
    written.
    """
    if UNWRITTEN not in entry.properties:
        return False
    if synced_to is not None and base + at >= synced_to:
        return True
    behind = at + entry.size
    return not is_blank(view, behind) and good_entry(view, behind, base, False) is None
