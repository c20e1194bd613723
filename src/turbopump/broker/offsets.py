"""Committed offsets of each consumer group in each queue."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from turbopump.message import QueueOffset
from turbopump.tables import Table, TableFile
from turbopump.wire.bodies import ConsumerOffsets

_log = logging.getLogger(__name__)

_SEPARATOR = "@"
_LISTED_MAX = 10

OnLowered = Callable[[str, str, int, int, int], None]
"""Called after a commit below the stored offset: group, topic, queue, stored and new offset."""


class Offsets:
    """Committed offsets by topic, group and queue; in memory, and in a file that follows."""

    def __init__(self, file: TableFile) -> None:
        self._file = file
        self._table: dict[str, dict[int, int]] = {}
        self._topics: Counter[str] = Counter()
        """In how many topics each group has offsets."""
        self.saving = Table("offsets", file, self.encoded)
        self.on_lowered: OnLowered | None = None

    def load(self) -> bool:
        """Load the saved offsets, if any."""
        saved = self._file.load(ConsumerOffsets)
        if saved is not None:
            self._take(saved)
        return saved is not None

    def clamp_to_ends(self, end_of: Callable[[str, int], int]) -> None:
        """Lower offsets beyond the end of their queue, which a power failure may have cut.

        Otherwise groups would skip the messages that get these offsets next.
        """
        lowered = [
            (key, queue_id, offset, end)
            for key, queues in self._table.items()
            for queue_id, offset in queues.items()
            if offset > (end := end_of(_split(key)[0], queue_id))
        ]
        if not lowered:
            return
        texts = []
        for key, queue_id, offset, end in lowered:
            self._table[key][queue_id] = end
            topic, group = _split(key)
            texts.append(f"queue {queue_id} of {topic} by {group}: {offset}, now {end}")
        self.saving.changes += 1
        _log.warning(
            "%d offsets were beyond the end of their queues, which have lost messages: %s%s",
            len(lowered),
            "; ".join(texts[:_LISTED_MAX]),
            "; ..." if len(texts) > _LISTED_MAX else "",
        )
        # Before new messages get these offsets: after another crash, the old ones would look valid.
        self.saving.try_save_now()

    # --- one queue --------------------------------------------------------------------------------

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Commit a group's offset. It may go back, which is how a stopped group is reset."""
        self.commit_all(group, topic, {queue_id: offset})

    def commit_all(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit a group's offsets in several queues of a topic."""
        key = f"{topic}{_SEPARATOR}{group}"
        queues = self._table.get(key)
        if queues is None:
            queues = self._table[key] = {}
            self._topics[group] += 1
        changes = 0
        for queue_id, offset in offsets.items():
            stored = queues.get(queue_id)
            if stored != offset:
                queues[queue_id] = offset
                changes += 1
                if stored is not None and offset < stored and self.on_lowered is not None:
                    self.on_lowered(group, topic, queue_id, stored, offset)
        self.saving.changes += changes

    def find(self, group: str, topic: str, queue_id: int) -> QueueOffset | None:
        """Return a group's offset in a queue; None if it never committed one."""
        queues = self._table.get(f"{topic}{_SEPARATOR}{group}")
        offset = None if queues is None else queues.get(queue_id)
        return None if offset is None else QueueOffset(offset)

    def adopt_copy(self, copied: ConsumerOffsets) -> None:
        """Replace the table by a master's; for a slave, where no client commits."""
        self._take(copied)
        self.saving.changes += 1

    def _take(self, table: ConsumerOffsets) -> None:
        self._table = table.offset_table
        self._topics = Counter(_split(key)[1] for key in self._table)

    # --- whole groups -----------------------------------------------------------------------------

    @property
    def group_count(self) -> int:
        """How many groups have offsets."""
        return len(self._topics)

    def has_group(self, group: str) -> bool:
        """Whether a group has an offset in any topic."""
        return group in self._topics

    @property
    def snapshot(self) -> ConsumerOffsets:
        """All offsets, as they are now."""
        return ConsumerOffsets(offset_table={key: dict(q) for key, q in self._table.items()})

    def encoded(self) -> bytes:
        """Return all offsets as JSON, the form of file and wire; fast, since there may be many."""
        return msgspec.json.encode({"offsetTable": self._table})

    def of_topic(self, group: str, topic: str) -> dict[int, QueueOffset]:
        """Return a group's offsets in a topic by queue."""
        queues = self._table.get(f"{topic}{_SEPARATOR}{group}", {})
        return {queue_id: QueueOffset(offset) for queue_id, offset in queues.items()}

    def topics_of(self, group: str) -> set[str]:
        """Return the topics in which a group has offsets."""
        return {topic for topic, name in map(_split, self._table) if name == group}

    def groups_of(self, topic: str) -> set[str]:
        """Return the groups that have offsets in a topic."""
        return {group for name, group in map(_split, self._table) if name == topic}

    def clone(self, source: str, target: str, topic: str) -> None:
        """Copy a group's offsets in a topic to another group, in place of its own."""
        queues = self._table.get(f"{topic}{_SEPARATOR}{source}")
        if queues is not None:
            self._remove(target, topic)
            self.commit_all(target, topic, queues)

    def remove_group(self, group: str) -> None:
        for topic in self.topics_of(group):
            self._remove(group, topic)

    def remove_topic(self, topic: str) -> None:
        for group in self.groups_of(topic):
            self._remove(group, topic)

    def _remove(self, group: str, topic: str) -> None:
        if self._table.pop(f"{topic}{_SEPARATOR}{group}", None) is None:
            return
        self._topics[group] -= 1
        if not self._topics[group]:
            del self._topics[group]
        self.saving.changes += 1


def _split(key: str) -> tuple[str, str]:
    topic, _, group = key.partition(_SEPARATOR)
    return topic, group
