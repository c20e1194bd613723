"""Arithmetic of the protocol: string hashes, CRC, bloom filter positions."""

from __future__ import annotations

from turbopump.core import bloom_positions, body_crc, index_hash, murmur3, string_hash, tags_code

__all__ = [
    "INT_MAX",
    "bloom_positions",
    "body_crc",
    "index_hash",
    "murmur3",
    "string_hash",
    "tags_code",
]

INT_MAX = 0x7FFF_FFFF
