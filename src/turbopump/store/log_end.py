"""Finds where the log ends, at a start: damage is skipped, a torn tail is not.

After the position known to be on disk, the first bytes that are no record are where a crash tore
the log. Before it they are damage: the records after them are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from turbopump.core import Records, find_records
from turbopump.message import PhysicalOffset
from turbopump.store.checkpoint import Checkpoint
from turbopump.store.commit_log import CommitLog
from turbopump.store.log_scan import good_entry, next_magic, scan

_SEARCHED_AT_ONCE = 1024 * 1024
_CHECKPOINT_MARGIN_MS = 3000
"""How far before the checkpoint a replay begins, as clocks are only roughly right."""


class LogEnd:
    """Scans the last part of a log once."""

    def __init__(
        self,
        log: CommitLog,
        checkpoint: Checkpoint,
        queues_end: PhysicalOffset,
        *,
        crashed: bool,
        check_crc: bool = True,
        clean_check_segments: int = 1,
    ) -> None:
        """Prepare to read a log that has files.

        ``queues_end`` is where the last message ends that has a unit in a queue.
        """
        self._log = log
        self._checkpoint = checkpoint
        self._queues_end = queues_end
        self._crashed = crashed
        self._check_crc = check_crc
        self.start = _scan_start(
            log, checkpoint, crashed=crashed, clean_check_segments=clean_check_segments
        )
        self.end = self.start
        self.damaged: list[tuple[PhysicalOffset, PhysicalOffset]] = []
        """Unreadable ranges before the end: first position and the one after the last."""
        self._newest_ms = 0

    def find(self, see: Callable[[Records], None]) -> PhysicalOffset:
        """Visit all records up to the end of the log; return that end."""
        synced_to = (self._checkpoint.log_end or None) if self._crashed else None
        position: PhysicalOffset | None = self.start
        while position is not None:
            for found in scan(self._log, position, check_crc=self._check_crc, synced_to=synced_to):
                if isinstance(found, Records):
                    self._newest_ms = max(self._newest_ms, found.newest_ms)
                    see(found)
                else:
                    self.end = found
            position = behind_damage(self._log, self.end) if self.end < self.vouched else None
            if position is not None:
                self.damaged.append((self.end, position))
                kept = _with_damaged_body(self._log, self.end)
                if kept is not None:
                    # It keeps its place in its queue, even if a crash came before it had a unit.
                    see(kept)
        return self.end

    @property
    def vouched(self) -> PhysicalOffset:
        """The position that the log must reach, whatever a crash has cut off."""
        if self._checkpoint.log_end:
            return self._checkpoint.log_end
        if not self._crashed or self._checkpoint.log_ms > self._newest_ms:
            # Without a position, as in a store of Apache RocketMQ, the queues vouch for the log.
            return max(self._queues_end, PhysicalOffset(0))
        return PhysicalOffset(0)


def records(log: CommitLog, start: PhysicalOffset, end: PhysicalOffset) -> Iterator[Records]:
    """Return all records between two positions, skipping damage."""
    position: PhysicalOffset | None = start
    while position is not None and position < end:
        for found in scan(log, position, check_crc=False, end=end):
            if isinstance(found, Records):
                yield found
            else:
                position = found
        position = behind_damage(log, position) if position < end else None


def behind_damage(log: CommitLog, damaged: PhysicalOffset) -> PhysicalOffset | None:
    """Return where the first record begins after a position that has none; None if there is none.

    Searches the rest of a file, then the starts of later ones. A record of which only the body is
    damaged ends where it says.
    """
    view, at = memoryview(b""), 0
    if damaged < log.starts[-1] + log.segment_bytes:
        view = log.rest_of_segment(damaged)
        body_only = _with_damaged_body(log, damaged)
        if body_only is not None:
            # The record is kept: readers verify the checksum.
            return body_only.end
    while at < len(view):
        # In parts: a file is large, and the next record mostly near.
        at = next_magic(view, at, min(at + _SEARCHED_AT_ONCE, len(view)), damaged)
        if good_entry(view, at, damaged, check_crc=False) is not None:
            return PhysicalOffset(damaged + at)
    later = (start for start in log.starts if start > damaged)
    return next(
        (PhysicalOffset(start) for start in later if log.first_store_timestamp_ms(start)), None
    )


def _with_damaged_body(log: CommitLog, position: PhysicalOffset) -> Records | None:
    """Return the record at a position of which at most the body is damaged."""
    if position >= log.starts[-1] + log.segment_bytes:
        return None
    view = log.rest_of_segment(position)
    return find_records(view, 0, len(view), position, count_max=1) or None


def _scan_start(
    log: CommitLog, checkpoint: Checkpoint, *, crashed: bool, clean_check_segments: int = 1
) -> PhysicalOffset:
    """Return the start of the first file to be read, of a log that has any."""
    starts = log.starts
    if not crashed:
        last = len(starts) - 1
        while last > 0 and not log.first_store_timestamp_ms(starts[last]):
            last -= 1
        return PhysicalOffset(starts[max(0, last + 1 - clean_check_segments)])
    known = checkpoint.end
    if starts[0] < known <= starts[-1] + log.segment_bytes:
        return PhysicalOffset(max(start for start in starts if start <= known))
    return _scan_start_by_time(log, checkpoint)


def _scan_start_by_time(log: CommitLog, checkpoint: Checkpoint) -> PhysicalOffset:
    """Return where to begin after a crash of a broker that stores no positions."""
    # The store timestamp up to which the log and what follows it are known to be on disk.
    safe_ms = max(0, min(checkpoint.log_ms, checkpoint.queues_ms) - _CHECKPOINT_MARGIN_MS)
    chosen, newest_ms = log.min_offset, 0
    for start in log.starts:
        first_ms = log.first_store_timestamp_ms(start)
        # Where the clock was set back, an early timestamp does not prove that a file is old.
        if not newest_ms <= first_ms <= safe_ms:
            break
        chosen, newest_ms = PhysicalOffset(start), first_ms
    return chosen
