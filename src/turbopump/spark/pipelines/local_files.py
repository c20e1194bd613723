"""Local files and directories, with the durability that archives need."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from turbopump.spark.pipelines.archive_layout import COMPACTION, SETTINGS_FILE

_MOVING = "moving"
_STAGING = ".spark-staging-*"
"""Where Spark stages a batch that replaces whole folders."""


def local_directory(path: str) -> Path | None:
    """Return a path of the local file system, or None if it is elsewhere."""
    parts = urlsplit(path)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if "://" in path else Path(path)


def full_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path: Java may have been started in another directory."""
    text = os.fspath(path)
    return text if "://" in text or text.startswith("file:") else str(Path(text).absolute())


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file atomically, even across a power failure."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    with unfinished.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(file)
    sync_directory(file.parent)


def sync_directory(directory: Path) -> None:
    """Make names in a directory survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing_archive(directory: Path) -> Iterator[None]:
    """Hold a shared lock on an archive while a query writes it.

    The first writer removes the staging directories of writers that were killed: no process needs
    them, since a batch is written again as a whole. A file system without locks keeps them.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for staging in directory.glob(_STAGING):
                shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def moving_folders(directory: Path) -> Iterator[None]:
    """Move a merge into place while no process lists the archive."""
    with (directory / COMPACTION / _MOVING).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def folders_stay(directory: Path) -> Iterator[None]:
    """Block merges from being moved into place while an archive is listed."""
    file = directory / COMPACTION / _MOVING
    # Leave nothing behind in a directory that is not an archive.
    if not file.exists() and (directory / SETTINGS_FILE).exists():
        # Read-only storage has no lock, and no merges.
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            file.touch()
    if not file.exists():
        yield
        return
    with file.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
