"""The real disk of a process that is killed at a chosen disk operation."""

from __future__ import annotations

from pathlib import Path

from turbopump.store import Files


class Killed(BaseException):
    """The process is dead: nothing may catch this."""


class KilledFiles(Files):
    """Simulates the death of the process after a number of changes to the disk."""

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
