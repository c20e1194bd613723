"""Recovery: what a store does before it opens, after a clean stop and after a crash.

Every step is idempotent: killed halfway, the next start reaches the same result.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass

from msgspec import Struct

from turbopump.core import Records
from turbopump.errors import StoreDamaged
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.checkpoint import Checkpoint
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import StoreConfig
from turbopump.store.damage import DamageLog
from turbopump.store.deferred_steps import DeferredSteps
from turbopump.store.dispatch import Dispatcher
from turbopump.store.key_index import KeyIndex
from turbopump.store.log_end import LogEnd, records
from turbopump.store.losses import find_losses
from turbopump.store.queue_rebuild import QueueRebuild
from turbopump.store.queues import Queues
from turbopump.store.unit_repair import UnitRepair
from turbopump.store.write_behind import WriteBehind
from turbopump.wire.record import FIXED_BYTES

_log = logging.getLogger(__name__)

_REINDEXED_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of the log that a start reads to rebuild a damaged index file."""


class Recovered(Struct, frozen=True):
    """What recovery found and did."""

    crashed: bool
    end: PhysicalOffset
    """Where the log ends now."""
    cut_bytes: int
    """Torn or damaged bytes, and those after them, that were cut off; without empty space."""
    replayed: int
    """Messages entered again."""


