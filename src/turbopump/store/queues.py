"""All consume queues of a store, and which of them have units that wait to be written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from turbopump.clock import Clock
from turbopump.errors import InvalidArgument, StoreDamaged
from turbopump.machine.files import Files, OpenFiles
from turbopump.message import PhysicalOffset
from turbopump.store.consume_queue import ConsumeQueue, QueueKey
from turbopump.store.entry_run import is_topic_name
from turbopump.store.removed_topics import RemovedTopics
from turbopump.store.segments import BrokenRow, Segments


class Waiting(Struct, frozen=True):
    """Since when a queue has units that are not in its file, and the first one's message."""

    since_ms: int
    store_timestamp_ms: int
    physical_offset: PhysicalOffset


class _QueuesByRecord(dict[tuple[bytes, int], ConsumeQueue]):
    """Queues by what records have of them; made if need be."""

    def __init__(self, made: Callable[[bytes, int], ConsumeQueue]) -> None:
        super().__init__()
        self._made = made

    def __missing__(self, key: tuple[bytes, int]) -> ConsumeQueue:
        return self._made(*key)


class Queues:
    """The queues by topic and number; made when first used, in memory only until units come."""

    def __init__(
        self,
        directory: Path,
        segment_bytes: int,
        files: Files,
        open_files: OpenFiles,
        spare: Path,
        clock: Clock,
        removed: RemovedTopics,
    ) -> None:
        self._clock = clock
        self.removed = removed
        self.entered_to = PhysicalOffset(0)
        """Position behind the last message entered."""
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._files = files
        self._open_files = open_files
        self._spare = spare
        self._queues: dict[QueueKey, ConsumeQueue] = {}
        self.by_record: Mapping[tuple[bytes, int], ConsumeQueue]
        """The queues of stored or storable messages, by topic and number; made if need be."""
        # Asked several times for each message: without a call for those that exist.
        self.by_record = self._by_record = _QueuesByRecord(self._made)
        # In the order in which they began to wait: the first has the oldest unit.
        self._waiting: dict[ConsumeQueue, Waiting] = {}

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return a queue that exists."""
        return self._queues.get((topic, queue_id))

    def for_record(self, topic: bytes, queue_id: int) -> ConsumeQueue:
        """Return the queue of a stored or storable message, made if need be."""
        return self.by_record[topic, queue_id]

    def _made(self, topic: bytes, queue_id: int) -> ConsumeQueue:
        self.check_name(topic, queue_id)
        return self._make(topic.decode(), queue_id)

    def check_name(self, topic: bytes, queue_id: int) -> None:
        """Refuse a queue that cannot be."""
        if queue_id < 0 or not is_topic_name(topic):
            raise InvalidArgument(
                f"queue {topic!r}, {queue_id}: the topic must be able to name a directory"
                " and the number must not be negative"
            )

    def __iter__(self) -> Iterator[ConsumeQueue]:
        return iter(list(self._queues.values()))

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def physical_end(self) -> PhysicalOffset:
        """Position behind the last message that any queue knows; -1 when there is none."""
        return max((queue.physical_end for queue in self), default=PhysicalOffset(-1))

    def load(self, *, without: Collection[QueueKey] = ()) -> dict[QueueKey, BrokenRow]:
        """Find the queues that have files, and which topics were removed.

        Returns what is wrong with queues of which files are missing or have a wrong size: like
        those in ``without`` they are not loaded, and seem to be empty.
        """
        self.removed.load()
        damaged = {}
        for topic, queue_id in queue_directories(self._files, self.directory):
            queue = self._make(topic, queue_id)
            if queue.key not in without:
                try:
                    queue.load()
                except BrokenRow as error:
                    damaged[queue.key] = error
        return damaged

    def mark_waiting(
        self, queue: ConsumeQueue, store_timestamp_ms: int, position: PhysicalOffset
    ) -> None:
        """Remember that a queue has units to be written, the first for a message."""
        queue.is_waiting = True
        self._waiting[queue] = Waiting(self._clock.monotonic_ms(), store_timestamp_ms, position)

    @property
    def written_to(self) -> PhysicalOffset:
        """Position up to which all that was entered is in files."""
        oldest = self.oldest_waiting()
        return self.entered_to if oldest is None else oldest[1].physical_offset

    def oldest_waiting(self) -> tuple[ConsumeQueue, Waiting] | None:
        return next(iter(self._waiting.items()), None)

    def write_pending(self, queue: ConsumeQueue, touched: dict[Path, int], new: set[Path]) -> None:
        """Write a queue's waiting units; add files to be synced, and new ones."""
        queue.write_pending(touched, new)
        queue.is_waiting = False
        self._waiting.pop(queue, None)

    def remove(self, queue: ConsumeQueue) -> None:
        """Delete a queue with its files."""
        queue.destroy()
        self._waiting.pop(queue, None)
        del self._queues[queue.key]
        del self._by_record[queue.topic.encode(), queue.queue_id]

    def remove_topic(self, topic: str, end: PhysicalOffset, log_min: PhysicalOffset) -> None:
        """Delete a topic's queues; its messages in the log up to a position do not count any more.

        Queues with messages behind the position have only such, and stay.
        """
        queues = [queue for queue in self if queue.topic == topic and queue.physical_end <= end]
        if queues:
            # First: killed in between, the next start finishes this and brings nothing back.
            self.removed.add(topic.encode(), log_min, end)
        for queue in queues:
            self.remove(queue)

    def _make(self, topic: str, queue_id: int) -> ConsumeQueue:
        directory = self.directory / topic / str(queue_id)
        segments = Segments(directory, self._segment_bytes, self._files, self._spare)
        queue = ConsumeQueue(topic, queue_id, segments, self._files, self._open_files)
        self._queues[queue.key] = queue
        self._by_record[topic.encode(), queue_id] = queue
        return queue


def queue_directories(files: Files, directory: Path) -> list[tuple[str, int]]:
    """Return topic and number of the queues that have a directory, sorted."""
    found = []
    for topic in files.entries(directory):
        for queue in files.entries(topic):
            if not queue.name.isdecimal():
                raise StoreDamaged(f"{queue} is not a store file: move it away")
            found.append((topic.name, int(queue.name)))
    return sorted(found)
