"""What follows the log on disk: queue units and index entries, written late and in batches.

No acknowledgement depends on them. The checkpoint records how far the files are known to be
complete; after a crash, the rest is rebuilt from the log.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from turbopump.clock import Clock
from turbopump.machine import Machine
from turbopump.machine.files import Files, sync_path
from turbopump.message import PhysicalOffset
from turbopump.store.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from turbopump.store.commit_log import CommitLog
from turbopump.store.consume_queue import ConsumeQueue
from turbopump.store.key_index import KeyIndex
from turbopump.store.queues import Queues

_QUEUES_PER_RUN_MAX = 256

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Unsynced:
    """Files that were written, each from a position on, and not synced."""

    touched: dict[Path, int] = field(default_factory=dict)
    new: set[Path] = field(default_factory=set)
    repairs: bool = False
    """Whether it includes everything for which an earlier sync failed, rewritten."""

    def add(self, other: Unsynced) -> None:
        """Merge another one."""
        for path, position in other.touched.items():
            self.touched[path] = min(position, self.touched.get(path, position))
        self.new |= other.new


class WriteBehind:
    """Writes units and entries (owner's thread), then syncs them (flusher's thread)."""

    def __init__(
        self,
        machine: Machine,
        checkpoint_path: Path,
        log: CommitLog,
        queues: Queues,
        index: KeyIndex | None,
        crowded: list[ConsumeQueue],
    ) -> None:
        self._files = files = machine.files
        self._clock = clock = machine.clock
        self._path = checkpoint_path
        self._log = log
        self._queues = queues
        self._index = index
        self._crowded = crowded
        self._unsynced = Unsynced()
        self._lost: Unsynced | None = None
        self._unrepairable = False
        self._syncer = FileSyncer(files, clock, checkpoint_path.parent)
        # Both threads advance the checkpoint: the flusher for the log, its jobs for the rest.
        self._lock = machine.background.lock()
        self.checkpoint = Checkpoint()
        self.failure: OSError | None = None
        """Why files may lack what was written to them, until that is rewritten."""

    def load(self) -> None:
        root = self._path.parent
        self._syncer.open((root, root / "consumequeue", root / "index"))
        self.checkpoint = read_checkpoint(self._files, self._path)

    def close(self) -> None:
        self._syncer.close()

    def crowded(self) -> bool:
        """Whether the backlog should be written."""
        return bool(self._crowded) or (self._index is not None and self._index.crowded())

    def spill(self) -> None:
        """Write the backlog, so that memory stays bounded."""
        while self._crowded:
            self._write_queue(self._crowded[-1])
            self._crowded.pop()
        if self._index is not None and self._index.crowded():
            self._index.absorb()

    def try_again(self) -> None:
        """Write the backlog, and the queue that has waited longest, which may have failed."""
        self.spill()
        oldest = self._queues.oldest_waiting()
        if oldest is not None:
            self._write_queue(oldest[0])

    def write_waiting(self, before_ms: int) -> None:
        """Write some of the queues that have waited since before a timestamp, and the index."""
        for _ in range(_QUEUES_PER_RUN_MAX):
            oldest = self._queues.oldest_waiting()
            if oldest is None or oldest[1].since_ms > before_ms:
                break
            self._write_queue(oldest[0])
        self._write_index(with_slots=False)
        self._write_lost()

    def write_all(self, time_max_ms: int | None = None) -> None:
        """Write everything; raise if it takes too long, as creating thousands of files does."""
        started_ms = self._clock.monotonic_ms()
        while (oldest := self._queues.oldest_waiting()) is not None:
            if time_max_ms is not None and self._clock.monotonic_ms() - started_ms > time_max_ms:
                raise TimeoutError(
                    f"writing them took longer than {time_max_ms} ms; the next start does the rest"
                )
            self._write_queue(oldest[0])
        self._write_index(with_slots=True)
        self._write_lost()

    def rewrite_from(self, position: PhysicalOffset) -> None:
        """Rewrite and sync the units of messages from a position on.

        A killed process may have left them in memory only, even if a sync would succeed: a failed
        sync drops what it could not write. Units and names that a later power failure restores
        would belong to other messages.
        """
        for queue in self._queues:
            rewritten = queue.rewrite_since(position)
            self._unsynced.add(Unsynced(rewritten, set(rewritten)))
        # Including those of removed queues and topics.
        directory = self._queues.directory
        self._unsynced.new.update(
            each / "removed" for each in (directory, *self._files.entries(directory))
        )

    def sync_job(self, entered_ms: int, time_max_ms: int | None = None) -> Callable[[], None]:
        """Return the flusher's job that makes the files reliable.

        ``entered_ms`` is the store timestamp of the last message entered into queues and index.
        What takes longer than the given time counts as failed.
        """
        unsynced, self._unsynced = self._unsynced, Unsynced()
        return partial(self._sync, unsynced, self._reached(entered_ms), time_max_ms)

    def needs_sync(self, entered_ms: int) -> bool:
        """Whether `sync_job` would do anything."""
        unsynced = self._unsynced
        has_files = bool(unsynced.touched or unsynced.new or unsynced.repairs)
        return has_files or not self.is_reached(self._reached(entered_ms))

    def _reached(self, entered_ms: int) -> Checkpoint:
        oldest = self._queues.oldest_waiting()
        queues_ms = entered_ms if oldest is None else oldest[1].store_timestamp_ms - 1
        index_ms = self._index.sealed_ms if self._index is not None else 0
        return Checkpoint(0, queues_ms, index_ms, queues_end=self._queues.written_to)

    def fit(self, log_end: PhysicalOffset) -> None:
        """Follow a log that is about to be cut: what is stored there next is not on disk yet."""
        self._replace(self.checkpoint.within(log_end))

    def forget(self) -> None:
        """Follow a log that is about to be dropped: nothing is known to be on disk any more."""
        self._replace(Checkpoint())

    def _replace(self, fitting: Checkpoint) -> None:
        if fitting != self.checkpoint:
            write_checkpoint(self._files, self._path, fitting)
            self.checkpoint = fitting

    def reach(self, reached: Checkpoint) -> None:
        """Advance the checkpoint and write it; on any thread."""
        with self._lock:
            later = self.checkpoint.joined(reached)
            if later == self.checkpoint or self.failure is not None:
                return
            try:
                write_checkpoint(self._files, self._path, later)
            except OSError as error:
                # An old checkpoint only costs time after a crash; the next one may work.
                _log.warning("the checkpoint could not be written: %s", error)
            else:
                self.checkpoint = later

    def is_reached(self, reached: Checkpoint) -> bool:
        """Whether the written checkpoint already includes this one."""
        return self.checkpoint.joined(reached) == self.checkpoint

    def _sync(self, unsynced: Unsynced, reached: Checkpoint, time_max_ms: int | None) -> None:
        """Sync files that follow the log; on the flusher's thread."""
        try:
            self._syncer.sync(unsynced.touched, unsynced.new, time_max_ms)
        except OSError as error:
            self.fail(error, unsynced)
            return
        with self._lock:
            if unsynced.repairs and self._lost is None:
                self.failure = None
        self.reach(reached)

    def fail(self, error: OSError, unsynced: Unsynced | None = None) -> None:
        """Record that files may be incomplete: they are rewritten, or the log is replayed."""
        if self.failure is None:
            _log.error("queues or index may be incomplete on disk: %s", error)
        with self._lock:
            self.failure = error
            if unsynced is not None:
                self._lost = self._lost or Unsynced()
                self._lost.add(unsynced)

    def _write_lost(self) -> None:
        """Rewrite what a failed sync may have dropped, so that the next sync is reliable."""
        with self._lock:
            lost, self._lost = self._lost, None
        if lost is None:
            return
        try:
            rewritten = [self._rewrite(*file) for file in lost.touched.items()]
        except OSError as error:
            self.fail(error, lost)
            raise
        self._unsynced.add(lost)
        # What memory has lost as well is left to the next start.
        self._unrepairable |= not all(rewritten)
        self._unsynced.repairs = not self._unrepairable

    def _rewrite(self, path: Path, position: int) -> bool:
        """Rewrite a file's bytes if memory still matches the log; return whether it does."""
        if self._index is not None and path.parent == self._index.directory:
            return self._index.rewrite(path)
        queue = self._queues.find(path.parent.parent.name, int(path.parent.name))
        return queue is None or queue.rewrite(path, position, self._log.entry_at)

    def _write_queue(self, queue: ConsumeQueue) -> None:
        self._queues.write_pending(queue, self._unsynced.touched, self._unsynced.new)

    def _write_index(self, *, with_slots: bool) -> None:
        if self._index is not None:
            touched, new = self._unsynced.touched, self._unsynced.new
            self._index.write_pending(touched, new, with_slots=with_slots)


