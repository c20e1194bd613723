"""The checkpoint file: store times up to which log, queues and index are surely on disk."""

from __future__ import annotations

import struct
from pathlib import Path

from msgspec import Struct

from turbopump.store.files import Files

FILE_BYTES = 4096
_LAYOUT = struct.Struct(">qqq")


class Checkpoint(Struct, frozen=True):
    """Store times in milliseconds; 0 when nothing is known."""

    log_ms: int = 0
    queues_ms: int = 0
    index_ms: int = 0

    def joined(self, other: Checkpoint) -> Checkpoint:
        """Return the later of both in each part."""
        return Checkpoint(
            max(self.log_ms, other.log_ms),
            max(self.queues_ms, other.queues_ms),
            max(self.index_ms, other.index_ms),
        )


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the file; a missing or short one knows nothing."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Checkpoint()
    return Checkpoint(*_LAYOUT.unpack_from(data)) if len(data) >= _LAYOUT.size else Checkpoint()


def write_checkpoint(files: Files, path: Path, checkpoint: Checkpoint) -> None:
    """Write the file and wait for the disk. In place: its 24 bytes lie in one sector."""
    new = not path.exists()
    fd = files.open_new(path) if new else files.open(path)
    try:
        files.truncate(fd, FILE_BYTES)
        times = (checkpoint.log_ms, checkpoint.queues_ms, checkpoint.index_ms)
        files.write(fd, _LAYOUT.pack(*times), 0)
        files.sync(fd)
    finally:
        files.close(fd)
    if new:
        files.sync_directory(path.parent)