@dataclass(eq=False)
class Recovery:
    """Makes log, queues and index of one directory agree."""

    config: StoreConfig
    log: CommitLog
    queues: Queues
    index: KeyIndex | None
    dispatcher: Dispatcher
    behind: WriteBehind
    deferred: DeferredSteps
    repair: UnitRepair
    damage: DamageLog
    rebuild: QueueRebuild

    def __post_init__(self) -> None:
        self._removed = self.queues.removed
        self._replay = Replay(self.log, self.queues, self.dispatcher, self.behind, self.deferred)
        self._last_ms = 0

    def run(self, *, crashed: bool) -> Recovered:
        """Recover; afterwards everything in the log can be read, and is on disk.

        On a full disk it can be read too; pending writes are deferred.
        """
        if not self.log.starts:
            self.deferred.attempt(self.rebuild.set_aside)
            self.deferred.attempt(self.rebuild.finish)
            return self._begin_empty(crashed)
        found = LogEnd(
            self.log,
            self.behind.checkpoint,
            self.queues.physical_end,
            crashed=crashed,
            check_crc=self.config.check_crc_on_recovery,
            clean_check_segments=self.config.clean_check_segments,
        )
        start = found.start
        end, missing_from = self._find_end(found, crashed)
        self._check_complete(found)
        self.deferred.attempt(self.rebuild.set_aside)
        is_end_known = self.behind.checkpoint.log_end == end
        self.deferred.attempt(lambda: self.behind.fit(end))
        cut_bytes = self._cut_log(start, end, crashed)
        self._judge_index(end, crashed)
        is_cut = crashed or cut_bytes > 0 or not is_end_known
        taken_from = self._follow_log(start, end, crashed, is_cut)
        self._finish_removals(end)
        if self.rebuild.is_needed:
            missing_from = PhysicalOffset(0)
        elif not crashed:
            # Unless a queue was removed, all of them are complete as far as any reaches.
            reached = max(self.queues.physical_end, PhysicalOffset(0))
            missing_from = min(missing_from, taken_from, reached)
        elif not len(self.queues):
            missing_from = PhysicalOffset(0)
        elif taken_from < end:
            missing_from = start
        missing_from = min(missing_from, self._unindexed_from(end))
        self._replay.run(max(self.log.min_offset, missing_from), end)
        self.rebuild.keep_ends(end)
        for queue in self.queues:
            queue.next_offset = queue.max_offset
            queue.raise_minimum(self.log.min_offset)
        self.queues.entered_to = end
        self.deferred.attempt(lambda: self._make_durable(start, crashed))
        self.deferred.attempt(self.rebuild.finish)
        return Recovered(crashed, end, cut_bytes, self._replay.count)

    def _begin_empty(self, crashed: bool) -> Recovered:
        # Without a log the units are dangling.
        for queue in self.queues:
            self.queues.remove(queue)
        if self.index is not None:
            self.index.clear()
        self.log.begin_at(PhysicalOffset(0), PhysicalOffset(0))
        self.deferred.attempt(lambda: self.behind.fit(PhysicalOffset(0)))
        self.deferred.attempt(lambda: self._removed.fit(PhysicalOffset(0), PhysicalOffset(0)))
        self.deferred.attempt(lambda: self._make_durable(PhysicalOffset(0), crashed))
        return Recovered(crashed, PhysicalOffset(0), 0, 0)

    def _find_end(self, found: LogEnd, crashed: bool) -> tuple[PhysicalOffset, PhysicalOffset]:
        """Return where the log ends, and the first message that is not entered, or the end."""
        index = self.index if crashed else None
        indexed = index.end_offset if index is not None else None
        missing_from: PhysicalOffset | None = None

        def see(found: Records) -> None:
            nonlocal missing_from
            self._last_ms = found.store_timestamp_ms
            if missing_from is None:
                missing_from = self._first_missing(found, indexed)

        end = found.find(see)
        return end, end if missing_from is None else missing_from

    def _check_complete(self, found: LogEnd) -> None:
        """Refuse a log that ends before what is known to be on disk, before any change."""
        log, end, vouched = self.log, found.end, found.vouched
        if end < vouched:
            root = log.directory.parent
            losses = find_losses(log.files, root, log.segment_bytes)
            raise StoreDamaged(str(losses or f"{root} ends at {end}, but {vouched} was on disk"))
        for position, behind in found.damaged:
            message = "%s is damaged from %d to %d: the messages in there are lost"
            _log.error(message, log.directory, position, behind)
        self.damage.log_ranges += len(found.damaged)

    def _first_missing(self, found: Records, indexed: int | None) -> PhysicalOffset | None:
        """Return the first message that its queue or the index lacks."""
        first = found.end if indexed is None else _first_from(found, indexed)
        lacking_queue: tuple[bytes, int] | None = None
        for topic, queue_id, part in found.by_queue():
            queue = self.queues.find(topic.decode(), queue_id)
            missing = part if queue is None else part[part.count_before(queue.physical_end) :]
            if not missing:
                continue
            position = _first_from(missing, self._removed.end_of(topic))
            if position < min(first, missing.end):
                first, lacking_queue = position, (topic, queue_id)
        if lacking_queue is not None:
            # Now the queue is known to exist, though all of its files may be missing.
            self.queues.for_record(*lacking_queue)
        return first if first < found.end else None

    def _finish_removals(self, end: PhysicalOffset) -> None:
        """Delete the queues of removed topics that a kill or another broker left."""
        self.deferred.attempt(lambda: self._removed.fit(self.log.min_offset, end))
        for queue in self.queues:
            last = max(0, queue.last_position - 1)
            if self._removed.covers(queue.topic.encode(), last):
                self.queues.remove(queue)

    def _judge_index(self, end: PhysicalOffset, crashed: bool) -> None:
        """Find damaged index files; re-enter what takes little reading."""
        index = self.index
        if index is None:
            return
        # A power failure may lose the end of the log but not its keys: those are cut off later.
        index_end = max(end, PhysicalOffset(index.end_offset + 1)) if crashed else end
        index.judge(self.log.entry_at, self.log.min_offset, index_end, self.damage)
        if end - max(index.end_offset, self.log.min_offset) <= _REINDEXED_BYTES_MAX:
            index.discard_newest_damaged()

    def _unindexed_from(self, end: PhysicalOffset) -> PhysicalOffset:
        """Return the position to index messages from, if that takes little reading."""
        if self.index is None or not self.damage.index_files:
            return end
        begin = max(PhysicalOffset(self.index.end_offset), self.log.min_offset)
        return begin if end - begin <= _REINDEXED_BYTES_MAX else end

    def _follow_log(
        self, start: PhysicalOffset, end: PhysicalOffset, crashed: bool, is_cut: bool
    ) -> PhysicalOffset:
        """Cut queues and index where the log ends; return where missing entries may begin."""
        taken_from = end
        for queue in self.queues:
            queue_end = queue.physical_end
            replayed_from = start if crashed else None
            if queue.truncate(end if is_cut else None, replayed_from) or crashed:
                self.deferred.attempt(queue.erase_unused)
            self.repair.settle_end(queue, start)
            if queue.physical_end < queue_end:
                taken_from = min(taken_from, max(queue.physical_end, PhysicalOffset(0)))
            queue.raise_minimum(self.log.min_offset)
        index = self.index
        if index is not None and crashed:
            indexed = index.end_offset
            self.deferred.attempt(lambda: index.repair(self.behind.checkpoint, end))
            if index.end_offset < indexed:
                taken_from = min(taken_from, start)
        return taken_from

    def _cut_log(self, start: PhysicalOffset, end: PhysicalOffset, crashed: bool) -> int:
        """Drop what follows the end; return how many bytes that were."""
        log = self.log
        cut_bytes = log.used_bytes_after(end)
        # What was read here may be in memory only: it counts as unflushed until it is synced.
        log.begin_at(end, start)
        if crashed or cut_bytes or log.starts[-1] > end:
            # Also drops a file created in advance: it is re-created when needed.
            self.deferred.attempt(lambda: self._cut_files(end, cut_bytes))
        return cut_bytes

    def _cut_files(self, end: PhysicalOffset, cut_bytes: int) -> None:
        log, kept = self.log, ""
        if any(log.first_store_timestamp_ms(later) for later in log.starts if later > end):
            # More than a torn tail: an operator may want to save its content.
            kept = f", and kept in {log.set_aside(end, f'damaged-{end}')}"
        if cut_bytes:
            message = "%s is torn or damaged at %d: %d bytes are cut off%s"
            _log.error(message, log.directory, end, cut_bytes, kept)
        log.truncate(end)

    def _make_durable(self, start: PhysicalOffset, crashed: bool) -> None:
        self.behind.write_all()
        if crashed:
            self.log.rewrite_unflushed()
            self.behind.rewrite_from(start)
        changed = crashed or self._replay.count > 0
        job = self.behind.sync_job(self._last_ms if changed else 0)
        self.log.sync()
        job()
        if changed:
            self.behind.reach(Checkpoint(log_ms=self._last_ms, log_end=self.log.flushed))


