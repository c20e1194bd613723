"""Small disks: mounts visible only to this process and its children."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)
_CHUNK = bytes(64 * 1024)


class NotPermitted(Exception):
    """This process may not mount file systems."""


def make_private() -> str:
    """Give this process a private mount namespace; return why that failed, or ''.

    Must be called while the process has only one thread.
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
def small_disk(directory: Path, size_bytes: int) -> Iterator[str]:
    """Mount a file system of this size at a directory, and yield its type; raises `NotPermitted`.

    It is ext4 in a file where loop devices are available, tmpfs elsewhere.
    """
    directory.mkdir(parents=True, exist_ok=True)
    image = directory.with_suffix(".image")
    try:
        is_loop = _is_loop_mounted(image, directory, size_bytes)
        if not is_loop:
            _mount_tmpfs(directory, size_bytes)
        yield "ext4" if is_loop else "tmpfs"
    finally:
        _libc.umount2(os.fsencode(directory), _MNT_DETACH)
        image.unlink(missing_ok=True)


def _is_loop_mounted(image: Path, directory: Path, size_bytes: int) -> bool:
    """Try to mount a file; needs root, mkfs and a free loop device."""
    with image.open("wb") as file:
        file.truncate(size_bytes)
    for command in (
        ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)],
        ["mount", "-o", "loop", str(image), str(directory)],
    ):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return False
    return True


def _mount_tmpfs(directory: Path, size_bytes: int) -> None:
    options = f"size={size_bytes}".encode()
    try:
        _check(_libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, options))
    except OSError as error:
        raise NotPermitted(f"mounting a file system failed: {error.strerror}") from error


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
