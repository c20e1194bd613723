"""Append-only records of what processes did; each line is one write, so that a kill tears none.

Times are from the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

_MODE = 0o644


class Journal:
    """Written by one process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _MODE)

    def note(self, event: str, *fields: object) -> None:
        """Append a line: the event, the time, the fields; no field may contain a tab."""
        texts = [event, str(time.monotonic_ns()), *map(str, fields)]
        os.write(self._file, ("\t".join(texts) + "\n").encode())


class JournalReader:
    """Reads what was appended to a directory's journals since the last call."""

    def __init__(self, directory: Path, pattern: str) -> None:
        self._directory = directory
        self._pattern = pattern
        self._read: dict[Path, int] = {}

    def news(self) -> Iterator[tuple[str, list[str]]]:
        """Yield (journal's name, fields of a line)."""
        for path in sorted(self._directory.glob(self._pattern)):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._read[path] = self._read.get(path, 0) + len(whole) + 1
                for line in whole.split(b"\n"):
                    yield path.stem, line.decode().split("\t")
