"""Enters messages of the log into queues and index again, by column where they follow."""

from __future__ import annotations

from dataclasses import dataclass

from turbopump.message import PhysicalOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.deferred_steps import DeferredSteps
from turbopump.store.dispatch import INVISIBLE_BIT, Dispatcher
from turbopump.store.entry_run import EntryRun
from turbopump.store.log_end import records
from turbopump.store.queues import Queues
from turbopump.store.write_behind import WriteBehind
from turbopump.wire.record import FIXED_BYTES, RecordEntry


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

    def is_readable(self, entry: RecordEntry) -> bool:
        """Whether a message belongs into a queue: not a half message, not removed."""
        invisible = entry.sys_flag & INVISIBLE_BIT
        return not invisible and not self._removed.covers(entry.topic, entry.physical_offset)

    def _run_from(self, start: PhysicalOffset, end: PhysicalOffset) -> bool:
        complete = start == self.log.min_offset
        reached, unread_bytes = int(start), 0
        for found in records(self.log, start, end):
            unread_bytes += found.physical_offset - reached
            reached = (
                found.end if isinstance(found, EntryRun) else found.physical_offset + found.size
            )
            if not self._enter(found, complete, unread_bytes):
                return False
        return True

    def _enter(self, found: EntryRun | RecordEntry, complete: bool, unread_bytes: int) -> bool:
        """Enter messages; False if earlier ones are missing."""
        if isinstance(found, RecordEntry):
            return self._enter_one(found, complete, unread_bytes)
        for part in found.parts():
            if self.dispatcher.enter_run(part) is not None:
                self._spill(len(part))
            elif not all(
                self._enter_one(entry, complete, unread_bytes) for entry in part.entries()
            ):
                return False
        return True

    def _enter_one(self, entry: RecordEntry, complete: bool, unread_bytes: int) -> bool:
        if self.is_readable(entry):
            queue = self.queues.for_record(entry.topic, entry.queue_id)
            if entry.queue_offset > queue.max_offset:
                if not complete:
                    return False
                if queue.last_position <= self.log.min_offset:
                    # Its units are of deleted messages, and so are those it lacks: it begins here.
                    self.queues.remove(queue)
                elif (entry.queue_offset - queue.max_offset) * FIXED_BYTES <= unread_bytes:
                    # Damaged in the log: later messages keep their offsets.
                    queue.fill_to(entry.queue_offset)
        self.dispatcher.enter_all((entry,))
        self._spill(1)
        return True

    def _spill(self, count: int) -> None:
        if self.deferred.error is None:
            self.deferred.attempt(self.behind.spill)
        self.count += count
