"""The disk: every access of store, broker, name server and client goes through `Files`.

Positions are explicit (no file pointers), data is forced to disk only where `sync` says so.
`turbopump.testing.Disk` is the same in memory, with faults.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import shutil
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

Mapped: TypeAlias = mmap.mmap | memoryview
"""A file's bytes for reading; what is written to the file later is seen in it."""

_MODE = 0o644
_UNLIMITED = 1 << 20
_ERASED_AT_ONCE = _COPIED_AT_ONCE = _FETCHED_AT_ONCE = 1024 * 1024
_REPORTS_LOSS_SINCE = (5, 8)
_UNWRITTEN_MAX_KB = 64 * 1024
_UNWRITTEN_PER_FILE_KB = 32
"""How much any process writes in about the time that flushing one file takes."""
_PAGE_BYTES = mmap.PAGESIZE
_MEMORY = Path("/proc/meminfo")
SPARE_NAME = "spare.tmp"
"""Where a file grows to its size before it gets its name: in the store's own directory."""

# A struct flock: kind, from where, start, size, process (0: locks of open files have none).
_FIRST_BYTE_LOCK = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)


class Space(NamedTuple):
    """The space of a file system, as ``df`` reports to a user without privileges."""

    total_bytes: int
    free_bytes: int


def _with_context(operation: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Add the operation and the path, the first argument, to errors of a method."""

    def wrap(call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def named(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return call(*args, **kwargs)
            except OSError as error:
                raise _with_path(error, operation, args[1]) from error

        return named

    return wrap


def _with_path(error: OSError, operation: str, file: object) -> OSError:
    """Return the system's error with what was tried, and the path of the file or descriptor."""
    if error.errno is None or str(error.strerror).startswith("cannot "):
        return error
    path = file
    if isinstance(file, int):
        try:
            path = Path(f"/proc/self/fd/{file}").readlink()
        except OSError:
            path = f"file descriptor {file}"
    return OSError(error.errno, f"cannot {operation}: {error.strerror}", str(path))


_locked_here: set[Path] = set()


class Files:
    """The real disk. A subclass may fail, lose or tear whatever passes through it."""

    @property
    def locked_here(self) -> set[Path]:
        """The directories on it that this process has locked."""
        return _locked_here

    @_with_context("open")
    def open(self, path: Path) -> int:
        """Open an existing file for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @_with_context("open")
    def open_to_read(self, path: Path) -> int:
        """Open an existing file that need not be writable."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        return fd

    @_with_context("create")
    def open_new(self, path: Path) -> int:
        """Open a file for reading and writing; its old content is lost."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        """Write all of the data, or raise."""
        try:
            written = os.pwrite(fd, data, at)
            while written < len(data):
                # A signal or a nearly full disk causes a short write; the next one shows which.
                written += os.pwrite(fd, memoryview(data)[written:], at + written)
        except OSError as error:
            raise _with_path(error, "write", fd) from error

    def read(self, fd: int, size: int, at: int) -> bytes:
        """Read up to ``size`` bytes; fewer only at the end of the file."""
        try:
            return os.pread(fd, size, at)
        except OSError as error:
            raise _with_path(error, "read", fd) from error

    def read_from_memory(self, fd: int, size: int, at: int) -> bytes | None:
        """Do the same without waiting for the disk; None if not all of it is in memory.

        Where the system cannot do that, it may wait.
        """
        data = bytearray(size)
        try:
            found = os.preadv(fd, [data], at, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except (AttributeError, NotImplementedError, OSError):
            # Not Linux, or a file system without such reads. Other errors are reported from here.
            return self.read(fd, size, at)
        return bytes(data) if found == size else None

    def fetch(self, fd: int, at: int, size: int) -> None:
        """Read a part of a file that is open for nothing else into memory."""
        try:
            # Otherwise the system reads far ahead, and lets whoever gets there, such as an event
            # loop, request the next part: that takes it milliseconds.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            end = at + size
            # Before a part that the disk cannot read, less is returned than was requested.
            while at < end and (data := os.pread(fd, min(_FETCHED_AT_ONCE, end - at), at)):
                at += len(data)
        except OSError as error:
            raise _with_path(error, "read", fd) from error

    def size(self, fd: int) -> int:
        """Return the current size of the file."""
        return os.lseek(fd, 0, os.SEEK_END)

    @_with_context("resize")
    def truncate(self, fd: int, size: int) -> None:
        """Cut the file, or grow it by a hole that reads as zeros."""
        os.ftruncate(fd, size)

    def data_ranges(self, fd: int, at: int, size: int) -> Iterator[tuple[int, int]]:
        """Return start and end of what has ever been written from a position on."""
        while at < size:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise _with_path(error, "read", fd) from error
            end = os.lseek(fd, at, os.SEEK_HOLE)
            yield at, min(end, size)
            at = end

    @_with_context("flush")
    def sync(self, fd: int) -> None:
        """Return when the file's data is on disk. Lets other threads run meanwhile."""
        os.fdatasync(fd)

    @_with_context("map")
    def map(self, fd: int, size: int) -> Mapped:
        """Map a file for reading."""
        try:
            return mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        except ValueError as error:
            # Another process has truncated it.
            raise OSError(errno.EIO, f"it is shorter than {size} bytes") from error

    def is_in_memory(self, fd: int, at: int, size: int, mapped_at: int) -> bool:  # noqa: ARG002
        """Whether a part of a file that is mapped at an address is in memory.

        True as well if the system does not tell.
        """
        call = _mincore()
        if call is None or size <= 0:
            return True
        first = (mapped_at + at) // _PAGE_BYTES * _PAGE_BYTES
        end = mapped_at + at + size
        pages = ctypes.create_string_buffer((end - first + _PAGE_BYTES - 1) // _PAGE_BYTES)
        return call(first, end - first, pages) != 0 or b"\0" not in pages.raw

    @_with_context("rename")
    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    @_with_context("link")
    def link(self, path: Path, name: Path) -> None:
        """Give a file a second name."""
        os.link(path, name)

    def exists(self, path: Path) -> bool:
        return path.exists()

    def is_directory(self, path: Path) -> bool:
        return path.is_dir()

    def is_file(self, path: Path) -> bool:
        return path.is_file()

    @_with_context("look up")
    def file_size(self, path: Path) -> int:
        """Return the size of a file that need not be open."""
        return path.stat().st_size

    @_with_context("list")
    def entries(self, path: Path) -> list[Path]:
        """Return the entries of a directory, sorted by name; none if it does not exist."""
        return sorted(path.iterdir()) if path.is_dir() else []

    def resolve(self, path: Path) -> Path:
        """Return the absolute path without links."""
        return path.resolve()

    @_with_context("delete")
    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    @_with_context("create directory")
    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    @_with_context("delete directory")
    def remove_directory(self, path: Path) -> None:
        """Remove a directory if it is empty."""
        try:
            path.rmdir()
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}:
                raise

    @_with_context("flush directory")
    def sync_directory(self, path: Path) -> None:
        """Return when the names in a directory are on disk."""
        fd = self.open_directory(path)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @_with_context("open directory")
    def open_directory(self, path: Path) -> int:
        """Open a directory, for calls that concern its file system."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def device(self, path: Path) -> int | None:
        """Return the number of a path's file system; None if the path does not exist."""
        try:
            return path.stat().st_dev
        except FileNotFoundError:
            return None

    @_with_context("flush the file system of")
    def sync_file_system(self, fd: int, instead_of: int) -> bool:
        """Return when all data and names on a directory's file system are on disk.

        False if the call is missing, does not report lost data (before Linux 5.8), or may take
        longer than flushing ``instead_of`` files, because other processes have written much: it
        cannot be interrupted. Open the directory before writing the data: only losses after that
        are reported.
        """
        call = _syncfs()
        unwritten_max_kb = max(_UNWRITTEN_MAX_KB, instead_of * _UNWRITTEN_PER_FILE_KB)
        if call is None or _unwritten_kb() > unwritten_max_kb:
            return False
        if call(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return True

    def open_max(self) -> int:
        """Return how many files the process may have open."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return _UNLIMITED if limit == resource.RLIM_INFINITY else limit

    @_with_context("look up the space on")
    def used_ratio(self, path: Path) -> float:
        """Return how much of the disk is in use, as ``df`` reports to a user without privileges."""
        usage = shutil.disk_usage(path)
        return usage.used / (usage.used + usage.free)

    @_with_context("look up the space on")
    def space(self, path: Path) -> Space:
        """Return how much space the disk has."""
        usage = shutil.disk_usage(path)
        return Space(usage.total, usage.free)

    @_with_context("lock")
    def lock(self, fd: int) -> None:
        """Take a lock that excludes Java processes too, or raise OSError; it ends with the process.

        It belongs to the open file. Java's kind belongs to the process, and is lost as soon as
        that closes any other descriptor of the file, as a copy of the directory does.
        """
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FIRST_BYTE_LOCK)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            # Not Linux, or a file system without such locks.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            # That kind does not exclude the same process.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @_with_context("lock directory")
    def lock_directory(self, fd: int) -> None:
        """Take the lock of an open directory, or raise OSError; it ends with the process."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unwritten_kb() -> int:
    """Return how much of all that was written the disks do not have yet."""
    lines = (line.split() for line in _MEMORY.read_text().splitlines())
    return sum(int(line[1]) for line in lines if line[0] in {"Dirty:", "Writeback:"})


@lru_cache(maxsize=1)
def _syncfs() -> Callable[[int], int] | None:
    try:
        release = tuple(int(part) for part in os.uname().release.split(".")[:2])
        # Lets other threads run meanwhile, as all foreign functions called in this way do.
        call = ctypes.CDLL(None, use_errno=True).syncfs
    except (AttributeError, OSError, ValueError):
        return None
    return call if release >= _REPORTS_LOSS_SINCE else None


@lru_cache(maxsize=1)
def _mincore() -> Callable[[int, int, ctypes.Array[ctypes.c_char]], int] | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return call


REAL_FILES = Files()


def create_full_size(files: Files, path: Path, size: int, spare: Path) -> int:
    """Create a file of its full size, all zeros and no blocks, and return it open.

    It grows under the name ``spare`` first: a kill in between must not leave a short file where
    only full ones are accepted. If ``spare`` is on another disk, it grows in its own directory.
    """
    try:
        return _create_renamed(files, path, size, spare)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    files.remove(spare)
    return _create_renamed(files, path, size, path.with_name(SPARE_NAME))


def _create_renamed(files: Files, path: Path, size: int, spare: Path) -> int:
    fd = files.open_new(spare)
    try:
        files.truncate(fd, size)
        files.rename(spare, path)
    except OSError:
        files.close(fd)
        raise
    return fd


def erase_from(files: Files, fd: int, at: int, size: int) -> None:
    """Overwrite everything from a position on with zeros.

    Truncating and growing the file again could leave a wrong size after a kill. Overwriting takes
    no space where data was written, and holes are zeros already.
    """
    for start, end in list(files.data_ranges(fd, at, size)):
        for part in range(start, end, _ERASED_AT_ONCE):
            files.write(fd, bytes(min(_ERASED_AT_ONCE, end - part)), part)


def make_directory_durable(files: Files, path: Path) -> None:
    """Create a directory and its parents, and force their names to disk.

    Each name is synced before the next directory is created below it. So only the lowest one that
    exists may not be on disk yet: whoever created it may have been killed before the sync.
    """
    missing = [each for each in (path, *path.parents) if not files.exists(each)]
    lowest = missing[-1].parent if missing else path
    try:
        files.sync_directory(lowest.parent)
    except OSError as error:
        # Another user's directory, or one of a file system that cannot sync directories.
        if error.errno not in {errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS}:
            raise
    for each in reversed(missing):
        files.make_directory(each)
        files.sync_directory(each.parent)


@contextmanager
def closing(files: Files, fd: int) -> Iterator[int]:
    """Close a file at the end."""
    try:
        yield fd
    finally:
        files.close(fd)


def read_file(files: Files, path: Path) -> bytes:
    """Return the content of a file."""
    with closing(files, files.open_to_read(path)) as fd:
        return files.read(fd, files.size(fd), 0)


def read_text(files: Files, path: Path) -> str:
    """Return the content of a text file, its line ends as in Python."""
    return read_file(files, path).decode().replace("\r\n", "\n")


def write_file(files: Files, path: Path, data: bytes) -> None:
    """Write a file as a whole; it is not forced to disk."""
    with closing(files, files.open_new(path)) as fd:
        files.write(fd, data, 0)


def copy_file(files: Files, path: Path, new: Path, end: int | None = None) -> None:
    """Write the same bytes under another name; they are not forced to disk.

    Holes stay holes. With ``end``, what follows it becomes a hole.
    """
    with (
        closing(files, files.open_to_read(path)) as source,
        closing(files, files.open_new(new)) as target,
    ):
        size = files.size(source)
        files.truncate(target, size)
        copied = size if end is None else min(size, end)
        for start, stop in files.data_ranges(source, 0, copied):
            for at in range(start, stop, _COPIED_AT_ONCE):
                files.write(target, files.read(source, min(_COPIED_AT_ONCE, stop - at), at), at)


def copy_tree(files: Files, path: Path, new: Path) -> None:
    """Copy a directory and its content."""
    files.make_directory(new)
    for entry in files.entries(path):
        copy = copy_tree if files.is_directory(entry) else copy_file
        copy(files, entry, new / entry.name)


def remove_tree(files: Files, path: Path) -> None:
    """Remove a directory and its content, if it exists."""
    remove_content(files, path)
    files.remove_directory(path)


def remove_content(files: Files, path: Path) -> None:
    """Remove what is in a directory, if it exists."""
    for entry in files.entries(path):
        if files.is_directory(entry):
            remove_tree(files, entry)
        else:
            files.remove(entry)


def sync_path(files: Files, path: Path) -> None:
    """Force a file to disk that this thread does not have open; ignore a missing one."""
    try:
        fd = files.open(path)
    except FileNotFoundError:
        return
    with closing(files, fd):
        files.sync(fd)


class OpenFiles:
    """A bounded number of open files by path; the least recently used is closed first."""

    def __init__(self, files: Files, count_max: int) -> None:
        self._files = files
        self._count_max = min(count_max, max(8, files.open_max() // 4))
        self._fds: OrderedDict[Path, int] = OrderedDict()
        self._read_only: set[Path] = set()
        """Those that were opened for reading only."""

    def fd(self, path: Path) -> int:
        """Return a descriptor to read a file, opened if necessary; valid until the next call."""
        fd = self._fds.get(path)
        if fd is None:
            # The disk may be read-only.
            fd = self.retry_on_emfile(lambda: self._files.open_to_read(path))
            self.adopt(path, fd)
            self._read_only.add(path)
        else:
            self._fds.move_to_end(path)
        return fd

    def fd_to_write(self, path: Path) -> int:
        """Return a descriptor to read and write a file; valid until the next call."""
        if path in self._read_only:
            self.close(path)
        if path not in self._fds:
            self.adopt(path, self.retry_on_emfile(lambda: self._files.open(path)))
        return self.fd(path)

    def adopt(self, path: Path, fd: int) -> None:
        """Adopt a file that was opened elsewhere, for reading and writing."""
        self._close_all_but(self._count_max - 1)
        self._fds[path] = fd

    def retry_on_emfile(self, opening: Callable[[], T]) -> T:
        """Open something; on EMFILE, close half of the cached files and retry."""
        try:
            return opening()
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE} or not self._fds:
                raise
        self._close_all_but(len(self._fds) // 2)
        return opening()

    def _close_all_but(self, count: int) -> None:
        while len(self._fds) > count:
            path, unused = self._fds.popitem(last=False)
            self._read_only.discard(path)
            self._files.close(unused)

    def close(self, path: Path) -> None:
        self._read_only.discard(path)
        fd = self._fds.pop(path, None)
        if fd is not None:
            self._files.close(fd)

    def close_all(self) -> None:
        self._read_only.clear()
        while self._fds:
            self._files.close(self._fds.popitem()[1])
