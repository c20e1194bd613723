"""The files of one log or queue: contiguous, of equal size, named by their start."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from turbopump.errors import StoreDamaged
from turbopump.machine.files import SPARE_NAME, Files, create_full_size

_NAME_DIGITS = 20


# Every read of a queue needs a path, mostly the same ones, and building one takes longer than the
# rest of such a read.
@lru_cache(maxsize=1024)
def segment_path(directory: Path, start: int) -> Path:
    """Return the path of a file in some directory."""
    return directory / f"{start:0{_NAME_DIGITS}d}"


class BrokenRow(StoreDamaged):
    """Files are missing between others, or have a wrong size."""


class Segments:
    """Which files exist; each change replaces the tuple ``starts``: other threads may read it."""

    __slots__ = ("_files", "_spare", "directory", "segment_bytes", "starts")

    def __init__(self, directory: Path, segment_bytes: int, files: Files, spare: Path) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.starts: tuple[int, ...] = ()
        self._files = files
        self._spare = spare

    def load(self, *, may_end_empty: bool = True) -> None:
        """Find the files; refuse anything that is not a full file in a contiguous row.

        An empty file at the end is removed if ``may_end_empty``.
        """
        self._files.remove(self.directory / SPARE_NAME)
        found = segment_files(self._files, self.directory)
        if may_end_empty and found and found[-1][1] == 0:
            # Killed between creating the file and setting its size; nothing can be in it.
            self._files.remove(self.path(found.pop()[0]))
        for start, size in found:
            if size != self.segment_bytes:
                raise BrokenRow(
                    f"{self.path(start)} has {size} bytes instead of {self.segment_bytes}:"
                    " restore it from a copy, or set the size the store was created with"
                )
        starts = tuple(start for start, _ in found)
        for left, right in itertools.pairwise(starts):
            if right - left != self.segment_bytes:
                raise BrokenRow(f"{self.directory}: no file between {left} and {right}")
        self.starts = starts

    def path(self, start: int) -> Path:
        return segment_path(self.directory, start)

    @property
    def end(self) -> int:
        """Position after the last file."""
        return self.starts[-1] + self.segment_bytes if self.starts else 0

    def start_at(self, position: int) -> int | None:
        """Return the start of the file that a position lies in."""
        starts = self.starts
        if not starts or not starts[0] <= position < starts[-1] + self.segment_bytes:
            return None
        return starts[bisect_right(starts, position) - 1]

    def create(self, start: int) -> int:
        """Create the next file and return it open."""
        assert not self.starts or start == self.end, (start, self.starts)
        self._files.make_directory(self.directory)
        fd = create_full_size(self._files, self.path(start), self.segment_bytes, self._spare)
        self.starts = (*self.starts, start)
        return fd

    def drop_first(self) -> Path:
        """Delete the first file."""
        path = self.path(self.starts[0])
        self._files.remove(path)
        self.starts = self.starts[1:]
        return path

    def move_last(self, directory: Path) -> None:
        """Move the last file into another directory."""
        path = self.path(self.starts[-1])
        self._files.rename(path, directory / path.name)
        self.starts = self.starts[:-1]

    def drop_last(self) -> Path:
        """Delete the last file."""
        path = self.path(self.starts[-1])
        self._files.remove(path)
        self.starts = self.starts[:-1]
        return path


def is_segment_name(name: str) -> bool:
    """Whether a file's name is a start position."""
    return len(name) == _NAME_DIGITS and name.isdecimal()


def segment_files(files: Files, directory: Path) -> list[tuple[int, int]]:
    """Return start and size of the files in a directory, in order; foreign names are refused."""
    paths = own_entries(files, directory, is_segment_name)
    return sorted((int(path.name), files.file_size(path)) for path in paths)


def own_entries(files: Files, directory: Path, is_own: Callable[[str], bool]) -> list[Path]:
    """Return the entries of a directory, sorted by name; foreign names are refused."""
    found = entries(files, directory)
    for path in found:
        if not is_own(path.name):
            raise StoreDamaged(f"{path} is not a store file: move it away")
    return found


def entries(files: Files, directory: Path) -> list[Path]:
    """Return the entries of a directory, if it exists, without leftovers of a kill."""
    return [path for path in files.entries(directory) if path.name != SPARE_NAME]
