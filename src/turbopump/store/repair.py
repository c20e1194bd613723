"""Makes a store that has lost messages startable again, with as few changes as possible.

What is left keeps its position and queue offset. Blank files replace missing log files, units of
lost messages are marked, so that readers skip them, and new messages get offsets after the lost
ones: no group skips any of them because of its committed offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from turbopump.clock import Clock
from turbopump.errors import InvalidArgument, StoreDamaged
from turbopump.machine.files import Files, closing, copy_file, create_full_size, write_file
from turbopump.machine.text_files import save_text
from turbopump.message import PhysicalOffset
from turbopump.store.checkpoint import read_checkpoint, write_checkpoint
from turbopump.store.config_files import load_table
from turbopump.store.consume_queue import FILLER_SIZE
from turbopump.store.directory import StoreDirectory
from turbopump.store.losses import Losses, find_losses, lost_in, queue_units
from turbopump.store.outcomes import Units
from turbopump.store.segments import segment_path
from turbopump.wire.bodies import ConsumerOffsets, DelayOffsets
from turbopump.wire.names import SCHEDULE_TOPIC
from turbopump.wire.record import BLANK_BYTES, encode_blank
from turbopump.wire.schema import Body

_BLANK_FILES_MAX = 10_000
"""More missing files are not a loss, but a file with a wrong name."""


class StoppedStore:
    """A store directory that no broker has open; get one from `stopped_store`."""

    def __init__(self, directory: StoreDirectory, files: Files, clock: Clock) -> None:
        self._directory = directory
        self._files = files
        self._clock = clock

    def losses(self, segment_bytes: int | None = None) -> Losses | None:
        """Return what is missing; None if the store can be started."""
        return find_losses(self._files, self._directory.root, segment_bytes)

    def repair(self, losses: Losses) -> Path:
        """Accept a loss; return the backup directory of what was changed.

        Killed halfway, the store is either refused as before, or complete.
        """
        missing = sum(end - start for start, end in losses.missing) // losses.segment_bytes
        if missing > _BLANK_FILES_MAX:
            raise StoreDamaged(
                f"{self._directory.commit_log} lacks {missing:,} files between others:"
                " move away the one with a wrong name"
            )
        backup = self._directory.new_backup(self._clock.now_ms())
        self._files.make_directory(backup)
        if losses.has_log:
            self._mark_units(losses, backup)
        if losses.resume_at:
            self._lower_offsets(losses, backup)
        # From here on, the next start reads the log as after a crash.
        self._directory.mark_running()
        self._close_log(losses, backup)
        self._write_checkpoint(losses, backup)
        return backup

    def _keep(self, path: Path, backup: Path) -> None:
        kept = backup / path.relative_to(self._directory.root)
        self._files.make_directory(kept.parent)
        if not self._files.exists(kept):
            copy_file(self._files, path, kept)

    # --- queues and offsets -----------------------------------------------------------------------

    def _mark_units(self, losses: Losses, backup: Path) -> None:
        """Make readers skip lost messages, in queues that keep their length."""
        for queue in queue_units(self._files, self._directory.queues):
            for path, _, units in queue.files:
                lost = lost_in(units, losses.lost)
                if lost.any():
                    self._keep(path, backup)
                    self._write(path, _marked(units, lost, losses.resume_at))

    def _write(self, path: Path, data: bytes, at: int = 0) -> None:
        with closing(self._files, self._files.open(path)) as fd:
            self._files.write(fd, data, at)
            self._files.sync(fd)

    def _lower_offsets(self, losses: Losses, backup: Path) -> None:
        """Lower group and delay offsets to their queues' ends, or new messages would be skipped."""
        path = self._directory.config / "consumerOffset.json"
        groups = load_table(self._files, path, ConsumerOffsets)
        if groups is not None:
            table = {
                key: _lowered(key.partition("@")[0], offsets, losses)
                for key, offsets in groups.offset_table.items()
            }
            self._save(path, groups, replace(groups, offset_table=table), backup)
        path = self._directory.config / "delayOffset.json"
        delays = load_table(self._files, path, DelayOffsets)
        if delays is not None:
            queues = {level - 1: offset for level, offset in delays.offset_table.items()}
            lowered = _lowered(SCHEDULE_TOPIC, queues, losses)
            levels = {queue_id + 1: offset for queue_id, offset in lowered.items()}
            self._save(path, delays, replace(delays, offset_table=levels), backup)

    def _save(self, path: Path, old: Body, new: Body, backup: Path) -> None:
        if new != old:
            self._keep(path, backup)
            save_text(self._files, path, msgspec.json.format(new.encode(), indent=4).decode())

    # --- the log ----------------------------------------------------------------------------------

    def _close_log(self, losses: Losses, backup: Path) -> None:
        """Make the files contiguous again; where nothing can be read, readers continue after it."""
        log, size = self._directory.commit_log, losses.segment_bytes
        self._files.make_directory(log)
        if not losses.has_log:
            self._create(losses.resume_at, size, b"")
        for start in losses.cut:
            self._grow(start, size)
        if losses.ends_at < losses.resume_at and losses.has_log:
            self._write_blank(PhysicalOffset(losses.ends_at), losses.resume_at, size, backup)
        for gap in losses.missing:
            for start in range(*gap, size):
                self._create(start, size, encode_blank(size))
        self._files.sync_directory(log)

    def _grow(self, start: int, size: int) -> None:
        path = segment_path(self._directory.commit_log, start)
        with closing(self._files, self._files.open(path)) as fd:
            self._files.truncate(fd, size)
            self._files.sync(fd)

    def _create(self, start: int, size: int, data: bytes) -> None:
        path = segment_path(self._directory.commit_log, start)
        fd = create_full_size(self._files, path, size, self._directory.spare)
        with closing(self._files, fd):
            self._files.write(fd, data, 0)
            self._files.sync(fd)

    def _write_blank(self, position: PhysicalOffset, end: int, size: int, backup: Path) -> None:
        """End the scan of a file at a position; what follows stays unchanged."""
        start = position // size * size
        path = segment_path(self._directory.commit_log, start)
        with closing(self._files, self._files.open_to_read(path)) as fd:
            before = self._files.read(fd, BLANK_BYTES, position - start)
        kept = segment_path(backup / "commitlog", position)
        self._files.make_directory(kept.parent)
        write_file(self._files, kept, before)
        self._write(path, encode_blank(end - position), position - start)

    def _write_checkpoint(self, losses: Losses, backup: Path) -> None:
        checkpoint = read_checkpoint(self._files, self._directory.checkpoint)
        if losses.resume_at and checkpoint.log_end > losses.resume_at:
            self._keep(self._directory.checkpoint, backup)
            fitting = checkpoint.within(PhysicalOffset(losses.resume_at))
            write_checkpoint(self._files, self._directory.checkpoint, fitting)