@dataclass(eq=False)
class Replay:
    """Enters the messages of a log that queues and index lack."""

    log: CommitLog
    queues: Queues
    dispatcher: Dispatcher
    behind: WriteBehind
    deferred: DeferredSteps

    def __post_init__(self) -> None:
        self._removed = self.queues.removed
        self.count = 0
        """Messages entered again."""

    def run(self, start: PhysicalOffset, end: PhysicalOffset) -> None:
        """Enter all messages between two positions."""
        if start < end and not self._run_from(start, end):
            # Some queue lacks more than was to be entered: complete all of them.
            self._run_from(self.log.min_offset, end)

    def _run_from(self, start: PhysicalOffset, end: PhysicalOffset) -> bool:
        complete = start == self.log.min_offset
        reached, unread_bytes = start, 0
        for found in records(self.log, start, end):
            unread_bytes += found.physical_offset - reached
            reached = found.end
            if not self._enter(found, complete, unread_bytes):
                return False
        return True

    def _enter(self, found: Records, complete: bool, unread_bytes: int) -> bool:
        """Enter messages; False if earlier ones are missing."""
        if not self.dispatcher.follows(found):
            if len(found) > 1:
                one_by_one = (found[number : number + 1] for number in range(len(found)))
                return all(self._enter(each, complete, unread_bytes) for each in one_by_one)
            if not self._close_gap(found, complete, unread_bytes):
                return False
        self.dispatcher.enter(found)
        if self.deferred.error is None:
            self.deferred.attempt(self.behind.spill)
        self.count += len(found)
        return True

    def _close_gap(self, one: Records, complete: bool, unread_bytes: int) -> bool:
        """Prepare a queue for a message that is not the next one; False if earlier are missing."""
        entry = one[0]
        queue = self.queues.for_record(entry.topic, entry.queue_id)
        if entry.queue_offset > queue.max_offset:
            if not complete:
                return False
            if queue.last_position <= self.log.min_offset:
                # Its units are of deleted messages, and so are those it lacks: it begins here.
                self.queues.remove(queue)
            elif (entry.queue_offset - queue.max_offset) * FIXED_BYTES <= unread_bytes:
                # Damaged in the log: later messages keep their offsets.
                queue.fill_to(QueueOffset(entry.queue_offset))
        return True


def _first_from(records: Records, position: int) -> PhysicalOffset:
    """Return where the first record from a position on begins, or the end of all."""
    positions = records.positions()
    number = bisect_left(positions, position)
    return PhysicalOffset(positions[number]) if number < len(positions) else records.end
