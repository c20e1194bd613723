"""Pulls that repeat one that was let in and found messages, but for their offset and count."""

from __future__ import annotations

from turbopump.broker.stats import Stats
from turbopump.message import QueueOffset
from turbopump.store.config import ReadLimits
from turbopump.store.store import Store
from turbopump.store.stretch import Part, Stretch


class PullRun:
    """Reads all messages of a queue, for pulls that come one right behind the other."""

    def __init__(
        self,
        store: Store,
        stats: Stats,
        group: str,
        topic: str,
        queue_id: int,
        limits: ReadLimits | None,
    ) -> None:
        self._store = store
        self._stats = stats
        self._group = group
        self._topic = topic
        self._queue_id = queue_id
        self._limits = limits
        self._stretch: Stretch | None = None

    def read(self, offset: int, count_max: int) -> tuple[Stretch, Part] | None:
        """Read from the stretch that was read last, or else from one that begins here."""
        stretch = self._stretch
        if stretch is not None and (part := stretch.part(offset, count_max)) is not None:
            return stretch, part
        at = QueueOffset(offset)
        stretch = self._store.stretch(self._topic, self._queue_id, at, count_max, self._limits)
        self._stretch = stretch
        if stretch is None or (part := stretch.part(offset, count_max)) is None:
            return None
        return stretch, part

    def count(self, messages: int, size: int, pulls: int) -> None:
        """Count pulls that are answered."""
        self._stats.get(self._group, self._topic, self._queue_id, messages, size, pulls)