@contextmanager
def stopped_store(root: Path, files: Files, clock: Clock) -> Iterator[StoppedStore]:
    """Lock a store directory, keeping brokers out.

    Raises StoreInUse if one has it open, InvalidArgument if it is not a store.
    """
    directory = StoreDirectory(root, files)
    parts = (directory.commit_log, directory.queues, directory.config)
    if not any(files.exists(part) for part in parts):
        names = ", ".join(part.name for part in parts)
        raise InvalidArgument(f"{root} is not a store: it has none of {names}")
    directory.acquire()
    try:
        yield StoppedStore(directory, files, clock)
    finally:
        directory.release()


def _marked(units: Units, lost: NDArray[np.bool_], resume_at: int) -> bytes:
    """Return units with those of lost messages marked, in a log file that has no others."""
    marked = units.copy()
    marked["size"][lost] = FILLER_SIZE
    if resume_at:
        positions = marked["physical_offset"]
        positions[lost] = np.minimum(positions[lost], resume_at - 1)
    return marked.tobytes()


def _lowered(topic: str, offsets: Mapping[int, int], losses: Losses) -> dict[int, int]:
    """Return offsets in the queues of a topic, none of them after the end of its queue.

    A queue without units begins at 0 with the next message, or is rebuilt from the log.
    """
    return {
        queue_id: min(
            offset, losses.queue_ends.get((topic, queue_id), offset if losses.has_log else 0)
        )
        for queue_id, offset in offsets.items()
    }
