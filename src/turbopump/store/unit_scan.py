"""Examines units one by one for those that a filter wants, until an answer is full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
from numpy.typing import NDArray

from turbopump.message import QueueOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import UNIT_BYTES, ReadLimits
from turbopump.store.consume_queue import UNIT, ConsumeQueue, as_units
from turbopump.store.outcomes import (
    Filter,
    Found,
    MessageDamaged,
    MessagesRemoved,
    NoMatch,
    ReadOutcome,
    Units,
)
from turbopump.store.unit_check import properties_at
from turbopump.store.unit_repair import Settled, UnitRepair

_FEW_CODES = 16
FILTERED_BYTES_MAX = 256 * 1024
"""Most bytes of properties, and of expressions over them, for one answer: some milliseconds."""
FILTERED_MESSAGE_BYTES = 128
"""What finding a message costs, in bytes of properties that take as long to read."""


class Scan:
    """Scans a run of units once; collects messages until the limits are reached."""

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
        self._repair = repair
        self._limits = limits
        self._wanted = wanted
        self._count_max = count_max
        self._recent_from = log.written - limits.recent_bytes
        self._messages: list[memoryview] = []
        self._numbers: list[int] = []
        self._bytes = 0
        self._removed = False
        self._skip_to = -1
        self._damaged_to = 0
        """The offset after wanted messages that cannot be read."""
        self._is_searching = False
        self._window = 0, 0, memoryview(b"")
        """The file of the last message: finding it costs more than examining a message."""
        self._filtered_bytes = 0

    def run(self, data: bytes) -> ReadOutcome:
        units = as_units(data)
        stop = len(units)
        looked_at = 0
        for number, position, size in self._candidates(data, units):
            if self._messages:
                full_at = self._first_full(units, looked_at, number, position, size)
                if full_at is not None:
                    stop = full_at
                    break
            if not 0 <= position < self._skip_to:
                self._collect(number, position, size)
            if self._is_searching:
                stop = number
                break
            looked_at = number + 1
            if self._filtered_bytes >= FILTERED_BYTES_MAX:
                stop = looked_at
                break
        else:
            stop = self._first_full_between(units, looked_at, stop) or stop
        last_position = int(units["physical_offset"][max(0, stop - 1)])
        following = QueueOffset(self._offset + stop)
        return self._outcome(following, far_behind=last_position < self._recent_from)

    def _outcome(self, following: QueueOffset, *, far_behind: bool) -> ReadOutcome:
        low, high = self._queue.min_offset, self._queue.max_offset
        if self._messages:
            return Found(
                pieces=self._messages,
                sizes=[len(message) for message in self._messages],
                # Cast as a whole: calling the type per element takes as long as all the rest.
                queue_offsets=cast(
                    list[QueueOffset], [self._offset + number for number in self._numbers]
                ),
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
        nothing = MessagesRemoved if self._removed else NoMatch
        return nothing(
            suggest_slave=far_behind, next_offset=following, min_offset=low, max_offset=high
        )

    def _candidates(self, data: bytes, units: Units) -> Iterator[tuple[int, int, int]]:
        """Skip units whose tag is not wanted, in one step."""
        mask = mask_of(units, self._wanted)
        if mask is None:
            for number, (position, size, _) in enumerate(UNIT.iter_unpack(data)):
                yield number, position, size
            return
        for number in np.flatnonzero(mask).tolist():
            position, size, _ = UNIT.unpack_from(data, number * UNIT_BYTES)
            yield number, position, size

    def _first_full(
        self, units: Units, first: int, candidate: int, position: int, size: int
    ) -> int | None:
        """Return the first unit, wanted or not, up to a candidate, at which the answer is full."""
        if first < candidate:
            full_at = self._first_full_between(units, first, candidate)
            if full_at is not None:
                return full_at
        return candidate if self._is_full(position, size) else None

    def _first_full_between(self, units: Units, first: int, end: int) -> int | None:
        count, limits = len(self._messages), self._limits
        if count == 0 or first >= end:
            return None
        if count >= self._count_max:
            return first
        run = units[first:end]
        recent = run["physical_offset"] >= self._recent_from
        bytes_max = np.where(recent, limits.memory_bytes_max, limits.disk_bytes_max)
        count_max = np.where(recent, limits.memory_count_max, limits.disk_count_max)
        full = (run["size"].astype(np.int64) + self._bytes > bytes_max) | (count >= count_max)
        found = np.flatnonzero(full)
        return first + int(found[0]) if len(found) else None

    def _is_full(self, position: int, size: int) -> bool:
        limits = self._limits
        if position >= self._recent_from:
            bytes_max, count_max = limits.memory_bytes_max, limits.memory_count_max
        else:
            bytes_max, count_max = limits.disk_bytes_max, limits.disk_count_max
        count = len(self._messages)
        return count >= self._count_max or count >= count_max or self._bytes + size > bytes_max

    def _collect(self, number: int, position: int, size: int) -> None:
        if self._is_removed(position):
            if not self._messages:
                self._removed = True
            # The whole file is deleted: skip everything else that was in it.
            segment_bytes = self._log.segment_bytes
            self._skip_to = position + segment_bytes - position % segment_bytes
            return
        found = self._record(number, position, size)
        if found is None:
            unit = self._settled(number)
            if unit is None:
                return
            position, size, _ = unit
            found = self._record(number, position, size)
            assert found is not None, "it was compared with its unit"
        message, properties_start = found
        if self._wanted.properties is not None and not self._wants(message[properties_start:]):
            self._removed = False
            return
        self._messages.append(message)
        self._numbers.append(number)
        self._bytes += size
        self._skip_to = -1

    def _record(self, number: int, position: int, size: int) -> tuple[memoryview, int] | None:
        """Return a unit's message and where its properties begin; None if it is another message."""
        start, end, view = self._window
        if not start <= position < end:
            window = self._log.window(position)
            if window is None:
                return None
            start, end, view = self._window = window
        at = position - start
        if position + size > end:
            return None
        found = properties_at(view, at, position, size, self._queue, self._offset + number)
        return None if found is None else (view[at : at + size], found - at)

    def _is_removed(self, position: int) -> bool:
        """Whether retention has deleted the message before the queue could follow."""
        log_min = self._log.min_offset
        if not 0 <= position < log_min:
            return False
        first = self._queue.unit(self._queue.min_offset)
        return first is not None and first[0] < log_min

    def _settled(self, number: int) -> tuple[int, int, int] | None:
        """Have a damaged unit rebuilt; None if its message cannot be read, or not yet."""
        offset = QueueOffset(self._offset + number)
        settled, following = self._repair.settle(self._queue, offset)
        if settled is Settled.READABLE:
            return self._queue.unit(offset)
        self._is_searching = settled is Settled.SEARCHING
        if settled is Settled.LOST and not self._messages:
            self._damaged_to = following
        return None

    def _wants(self, properties: memoryview) -> bool:
        assert self._wanted.properties is not None
        self._filtered_bytes += FILTERED_MESSAGE_BYTES + len(properties) + self._wanted.weight
        return self._wanted.properties(bytes(properties))


def mask_of(units: Units, wanted: Filter) -> NDArray[np.bool_] | None:
    """Return which units to consider; None for all of them."""
    mask = None if wanted.tags_codes is None else has_code(units, wanted.tags_codes)
    if wanted.units is not None:
        allowed = wanted.units(units)
        mask = allowed if mask is None else mask & allowed
    return mask


def has_code(units: Units, codes: frozenset[int]) -> NDArray[np.bool_]:
    # The hash is the lower half of the field; units of delayed messages hold a time there.
    found = units["tags_code"].astype(np.int64).astype(np.int32)
    if len(codes) > _FEW_CODES:
        return np.isin(found, np.array(sorted(codes), np.int64))
    mask = np.zeros(len(found), np.bool_)
    for code in codes:
        mask |= found == code
    return mask
