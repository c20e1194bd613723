"""All consume queues of a store, and which of them have unwritten units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from turbopump.clock import Clock
from turbopump.core import is_topic_name
from turbopump.errors import InvalidArgument, StoreDamaged
from turbopump.machine.files import Files, OpenFiles
from turbopump.message import PhysicalOffset
from turbopump.store.consume_queue import ConsumeQueue, QueueKey
from turbopump.store.removed_topics import RemovedTopics
from turbopump.store.segments import BrokenRow, Segments


class Waiting(Struct, frozen=True):
    """Since when a queue has unwritten units, and the first one's message."""

    since_ms: int
    store_timestamp_ms: int
    physical_offset: PhysicalOffset


class _QueuesByRecord(dict[tuple[bytes, int], ConsumeQueue]):
    """Queues by topic and id as in records; created on demand."""

    def __init__(self, create: Callable[[bytes, int], ConsumeQueue]) -> None:
        super().__init__()
        self._create = create

    def __missing__(self, key: tuple[bytes, int]) -> ConsumeQueue:
        return self._create(*key)


@dataclass(eq=False)
class Queues:
    """The queues by topic and id; created on first use, in memory only until units arrive."""

    directory: Path
    segment_bytes: int
    files: Files
    open_files: OpenFiles
    spare: Path
    clock: Clock
    removed: RemovedTopics

    def __post_init__(self) -> None:
        self.entered_to = PhysicalOffset(0)
        """Position after the last message entered."""
        self._queues: dict[QueueKey, ConsumeQueue] = {}
        self._by_topic: dict[str, dict[int, ConsumeQueue]] = {}
        self.by_record: Mapping[tuple[bytes, int], ConsumeQueue]
        """The queues of stored or storable messages, by topic and id; created on demand."""
        # Used several times per message: existing queues need no call.
        self.by_record = self._by_record = _QueuesByRecord(self._create)
        # In the order in which they began to wait: the first has the oldest unit.
        self._waiting: dict[ConsumeQueue, Waiting] = {}

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return a queue, or None if it does not exist."""
        return self._queues.get((topic, queue_id))

    def find_all(self, topic: str, queue_ids: Iterable[int]) -> list[ConsumeQueue | None]:
        """Return queues of a topic, None where one does not exist."""
        return list(map(self._by_topic.get(topic, {}).get, queue_ids))

    def for_record(self, topic: bytes, queue_id: int) -> ConsumeQueue:
        """Return the queue of a stored or storable message, created on demand."""
        return self.by_record[topic, queue_id]

    def _create(self, topic: bytes, queue_id: int) -> ConsumeQueue:
        if queue_id < 0 or not is_topic_name(topic):
            raise InvalidArgument(
                f"queue {topic!r}, {queue_id}: the topic must be able to name a directory"
                " and the number must not be negative"
            )
        return self._add(topic.decode(), queue_id)

    def __iter__(self) -> Iterator[ConsumeQueue]:
        return iter(list(self._queues.values()))

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def physical_end(self) -> PhysicalOffset:
        """Position after the last message that any queue has; -1 if there is none."""
        return max((queue.physical_end for queue in self), default=PhysicalOffset(-1))

    def load(self, *, without: Collection[QueueKey] = ()) -> dict[QueueKey, BrokenRow]:
        """Find the queues that have files, and which topics were removed.

        Returns what is wrong with queues whose files are missing or have a wrong size: like those
        in ``without``, they are not loaded and seem to be empty.
        """
        self.removed.load()
        damaged = {}
        for topic, queue_id in queue_directories(self.files, self.directory):
            queue = self._add(topic, queue_id)
            if queue.key not in without:
                try:
                    queue.load()
                except BrokenRow as error:
                    damaged[queue.key] = error
        return damaged

    def mark_waiting(
        self, queue: ConsumeQueue, store_timestamp_ms: int, position: PhysicalOffset
    ) -> None:
        """Record that a queue has unwritten units, and the message of the first."""
        queue.is_waiting = True
        self._waiting[queue] = Waiting(self.clock.monotonic_ms(), store_timestamp_ms, position)

    @property
    def written_to(self) -> PhysicalOffset:
        """Position up to which everything entered is in files."""
        oldest = self.oldest_waiting()
        return self.entered_to if oldest is None else oldest[1].physical_offset

    def oldest_waiting(self) -> tuple[ConsumeQueue, Waiting] | None:
        return next(iter(self._waiting.items()), None)

    def write_pending(self, queue: ConsumeQueue, touched: dict[Path, int], new: set[Path]) -> None:
        """Write a queue's pending units; add files to be synced, and new ones."""
        queue.write_pending(touched, new)
        queue.is_waiting = False
        self._waiting.pop(queue, None)

    def remove(self, queue: ConsumeQueue) -> None:
        """Delete a queue with its files."""
        queue.destroy()
        self._waiting.pop(queue, None)
        del self._queues[queue.key]
        siblings = self._by_topic[queue.topic]
        del siblings[queue.queue_id]
        if not siblings:
            del self._by_topic[queue.topic]
        del self._by_record[queue.topic.encode(), queue.queue_id]

    def remove_topic(
        self, topic: str, end: PhysicalOffset, log_min: PhysicalOffset, *, is_deleted: bool
    ) -> None:
        """Delete a topic's queues, and ignore its messages in the log up to a position.

        Queues with messages after the position have no others, and stay.
        """
        queues = [queue for queue in self if queue.topic == topic and queue.physical_end <= end]
        if queues or is_deleted:
            # First: killed in between, the next start finishes this and restores nothing.
            self.removed.add(topic.encode(), log_min, end)
        for queue in queues:
            self.remove(queue)

    def _add(self, topic: str, queue_id: int) -> ConsumeQueue:
        directory = self.directory / topic / str(queue_id)
        segments = Segments(directory, self.segment_bytes, self.files, self.spare)
        queue = ConsumeQueue(topic, queue_id, segments, self.files, self.open_files)
        self._queues[queue.key] = queue
        self._by_topic.setdefault(topic, {})[queue_id] = queue
        self._by_record[topic.encode(), queue_id] = queue
        return queue


def queue_directories(files: Files, directory: Path) -> list[tuple[str, int]]:
    """Return topic and id of the queues that have a directory, sorted."""
    found = []
    for topic in files.entries(directory):
        for queue in files.entries(topic):
            if not queue.name.isdecimal():
                raise StoreDamaged(f"{queue} is not a store file: move it away")
            found.append((topic.name, int(queue.name)))
    return sorted(found)
