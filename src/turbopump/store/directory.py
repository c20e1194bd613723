"""The store's directory: its layout, its lock, and whether the last owner crashed."""

from __future__ import annotations

import errno
import itertools
import threading
from pathlib import Path

from turbopump.clock import local_time
from turbopump.errors import StoreInUse
from turbopump.machine.files import SPARE_NAME, Files, make_directory_durable

_LOCK_TEXT = b"lock"
# What file systems answer that cannot lock directories, such as NFS.
_NO_DIRECTORY_LOCKS = {
    errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP,
}  # fmt: skip
SET_ASIDE = ("diverged-", "damaged-")
"""How directories begin, beside the log's, that keep what was cut off the log."""

# Java's kind of lock does not exclude the same process; this does.
_locked_here_guard = threading.Lock()


class StoreDirectory:
    """Paths, the lock, and the ``abort`` file that exists while a store is open."""

    def __init__(self, root: Path, files: Files) -> None:
        self.files = self._files = files
        self._locks: list[int] = []
        self._set_root(root)

    def _set_root(self, root: Path) -> None:
        self.root = root
        self.commit_log = root / "commitlog"
        self.queues = root / "consumequeue"
        self.index = root / "index"
        self.config = root / "config"
        self.checkpoint = root / "checkpoint"
        self.abort = root / "abort"
        self.removed_topics = root / "removed-topics.json"
        self.unfinished_repair = root / "repair-unfinished"
        self.spare = root / SPARE_NAME

    def new_backup(self, now_ms: int) -> Path:
        """Return a new path for files that a repair replaces."""
        path = self.root / f"repair-{local_time(now_ms):%Y%m%d-%H%M%S}"
        names = itertools.chain(
            (path,), (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
        )
        return next(each for each in names if not self._files.exists(each))

    def acquire(self) -> None:
        """Create the directory if necessary and lock it."""
        make_directory_durable(self._files, self.root)
        resolved = self._files.resolve(self.root)
        if resolved != self.root:
            make_directory_durable(self._files, resolved)
        self._set_root(resolved)
        with _locked_here_guard:
            if self.root in self._files.locked_here:
                raise StoreInUse(f"{self.root} is already open in this process")
            self._take_lock()
            self._files.locked_here.add(self.root)

    def _take_lock(self) -> None:
        try:
            self._lock_root()
            self._lock_file()
        except BaseException as error:
            self._unlock()
            if isinstance(error, BlockingIOError | PermissionError):
                raise StoreInUse(f"{self.root} is open in another process") from error
            raise

    def _lock_root(self) -> None:
        """Lock the directory itself: the lock file can be deleted while it is locked."""
        fd = self._files.open_directory(self.root)
        self._locks.append(fd)
        lock_where_supported(self._files, fd)

    def _lock_file(self) -> None:
        """Lock the file that excludes Apache RocketMQ too."""
        path = self.root / "lock"
        fd = self._files.open(path) if self._files.exists(path) else self._files.open_new(path)
        self._locks.append(fd)
        self._files.lock(fd)
        if self._files.read(fd, len(_LOCK_TEXT), 0) != _LOCK_TEXT:
            # Only if necessary: the disk may be full.
            self._files.write(fd, _LOCK_TEXT, 0)

    def _unlock(self) -> None:
        # Locks live as long as the open files.
        while self._locks:
            self._files.close(self._locks.pop())

    def make_parts(self) -> None:
        """Create missing directories, and sync their names before anything is put into them."""
        self._files.remove(self.spare)
        for part in (self.commit_log, self.queues, self.index, self.config):
            self._files.make_directory(part)
        self._files.sync_directory(self.root)

    @property
    def has_crashed(self) -> bool:
        """Whether the last owner did not stop cleanly, or is still running."""
        return self._files.exists(self.abort)

    def mark_running(self) -> None:
        """Mark the store as running: from now on, an end without `mark_stopped` is a crash."""
        self._files.close(self._files.open_new(self.abort))
        self._files.sync_directory(self.root)

    def mark_stopped(self) -> None:
        """Mark a clean stop: everything is on disk, and the next start need not look for damage."""
        self._files.remove(self.abort)
        self._files.sync_directory(self.root)

    def release(self) -> None:
        """Unlock the directory."""
        with _locked_here_guard:
            self._files.locked_here.discard(self.root)
        self._unlock()


def lock_where_supported(files: Files, fd: int) -> None:
    """Lock an open directory, unless its file system cannot; raises BlockingIOError if locked."""
    try:
        files.lock_directory(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_LOCKS:
            raise
