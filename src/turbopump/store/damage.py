"""Damage found while a store is open: each place is logged once and counted."""

from __future__ import annotations

import logging
from bisect import bisect_right
from pathlib import Path

from turbopump.message import QueueOffset
from turbopump.store.consume_queue import ConsumeQueue, QueueKey

_log = logging.getLogger(__name__)

_PLACES_MAX = 10_000
"""Ranges remembered per queue. Damage beyond them is searched and logged again when read."""


class DamageLog:
    """Damage found since the store was opened."""

    def __init__(self) -> None:
        self.messages = 0
        """Messages that cannot be read; readers skip them."""
        self.repaired_units = 0
        """Queue units that were rebuilt from the log."""
        self.index_files = 0
        """Files of the key index that are not searched."""
        self.log_ranges = 0
        """Ranges of the log from which no message can be read."""
        self.scrubbed_to = 0
        """Position that the scrubber has reached in this pass."""
        self.scrub_passes = 0
        """Passes that reached the end."""
        self._lost: dict[QueueKey, list[tuple[int, int]]] = {}
        self._places: set[object] = set()

    @property
    def summary(self) -> str:
        """All counters, as text."""
        return (
            f"{self.messages} damaged messages, {self.log_ranges} damaged ranges of the log,"
            f" {self.repaired_units} rebuilt units, {self.index_files} damaged index files"
        )

    def lost(self, queue: ConsumeQueue, first: int, end: int, where: str) -> None:
        """Record messages of a queue that neither the queue nor the log can restore."""
        self.messages += end - first
        ranges = self._lost.setdefault(queue.key, [])
        if len(ranges) < _PLACES_MAX:
            ranges.insert(bisect_right(ranges, (first, end)), (first, end))
        count = f"offset {first}" if end - first == 1 else f"offsets {first} to {end - 1}"
        _log.error(
            "topic %s, queue %d, %s: no readable message in %s; readers skip it",
            queue.topic, queue.queue_id, count, where,
        )  # fmt: skip

    def lost_to(self, queue: ConsumeQueue, offset: int) -> QueueOffset | None:
        """Return the end of the known damage that contains an offset."""
        ranges = self._lost.get(queue.key)
        if not ranges:
            return None
        number = bisect_right(ranges, offset, key=lambda lost: lost[0]) - 1
        is_inside = number >= 0 and offset < ranges[number][1]
        return QueueOffset(ranges[number][1]) if is_inside else None

    def repaired(self, queue: ConsumeQueue, offset: QueueOffset, position: int) -> None:
        """Record a rebuilt unit."""
        self.repaired_units += 1
        _log.error(
            "%s: the unit of topic %s, queue %d, offset %d was damaged and is rebuilt:"
            " the message is at %d of the commit log",
            queue.path_of(offset), queue.topic, queue.queue_id, offset, position,
        )  # fmt: skip

    def bad_log(self, path: Path | None, position: int, size: int) -> None:
        """Record bytes of the log from which no message, or only a damaged one, can be read."""
        if self._is_new(position):
            self.log_ranges += 1
            _log.error("%s is damaged: %d bytes at %d of the log are skipped", path, size, position)

    def bad_message(self, path: Path | None, position: int, reason: str) -> None:
        """Record a message whose body is damaged, which only some readers notice."""
        if self._is_new(position):
            self.messages += 1
            _log.error("%s, message at %d of the commit log: %s", path, position, reason)

    def bad_index_file(self, path: Path, reason: str) -> None:
        """Record an index file that is not reliable."""
        if self._is_new(path):
            self.index_files += 1
            _log.error("%s is damaged and not searched: %s", path, reason)

    def _is_new(self, place: object) -> bool:
        if place in self._places or len(self._places) >= _PLACES_MAX:
            return False
        self._places.add(place)
        return True
