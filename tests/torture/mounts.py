"""Small disks: tmpfs mounts that only this process and its children see."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)
_CHUNK = bytes(64 * 1024)


class NotPermitted(Exception):
    """The system does not let this process mount anything."""


def make_private() -> str:
    """Give this process mounts of its own, which vanish with it; return why not, or ''.

    Must be called while there is one thread only.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        if user == 0:
            _check(_libc.unshare(_CLONE_NEWNS))
        else:
            _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    except OSError as error:
        return f"no private mounts: {error.strerror}"
    return ""


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[None]:
    """Mount a file system of this size at a directory; raises `NotPermitted`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = os.fsencode(directory)
    try:
        _check(_libc.mount(b"tmpfs", path, b"tmpfs", 0, f"size={size_bytes}".encode()))
    except OSError as error:
        raise NotPermitted(f"mounting a tmpfs failed: {error.strerror}") from error
    try:
        yield
    finally:
        _libc.umount2(path, _MNT_DETACH)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for chunk in (_CHUNK, _CHUNK[:4096], _CHUNK[:1]):
            try:
                while os.write(file, chunk) == len(chunk):
                    pass
            except OSError:
                continue
    finally:
        os.close(file)
