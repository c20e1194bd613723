"""Faults of a disk in tests: errors, on command or by chance."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(slots=True)
class Chances:
    """Probabilities of random faults; decided by the disk's ``random``."""

    write_fails: float = 0.0
    """Of each write, with `errno.ENOSPC` or `errno.EIO`, perhaps after half of it."""
    sync_fails: float = 0.0
    """Of each sync, with `errno.EIO`."""
    read_fails: float = 0.0
    """Of each read, map, listing and opening of an existing file, with `errno.EIO`."""
    sync_ms_max: int = 0
    """Each sync takes up to this many milliseconds of virtual time."""
    bit_flips: float = 0.0
    """Of each file, that a power failure flips one of its bits."""


@dataclass(slots=True)
class Fault:
    """An error that operations fail with."""

    operations: frozenset[str]
    number: int
    matching: str
    after: int
    times: int | None

    def strikes(self, operation: str, path: Path) -> bool:
        """Whether an operation fails; counted."""
        if operation not in self.operations or not fnmatchcase(str(path), self.matching):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return self.times is None or self.times >= 0


_TRIED = {
    "open_new": "create",
    "fetch": "read",
    "open_to_read": "open",
    "truncate": "resize",
    "sync": "flush",
    "sync_directory": "flush directory",
    "sync_file_system": "flush the file system of",
    "remove": "delete",
    "make_directory": "create directory",
    "remove_directory": "delete directory",
    "open_directory": "open directory",
    "entries": "list",
    "used_ratio": "look up the space on",
}
"""How `Files` names operations in errors, where that is not the method's name."""


def disk_error(number: int, operation: str, file: Path | int) -> OSError:
    tried = _TRIED.get(operation, operation)
    where = str(file) if isinstance(file, Path) else f"file descriptor {file}"
    return OSError(number, f"cannot {tried}: {os.strerror(number)}", where)
