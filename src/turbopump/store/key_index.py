"""The key index: messages by unique id and by key, in files of limited size.

Entries wait in memory and are added in batches; like the queues, they can be rebuilt from the log.
"""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct

from turbopump.clock import Clock, local_time
from turbopump.core import Records, index_hash
from turbopump.errors import StoreDamaged
from turbopump.machine.files import SPARE_NAME, Files, OpenFiles, create_full_size
from turbopump.message import PhysicalOffset
from turbopump.store.checkpoint import Checkpoint
from turbopump.store.config import StoreConfig
from turbopump.store.consume_queue import EntryAt
from turbopump.store.damage import DamageLog
from turbopump.store.index_file import NAME_DIGITS, IndexFile, IndexHeader, KeySearch
from turbopump.store.outcomes import Cold
from turbopump.store.segments import own_entries

RESULTS_MAX = 64
PENDING_MAX = 1024
"""Keys that may wait in memory."""

_SLOTS_INTERVAL_MS = 10_000
"""How often slots are written: up to 20 MB if many messages have arrived."""


class KeyPositions(Struct, frozen=True):
    """Where messages with the hash of a key are, oldest first, without repeats."""

    positions: list[int]
    is_complete: bool
    """Whether everything was searched, or enough was found."""


class KeyIndex:
    """All files of the index, oldest first; only the newest is extended."""

    def __init__(
        self,
        directory: Path,
        config: StoreConfig,
        clock: Clock,
        files: Files,
        open_files: OpenFiles,
        spare: Path,
    ) -> None:
        self.directory = directory
        self._config = config
        self._clock = clock
        self._files = files
        self._open_files = open_files
        self._spare = spare
        self._index_files: list[IndexFile] = []
        self._touched: set[Path] = set()
        self._new: set[Path] = set()
        # Of the keys that wait to be written.
        self._hashes = array("i")
        self._positions = array("q")
        self._times_ms = array("q")
        self._replayed_to = PhysicalOffset(-1)
        self._slots_written_ms = clock.monotonic_ms()

    @property
    def files(self) -> tuple[IndexFile, ...]:
        return tuple(self._index_files)

    def crowded(self) -> bool:
        """Whether enough keys wait to be worth a write."""
        return len(self._hashes) >= PENDING_MAX

    @property
    def newest_header(self) -> IndexHeader | None:
        """The header of the newest file that has entries; None if the index is empty."""
        used = (file.header for file in reversed(self.good_files) if file.header.count > 1)
        return next(used, None)

    @property
    def good_files(self) -> list[IndexFile]:
        """The undamaged files."""
        return [file for file in self._index_files if not file.is_damaged]

    @property
    def end_offset(self) -> int:
        """Position of the newest message in the index; -1 if it is empty."""
        header = self.newest_header
        return -1 if header is None else header.end_offset

    @property
    def sealed_ms(self) -> int:
        """Store timestamp that full files reach: those never change any more."""
        full = [file.header.end_ms for file in self.good_files if file.room <= 0]
        return max(full, default=0)

    def load(self) -> None:
        """Find the files."""
        self._files.remove(self.directory / SPARE_NAME)
        for path in own_entries(self._files, self.directory, is_index_name):
            file = self._file(path)
            found = self._files.file_size(path)
            if found != file.size:
                raise StoreDamaged(
                    f"{path} has {found} bytes instead of {file.size}:"
                    " delete it, or set the numbers of slots and entries the store was created with"
                )
            file.load_header()
            self._index_files.append(file)
        self._replayed_to = PhysicalOffset(self.end_offset)

    def judge(
        self, entry_at: EntryAt, log_min: PhysicalOffset, log_end: PhysicalOffset, damage: DamageLog
    ) -> None:
        """Find out which files are not reliable, one by one."""
        for file in self._index_files:
            reason = file.header_damage(entry_at, log_min, log_end)
            if reason is not None:
                file.is_damaged = True
                damage.bad_index_file(file.path, reason)
        self._replayed_to = PhysicalOffset(self.end_offset)

    def discard_newest_damaged(self) -> None:
        """Delete damaged files after the last intact one: their messages are entered again."""
        while self._index_files and self._index_files[-1].is_damaged:
            self._delete(self._index_files[-1])

    def repair(self, checkpoint: Checkpoint, log_end: PhysicalOffset) -> None:
        """After a crash, repair the files that were being written, and delete empty ones."""
        for file in self.good_files:
            header = file.header
            on_disk = (
                header.end_offset < checkpoint.end
                if checkpoint.end
                else header.end_ms <= checkpoint.index_ms
            )
            if file.room <= 0 and on_disk and header.end_offset < log_end:
                continue
            file.repair(log_end)
            if file.header.count <= 1:
                self._delete(file)
        # The last message may lack some of its keys; entered twice, it is still found once.
        self._replayed_to = PhysicalOffset(self.end_offset - 1)

    def add(self, records: Records) -> None:
        """Enter messages under their keys, unless already entered, as after a replay."""
        if records.physical_offset <= self._replayed_to:
            records = records[bisect_right(records.positions(), self._replayed_to) :]
        hashes, positions, times_ms = records.keys()
        self._hashes += hashes
        self._positions += positions
        self._times_ms += times_ms

    def absorb(self) -> None:
        """Move pending keys into files; the slots of the newest stay in memory."""
        pending = self._hashes, self._positions, self._times_ms
        while self._hashes:
            file = self._file_with_room()
            room = file.room
            file.extend(*(np.array(each[:room], np.int64) for each in pending))
            for each in pending:
                del each[:room]
            self._touched.add(file.path)

    def write_pending(
        self, touched: dict[Path, int], new: set[Path], *, with_slots: bool = True
    ) -> None:
        """Write everything; add the files to be synced, and the new ones.

        Slots are scattered over their table: written rarely, many share a page. Until then they may
        be omitted, unless the file is full: slots of full files are not rebuilt after a crash.
        """
        self.absorb()
        if self._index_files and not self._index_files[-1].is_damaged:
            newest, now_ms = self._index_files[-1], self._clock.monotonic_ms()
            is_due = now_ms - self._slots_written_ms >= _SLOTS_INTERVAL_MS
            if is_due:
                self._slots_written_ms = now_ms
            if newest.write_out(with_slots=with_slots or is_due or newest.room <= 0):
                self._touched.add(newest.path)
        touched.update(dict.fromkeys(self._touched, 0))
        new |= self._new
        self._touched, self._new = set(), set()

    def search(
        self, topic: str, key: str, count_max: int, begin_ms: int, end_ms: int, entries_max: int
    ) -> Iterator[KeyPositions | Cold | None]:
        """Find messages with the key's hash, the newest if there are more than wanted.

        Yields None before each slice, `Cold` before it reads what is not in memory, and finally
        what was found when ``entries_max`` were examined, or all were.
        """
        with contextlib.suppress(OSError):
            # A full disk delays new entries; older ones can still be searched.
            self.absorb()
        count_max = min(count_max, RESULTS_MAX)
        search = KeySearch(index_hash(topic, key), begin_ms, end_ms, count_max, entries_max)
        yield None
        for file in reversed(self.good_files):
            if len(search.found) >= count_max or search.is_stopped:
                break
            if file.header.overlaps(begin_ms, end_ms):
                for paused in file.search(search):
                    yield paused
                    if file not in self._index_files:
                        break  # Deleted meanwhile, with its messages.
            if file.header.begin_ms < begin_ms:
                break
        yield KeyPositions(sorted(set(search.found)), is_complete=not search.is_stopped)

    def rewrite(self, path: Path) -> bool:
        """Rewrite a file whose sync has failed; False if it has lost entries."""
        return all(file.rewrite() for file in self.good_files if file.path == path)

    def clear(self) -> None:
        """Delete all files."""
        for file in self.files:
            self._delete(file)

    def drop_before(self, log_min: PhysicalOffset) -> None:
        """Delete files whose messages are all deleted; the newest stays, to be extended."""
        while len(self._index_files) > 1:
            first, second = self._index_files[:2]
            # The end in a damaged header is not reliable.
            end = second.header.begin_offset - 1 if first.is_damaged else first.header.end_offset
            if end >= log_min or (first.is_damaged and second.is_damaged):
                break
            self._delete(first)

    def _file_with_room(self) -> IndexFile:
        if self._index_files and not self._index_files[-1].is_damaged:
            newest = self._index_files[-1]
            if newest.room > 0:
                return newest
            newest.seal()
        self._files.make_directory(self.directory)
        file = self._file(self._free_path())
        fd = self._open_files.retry_on_emfile(
            lambda: create_full_size(self._files, file.path, file.size, self._spare)
        )
        self._open_files.adopt(file.path, fd)
        self._index_files.append(file)
        self._new.add(file.path)
        return file

    def _file(self, path: Path) -> IndexFile:
        config = self._config
        return IndexFile(
            path, config.index_slots, config.index_entries, self._files, self._open_files
        )

    def _free_path(self) -> Path:
        """Name a file by the time; later than the newest one's name, whatever the clock says."""
        # Local time, as in Apache RocketMQ's file names.
        moment = local_time(self._clock.now_ms())
        name = f"{moment:%Y%m%d%H%M%S}{moment.microsecond // 1000:03d}"
        if self._index_files and name <= self._index_files[-1].path.name:
            name = f"{int(self._index_files[-1].path.name) + 1:0{NAME_DIGITS}d}"
        return self.directory / name

    def _delete(self, file: IndexFile) -> None:
        self._open_files.close(file.path)
        self._files.remove(file.path)
        self._index_files.remove(file)


def is_index_name(name: str) -> bool:
    """Whether a file's name is a timestamp, as those of index files are."""
    return len(name) == NAME_DIGITS and name.isdecimal()
