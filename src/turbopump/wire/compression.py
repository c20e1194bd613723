"""Compression of message bodies."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import lz4.frame
import zstandard

from turbopump.errors import RecordError
from turbopump.wire.sysflag import Compression

INFLATED_BYTES_MAX = 64 * 1024 * 1024
"""Largest decompressed body: senders are limited to 4 MiB, so more is an attack."""

LEVEL = 5


def deflate(body: bytes, compression: Compression = Compression.ZLIB, level: int = LEVEL) -> bytes:
    match compression:
        case Compression.ZLIB:
            return zlib.compress(body, level)
        case Compression.LZ4:
            return lz4.frame.compress(body, compression_level=level)
        case Compression.ZSTD:
            return zstandard.ZstdCompressor(level=level).compress(body)


def inflate(stored: bytes, compression: Compression, bytes_max: int = INFLATED_BYTES_MAX) -> bytes:
    """Return the plain body; refuse one that is damaged or exceeds ``bytes_max``."""
    try:
        body, complete = _INFLATE[compression](stored, bytes_max + 1)
    except (zlib.error, RuntimeError, zstandard.ZstdError, EOFError) as error:
        raise RecordError(f"body is not valid {compression.name}: {error}") from error
    if len(body) > bytes_max:
        raise RecordError(f"body inflates to more than {bytes_max} bytes")
    if not complete:
        raise RecordError(f"body ends in the middle of its {compression.name} stream")
    return body


def _inflate(stream: Any, stored: bytes, bytes_max: int) -> tuple[bytes, bool]:
    return stream.decompress(stored, bytes_max), stream.eof


def _inflate_zstd(stored: bytes, bytes_max: int) -> tuple[bytes, bool]:
    reader = zstandard.ZstdDecompressor().stream_reader(stored)
    body = reader.read(bytes_max)
    if len(body) >= bytes_max:
        return body, True
    stream = zstandard.ZstdDecompressor().decompressobj()
    stream.decompress(stored)
    return body, stream.eof


_INFLATE: dict[Compression, Callable[[bytes, int], tuple[bytes, bool]]] = {
    Compression.ZLIB: lambda *stored: _inflate(zlib.decompressobj(), *stored),
    Compression.LZ4: lambda *stored: _inflate(lz4.frame.LZ4FrameDecompressor(), *stored),
    Compression.ZSTD: _inflate_zstd,
}
