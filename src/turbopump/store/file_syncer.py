"""Syncs the files that follow the log: one by one, or whole file systems."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from turbopump.clock import Clock
from turbopump.machine.files import Files, sync_path

_ONE_BY_ONE_MAX = 64
"""Up to this many files and directories are synced one by one, sparing the rest of the disk."""


class FileSyncer:
    """Syncs files, or their whole file systems; `sync` runs on the flusher's thread."""

    def __init__(self, files: Files, clock: Clock, root: Path) -> None:
        self._files = files
        self._clock = clock
        self._root = root
        self._by_device: dict[int, int] = {}

    def open(self, directories: Iterable[Path]) -> None:
        """Open file systems before anything is written: from then on losses are reported."""
        for directory in directories:
            device = self._files.device(directory)
            if device is not None and device not in self._by_device:
                self._by_device[device] = self._files.open_directory(directory)

    def close(self) -> None:
        while self._by_device:
            self._files.close(self._by_device.popitem()[1])

    def sync(
        self, touched: Iterable[Path], new: Iterable[Path], time_max_ms: int | None = None
    ) -> None:
        """Sync files and the names of new ones; raise if that takes too long."""
        started_ms = self._clock.monotonic_ms()
        files, directories = set(touched), self._parents(new)
        if len(files) + len(directories) > _ONE_BY_ONE_MAX:
            synced = self._sync_file_systems(files | directories)
            files -= synced
            directories -= synced
        for path in sorted(files | directories):
            if time_max_ms is not None and self._clock.monotonic_ms() - started_ms > time_max_ms:
                raise TimeoutError(f"the disk took longer than {time_max_ms} ms")
            if path in files:
                sync_path(self._files, path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    # Its topic has been deleted meanwhile.
                    self._files.sync_directory(path)

    def _sync_file_systems(self, paths: Iterable[Path]) -> set[Path]:
        """Sync whole known file systems; return the paths that lie on them."""
        by_device: dict[int, list[Path]] = {}
        for path in paths:
            device = self._files.device(path)
            if device is not None:
                by_device.setdefault(device, []).append(path)
        synced: set[Path] = set()
        for device, there in by_device.items():
            fd = self._by_device.get(device)
            if fd is not None and self._files.sync_file_system(fd, len(there)):
                synced.update(there)
        return synced

    def _parents(self, paths: Iterable[Path]) -> set[Path]:
        found: set[Path] = set()
        for path in paths:
            directory = path.parent
            while directory not in found:
                found.add(directory)
                if directory == self._root:
                    break
                directory = directory.parent
        return found
