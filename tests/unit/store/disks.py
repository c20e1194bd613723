"""Disks that lose power or whose process is killed, at any chosen moment."""

from __future__ import annotations

import os
import random
from pathlib import Path

from turbopump.store import Files


class Killed(BaseException):
    """The process is gone: nothing may catch this on the way."""


class KilledFiles(Files):
    """Ends the process, so to speak, after a number of changes to the disk."""

    def __init__(self, changes_left: int) -> None:
        self._changes_left = changes_left

    def _change(self) -> None:
        if self._changes_left == 0:
            raise Killed
        self._changes_left -= 1

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        self._change()
        super().write(fd, data, at)

    def truncate(self, fd: int, size: int) -> None:
        self._change()
        super().truncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        self._change()
        super().rename(old, new)

    def link(self, path: Path, name: Path) -> None:
        self._change()
        super().link(path, name)

    def remove(self, path: Path) -> None:
        self._change()
        super().remove(path)

    def open_new(self, path: Path) -> int:
        self._change()
        return super().open_new(path)

    def make_directory(self, path: Path) -> None:
        self._change()
        super().make_directory(path)

    def sync(self, fd: int) -> None:
        self._change()
        super().sync(fd)

    def sync_file_system(self, fd: int, instead_of: int) -> bool:
        self._change()
        return super().sync_file_system(fd, instead_of)


class PowerLossFiles(Files):
    """Remembers what would be on disk: data that was synced, under names that were synced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._data: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, int]] = {}

    def sync(self, fd: int) -> None:
        super().sync(fd)
        status = os.fstat(fd)
        self._data[status.st_ino] = os.pread(fd, status.st_size, 0)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}

    def sync_file_system(self, fd: int, instead_of: int) -> bool:
        for directory, _, names in os.walk(self._root.resolve()):
            self.sync_directory(Path(directory))
            for name in names:
                data = (Path(directory) / name).read_bytes()
                self._data[(Path(directory) / name).stat().st_ino] = data
        return True

    def after_power_loss(self, target: Path, random_: random.Random) -> None:
        """Make a directory as it is found when the power is back.

        Of pages that were written but not synced, some are there and some are not; of the names in
        a directory that was not synced, all or none.
        """
        self._restore(self._root.resolve(), target, random_)

    def _restore(self, source: Path, target: Path, random_: random.Random) -> None:
        target.mkdir()
        names = self._names.get(source, {})
        if random_.random() < 0.7:
            names = {entry.name: entry.inode() for entry in os.scandir(source)}
        for name, inode in names.items():
            if (source / name).is_dir():
                self._restore(source / name, target / name, random_)
            else:
                synced = self._data.get(inode)
                exists = (source / name).exists()
                current = (source / name).read_bytes() if exists else synced or b""
                if synced is None:
                    # A file gets its size before its name.
                    synced = bytes(len(current))
                (target / name).write_bytes(_mixed(synced, current, random_))


def _mixed(synced: bytes, current: bytes, random_: random.Random) -> bytes:
    if len(synced) != len(current):
        return synced
    pages = []
    for at in range(0, len(synced), 512):
        chosen = current if random_.random() < 0.3 else synced
        pages.append(chosen[at : at + 512])
    return b"".join(pages)
