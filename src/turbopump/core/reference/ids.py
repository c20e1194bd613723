"""The texts of the two ids of a message: where it is stored (offset id), and its origin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_COUNTER_MASK = 0xFFFF


def offset_id(ip: bytes, port: int, offset: int) -> str:
    """Return the id that contains the address of a message's broker and its position."""
    return f"{_host_digits(ip, port)}{_position_digits(offset)}"


def offset_ids(ip: bytes, port: int, offsets: Sequence[int]) -> str:
    """Return the ids of messages on one broker, separated by commas."""
    host = _host_digits(ip, port)
    return ",".join([f"{host}{_position_digits(offset)}" for offset in offsets])


def _host_digits(ip: bytes, port: int) -> str:
    return (ip + port.to_bytes(4, "big", signed=True)).hex().upper()


def _position_digits(offset: int) -> str:
    return offset.to_bytes(8, "big", signed=True).hex().upper()


def unique_id_prefix(maker: bytes, elapsed_ms: int) -> str:
    """Return what the unique ids of one process and millisecond have in common."""
    return (maker + elapsed_ms.to_bytes(4, "big")).hex().upper()


def unique_id(prefix: str, counter: int) -> str:
    """Return the unique id with the low 16 bits of a counter."""
    return f"{prefix}{counter & _COUNTER_MASK:04X}"


def unique_ids(prefix: str, counters: Iterable[int]) -> list[str]:
    return [unique_id(prefix, counter) for counter in counters]
