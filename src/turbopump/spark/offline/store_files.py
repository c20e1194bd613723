"""The files of a stopped store: which exist, and what the directory reveals.

Nothing is written, locked or repaired.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbopump.broker.config import PERM_INHERIT
from turbopump.errors import InvalidArgument, StoreDamaged, StoreInUse
from turbopump.machine.files import SPARE_NAME
from turbopump.store.segments import is_segment_name
from turbopump.wire.names import TEMPLATE_TOPIC

_FLOCK = struct.Struct("hhqqi0q")
_UNWRITTEN = b"\0" * 8


@dataclass(frozen=True, slots=True)
class LogFile:
    """A commit log file; ``start`` is the log position of its first byte."""

    path: str
    start: int
    size: int

    @property
    def is_used(self) -> bool:
        """Whether it has been written to: files may be preallocated."""
        with Path(self.path).open("rb") as file:
            return file.read(len(_UNWRITTEN)) not in (_UNWRITTEN, b"")


def log_files(directory: Path, *, ignore_damage: bool) -> list[LogFile]:
    """Return the commit log files in order, without unused ones at the end.

    With damage ignored, a file that seems unused may be one whose beginning is lost. Raises
    InvalidArgument if the directory is not a store, StoreDamaged if files are missing.
    """
    log = directory / "commitlog"
    if not log.is_dir():
        what = "it has no directory commitlog" if directory.is_dir() else "no such directory"
        raise InvalidArgument(
            f"{directory} is not a store: {what}; the path must be a broker's store directory that "
            "the driver and all executors can read"
        )
    files = []
    for path in sorted(log.iterdir()):
        if is_segment_name(path.name) and path.is_file():
            files.append(LogFile(str(path), int(path.name), path.stat().st_size))
        elif path.name != SPARE_NAME and not ignore_damage:
            raise StoreDamaged(f"{path} is not a file of a store: move it elsewhere")
    if ignore_damage:
        return files
    while files and not files[-1].is_used:
        files.pop()
    _require_row(files)
    return files


def _require_row(files: Sequence[LogFile]) -> None:
    for file, following in itertools.pairwise(files):
        if file.start + file.size != following.start:
            raise StoreDamaged(
                f"{file.path} has {file.size} bytes and the next file starts at {following.start}: "
                "files are missing or cut; restore them, or read the rest with onBadRecord=skip"
            )


def require_stopped(directory: Path) -> None:
    """Refuse a store that a broker has open; the file ``abort`` alone may come from a copy."""
    try:
        fd = os.open(directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        kind = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    except (AttributeError, OSError):
        # Not Linux, or a file system without such locks: open stores cannot be detected.
        return
    finally:
        os.close(fd)
    if kind != fcntl.F_UNLCK:
        raise StoreInUse(
            f"{directory} is open in a running broker: stop it, or read a copy of the directory"
        )


def broker_name(directory: Path) -> str:
    """Return the name of the store's broker, or an empty string if it cannot be determined."""
    try:
        saved = json.loads((directory / "config" / "topics.json").read_text())
    except (OSError, ValueError):
        return ""
    table = saved.get("topicConfigTable") if isinstance(saved, dict) else None
    names = _broker_topics(table) if isinstance(table, dict) else []
    return names[0] if len(names) == 1 else ""


def _broker_topics(table: Mapping[str, Any]) -> list[str]:
    """Return the topics named after the broker.

    A broker creates one for itself and one for its cluster, with attributes that users do not
    choose but could. The cluster's has a second topic beside it, for replies.
    """
    return [
        name
        for name, topic in table.items()
        if isinstance(topic, dict)
        and isinstance(perm := topic.get("perm"), int)
        and perm & PERM_INHERIT
        and name != TEMPLATE_TOPIC
        and f"{name}_REPLY_TOPIC" not in table
    ]
