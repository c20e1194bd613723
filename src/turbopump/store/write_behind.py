"""What follows the log on disk: queue units and index entries, written late and in one go.

Nothing here is needed for an acknowledgement. The checkpoint says how far the files are surely
complete; whatever lies behind it is made again from the log after a crash.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from pathlib import Path

from turbopump.store.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from turbopump.store.consume_queue import ConsumeQueue
from turbopump.store.files import Files, sync_path
from turbopump.store.key_index import KeyIndex
from turbopump.store.queues import Queues

_QUEUES_PER_RUN_MAX = 256

_log = logging.getLogger(__name__)


class WriteBehind:
    """Writes units and entries (owner's thread), then syncs them (flusher's thread)."""

    def __init__(
        self,
        files: Files,
        checkpoint_path: Path,
        queues: Queues,
        index: KeyIndex | None,
        crowded: list[ConsumeQueue],
    ) -> None:
        self._files = files
        self._path = checkpoint_path
        self._queues = queues
        self._index = index
        self._crowded = crowded
        self._touched: set[Path] = set()
        self._new: set[Path] = set()
        # Both threads move the checkpoint: the flusher for the log, its jobs for the rest.
        self._lock = threading.Lock()
        self.checkpoint = Checkpoint()
        self.failure: OSError | None = None
        """Why files may lack what was written to them; only a replay of the log mends that."""

    def load(self) -> None:
        self.checkpoint = read_checkpoint(self._path)

    def crowded(self) -> bool:
        """Whether so much has piled up that it should be written."""
        return bool(self._crowded) or (self._index is not None and self._index.crowded())

    def spill(self) -> None:
        """Write what has piled up, so that memory stays bounded."""
        while self._crowded:
            self._write_queue(self._crowded[-1])
            self._crowded.pop()
        if self._index is not None and self._index.crowded():
            self._index.absorb()

    def write_waiting(self, before_ms: int, *, all_of_them: bool = False) -> None:
        """Write queues that began to wait before a moment, some at a time, and the index."""
        budget = len(self._queues) if all_of_them else _QUEUES_PER_RUN_MAX
        while budget > 0:
            oldest = self._queues.oldest_waiting()
            if oldest is None or oldest[1].since_ms > before_ms:
                break
            self._write_queue(oldest[0])
            budget -= 1
        self._write_index()

    def sync_job(self, entered_ms: int) -> SyncJob:
        """Return what the flusher has to do so that the files may be relied upon.

        ``entered_ms`` is the store time of the last message entered into queues and index.
        """
        oldest = self._queues.oldest_waiting()
        queues_ms = entered_ms if oldest is None else oldest[1].store_timestamp_ms - 1
        index_ms = self._index.sealed_ms if self._index is not None else 0
        job = SyncJob(self, self._touched, self._new, Checkpoint(0, queues_ms, index_ms))
        self._touched, self._new = set(), set()
        return job

    def reach(self, reached: Checkpoint) -> None:
        """Move the checkpoint on and write it; on any thread."""
        with self._lock:
            later = self.checkpoint.joined(reached)
            if later == self.checkpoint or self.failure is not None:
                return
            try:
                write_checkpoint(self._files, self._path, later)
            except OSError as error:
                # An old checkpoint costs time after a crash, nothing else; the next one may work.
                _log.warning("the checkpoint could not be written: %s", error)
            else:
                self.checkpoint = later

    def sync(self, touched: Iterable[Path], new: Iterable[Path]) -> None:
        """Force files and the names of new ones to disk."""
        for path in sorted(touched):
            sync_path(self._files, path)
        root = self._path.parent
        directories = {
            parent for path in new for parent in path.parents if parent.is_relative_to(root)
        }
        for directory in sorted(directories):
            with contextlib.suppress(FileNotFoundError):
                # Its topic has been deleted meanwhile.
                self._files.sync_directory(directory)

    def fail(self, error: OSError) -> None:
        """Remember that files may be incomplete; the next start will replay the log."""
        if self.failure is None:
            _log.error("queues or index could not be forced to disk: %s", error)
        self.failure = error

    def _write_queue(self, queue: ConsumeQueue) -> None:
        self._queues.write_pending(queue, self._touched, self._new)

    def _write_index(self) -> None:
        if self._index is not None:
            self._index.write_pending(self._touched, self._new)


class SyncJob:
    """One round of the flusher over files that were written behind the log."""

    def __init__(
        self, owner: WriteBehind, touched: set[Path], new: set[Path], reached: Checkpoint
    ) -> None:
        self._owner = owner
        self._touched = touched
        self._new = new
        self._reached = reached

    def __call__(self) -> None:
        try:
            self._owner.sync(self._touched, self._new)
        except OSError as error:
            self._owner.fail(error)
        else:
            self._owner.reach(self._reached)
