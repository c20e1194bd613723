"""Syncing a whole file system: thousands of files take one wait, not one each."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

_REPORTS_LOSS_SINCE = (5, 8)
_UNWRITTEN_MAX_KB = 64 * 1024
_UNWRITTEN_PER_FILE_KB = 32
"""How much any process writes in about the time that flushing one file takes."""

_MEMORY = Path("/proc/meminfo")


def sync_file_system(fd: int, instead_of: int) -> bool:
    """Flush the file system of an open file; return False if that is unsafe or too slow.

    Unsafe if the kernel does not report lost data. Too slow if other processes have written so much
    that flushing ``instead_of`` files one by one is faster; it cannot be interrupted.
    """
    call = _syncfs()
    unwritten_max_kb = max(_UNWRITTEN_MAX_KB, instead_of * _UNWRITTEN_PER_FILE_KB)
    if call is None or _unwritten_kb() > unwritten_max_kb:
        return False
    if call(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return True


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
