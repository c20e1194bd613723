"""Arithmetic of the protocol: string hashes, CRC, bloom filter positions."""

from __future__ import annotations

from functools import lru_cache

from isal.isal_zlib import crc32

_INT_MAX = 0x7FFF_FFFF


@lru_cache(maxsize=4096)
def string_hash(text: str) -> int:
    """Return Java's hash of a string: a signed 32-bit number over its UTF-16 code units."""
    value = 0
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (31 * value + unit) & 0xFFFF_FFFF
    else:
        units = text.encode("utf-16-be", "surrogatepass")
        for high, low in zip(units[::2], units[1::2], strict=True):
            value = (31 * value + (high << 8 | low)) & 0xFFFF_FFFF
    return value - (1 << 32) if value > _INT_MAX else value


def tags_code(tags: str | None) -> int:
    """Return the hash of a message's tag in a consume queue; 0 if it has none."""
    return string_hash(tags) if tags else 0


def index_hash(topic: str, key: str) -> int:
    """Return the key index's hash of a key; never negative."""
    value = abs(string_hash(f"{topic}#{key}"))
    return 0 if value > _INT_MAX else value


def body_crc(body: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32 of a stored body with the sign bit cleared."""
    return crc32(body) & _INT_MAX


_U64_MAX = 0xFFFF_FFFF_FFFF_FFFF
_MURMUR_1 = 0x87C3_7B91_1142_53D5
_MURMUR_2 = 0x4CF5_AD43_2745_937F


def bloom_positions(text: str, bits: int, hashes: int) -> list[int]:
    """Return a string's positions in a bloom filter: combinations of the halves of one hash."""
    value = murmur3(text.encode())
    low, high = value & 0xFFFF_FFFF, value >> 32
    sums = ((low + number * high) & 0xFFFF_FFFF for number in range(1, hashes + 1))
    # As signed 32-bit numbers; the complement of a negative one is positive.
    return [(~each & 0xFFFF_FFFF if each > _INT_MAX else each) % bits for each in sums]


def murmur3(data: bytes) -> int:
    """Return the first half of the 128-bit MurmurHash3 (x64) with seed 0."""
    first = second = 0
    whole = len(data) // 16 * 16
    for at in range(0, whole, 16):
        low, high = _mixed_words(data[at : at + 16])
        first = ((_rotated(first ^ low, 27) + second) * 5 + 0x52DC_E729) & _U64_MAX
        second = ((_rotated(second ^ high, 31) + first) * 5 + 0x3849_5AB5) & _U64_MAX
    low, high = _mixed_words(data[whole:])
    first, second = first ^ low ^ len(data), second ^ high ^ len(data)
    first = (first + second) & _U64_MAX
    second = (second + first) & _U64_MAX
    return (_avalanche(first) + _avalanche(second)) & _U64_MAX


def _mixed_words(block: bytes) -> tuple[int, int]:
    """Mix the two words of a block; missing bytes are 0."""
    low, high = int.from_bytes(block[:8], "little"), int.from_bytes(block[8:], "little")
    return (
        _rotated(low * _MURMUR_1 & _U64_MAX, 31) * _MURMUR_2 & _U64_MAX,
        _rotated(high * _MURMUR_2 & _U64_MAX, 33) * _MURMUR_1 & _U64_MAX,
    )


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _U64_MAX


def _avalanche(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51_AFD7_ED55_8CCD & _U64_MAX
    value = (value ^ value >> 33) * 0xC4CE_B9FE_1A85_EC53 & _U64_MAX
    return value ^ value >> 33
