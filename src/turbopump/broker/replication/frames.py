"""Frames on the HA port, in both directions. Only encoding and decoding.

A slave reports its position as 8 bytes, repeatedly. A master sends frames: the position of the
log's bytes that follow (8 bytes), their number (4), and the bytes. A frame without bytes is a
heartbeat.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from msgspec import Struct

from turbopump.errors import FrameError
from turbopump.message import PhysicalOffset

_REPORT = struct.Struct(">q")
_HEADER = struct.Struct(">qi")
HEADER_BYTES = _HEADER.size

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Larger frames are invalid; Apache RocketMQ's masters send 32 KiB by default."""


def encode_report(position: PhysicalOffset) -> bytes:
    """Return the report of a slave that has stored the log up to a position."""
    return _REPORT.pack(position)


def encode_header(position: PhysicalOffset, size: int) -> bytes:
    """Return the header of a frame; with size 0, a heartbeat."""
    return _HEADER.pack(position, size)


class ReportDecoder:
    """Decodes a slave's reports from chunks of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> PhysicalOffset | None:
        """Return the newest report, the only one that counts; None if none is complete."""
        data = self._rest + data if self._rest else data
        whole = len(data) // _REPORT.size * _REPORT.size
        self._rest = data[whole:]
        if not whole:
            return None
        (position,) = _REPORT.unpack_from(data, whole - _REPORT.size)
        if position < 0:
            raise FrameError(f"position must not be negative, got {position}")
        return PhysicalOffset(position)


class Transfer(Struct, frozen=True):
    """Bytes of the log, a frame's or a part of them; empty for a heartbeat."""

    position: PhysicalOffset
    data: memoryview


class TransferDecoder:
    """Decodes a master's frames from chunks of any size, without waiting for whole frames."""

    def __init__(self) -> None:
        self._header = b""
        self._position = PhysicalOffset(0)
        self._left = 0

    def feed(self, data: bytes) -> Iterator[Transfer]:
        """Yield the contents of a chunk, as views of it."""
        view, at = memoryview(data), 0
        while at < len(view):
            if not self._left:
                part = view[at : at + HEADER_BYTES - len(self._header)]
                self._header += part
                at += len(part)
                if len(self._header) < HEADER_BYTES:
                    return
                self._begin_frame()
                if not self._left:
                    yield Transfer(self._position, view[:0])
                continue
            part = view[at : at + self._left]
            at += len(part)
            position, self._left = self._position, self._left - len(part)
            self._position = PhysicalOffset(position + len(part))
            yield Transfer(position, part)

    def _begin_frame(self) -> None:
        position, size = _HEADER.unpack(self._header)
        self._header = b""
        if position < 0 or not 0 <= size <= FRAME_BYTES_MAX:
            raise FrameError(
                f"frame of {size} bytes at position {position}: expected 0 to {FRAME_BYTES_MAX}"
                " bytes at a position of at least 0"
            )
        self._position, self._left = PhysicalOffset(position), size


def joined(transfers: Iterable[Transfer], file_bytes: int) -> Iterator[Transfer]:
    """Join transfers that continue each other within one file of the log.

    A slave enters messages of large transfers in less time than those of many small ones.
    """
    first, parts, end = PhysicalOffset(0), list[memoryview](), 0
    for transfer in transfers:
        position, data = transfer.position, transfer.data
        if parts and data and position == end and position // file_bytes == first // file_bytes:
            parts.append(data)
            end += len(data)
            continue
        if parts:
            yield _whole(first, parts)
        first, parts, end = position, [data], position + len(data) if data else -1
    if parts:
        yield _whole(first, parts)


def _whole(position: PhysicalOffset, parts: list[memoryview]) -> Transfer:
    return Transfer(position, parts[0] if len(parts) == 1 else memoryview(b"".join(parts)))