_ONE_BY_ONE_MAX = 64
"""Up to this many files and directories are synced one by one, sparing the rest of the disk."""


class FileSyncer:
    """Syncs files, or their whole file systems; `sync` runs on the flusher's thread."""

    def __init__(self, files: Files, clock: Clock, root: Path) -> None:
        self._files = files
        self._clock = clock
        self._root = root
        self._by_device: dict[int, int] = {}

    def open(self, directories: Iterable[Path]) -> None:
        """Open file systems before anything is written: from then on losses are reported."""
        for directory in directories:
            device = self._files.device(directory)
            if device is not None and device not in self._by_device:
                self._by_device[device] = self._files.open_directory(directory)

    def close(self) -> None:
        while self._by_device:
            self._files.close(self._by_device.popitem()[1])

    def sync(
        self, touched: Iterable[Path], new: Iterable[Path], time_max_ms: int | None = None
    ) -> None:
        """Sync files and the names of new ones; raise if that takes too long."""
        started_ms = self._clock.monotonic_ms()
        files, directories = set(touched), self._parents(new)
        if len(files) + len(directories) > _ONE_BY_ONE_MAX:
            synced = self._sync_file_systems(files | directories)
            files -= synced
            directories -= synced
        for path in sorted(files | directories):
            if time_max_ms is not None and self._clock.monotonic_ms() - started_ms > time_max_ms:
                raise TimeoutError(f"the disk took longer than {time_max_ms} ms")
            if path in files:
                sync_path(self._files, path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    # Its topic has been deleted meanwhile.
                    self._files.sync_directory(path)

    def _sync_file_systems(self, paths: Iterable[Path]) -> set[Path]:
        """Sync whole known file systems; return the paths that lie on them."""
        by_device: dict[int, list[Path]] = {}
        for path in paths:
            device = self._files.device(path)
            if device is not None:
                by_device.setdefault(device, []).append(path)
        synced: set[Path] = set()
        for device, there in by_device.items():
            fd = self._by_device.get(device)
            if fd is not None and self._files.sync_file_system(fd, len(there)):
                synced.update(there)
        return synced

    def _parents(self, paths: Iterable[Path]) -> set[Path]:
        found: set[Path] = set()
        for path in paths:
            directory = path.parent
            while directory not in found:
                found.add(directory)
                if directory == self._root:
                    break
                directory = directory.parent
        return found
