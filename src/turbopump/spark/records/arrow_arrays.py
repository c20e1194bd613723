"""Arrow arrays created from, and split into, plain memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Column: TypeAlias = "pa.Array[Any]"
Encoded: TypeAlias = "pa.DictionaryArray[Any, Any]"
"""A dictionary column: each distinct value once."""
Int64s: TypeAlias = npt.NDArray[np.int64]
K = TypeVar("K", bound=tuple[object, ...])
T = TypeVar("T")

SHARED_MAX = 1 << 17
"""Elements of a column that is cached for other batches."""
_FREED_BYTES = 16 * 1024 * 1024
"""More than a batch needs; twice as much may stay in the process."""


@cache
def keep_freed_memory() -> None:
    """Reuse the memory of one batch for the next.

    The C library returns memory at the end of its heap to the system, and gets it back page by page
    when it is needed again, unless blocks as large as this one were freed before. The block is
    never touched. Other C libraries are not affected.
    """
    np.empty(_FREED_BYTES, np.uint8)


def shared(make: Callable[[K, int], T]) -> Callable[[K, int], T]:
    """Decorate a function that repeats parts, so that its last results are reused.

    The parts may be repeated more often than requested, unless there are too many.
    """
    kept = lru_cache(maxsize=32)(make)

    def found(parts: K, times: int) -> T:
        if times * len(parts) > SHARED_MAX:
            return make(parts, times)
        # The next power of two is the same for most batches of a read.
        return kept(parts, 1 << (times - 1).bit_length())

    return found


def texts(offsets: npt.NDArray[np.int32], data: npt.NDArray[Any]) -> Column:
    """Return adjacent strings as an array; the bytes must be UTF-8, nothing is copied."""
    buffers = [None, pa.py_buffer(offsets.data), pa.py_buffer(data.data)]
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)


def contents(column: Column) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return the offsets and the bytes of strings or binaries; a slice's need not start at 0."""
    _, offsets, data = column.buffers()
    assert offsets is not None
    ends = np.frombuffer(memoryview(offsets), np.int32, len(column) + 1, 4 * column.offset)
    used = int(ends[-1])
    if data is None or not used:
        return ends, np.empty(0, np.uint8)
    return ends, np.frombuffer(memoryview(data), np.uint8, used)


def of_widths(kind: pa.DataType, values: npt.NDArray[Any], *widths: int) -> Column:
    """Return elements as binaries, or strings in UTF-8; nothing is copied.

    ``widths`` are those of the parts of an element, by default it is one part.
    """
    count, widths = len(values), widths or (values.dtype.itemsize,)
    buffers = [None, offsets_of(widths, count), pa.py_buffer(values.view(np.uint8).data)]
    return pa.Array.from_buffers(kind, count * len(widths), buffers)


@shared
def offsets_of(widths: tuple[int, ...], times: int) -> pa.Buffer:
    """Return the offsets of parts with these widths, repeated."""
    found = np.zeros(times * len(widths) + 1, np.int64)
    np.cumsum(np.tile(np.array(widths), times), out=found[1:])
    # Values beyond the request may exceed the integer's range.
    return pa.py_buffer(found.astype(np.int32).data)


def slices(buffer: pa.Buffer, start: Int64s, end: Int64s) -> Column:
    """Return ranges of a buffer as a new array; they are in order, without overlap.

    Arrow's offsets form a chain: wanted bytes, unwanted bytes, wanted ones... Taking every second
    link copies all of them in one native loop.
    """
    count = len(start)
    chain = np.empty(2 * count + 1, np.int32)
    chain[0:-1:2] = start
    chain[1::2] = end
    chain[-1] = end[-1] if count else 0
    buffers = [None, pa.py_buffer(chain.data), buffer]
    links = pa.Array.from_buffers(pa.binary(), 2 * count, buffers)
    return links.take(np.arange(0, 2 * count, 2, dtype=np.int32))


def repeated(texts: tuple[str, ...], times: int) -> Column:
    """Return repeated texts; the last result is reused."""
    return _repeated_texts(texts, times).slice(0, times * len(texts))


@shared
def _repeated_texts(texts: tuple[str, ...], times: int) -> Column:
    one: Column = pa.array(texts, pa.string())
    return one.take(np.arange(times * len(texts)) % len(texts))


def maps(count: int, firsts: pa.Buffer, names: Column, values: Column) -> Column:
    """Return maps of strings; ``firsts`` has the start of each one's entries, and the end."""
    entry = [pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())]
    entries: Column = pa.StructArray.from_arrays([names, values], fields=entry)
    kind = pa.map_(pa.string(), pa.string())
    return pa.Array.from_buffers(kind, count, [None, firsts], children=[entries])


def cells(column: Column) -> list[Any]:
    """Return one object for each element."""
    values: list[Any] = column.to_pylist()
    return values


def renamed(column: Column, rename: Callable[[str], str]) -> Column:
    """Return texts changed by a function, which is called once for each distinct text."""
    names: Encoded = column.dictionary_encode()
    return pa.array(map(rename, cells(names.dictionary)), pa.string()).take(names.indices)


def in_order(parts: list[Column], rows: list[Int64s]) -> Column:
    """Merge arrays whose elements belong to these rows."""
    order = np.argsort(np.concatenate(rows), kind="stable")
    return pa.concat_arrays(parts).take(order)
