"""Copies a store while its broker runs, as a crash of the broker would leave it.

The order of the copies makes them consistent: the checkpoint first, since what it vouches for is in
the files by then, then the tables, index and queues, then which topics were removed, and last the
log, up to its end at that time.
So nothing in the copy refers to a message that it lacks. What was stored but not entered into the
copied queues is entered at the start of the copy, as after a crash.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from turbopump.errors import InvalidArgument, StoreDamaged, StoreInUse
from turbopump.machine.files import (
    REAL_FILES,
    Files,
    closing,
    copy_file,
    make_directory_durable,
    remove_content,
    sync_path,
)
from turbopump.store.checkpoint import read_checkpoint
from turbopump.store.directory import SET_ASIDE, StoreDirectory, lock_where_supported
from turbopump.store.log_scan import good_entry, is_blank, may_be_torn
from turbopump.store.survey import numbered_files

_COMPARED_BYTES = 64 * 1024

LogFile = tuple[Path, int, int]
"""Path, start and size."""


class Backup(Struct, frozen=True):
    """What a copy contains: the log between two positions, and everything that refers to it."""

    directory: Path
    log_start: int
    log_end: int


def back_up(
    root: Path,
    target: Path,
    on_file: Callable[[], None] = lambda: None,
    files: Files = REAL_FILES,
) -> Backup:
    """Copy a store, running or stopped; ``on_file`` is called after each file of the log.

    The copy grows beside ``target``, which exists only when it is complete.
    """
    directory = StoreDirectory(files.resolve(root), files)
    if not files.is_directory(directory.commit_log):
        raise InvalidArgument(f"{root} must be a store directory, but has no commitlog in it")
    unfinished = target.with_name(f"{target.name}.unfinished")
    _check_place(directory, target, unfinished)
    make_directory_durable(files, unfinished)
    with _locked(files, unfinished):
        remove_content(files, unfinished)
        backup = _Copy(directory, unfinished, files, on_file).run(target)
        files.rename(unfinished, target)
    files.sync_directory(target.parent)
    return backup


def _check_place(directory: StoreDirectory, target: Path, unfinished: Path) -> None:
    """Refuse a place where the copy would replace another one, or the store itself."""
    files, root = directory.files, directory.root
    # Parts of a store may be links to other disks.
    parts = (directory.commit_log, directory.queues, directory.index, directory.config)
    own = (root, *map(files.resolve, parts))
    if any(files.resolve(target).is_relative_to(each) for each in own):
        raise InvalidArgument(f"the backup must be outside of the store {root}, got {target}")
    if files.exists(target):
        raise InvalidArgument(f"{target} exists: name a new directory for the backup")
    grows_in = files.resolve(unfinished)
    if any(each.is_relative_to(grows_in) or grows_in.is_relative_to(each) for each in own):
        raise InvalidArgument(
            f"a backup to {target} would replace {unfinished}, where the store is: name another"
            " directory for the backup"
        )


@contextmanager
def _locked(files: Files, unfinished: Path) -> Iterator[None]:
    """Exclude other backups to the same place: two would complete a mixture of both."""
    with closing(files, files.open_directory(unfinished)) as fd:
        try:
            lock_where_supported(files, fd)
        except BlockingIOError as error:
            raise StoreInUse(f"another backup is written to {unfinished}") from error
        yield


class _Copy:
    def __init__(
        self, directory: StoreDirectory, target: Path, files: Files, on_file: Callable[[], None]
    ) -> None:
        self._directory = directory
        self._target = target
        self._files = files
        self._on_file = on_file

    def run(self, target: Path) -> Backup:
        directory, files = self._directory, self._files
        cuts = self._cuts()
        # Whoever starts the copy recovers as after a crash.
        files.close(files.open_new(self._target / directory.abort.name))
        self._copy_some([directory.checkpoint], self._target)
        self._copy_some(files.entries(directory.config), self._target / directory.config.name)
        self._copy_some(files.entries(directory.index), self._target / directory.index.name)
        # First: the start of the copy rebuilds the queues that are found there.
        self._copy_queues(directory.unfinished_repair / directory.queues.name)
        self._copy_queues(directory.queues)
        # After the queues: the start of the copy deletes those of topics that it names.
        self._copy_some([directory.removed_topics], self._target)
        start, end = self._copy_log(cuts)
        for each in _directories(files, self._target):
            files.sync_directory(each)
        return Backup(target, start, end)

    def _cuts(self) -> set[Path]:
        """Return where the store keeps what it has cut off its log."""
        beside_log = self._files.resolve(self._directory.commit_log).parent
        return {path for path in self._files.entries(beside_log) if path.name.startswith(SET_ASIDE)}

    def _copy_queues(self, queues: Path) -> None:
        to = self._target / queues.relative_to(self._directory.root)
        for topic in self._files.entries(queues):
            for queue in _entries(self._files, topic):
                self._copy_some(_entries(self._files, queue), to / topic.name / queue.name)

    def _copy_some(self, paths: Sequence[Path], to: Path) -> None:
        """Copy files of a directory, in the order of their names, except those that vanish."""
        files = self._files
        files.make_directory(to)
        for number, path in enumerate(paths):
            if not self._copied(path, to / path.name) and path.name.isdecimal():
                # Retention deletes the oldest files first: what was copied before has no sequel.
                for earlier in paths[:number]:
                    files.remove(to / earlier.name)

    def _copied(self, path: Path, new: Path, end: int | None = None) -> bool:
        """Copy a file; return False if it was deleted meanwhile."""
        if not self._files.is_file(path):
            return False
        try:
            copy_file(self._files, path, new, end)
        except FileNotFoundError:
            return False
        sync_path(self._files, new)
        return True

    def _copy_log(self, cuts: Set[Path]) -> tuple[int, int]:
        """Copy the log up to its present end; return where it begins and ends.

        ``cuts`` are those of before the first copy.
        """
        log, to = self._directory.commit_log, self._target / self._directory.commit_log.name
        self._files.make_directory(to)
        found = numbered_files(self._files, log, [])
        end = self._log_end(found)
        tail = self._tail(found, end)
        used = [each for each in found if each[1] < end] or found[:1]
        begin = used[0][1] if used else end
        for number, (path, start, size) in enumerate(used):
            if not self._copied(path, to / path.name, min(size, end - start)):
                # As above: the log begins after it.
                for earlier, *_ in used[:number]:
                    self._files.remove(to / earlier.name)
                begin = start + size
            self._on_file()
        copies = [(to / path.name, start, size) for path, start, size in used]
        # The queues and the checkpoint of the copy may refer to what was cut off before the log.
        if self._cuts() - cuts or self._tail(copies, end) != tail:
            raise StoreDamaged(f"{log} was cut while it was copied: make the backup again")
        return begin, end

    def _log_end(self, found: Sequence[LogFile]) -> int:
        """Return where the last complete record ends."""
        copied = self._target / self._directory.checkpoint.name
        end: int = read_checkpoint(self._files, copied).log_end
        if not found:
            return end
        if not end or not found[0][1] <= end <= found[-1][1] + found[-1][2]:
            # Of a broker that stores no positions: the last file with messages has the end. Damage
            # in earlier ones is not where the log ends.
            end = next((each for each in reversed(found) if self._is_used(each[0])), found[0])[1]
        for path, start, size in found:
            if start <= end < start + size:
                end = self._end_in(path, start, end)
        return end

    def _is_used(self, path: Path) -> bool:
        with closing(self._files, self._files.open_to_read(path)) as fd:
            return any(self._files.read(fd, 8, 0))

    def _end_in(self, path: Path, start: int, position: int) -> int:
        """Return where the last record of a file ends, from the start of one; its end if full."""
        files = self._files
        with (
            closing(files, files.open_to_read(path)) as fd,
            memoryview(files.map(fd, files.size(fd))) as view,
        ):
            at = position - start
            while at < len(view):
                # The broker may be about to write it.
                entry = good_entry(view, at, start, check_crc=True)
                if entry is None or may_be_torn(view, start, entry, None):
                    return start + (len(view) if is_blank(view, at) else at)
                at += entry.size
            return start + at

    def _tail(self, found: Sequence[LogFile], end: int) -> bytes:
        """Return the end of the log, which changes if a slave cuts off what its master lacks."""
        path, start, _ = next((each for each in reversed(found) if each[1] < end), (None, 0, 0))
        if path is None:
            return b""
        at = max(0, end - start - _COMPARED_BYTES)
        with closing(self._files, self._files.open_to_read(path)) as fd:
            return self._files.read(fd, end - start - at, at)


def _entries(files: Files, directory: Path) -> list[Path]:
    """Return the entries of a directory; none if it was deleted meanwhile, with its topic."""
    try:
        return files.entries(directory)
    except FileNotFoundError:
        return []


def _directories(files: Files, path: Path) -> Iterator[Path]:
    """Return all directories below one, those inside first, and the directory itself."""
    inside = (each for each in files.entries(path) if files.is_directory(each))
    return itertools.chain(
        itertools.chain.from_iterable(_directories(files, each) for each in inside), [path]
    )
