"""Java's arithmetic where it is part of the protocol: string hash, index hash, CRC."""

from __future__ import annotations

from functools import lru_cache

from isal.isal_zlib import crc32

INT_MAX = 0x7FFF_FFFF


@lru_cache(maxsize=4096)
def string_hash(text: str) -> int:
    """Return Java's hash of a text: a signed 32-bit number over its UTF-16 code units."""
    value = 0
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (31 * value + unit) & 0xFFFF_FFFF
    else:
        units = text.encode("utf-16-be", "surrogatepass")
        for high, low in zip(units[::2], units[1::2], strict=True):
            value = (31 * value + (high << 8 | low)) & 0xFFFF_FFFF
    return value - (1 << 32) if value > INT_MAX else value


def tags_code(tags: str | None) -> int:
    """Return what a consume queue keeps of a message's tag; 0 when it has none."""
    return string_hash(tags) if tags else 0


def index_hash(topic: str, key: str) -> int:
    """Return the key index's hash of a key; never negative."""
    value = abs(string_hash(f"{topic}#{key}"))
    return 0 if value > INT_MAX else value


def body_crc(body: bytes | memoryview) -> int:
    """Return the CRC-32 of a stored body with the sign bit cleared."""
    return crc32(body) & INT_MAX
