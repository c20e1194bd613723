"""Queues with missing or wrongly sized files: set aside at a start, rebuilt from the log.

The damaged files are in ``repair-unfinished`` until the new ones are on disk, then in
``repair-<time>``: killed in between, the next start begins again with what it finds there.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from turbopump.clock import Clock
from turbopump.errors import StoreDamaged
from turbopump.machine.files import Files, copy_tree, remove_tree
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.config import UNIT_BYTES
from turbopump.store.consume_queue import QueueKey
from turbopump.store.directory import StoreDirectory
from turbopump.store.queues import Queues, queue_directories
from turbopump.store.segments import segment_files
from turbopump.store.survey import numbered_files, used_units

_log = logging.getLogger(__name__)

_GAP_FILES_MAX = 10_000
"""A file further beyond the others has a wrong name, and does not show where the queue ends."""


@dataclass(eq=False)
class QueueRebuild:
    """The queues of one store that one start rebuilds."""

    directory: StoreDirectory
    queues: Queues
    segment_bytes: int
    files: Files
    clock: Clock

    def __post_init__(self) -> None:
        self._damaged: tuple[str, ...] = ()
        self._ends: dict[QueueKey, int] = {}

    def load_queues(self) -> None:
        """Load all queues; changes nothing in the files of damaged ones.

        Raises StoreDamaged when it is the configured file size that is wrong.
        """
        begun = queue_directories(self.files, self._aside_queues)
        damaged = self.queues.load(without=begun)
        if damaged:
            self._check_size(next(iter(damaged.values())))
        self._damaged = tuple(map(str, damaged.values()))
        for key in (*damaged, *begun):
            self._ends[key] = max(map(self._end_of, self._places(key)))

    @property
    def is_needed(self) -> bool:
        return bool(self._ends)

    def set_aside(self) -> None:
        """Move the files of damaged queues away; the log replaces them."""
        for reason in self._damaged:
            _log.error("damaged queue, to be rebuilt from the log: %s", reason)
        for key in self._ends:
            old, aside = self._places(key)
            if self.files.exists(aside):
                # A killed start left an unfinished queue.
                remove_tree(self.files, old)
            elif self.files.exists(old):
                self.files.make_directory(aside.parent)
                self._move(old, aside)
                self.files.sync_directory(aside.parent)
                self.files.sync_directory(old.parent)

    def keep_ends(self, log_end: PhysicalOffset) -> None:
        """Keep each queue's end after offsets in use, though their messages have expired."""
        for (topic, queue_id), end in self._ends.items():
            queue = self.queues.for_record(topic.encode(), queue_id)
            if queue.max_offset < end:
                queue.fill_to(QueueOffset(end))
                if not queue.is_waiting:
                    self.queues.mark_waiting(queue, 0, log_end)

    def finish(self) -> None:
        """Record that the new files are on disk."""
        if self._ends:
            backup = self.directory.new_backup(self.clock.now_ms())
            self.files.rename(self.directory.unfinished_repair, backup)
            self.files.sync_directory(self.directory.root)
            queues = ", ".join(f"{topic}/{queue_id}" for topic, queue_id in self._ends)
            _log.warning("rebuilt queues: %s; their damaged files are in %s", queues, backup)
            self._ends.clear()

    @property
    def _aside_queues(self) -> Path:
        return self.directory.unfinished_repair / self.directory.queues.name

    def _places(self, key: QueueKey) -> tuple[Path, Path]:
        """Return the directory of a queue, and where its damaged files are set aside."""
        name = Path(key[0], str(key[1]))
        return self.directory.queues / name, self._aside_queues / name

    def _check_size(self, error: StoreDamaged) -> None:
        """Refuse to rebuild all queues of a store that was created with files of another size."""
        sizes = Counter(
            size
            for key in queue_directories(self.files, self.directory.queues)
            for _, size in segment_files(self.files, self._places(key)[0])
        )
        del sizes[0]
        most = max(sizes, key=sizes.__getitem__, default=0)
        if sizes[most] > max(1, sizes[self.segment_bytes]):
            raise StoreDamaged(
                f"{error}. If the configured size is right, move {self.directory.queues} away:"
                " all queues are then rebuilt from the log"
            )

    def _end_of(self, directory: Path) -> int:
        """Return the offset after the last remaining unit of a queue."""
        size, end, reached = self.segment_bytes, 0, None
        for path, start, _ in numbered_files(self.files, directory, []):
            is_likely = reached is None or start - reached <= _GAP_FILES_MAX * size
            if start % size == 0 and is_likely:
                count = min(len(used_units(self.files, path)[0]), size // UNIT_BYTES)
                end = max(end, start // UNIT_BYTES + count) if count else end
                reached = start
        return end

    def _move(self, old: Path, new: Path) -> None:
        try:
            self.files.rename(old, new)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            # The queues are on a different disk.
            part = self.directory.unfinished_repair / "copy"
            remove_tree(self.files, part)
            copy_tree(self.files, old, part)
            self.files.rename(part, new)
            remove_tree(self.files, old)
