"""The disk of a broker in a test: fast, since it forces nothing, and it fails when told to."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from turbopump.store.files import Files
from turbopump.testing.loop import VirtualTimeLoop

_WAIT_REAL_S_MAX = 30.0
"""How long a thread is kept waiting at most, should nobody let it go."""

FileId = tuple[int, int]


@dataclass(slots=True)
class _Unsynced:
    """What a file held before it was written to, since it was last forced to disk."""

    fd: int
    """A descriptor of its own, since the file may be closed, renamed or removed meanwhile."""
    before: list[tuple[int, bytes]] = field(default_factory=list)


_FULLNESS = 0.1


class Disk(Files):
    """Files that survive the process, but not the machine; with switches for what goes wrong.

    ::

        cluster.disk().fail_writes()            # no space left on device
        cluster.disk().sync_ms = 200            # a slow one, in virtual time
        await cluster.crash(lose_unflushed=True)
    """

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self.sync_ms = 0
        """How long it takes to force a file to disk, in virtual time."""
        self.fullness = _FULLNESS
        """How much of it is in use: from 0.9 on, brokers refuse messages."""
        self._loop = loop
        self._write_error: int | None = None
        self._sync_error: int | None = None
        self._is_dead = False
        self._is_stalled = False
        self._is_waiting = False
        self._change = threading.Condition()
        self._slow: set[threading.Event] = set()
        self._sleeping: set[object] = set()
        """Jobs of the loop that wait: those who write tables, not the flusher."""
        self._unsynced: dict[FileId, _Unsynced] = {}

    # --- switches ---------------------------------------------------------------------------------

    def fail_writes(self, number: int = errno.ENOSPC) -> None:
        """Let every write fail with this error, until `heal`."""
        self._write_error = number

    def fail_syncs(self, number: int = errno.EIO) -> None:
        """Let forcing files to disk fail with this error, until `heal`."""
        self._sync_error = number

    def stall(self) -> None:
        """Let nothing be forced to disk, until `heal`: who waits for it goes on waiting."""
        with self._change:
            self._is_stalled = True

    def heal(self) -> None:
        """End all that is wrong with the disk."""
        self.sync_ms = 0
        self.fullness = _FULLNESS
        self._write_error = self._sync_error = None
        with self._change:
            self._is_stalled = self._is_waiting = False
            self._wake(*self._sleeping)
            self._change.notify_all()
            for passed in self._slow:
                passed.set()

    @property
    def is_disturbed(self) -> bool:
        """Whether anything is wrong with the disk."""
        errors = self._write_error, self._sync_error
        is_slow = self.sync_ms > 0 or self._is_stalled
        return is_slow or self.fullness != _FULLNESS or any(errors)

    @property
    def is_waiting(self) -> bool:
        """Whether a thread waits for virtual time to pass, or for `heal`."""
        return self._is_waiting

    def die(self) -> None:
        """Let nothing reach the disk any more, though nobody is told: its process is gone."""
        self._is_dead = True
        self.heal()

    def lose_unsynced(self) -> None:
        """Bring files back to what was forced to disk, as after a power loss; names stay."""
        with self._change:
            for file in self._unsynced.values():
                for at, data in reversed(file.before):
                    os.pwrite(file.fd, data, at)
        self.close_all()

    def close_all(self) -> None:
        """Forget what was written."""
        with self._change:
            for file in self._unsynced.values():
                os.close(file.fd)
            self._unsynced.clear()

    # --- what the store calls ---------------------------------------------------------------------

    def open_new(self, path: Path) -> int:
        if self._is_dead:
            return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        _fail(self._write_error)
        return super().open_new(path)

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        if not self._is_dead:
            _fail(self._write_error)
            self._remember(fd, len(data), at)
            super().write(fd, data, at)

    def truncate(self, fd: int, size: int) -> None:
        if not self._is_dead:
            super().truncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        if not self._is_dead:
            super().rename(old, new)

    def link(self, path: Path, name: Path) -> None:
        if not self._is_dead:
            super().link(path, name)

    def remove(self, path: Path) -> None:
        if not self._is_dead:
            super().remove(path)

    def make_directory(self, path: Path) -> None:
        if not self._is_dead:
            super().make_directory(path)

    def remove_directory(self, path: Path) -> None:
        if not self._is_dead:
            super().remove_directory(path)

    def sync(self, fd: int) -> None:
        written = self._written(_file_id(fd))
        self._take_time()
        _fail(self._sync_error)
        self._forget(written)

    def sync_directory(self, path: Path) -> None:  # noqa: ARG002 - names are never lost here
        _fail(self._sync_error)

    def sync_file_system(self, fd: int, instead_of: int) -> bool:  # noqa: ARG002 - always all
        written = self._written(*self._unsynced)
        self._take_time()
        _fail(self._sync_error)
        self._forget(written)
        return True

    def used_ratio(self, path: Path) -> float:  # noqa: ARG002 - one disk for all
        return self.fullness

    # --- inside -----------------------------------------------------------------------------------

    def _remember(self, fd: int, size: int, at: int) -> None:
        before = os.pread(fd, size, at)
        with self._change:
            file = self._unsynced.get(_file_id(fd))
            if file is None:
                file = self._unsynced[_file_id(fd)] = _Unsynced(os.dup(fd))
            file.before.append((at, before + bytes(size - len(before))))

    def _written(self, *files: FileId) -> dict[FileId, int]:
        """Return how many writes files have had; later ones are not meant by a sync that runs."""
        with self._change:
            return {
                each: len(self._unsynced[each].before) for each in files if each in self._unsynced
            }

    def _forget(self, written: dict[FileId, int]) -> None:
        with self._change:
            for each, count in () if self._is_dead else written.items():
                file = self._unsynced[each]
                del file.before[:count]
                if not file.before:
                    os.close(file.fd)
                    del self._unsynced[each]

    def _take_time(self) -> None:
        """Wait on the thread that writes; the loop, which may let time pass, is told first."""
        if self.sync_ms > 0 and not self._is_dead:
            self._be_slow()
        with self._change:
            if self._is_stalled:
                if self._loop.is_in_job:
                    sleeper = object()
                    self._sleeping.add(sleeper)
                    self._loop.job_sleeps(sleeper)
                else:
                    self._is_waiting = True
                self._change.wait_for(lambda: not self._is_stalled, _WAIT_REAL_S_MAX)

    def _be_slow(self) -> None:
        passed = threading.Event()
        with self._change:
            self._slow.add(passed)
        # A loop that is closed has no time any more.
        with suppress(RuntimeError):
            let_pass, is_job = self._let_time_pass, self._loop.is_in_job
            self._loop.call_soon_threadsafe(let_pass, passed, is_job)
            passed.wait(_WAIT_REAL_S_MAX)
        with self._change:
            self._slow.discard(passed)

    def _let_time_pass(self, passed: threading.Event, is_job: bool) -> None:
        if passed.is_set():
            # Healed already: nobody waits any more.
            return
        if is_job:
            self._sleeping.add(passed)
            self._loop.job_sleeps(passed)
        else:
            self._is_waiting = True
        self._loop.call_later(self.sync_ms / 1000, self._end_wait, passed, is_job)

    def _end_wait(self, passed: threading.Event, is_job: bool) -> None:
        if is_job:
            self._wake(passed)
        else:
            self._is_waiting = False
        passed.set()

    def _wake(self, *sleepers: object) -> None:
        for sleeper in sleepers:
            self._sleeping.discard(sleeper)
            self._loop.job_wakes(sleeper)


def _file_id(fd: int) -> FileId:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _fail(number: int | None) -> None:
    if number is not None:
        raise OSError(number, os.strerror(number))
