"""The bits of a message's system flag and of a pull request's."""

from __future__ import annotations

from enum import IntEnum

from turbopump.errors import RecordError

COMPRESSED = 0x1
MULTI_TAGS = 0x2
BORN_HOST_V6 = 0x10
STORE_HOST_V6 = 0x20

_TRANSACTION_BITS = 0xC
_COMPRESSION_SHIFT = 8
_COMPRESSION_BITS = 0x7 << _COMPRESSION_SHIFT

PULL_COMMIT_OFFSET = 0x1
PULL_SUSPEND = 0x2
PULL_SUBSCRIPTION = 0x4
PULL_CLASS_FILTER = 0x8
PULL_LITE = 0x10


class Transaction(IntEnum):
    """The role of a stored message in a transaction."""

    NONE = 0x0
    PREPARED = 0x4
    COMMIT = 0x8
    ROLLBACK = 0xC


class Compression(IntEnum):
    """How a body is compressed; old clients set nothing and mean ZLIB.

    ::

        ProducerConfig(messages=MessageRules(compression=Compression.ZSTD))
    """

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3


def transaction_of(sys_flag: int) -> Transaction:
    return Transaction(sys_flag & _TRANSACTION_BITS)


def with_transaction(sys_flag: int, transaction: Transaction) -> int:
    return sys_flag & ~_TRANSACTION_BITS | transaction


def compression_of(sys_flag: int) -> Compression | None:
    """Return how the body is compressed, or None if it is plain; raises RecordError."""
    if not sys_flag & COMPRESSED:
        return None
    kind = (sys_flag & _COMPRESSION_BITS) >> _COMPRESSION_SHIFT
    if kind > max(Compression):
        raise RecordError(f"unknown compression type {kind}")
    return Compression(kind) if kind else Compression.ZLIB


def with_compression(sys_flag: int, compression: Compression) -> int:
    plain = sys_flag & ~_COMPRESSION_BITS
    return plain | COMPRESSED | compression << _COMPRESSION_SHIFT
