"""Forcing a whole file system to disk at once: thousands of files take one wait, not one each."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache

_TELLS_OF_LOSS_SINCE = (5, 8)


def sync_file_system(fd: int) -> bool:
    """Do so for the file system of an open file; False where that cannot be relied upon."""
    call = _syncfs()
    if call is None:
        return False
    if call(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return True


@lru_cache(maxsize=1)
def _syncfs() -> Callable[[int], int] | None:
    try:
        release = tuple(int(part) for part in os.uname().release.split(".")[:2])
        # Lets other threads run meanwhile, as all foreign functions called in this way do.
        call = ctypes.CDLL(None, use_errno=True).syncfs
    except (AttributeError, OSError, ValueError):
        return None
    return call if release >= _TELLS_OF_LOSS_SINCE else None
