"""The checkpoint file: up to where log, queues and index are known to be on disk.

Apache RocketMQ stores timestamps only, which prove nothing once the clock is set back. So positions
follow them, in bytes that Apache RocketMQ neither reads nor writes, together with the timestamps
they belong to: other timestamps mean that another broker has used the store since. A checksum
follows: a write that fails halfway leaves positions that no checkpoint had.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from msgspec import Struct
from msgspec.structs import astuple, replace

from turbopump.machine.files import Files, closing, read_file
from turbopump.message import PhysicalOffset

FILE_BYTES = 4096
_LAYOUT = struct.Struct(">qqq")
_POSITIONS = struct.Struct(">qqqq")
_CHECKSUM = struct.Struct(">I")
_USED_BYTES = _LAYOUT.size + _POSITIONS.size + _CHECKSUM.size


class Checkpoint(Struct, frozen=True, rename="camel"):
    """Store timestamps in milliseconds, and positions in the log; 0 if unknown."""

    log_ms: int = 0
    queues_ms: int = 0
    index_ms: int = 0
    log_end: PhysicalOffset = PhysicalOffset(0)
    """All of the log before this position is on disk."""
    queues_end: PhysicalOffset = PhysicalOffset(0)
    """Queue units and index entries of messages before this position are on disk."""

    @property
    def end(self) -> PhysicalOffset:
        """Position before which everything is on disk; 0 if unknown."""
        return min(self.log_end, self.queues_end)

    def joined(self, other: Checkpoint) -> Checkpoint:
        """Return the later of both in each field."""
        return Checkpoint(*map(max, astuple(self), astuple(other)))

    def within(self, log_end: PhysicalOffset) -> Checkpoint:
        """Return what remains of it when the log is cut at a position."""
        ends = min(self.log_end, log_end), min(self.queues_end, log_end)
        return replace(self, log_end=ends[0], queues_end=ends[1])


def read_checkpoint(files: Files, path: Path) -> Checkpoint:
    """Read the file; a missing or short one yields an empty checkpoint."""
    try:
        data = read_file(files, path)
    except FileNotFoundError:
        return Checkpoint()
    if len(data) < _LAYOUT.size:
        return Checkpoint()
    log_ms, queues_ms, index_ms = _LAYOUT.unpack_from(data)
    if len(data) >= _USED_BYTES:
        positions = data[_LAYOUT.size : _USED_BYTES - _CHECKSUM.size]
        *times, log_end, queues_end = _POSITIONS.unpack(positions)
        is_whole = data[_LAYOUT.size : _USED_BYTES] == _with_checksum(positions)
        if is_whole and times == [log_ms, queues_ms]:
            return Checkpoint(log_ms, queues_ms, index_ms, log_end, queues_end)
    return Checkpoint(log_ms, queues_ms, index_ms)


def write_checkpoint(files: Files, path: Path, checkpoint: Checkpoint) -> None:
    """Write the file in place (its bytes lie in one sector) and wait for the disk."""
    new = not files.exists(path)
    with closing(files, files.open_new(path) if new else files.open(path)) as fd:
        files.truncate(fd, FILE_BYTES)
        times = (checkpoint.log_ms, checkpoint.queues_ms)
        ends = (checkpoint.log_end, checkpoint.queues_end)
        positions = _with_checksum(_POSITIONS.pack(*times, *ends))
        files.write(fd, _LAYOUT.pack(*times, checkpoint.index_ms) + positions, 0)
        files.sync(fd)
    if new:
        files.sync_directory(path.parent)


def _with_checksum(positions: bytes) -> bytes:
    return positions + _CHECKSUM.pack(zlib.crc32(positions))
