"""Where a start begins to read the log."""

from __future__ import annotations

from turbopump.message import PhysicalOffset
from turbopump.store.checkpoint import Checkpoint
from turbopump.store.commit_log import CommitLog

_CHECKPOINT_MARGIN_MS = 3000
"""How far before the checkpoint a replay begins, as clocks are only roughly right."""


def scan_start(
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
