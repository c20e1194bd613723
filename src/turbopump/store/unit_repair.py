"""Rebuilds damaged units of a queue from the log, or reports what the log lacks as well.

All work is done in bounded slices: the next call resumes an unfinished search.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from turbopump.core import RecordEntry
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.consume_queue import FILLER_SIZE, ConsumeQueue
from turbopump.store.damage import DamageLog
from turbopump.store.log_scan import next_record
from turbopump.store.unit_check import unit_matches
from turbopump.wire.record import FIXED_BYTES

_log = logging.getLogger(__name__)

_SLICE_BYTES = 1024 * 1024
"""Bytes of the log that one call scans."""

_RUN_UNITS_MAX = 1024
"""Units that are looked up in one search."""

_SEARCHES_MAX = 64


class Settled(Enum):
    """What became of a unit that does not match its record."""

    READABLE = "its message can be read"
    LOST = "its message cannot be read"
    SEARCHING = "the log has not been searched to the end"


@dataclass(slots=True)
class _Search:
    """A search for the records of some offsets of a queue in a part of the log."""

    first: int
    end: int
    position: int
    high: int
    found: dict[int, RecordEntry] = field(default_factory=dict)


class UnitRepair:
    """Decides what to do about damaged units."""

    def __init__(
        self, log: CommitLog, code_of: Callable[[RecordEntry], int], damage: DamageLog
    ) -> None:
        self._log = log
        self._code_of = code_of
        self._damage = damage
        self._searches: dict[ConsumeQueue, _Search] = {}

    def settle(self, queue: ConsumeQueue, offset: QueueOffset) -> tuple[Settled, QueueOffset]:
        """Rebuild a damaged unit, or record that its message is lost.

        Returns the offset to continue at: the same one if the unit is intact now.
        """
        known = self._damage.lost_to(queue, offset)
        if known is not None:
            return Settled.LOST, known
        if self._is_at_its_place(queue, offset) and self._good_unit(queue, offset) is not None:
            return Settled.READABLE, offset
        search = self._searches.get(queue)
        if search is None and len(self._searches) >= _SEARCHES_MAX:
            # The others first: abandoning one for this one could mean that none is ever finished.
            self._go_on(*next(iter(self._searches.items())))
            return Settled.SEARCHING, offset
        if search is None or not search.first <= offset < search.end:
            search = self._begin(queue, offset)
        if not self._go_on(queue, search):
            return Settled.SEARCHING, offset
        known = self._damage.lost_to(queue, offset)
        return (Settled.READABLE, offset) if known is None else (Settled.LOST, known)

    def restore(self, queue: ConsumeQueue, entry: RecordEntry) -> None:
        """Rebuild the unit of a found record, unless the unit points to an equally good one."""
        offset = entry.queue_offset
        is_at_its_place = self._is_at_its_place(queue, offset)
        if not is_at_its_place or self._good_unit(queue, offset) is None:
            self._replace(queue, offset, entry)

    def settle_end(self, queue: ConsumeQueue, replayed_from: PhysicalOffset) -> None:
        """At the start: verify the last unit, which tells where the queue ends in the log.

        It is trusted if it is plausible, and outside of the replayed part.
        """
        last = QueueOffset(queue.max_offset - 1)
        unit, before = queue.unit(last), queue.unit(QueueOffset(last - 1))
        if unit is None or unit[1] == FILLER_SIZE:
            return
        is_likely = unit[1] >= FIXED_BYTES and unit[0] + unit[1] <= self._log.written
        if is_likely and before is not None:
            is_likely = unit[0] > before[0] or before[1] == FILLER_SIZE
        if is_likely and 0 <= unit[0] < max(replayed_from, self._log.min_offset):
            return
        if self._good_unit(queue, last) is not None:
            return
        while self.settle(queue, last)[0] is Settled.SEARCHING:
            pass
        queue.physical_end = self._end_before(queue, queue.max_offset) or PhysicalOffset(-1)

    def _end_before(self, queue: ConsumeQueue, offset: int) -> PhysicalOffset | None:
        """Return the end of the last readable message before an offset, if it is near."""
        for before in range(offset - 1, max(queue.min_offset, offset - _RUN_UNITS_MAX) - 1, -1):
            unit = self._good_unit(queue, before)
            if unit is not None:
                return PhysicalOffset(unit[0] + unit[1])
        return None

    def _is_at_its_place(self, queue: ConsumeQueue, offset: QueueOffset) -> bool:
        """Check the record at the unit's own position: perhaps only the size is wrong."""
        unit = queue.unit(offset)
        entry = None if unit is None else self._log.entry_at(unit[0])
        if unit is None or entry is None or not _is_of(queue, entry):
            return False
        if entry.queue_offset != offset and not self._is_shifted(queue, offset, entry):
            return False
        if entry.size != unit[1]:
            self._replace(queue, offset, entry)
        return True

    def _is_shifted(self, queue: ConsumeQueue, offset: QueueOffset, entry: RecordEntry) -> bool:
        """Whether a neighbor's record has an equally shifted offset: that is no damage."""
        for neighbor in (offset - 1, offset + 1):
            unit = queue.unit(QueueOffset(neighbor))
            other = None if unit is None else self._log.entry_at(unit[0])
            if other is None or not _is_of(queue, other):
                continue
            if other.queue_offset - neighbor == entry.queue_offset - offset:
                _log.warning(
                    "topic %s, queue %d: from offset %d on, records have different queue"
                    " offsets, as where a gap was closed",
                    queue.topic, queue.queue_id, neighbor,
                )  # fmt: skip
                queue.is_shifted = True
                return True
        return False

    def _begin(self, queue: ConsumeQueue, offset: QueueOffset) -> _Search:
        """Find the intact units around: the records lie between those of their neighbors."""
        low = self._end_before(queue, offset) or self._log.min_offset
        end = min(queue.max_offset, offset + _RUN_UNITS_MAX)
        for behind in range(offset + 1, end):
            unit = self._good_unit(queue, behind)
            if unit is not None:
                end, high = QueueOffset(behind), unit[0]
                break
        else:
            high = self._position_behind(queue, offset, end)
        search = self._searches[queue] = _Search(offset, end, low, high)
        return search

    def _position_behind(self, queue: ConsumeQueue, offset: int, behind: int) -> PhysicalOffset:
        """Return the position of some intact unit further on, or the end of the log."""
        while behind < queue.max_offset:
            unit = self._good_unit(queue, behind)
            if unit is not None:
                return unit[0]
            behind += behind - offset
        return self._log.written

    def _good_unit(self, queue: ConsumeQueue, offset: int) -> tuple[PhysicalOffset, int] | None:
        unit = queue.unit(QueueOffset(offset))
        if unit is None or not unit_matches(self._log, queue, offset, unit[0], unit[1]):
            return None
        return unit[0], unit[1]

    def _go_on(self, queue: ConsumeQueue, search: _Search) -> bool:
        """Search one more slice, and act on the result if that was the last."""
        if not self._advance(queue, search):
            return False
        del self._searches[queue]
        if search.end <= queue.max_offset:
            # Otherwise the topic was removed meanwhile.
            self._finish(queue, search)
        return True

    def _advance(self, queue: ConsumeQueue, search: _Search) -> bool:
        """Scan further through the log; return whether it has been searched to the end."""
        stop = min(search.high, search.position + _SLICE_BYTES)
        while search.position < stop:
            entry, search.position = next_record(self._log, search.position, stop)
            if entry is None or not _is_of(queue, entry):
                continue
            if search.first <= entry.queue_offset < search.end:
                search.found.setdefault(entry.queue_offset, entry)
                if len(search.found) == search.end - search.first:
                    return True
        return search.position >= search.high

    def _finish(self, queue: ConsumeQueue, search: _Search) -> None:
        """Rebuild what was found; the rest is lost, with one report for consecutive messages."""
        lost_from: int | None = None
        for offset in range(search.first, search.end):
            entry = search.found.get(offset)
            is_good = self._good_unit(queue, offset) is not None
            if entry is not None and not is_good:
                self._replace(queue, QueueOffset(offset), entry)
                is_good = self._good_unit(queue, offset) is not None
            if not is_good:
                lost_from = offset if lost_from is None else lost_from
                continue
            if lost_from is not None:
                self._lose(queue, lost_from, offset)
                lost_from = None
        if lost_from is not None:
            self._lose(queue, lost_from, search.end)

    def _lose(self, queue: ConsumeQueue, first: int, end: int) -> None:
        unit = queue.unit(QueueOffset(first))
        position = -1 if unit is None or unit[1] == FILLER_SIZE else unit[0]
        path = self._log.path_at(position)
        place = f"{path} at {position % self._log.segment_bytes}" if path else "the commit log"
        self._damage.lost(queue, first, end, place)

    def _replace(self, queue: ConsumeQueue, offset: QueueOffset, entry: RecordEntry) -> None:
        self._damage.repaired(queue, offset, entry.physical_offset)
        queue.replace_unit(offset, entry.physical_offset, entry.size, self._code_of(entry))


def _is_of(queue: ConsumeQueue, entry: RecordEntry) -> bool:
    return entry.queue_id == queue.queue_id and entry.topic == queue.stored_topic[1:]
