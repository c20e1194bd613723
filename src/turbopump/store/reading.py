"""Reads a queue: from an offset to messages, or to the reason why there are none."""

from __future__ import annotations

from typing import cast

import numpy as np

from turbopump.core import TakenUnits, UnitLimits, is_topic_name, take_units
from turbopump.message import QueueOffset
from turbopump.store.cold_reads import ColdReads
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import UNIT_BYTES, ReadLimits
from turbopump.store.consume_queue import UNIT, ConsumeQueue, as_units
from turbopump.store.outcomes import (
    EVERYTHING,
    Cold,
    Filter,
    Found,
    MessageDamaged,
    MessagesRemoved,
    NoMatch,
    OffsetTooLarge,
    OffsetTooSmall,
    QueueEmpty,
    QueueUnknown,
    ReadOutcome,
    UnitsMissing,
    UpToDate,
)
from turbopump.store.unit_repair import Settled, UnitRepair

FILTERED_BYTES_MAX = 256 * 1024
"""Most bytes of properties, and of expressions over them, for one answer: some milliseconds."""
FILTERED_MESSAGE_BYTES = 128
"""What finding a message costs, in bytes of properties that take as long to read."""

_NO_WINDOW = -1, -1, memoryview(b"")


def read_queue(
    log: CommitLog,
    queue: ConsumeQueue,
    offset: QueueOffset,
    count_max: int,
    limits: ReadLimits,
    wanted: Filter,
    repair: UnitRepair,
    cold_reads: ColdReads | None = None,
) -> ReadOutcome | Cold:
    """Answer a read of a queue that exists.

    With ``cold_reads``, nothing of the log is read that is not in memory: that is fetched first.
    """
    low, high = queue.min_offset, queue.max_offset
    if not low <= offset < high:
        return _outside(offset, low, high)
    is_everything = wanted is EVERYTHING or wanted == EVERYTHING
    few = _units_of_answer(count_max, limits)
    data = queue.units(offset, few if is_everything else max(limits.scan_units_max, count_max))
    if not data:
        per_file = queue.units_per_segment
        following = QueueOffset((offset + per_file) // per_file * per_file)
        return UnitsMissing(next_offset=following, min_offset=low, max_offset=high)
    if cold_reads is not None and not cold_reads.is_warm(UNIT.unpack_from(data)[0], limits):
        bytes_max = max(limits.memory_bytes_max, limits.disk_bytes_max)
        prepared = cold_reads.prepare(queue, offset, data, bytes_max, wanted)
        if isinstance(prepared, Cold):
            return prepared
        data = prepared
    return _Answer(log, queue, offset, count_max, limits, wanted, repair).read(data)


def _outside(offset: QueueOffset, low: QueueOffset, high: QueueOffset) -> ReadOutcome:
    """Answer a read where the queue has no messages (any more, or yet)."""
    if high == 0:
        return QueueEmpty(next_offset=QueueOffset(0), min_offset=low, max_offset=high)
    if offset < low:
        return OffsetTooSmall(next_offset=low, min_offset=low, max_offset=high)
    if offset == high:
        return UpToDate(next_offset=offset, min_offset=low, max_offset=high)
    return OffsetTooLarge(next_offset=high, min_offset=low, max_offset=high)


def _units_of_answer(count_max: int, limits: ReadLimits) -> int:
    """Return how many units to examine if every one yields a message.

    One more than can be returned shows where to stop.
    """
    return min(max(1, count_max), max(limits.memory_count_max, limits.disk_count_max)) + 1


class _Answer:
    """Collects messages of some units until the limits are reached."""

    def __init__(
        self,
        log: CommitLog,
        queue: ConsumeQueue,
        offset: QueueOffset,
        count_max: int,
        limits: ReadLimits,
        wanted: Filter,
        repair: UnitRepair,
    ) -> None:
        self._log = log
        self._queue = queue
        self._offset = offset
        self._wanted = wanted
        self._repair = repair
        self._recent_from = log.written - limits.recent_bytes
        self._limits = UnitLimits(
            self._recent_from,
            limits.memory_bytes_max,
            min(limits.memory_count_max, count_max),
            limits.disk_bytes_max,
            min(limits.disk_count_max, count_max),
        )
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._pieces: list[memoryview] = []
        self._bytes = 0
        self._cost = 0
        self._is_removed = False
        self._damaged_to = 0
        """The offset after wanted messages that cannot be read."""
        self._is_searching = False
        self._mended = -1
        """The last unit that was rebuilt."""

    def read(self, data: bytes) -> ReadOutcome:
        """Read the units of an answer; more may be given than it takes."""
        number, count, mask = 0, len(data) // UNIT_BYTES, None
        if self._wanted.units is not None:
            mask = self._wanted.units(as_units(data)).astype(np.bool_).tobytes()
        window = self._log.window(UNIT.unpack_from(data)[0]) or _NO_WINDOW
        while number < count and not self._is_searching:
            start, end, view = window
            is_own = self._offset + number >= self._queue.entered_from
            taken = self._take(data, number, mask, view[: end - start], start, is_own)
            number = taken.stop
            if not taken.is_mismatch:
                break
            if not is_own and self._offset + number >= self._queue.entered_from:
                continue
            position, _, _ = UNIT.unpack_from(data, number * UNIT_BYTES)
            other = None if start <= position < end else self._log.window(position)
            if other is not None and other[0] != start:
                window = other
            elif self._was_removed(position):
                self._is_removed = not self._sizes
                number = self._behind_removed(data, number)
            else:
                number, data = self._settle(data, number)
        last_position, _, _ = UNIT.unpack_from(data, max(0, number - 1) * UNIT_BYTES)
        following = QueueOffset(self._offset + number)
        return self._outcome(following, far_behind=last_position < self._recent_from)

    def _take(
        self,
        data: bytes,
        number: int,
        mask: bytes | None,
        view: memoryview,
        start: int,
        is_own: bool,
    ) -> TakenUnits:
        """Take the messages of one file of the log, up to one that needs a closer look.

        ``is_own`` if this process has entered all of them.
        """
        queue, wanted = self._queue, self._wanted
        taken = take_units(
            data,
            number,
            view,
            start,
            queue.stored_topic,
            queue.queue_id,
            self._offset,
            self._limits,
            is_shifted=queue.is_shifted or is_own,
            codes=wanted.tags_codes,
            mask=mask,
            accepts=wanted.properties,
            accept_cost=FILTERED_MESSAGE_BYTES + wanted.weight,
            cost_max=FILTERED_BYTES_MAX - self._cost,
            taken=len(self._sizes),
            taken_bytes=self._bytes,
        )
        if taken.offsets:
            self._offsets += taken.offsets
            self._sizes += taken.sizes
            self._pieces += taken.pieces
            self._bytes += sum(taken.sizes)
        if taken.cost:
            self._cost += taken.cost
            self._is_removed = False
        return taken

    def _was_removed(self, position: int) -> bool:
        """Whether retention has deleted a message before the queue could follow."""
        log_min = self._log.min_offset
        if not 0 <= position < log_min:
            return False
        first = self._queue.unit(self._queue.min_offset)
        return first is not None and first[0] < log_min

    def _behind_removed(self, data: bytes, number: int) -> int:
        """Return the unit after those whose messages were in the same, deleted file."""
        position, _, _ = UNIT.unpack_from(data, number * UNIT_BYTES)
        if self._sizes:
            return number + 1
        end = self._log.next_start(position)
        positions = as_units(data[number * UNIT_BYTES :])["physical_offset"]
        behind = np.flatnonzero((positions < 0) | (positions >= end))
        return number + int(behind[0]) if len(behind) else len(data) // UNIT_BYTES

    def _settle(self, data: bytes, number: int) -> tuple[int, bytes]:
        """Have a damaged unit rebuilt; return the unit to continue with, and all units."""
        offset = QueueOffset(self._offset + number)
        settled, following = self._repair.settle(self._queue, offset)
        if settled is Settled.READABLE:
            unit = self._queue.unit_bytes(offset)
            assert unit is not None
            assert self._mended < number, "a rebuilt unit matches its record"
            self._mended = number
            at = number * UNIT_BYTES
            return number, data[:at] + unit + data[at + UNIT_BYTES :]
        if settled is Settled.SEARCHING:
            self._is_searching = True
            return number, data
        if not self._sizes:
            self._damaged_to = following
        return number + 1, data

    def _outcome(self, following: QueueOffset, *, far_behind: bool) -> ReadOutcome:
        low, high = self._queue.min_offset, self._queue.max_offset
        if self._sizes:
            return Found(
                pieces=self._pieces,
                sizes=self._sizes,
                # Cast as a whole: calling the type per element takes as long as all the rest.
                queue_offsets=cast(list[QueueOffset], self._offsets),
                size=self._bytes,
                suggest_slave=far_behind,
                next_offset=following,
                min_offset=low,
                max_offset=high,
            )
        if self._is_searching or self._damaged_to:
            # Only past damage: waiters for something else continue from there.
            if not self._is_searching:
                following = QueueOffset(self._damaged_to)
            return MessageDamaged(next_offset=following, min_offset=low, max_offset=high)
        nothing = MessagesRemoved if self._is_removed else NoMatch
        return nothing(
            suggest_slave=far_behind, next_offset=following, min_offset=low, max_offset=high
        )


def unknown_queue(topic: str, queue_id: int) -> ReadOutcome:
    """Return the outcome of reading a queue that has no messages, or cannot have any."""
    zero = QueueOffset(0)
    try:
        possible = queue_id >= 0 and is_topic_name(topic.encode())
    except UnicodeEncodeError:
        possible = False
    kind = QueueEmpty if possible else QueueUnknown
    return kind(next_offset=zero, min_offset=zero, max_offset=zero)
