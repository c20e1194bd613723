"""Where many stored records lie in a buffer, and their fixed fields, as arrays."""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from turbopump.wire.record import FIXED_BYTES

Ints: TypeAlias = NDArray[np.int64]

_SIZE = struct.Struct(">i")
HEAD_BYTES = 88


def layout(places: dict[str, tuple[str, int]], size: int, shift: int = 0) -> np.dtype[Any]:
    """Return the layout of items of ``size`` bytes, given the format and offset of each field."""
    return np.dtype(
        {
            "names": list(places),
            "formats": [form for form, _ in places.values()],
            "offsets": [at + shift for _, at in places.values()],
            "itemsize": size,
        }
    )


HEAD = layout(
    {
        "size": (">i4", 0),
        "magic": (">u4", 4),
        "crc": (">i4", 8),
        "queue_id": (">i4", 12),
        "queue_offset": (">i8", 20),
        "physical_offset": (">i8", 28),
        "sys_flag": (">i4", 36),
        "born_time": (">i8", 40),
        "born_host": ("u8", 48),
        "store_time": (">i8", 56),
        "store_host": ("u8", 64),
        "reconsume": (">i4", 72),
        "body_length": (">i4", 84),
    },
    HEAD_BYTES,
)
"""The fields before the body and their offsets if both hosts are IPv4: address and port together.
With IPv6, everything after the born host's address is elsewhere."""


def read_at(view: memoryview, kind: str, positions: Ints) -> NDArray[Any]:
    """Return the value at each position; raises IndexError for those past the end."""
    if not len(positions):
        return np.empty(0, kind)
    # Every position of the buffer is an element, so that any of them can be indexed.
    width = np.dtype(kind).itemsize
    elements: NDArray[Any] = np.ndarray((len(view) - width + 1,), kind, buffer=view, strides=(1,))
    return elements[positions]


def heads_at(view: memoryview, positions: Ints) -> NDArray[Any]:
    return read_at(view, f"V{HEAD_BYTES}", positions).view(HEAD)


def are_same(values: NDArray[Any]) -> bool:
    """Whether all are the same bytes; there is at least one."""
    raw, width = values.view(np.uint8), values.dtype.itemsize
    return bool((raw[width:] == raw[:-width]).all())


def follow_sizes(view: memoryview, at: int, end: int, starts: list[int]) -> int:
    """Follow the sizes of records, and add their starts; return how far that leads.

    Any other part of the last one may be damaged.
    """
    found = starts.append
    size_at = _SIZE.unpack_from
    last = end - FIXED_BYTES
    while at <= last:
        size = size_at(view, at)[0]
        if size < FIXED_BYTES:
            break
        found(at)
        at += size
    return starts.pop() if at > end else at
