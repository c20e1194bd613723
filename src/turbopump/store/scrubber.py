"""Finds damage before readers do: a slow, repeated scan of the whole log."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from turbopump.core import RecordEntry
from turbopump.store.commit_log import CommitLog
from turbopump.store.damage import DamageLog
from turbopump.store.dispatch import INVISIBLE_BIT, Dispatcher
from turbopump.store.log_scan import next_record
from turbopump.store.queues import Queues
from turbopump.store.unit_repair import UnitRepair

_log = logging.getLogger(__name__)

SLICE_BYTES = 256 * 1024
"""Bytes of the log that one call reads, unless a single record is larger: a few milliseconds."""


@dataclass(slots=True, eq=False)
class Scrubber:
    """Verifies body checksums, and units against their records, slice by slice."""

    log: CommitLog
    queues: Queues
    dispatcher: Dispatcher
    repair: UnitRepair
    damage: DamageLog

    def run(self) -> None:
        """Check the next slice of what is on disk; start over at the end."""
        end = min(self.log.flushed, self.queues.entered_to)
        at = max(self.damage.scrubbed_to, self.log.min_offset)
        stop = min(end, at + SLICE_BYTES)
        while at < stop:
            entry, following = next_record(self.log, at, stop)
            if entry is not None:
                self._check(entry)
            elif following < self.log.next_start(at):
                self.damage.bad_log(self.log.path_at(at), at, following - at)
            at = following
        self.damage.scrubbed_to = at
        if at >= end > self.log.min_offset:
            self.damage.scrub_passes += 1
            self.damage.scrubbed_to = 0
            _log.info("scrubbed the store up to %d: %s", end, self.damage.summary)

    def _check(self, entry: RecordEntry) -> None:
        position = entry.physical_offset
        if self.log.entry_at(position, check_crc=True) is None:
            reason = (
                f"topic {entry.topic.decode('utf-8', 'replace')}, queue {entry.queue_id},"
                f" offset {entry.queue_offset}: the body does not match its checksum"
            )
            self.damage.bad_message(self.log.path_at(position), position, reason)
        removed = self.queues.removed
        if entry.sys_flag & INVISIBLE_BIT or removed.covers(entry.topic, position):
            return
        queue = self.queues.find(entry.topic.decode("utf-8", "replace"), entry.queue_id)
        unit = None if queue is None else queue.unit(entry.queue_offset)
        if queue is None or unit is None or queue.is_shifted:
            return
        if unit[:2] != (position, entry.size):
            self.repair.restore(queue, entry)
        elif unit[2] != (code := self.dispatcher.code_of(entry)):
            self.damage.repaired(queue, entry.queue_offset, position)
            queue.replace_unit(entry.queue_offset, position, entry.size, code)
