"""Python files that are watched for changes, as ``--reload`` does."""

from __future__ import annotations

import os
from pathlib import Path

_SKIPPED = {"__pycache__", "node_modules"}
_ENVIRONMENT = "pyvenv.cfg"
"""The file that marks a virtual environment, whose packages rarely change."""

State = tuple[int, int]
"""Modification time in ns, and size: two writes may have the same time."""


class SourceFiles:
    """The Python files below a directory, without hidden ones and virtual environments."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def states(self) -> dict[str, State]:
        """Return the state of each file, by its path in the directory."""
        found = {}
        for directory, folders, files in os.walk(self._root):
            if _ENVIRONMENT in files:
                folders.clear()
                continue
            folders[:] = [each for each in folders if each[0] != "." and each not in _SKIPPED]
            for path in (Path(directory, each) for each in files if each.endswith(".py")):
                try:
                    status = path.stat()
                except OSError:
                    # Deleted meanwhile, or a dangling link.
                    continue
                found[str(path.relative_to(self._root))] = status.st_mtime_ns, status.st_size
        return found

    def changed_since(self, before: dict[str, State]) -> list[str]:
        """Return the paths of files that were written, created or deleted."""
        now = self.states()
        return sorted(path for path in {*before, *now} if before.get(path) != now.get(path))
