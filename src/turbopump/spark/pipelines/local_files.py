"""Files and directories of this machine, as safe as archives need them."""

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
"""Where Spark writes a batch that replaces folders as a whole."""


def local_directory(path: str) -> Path | None:
    """Return a path of this machine's file system, None if it is one elsewhere."""
    parts = urlsplit(path)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if "://" in path else Path(path)


def full_path(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same to Java, which may have been started elsewhere."""
    text = os.fspath(path)
    return text if "://" in text or text.startswith("file:") else str(Path(text).absolute())


def write_in_one_step(file: Path, content: bytes) -> None:
    """Write a file that is there completely or not at all, also after a loss of power."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    with unfinished.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(file)
    sync_directory(file.parent)


def sync_directory(directory: Path) -> None:
    """Let names in a directory survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- what killed writers leave behind -------------------------------------------------------------


@contextmanager
def writing_archive(directory: Path) -> Iterator[None]:
    """Hold a shared lock on an archive while a query writes it.

    The first writer removes the staging directories of writers that were killed: nobody else needs
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


# --- folders of an archive that are moved while it is read ----------------------------------------


@contextmanager
def moving_folders(directory: Path) -> Iterator[None]:
    """Put a merge into place while nobody lists the archive."""
    with (directory / COMPACTION / _MOVING).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def folders_stay(directory: Path) -> Iterator[None]:
    """Let no merge be put into place while an archive is listed."""
    descriptor = _lock_to_read(directory)
    if descriptor is None:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _lock_to_read(directory: Path) -> int | None:
    """Open the lock; None if there is none and it is not to be made, as where one can only read."""
    file = directory / COMPACTION / _MOVING
    try:
        # In a directory that is no archive nothing is left behind.
        if (directory / SETTINGS_FILE).exists():
            file.parent.mkdir(exist_ok=True)
            return os.open(file, os.O_RDONLY | os.O_CREAT, 0o666)
        return os.open(file, os.O_RDONLY)
    except OSError:
        return os.open(file, os.O_RDONLY) if file.exists() else None
