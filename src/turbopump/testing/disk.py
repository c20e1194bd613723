"""The disk of a machine in a test: in memory, and it fails in every way that disks do."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random

from turbopump.durations import Duration, milliseconds
from turbopump.machine import Machine
from turbopump.machine.files import Files, Mapped, Space
from turbopump.testing.background import VirtualBackground
from turbopump.testing.disk_faults import Chances, Fault, disk_error
from turbopump.testing.loop import VirtualTimeLoop, virtual_loop
from turbopump.testing.memory_files import (
    BLOCK_BYTES,
    MemoryDirectory,
    MemoryFile,
    Sync,
    names_in,
)

_FULLNESS = 0.1
_TOTAL_BYTES = 1 << 40
_OPEN_MAX = 1 << 20
_WRITING = frozenset({"write", "open_new"})
_SYNCING = frozenset({"sync", "sync_directory", "sync_file_system"})
_READING = frozenset({"read", "fetch", "map", "open", "open_to_read", "entries"})
CHANGING = _WRITING | _SYNCING | {"truncate", "rename", "link", "remove", "make_directory"}
"""The operations that change what is on a disk."""

OnOperation = Callable[[str, Path], None]
"""Called with the name of a method of `Files`, and the path, before anything happens."""


@dataclass(slots=True)
class _Handle:
    """An open file or directory."""

    path: Path
    node: MemoryFile | MemoryDirectory


class Disk(Files):
    """A disk in memory, with switches for what goes wrong; it outlives the processes that use it.

    ::

        cluster.disk().fail_writes()            # no space left on device
        cluster.disk().sync_time = 0.2          # a slow one, in virtual time
        await cluster.crash(lose_unflushed=True)

    With ``random``, a power failure keeps some of what was not synced by chance, and `chances` may
    inject other faults. ``loop`` is the virtual time in which a slow disk takes its time.
    """

    def __init__(self, loop: VirtualTimeLoop | None = None, random: Random | None = None) -> None:
        self._locked_here: set[Path] = set()
        self._sync_ms = self._read_ms = 0
        self.fullness = _FULLNESS
        """How much of it is in use: from 0.9 on, brokers refuse messages."""
        self.roomy: set[Path] = set()
        """Paths at which other disks are mounted, which are never full."""
        self.capacity_bytes: int | None = None
        """Capacity of the disk; if set, `fullness` does not count."""
        self.chances = Chances()
        self.operations: Counter[str] = Counter()
        """How often each operation was called, by the name of its method."""
        self.on_operation: OnOperation | None = None
        """Called before each operation; it may raise, or call `die`."""
        self.background = VirtualBackground(loop, self._may_take_time)
        """Runs the jobs of the machine that has this disk."""
        self.random = random
        """Decides what is left to chance; without it, everything is lost that can be."""
        self._root = MemoryDirectory()
        self._handles: dict[int, _Handle] = {}
        self._next_fd = 1000
        self._faults: list[Fault] = []
        self._is_dead = False
        self._is_stalled = False

    # --- switches ---------------------------------------------------------------------------------

    def fail(
        self,
        *operations: str,
        number: int = errno.EIO,
        matching: str = "*",
        after: int = 0,
        times: int | None = None,
    ) -> None:
        """Make operations, methods of `Files`, fail with an error, until `heal`.

        Only for paths that match, as in a shell; after the first ``after`` that do, which succeed,
        and up to ``times`` times.
        """
        self._faults.append(Fault(frozenset(operations), number, matching, after, times))

    def fail_writes(self, number: int = errno.ENOSPC, matching: str = "*") -> None:
        """Make every write fail with this error, until `heal`."""
        self.fail(*_WRITING, number=number, matching=matching)

    def fail_syncs(self, number: int = errno.EIO, matching: str = "*") -> None:
        """Make every sync fail with this error, until `heal`."""
        self.fail(*_SYNCING, number=number, matching=matching)

    def stall(self) -> None:
        """Block all syncs until `heal`: callers keep waiting."""
        self._is_stalled = True

    def heal(self) -> None:
        """End all faults of the disk."""
        self._sync_ms = self._read_ms = 0
        self.fullness = _FULLNESS
        self.capacity_bytes = None
        self.chances = Chances()
        self._faults.clear()
        self._is_stalled = False
        self.background.release()

    @property
    def sync_time(self) -> Duration:
        """How long a sync takes, in virtual time."""
        return self._sync_ms / 1000

    @sync_time.setter
    def sync_time(self, duration: Duration) -> None:
        self._sync_ms = milliseconds("sync_time", duration, 0)

    @property
    def read_time(self) -> Duration:
        """How long a read takes of what is not in memory, in virtual time; see `drop_caches`."""
        return self._read_ms / 1000

    @read_time.setter
    def read_time(self, duration: Duration) -> None:
        self._read_ms = milliseconds("read_time", duration, 0)

    @contextmanager
    def reads_succeeding(self) -> Iterator[None]:
        """Let no read fail in the block: for a test that looks at what is on the disk."""
        chances = self.chances
        read_fails, chances.read_fails = chances.read_fails, 0.0
        try:
            yield
        finally:
            chances.read_fails = read_fails

    @property
    def is_disturbed(self) -> bool:
        """Whether the disk has any fault."""
        is_slow = self._sync_ms > 0 or self._read_ms > 0 or self._is_stalled
        is_full = self.fullness != _FULLNESS or self.capacity_bytes is not None
        return is_slow or is_full or bool(self._faults) or self.chances != Chances()

    @property
    def is_waiting(self) -> bool:
        """Whether a job waits for virtual time to pass, or for `heal`."""
        return self.background.is_waiting

    def flip_bit(self, path: Path, at: int | None = None, bit: int = 0) -> int:
        """Flip one bit of a file, as disks do over the years; return where.

        At a random position within what was ever written, if none is given.
        """
        file = self._file(path)
        if at is None:
            random = self.random or Random(0)  # noqa: S311 - the same each time
            start, end = random.choice(list(file.data_ranges(0, len(file.data))))
            at, bit = random.randrange(start, end), random.randrange(8)
        file.data[at] ^= 1 << bit
        return at

    def drop_caches(self, matching: str = "*") -> None:
        """Drop files from memory, until they are read or written; by path, as in a shell."""
        for path in self._paths(Path("/"), self._root):
            if fnmatchcase(str(path), matching):
                file = self._file(path)
                file.cold = set(file.blocks)

    @property
    def used_bytes(self) -> int:
        """Space that files take."""
        files = {each for each in self._root.walk() if isinstance(each, MemoryFile)}
        return sum(len(file.blocks) for file in files) * BLOCK_BYTES

    # --- the end of processes ---------------------------------------------------------------------

    def die(self) -> None:
        """Discard all later writes without an error, as of a killed process."""
        self._is_dead = True
        self.heal()

    def lose_unsynced(self) -> None:
        """Reset the disk to what was synced, as after a power failure.

        Names are lost too whose directory was not synced. With `random`, chance decides what is
        lost, down to single sectors of 512 bytes.
        """
        self._root.lose_power(self.random)
        flips = self.chances.bit_flips
        if self.random is not None and flips:
            for path in list(self._paths(Path("/"), self._root)):
                if self._file(path).blocks and self.random.random() < flips:
                    self.flip_bit(path)

    def close_all(self) -> list[Path]:
        """Close all files, as the end of a process does; then a new one may use the disk.

        Returns those that were open; a stopped broker leaves none.
        """
        left = [handle.path for handle in self._handles.values()]
        for fd in tuple(self._handles):
            self.close(fd)
        self._is_dead = False
        return left

    # --- open files -------------------------------------------------------------------------------

    def open(self, path: Path) -> int:
        self._begin("open", path)
        return self._open(path, self._file(path))

    def open_to_read(self, path: Path) -> int:
        self._begin("open_to_read", path)
        return self._open(path, self._file(path))

    def open_new(self, path: Path) -> int:
        if not self._begin("open_new", path):
            return self._open(path, MemoryFile())
        parent = self._directory(path.parent, "create")
        file = parent.entries.get(path.name)
        if isinstance(file, MemoryDirectory):
            raise disk_error(errno.EISDIR, "create", path)
        if file is None:
            file = MemoryFile()
            parent.put(path.name, file)
        file.truncate(0)
        return self._open(path, file)

    def close(self, fd: int) -> None:
        handle = self._handles.pop(fd, None)
        if handle is None:
            raise disk_error(errno.EBADF, "close", fd)
        if handle.node.locked_by == fd:
            handle.node.locked_by = None

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        path, file = self._opened(fd, "write")
        try:
            if not self._begin("write", path):
                return
        except OSError:
            self._write_torn(file, data, at)
            raise
        if self.capacity_bytes is not None:
            needed = file.new_blocks(at, len(data)) * BLOCK_BYTES
            if needed and self.used_bytes + needed > self.capacity_bytes:
                raise disk_error(errno.ENOSPC, "write", path)
        file.write(data, at)

    def read(self, fd: int, size: int, at: int) -> bytes:
        path, file = self._opened(fd, "read")
        self._begin("read", path)
        self._warm(file, at, size)
        return bytes(file.data[at : at + size])

    def read_from_memory(self, fd: int, size: int, at: int) -> bytes | None:
        if self._opened(fd, "read")[1].is_cold(at, size):
            return None
        return self.read(fd, size, at)

    def fetch(self, fd: int, at: int, size: int) -> None:
        path, file = self._opened(fd, "read")
        self._begin("fetch", path)
        self._warm(file, at, size)

    def is_in_memory(self, fd: int, at: int, size: int, mapped_at: int) -> bool:  # noqa: ARG002
        return not self._opened(fd, "map")[1].is_cold(at, size)

    def size(self, fd: int) -> int:
        return len(self._opened(fd, "look up")[1].data)

    def truncate(self, fd: int, size: int) -> None:
        path, file = self._opened(fd, "resize")
        if self._begin("truncate", path):
            file.truncate(size)

    def data_ranges(self, fd: int, at: int, size: int) -> Iterator[tuple[int, int]]:
        return self._opened(fd, "read")[1].data_ranges(at, size)

    def sync(self, fd: int) -> None:
        path, file = self._opened(fd, "flush")
        self._sync("sync", path, [file])

    def map(self, fd: int, size: int) -> Mapped:
        path, file = self._opened(fd, "map")
        self._begin("map", path)
        if size > len(file.data):
            raise OSError(errno.EIO, f"cannot map: it is shorter than {size} bytes", str(path))
        return memoryview(file.data)[:size].toreadonly()

    @property
    def locked_here(self) -> set[Path]:
        return self._locked_here

    def lock(self, fd: int) -> None:
        self._opened(fd, "lock")
        self.lock_directory(fd)

    def lock_directory(self, fd: int) -> None:
        handle = self._handles[fd]
        if handle.node.locked_by not in {None, fd}:
            raise disk_error(errno.EAGAIN, "lock", handle.path)
        handle.node.locked_by = fd

    # --- names ------------------------------------------------------------------------------------

    def rename(self, old: Path, new: Path) -> None:
        if self._begin("rename", old):
            node, target = self._node(old), self._directory(new.parent, "rename")
            if node is None:
                raise disk_error(errno.ENOENT, "rename", old)
            there = target.entries.get(new.name)
            if isinstance(there, MemoryDirectory) and there.entries:
                raise disk_error(errno.ENOTEMPTY, "rename", new)
            if there is not node:
                target.put(new.name, node)
                self._directory(old.parent).drop(old.name)
                for handle in self._handles.values():
                    if handle.node is node:
                        handle.path = new

    def link(self, path: Path, name: Path) -> None:
        if self._begin("link", path):
            if self._node(name) is not None:
                raise disk_error(errno.EEXIST, "link", name)
            self._directory(name.parent, "link").put(name.name, self._file(path, "link"))

    def exists(self, path: Path) -> bool:
        return self._node(path) is not None

    def is_directory(self, path: Path) -> bool:
        return isinstance(self._node(path), MemoryDirectory)

    def is_file(self, path: Path) -> bool:
        return isinstance(self._node(path), MemoryFile)

    def file_size(self, path: Path) -> int:
        return len(self._file(path, "look up").data)

    def entries(self, path: Path) -> list[Path]:
        self._begin("entries", path)
        node = self._node(path)
        found = node.entries if isinstance(node, MemoryDirectory) else ()
        return [path / name for name in sorted(found)]

    def resolve(self, path: Path) -> Path:
        return Path("/").joinpath(*names_in(path))

    def remove(self, path: Path) -> None:
        if self._begin("remove", path):
            node = self._node(path)
            if isinstance(node, MemoryDirectory):
                raise disk_error(errno.EISDIR, "delete", path)
            if node is not None:
                self._directory(path.parent).drop(path.name)

    def make_directory(self, path: Path) -> None:
        if not self._begin("make_directory", path):
            return
        directory = self._root
        for name in names_in(path):
            node = directory.entries.get(name)
            if node is None:
                node = MemoryDirectory()
                directory.put(name, node)
            if not isinstance(node, MemoryDirectory):
                raise disk_error(errno.EEXIST, "create directory", path)
            directory = node

    def remove_directory(self, path: Path) -> None:
        if self._begin("remove_directory", path):
            node = self._node(path)
            if isinstance(node, MemoryDirectory) and not node.entries:
                self._directory(path.parent).drop(path.name)

    def sync_directory(self, path: Path) -> None:
        self._sync("sync_directory", path, [self._directory(path)])

    def open_directory(self, path: Path) -> int:
        self._begin("open_directory", path)
        return self._open(path, self._directory(path))

    def device(self, path: Path) -> int | None:
        return None if self._node(path) is None else 1

    def sync_file_system(self, fd: int, instead_of: int) -> bool:  # noqa: ARG002 - always all
        self._sync("sync_file_system", self._handles[fd].path, list(self._root.walk()))
        return True

    def open_max(self) -> int:
        return _OPEN_MAX

    def used_ratio(self, path: Path) -> float:
        self._begin("used_ratio", path)
        if self.capacity_bytes is None:
            return _FULLNESS if path in self.roomy else self.fullness
        return min(1.0, self.used_bytes / self.capacity_bytes)

    def space(self, path: Path) -> Space:
        total = self.capacity_bytes or _TOTAL_BYTES
        return Space(total, int(total * (1 - self.used_ratio(path))))

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self, operation: str, path: Path) -> bool:
        """Count an operation and apply faults; return whether it may change anything."""
        self.operations[operation] += 1
        if self.on_operation is not None:
            self.on_operation(operation, path)
        if self._is_dead:
            return False
        for fault in self._faults:
            if fault.strikes(operation, path):
                raise disk_error(fault.number, operation, path)
        chance = self._chance_of(operation)
        if chance and self.random is not None and self.random.random() < chance:
            numbers = (errno.ENOSPC, errno.EIO) if operation in _WRITING else (errno.EIO,)
            raise disk_error(self.random.choice(numbers), operation, path)
        return True

    def _chance_of(self, operation: str) -> float:
        if operation in _WRITING:
            return self.chances.write_fails
        if operation in _READING:
            return self.chances.read_fails
        return self.chances.sync_fails if operation in _SYNCING else 0.0

    def _write_torn(self, file: MemoryFile, data: bytes | bytearray | memoryview, at: int) -> None:
        """Write a random part of a failing write."""
        if self.random is not None and not self._is_dead and self.random.random() < 1 / 2:
            file.write(memoryview(data)[: self.random.randint(0, len(data))], at)

    def _sync(self, operation: str, path: Path, nodes: list[MemoryFile | MemoryDirectory]) -> None:
        syncs = [node.begin_sync() for node in nodes if isinstance(node, MemoryFile)]
        try:
            self._take_time()
            may_change = self._begin(operation, path)
        except BaseException as error:
            _end_all(syncs, Sync.fail if isinstance(error, OSError) else Sync.abandon)
            raise
        _end_all(syncs, Sync.succeed if may_change else Sync.abandon)
        for node in nodes if may_change else ():
            if isinstance(node, MemoryDirectory):
                node.sync()

    def _may_take_time(self) -> bool:
        is_slow = self._sync_ms > 0 or self._read_ms > 0 or self.chances.sync_ms_max > 0
        return is_slow or self._is_stalled

    def _take_time(self) -> None:
        milliseconds = self._sync_ms
        if self.random is not None and self.chances.sync_ms_max:
            milliseconds += self.random.randint(0, self.chances.sync_ms_max)
        self._take_time_of(milliseconds)
        if self._is_stalled:
            self.background.stall()

    def _warm(self, file: MemoryFile, at: int, size: int) -> None:
        if file.warm(at, size):
            self._take_time_of(self._read_ms)

    def _take_time_of(self, milliseconds: int) -> None:
        if not self._is_dead:
            self.background.take_time(milliseconds)

    def _open(self, path: Path, node: MemoryFile | MemoryDirectory) -> int:
        fd = self._next_fd = self._next_fd + 1
        self._handles[fd] = _Handle(path, node)
        return fd

    def _opened(self, fd: int, operation: str) -> tuple[Path, MemoryFile]:
        handle = self._handles.get(fd)
        if handle is None or not isinstance(handle.node, MemoryFile):
            raise disk_error(errno.EBADF, operation, fd)
        return handle.path, handle.node

    def _node(self, path: Path) -> MemoryFile | MemoryDirectory | None:
        node: MemoryFile | MemoryDirectory | None = self._root
        for name in names_in(path):
            node = node.entries.get(name) if isinstance(node, MemoryDirectory) else None
        return node

    def _file(self, path: Path, operation: str = "open") -> MemoryFile:
        node = self._node(path)
        if isinstance(node, MemoryFile):
            return node
        raise disk_error(errno.ENOENT if node is None else errno.EISDIR, operation, path)

    def _directory(self, path: Path, operation: str = "open directory") -> MemoryDirectory:
        node = self._node(path)
        if isinstance(node, MemoryDirectory):
            return node
        raise disk_error(errno.ENOENT if node is None else errno.ENOTDIR, operation, path)

    def _paths(self, path: Path, directory: MemoryDirectory) -> Iterator[Path]:
        for name, node in directory.entries.items():
            if isinstance(node, MemoryDirectory):
                yield from self._paths(path / name, node)
            else:
                yield path / name


def _end_all(syncs: list[Sync], end: Callable[[Sync], None]) -> None:
    for sync in syncs:
        end(sync)


def virtual_machine(files: Files | None = None, seed: int = 0) -> Machine:
    """Return a machine in the time of the running loop, with a memory disk unless one is given.

    The loop runs its jobs, and ``seed`` decides what is left to chance.
    """
    loop = virtual_loop()
    files = files or Disk(loop)
    background = files.background if isinstance(files, Disk) else VirtualBackground(loop)
    return Machine(files, background, loop.clock, Random(seed))  # noqa: S311 - the same each time
