"""Arrow arrays created from, and split into, plain memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Column: TypeAlias = "pa.Array[Any]"
Encoded: TypeAlias = "pa.DictionaryArray[Any, Any]"
"""A dictionary column: each distinct value once."""
Int64s: TypeAlias = npt.NDArray[np.int64]

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


def same_width(values: npt.NDArray[Any]) -> Column:
    """Return elements of equal width as binaries; nothing is copied."""
    return _of_widths(pa.binary(), (values.dtype.itemsize,), values)


def same_width_texts(widths: tuple[int, ...], values: npt.NDArray[Any]) -> Column:
    """Return elements that are strings of these widths; they must be UTF-8, nothing is copied."""
    return _of_widths(pa.string(), widths, values)


def _of_widths(kind: pa.DataType, widths: tuple[int, ...], values: npt.NDArray[Any]) -> Column:
    count = len(values)
    buffers = [None, offsets_of(widths, count), pa.py_buffer(values.view(np.uint8).data)]
    return pa.Array.from_buffers(kind, count * len(widths), buffers)


def offsets_of(widths: tuple[int, ...], times: int) -> pa.Buffer:
    """Return the offsets of parts with these widths, repeated.

    There may be more than requested: the last result is reused.
    """
    if times * len(widths) > SHARED_MAX:
        return _made_offsets(widths, times)
    return _shared_offsets(widths, power_of_two(times))


def _made_offsets(widths: tuple[int, ...], times: int) -> pa.Buffer:
    found = np.zeros(times * len(widths) + 1, np.int64)
    np.cumsum(np.tile(np.array(widths), times), out=found[1:])
    # Values beyond the request may exceed the integer's range.
    return pa.py_buffer(found.astype(np.int32).data)


_shared_offsets = lru_cache(maxsize=32)(_made_offsets)


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


def optional(values: npt.NDArray[Any], missing: npt.NDArray[np.bool_]) -> Column:
    """Return numbers, null where they are missing."""
    column: Column = pa.array(values, mask=missing)
    return column


def numbers(kind: pa.DataType, values: npt.NDArray[Any]) -> Column:
    """Return numbers as they lie in memory; nothing is copied."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values.data)])


def repeated(texts: tuple[str, ...], times: int) -> Column:
    """Return repeated texts; the last result is reused."""
    count = times * len(texts)
    if count > SHARED_MAX:
        return _repeated_texts(texts, times)
    return _shared(texts, power_of_two(times)).slice(0, count)


def power_of_two(count: int) -> int:
    """Return a number at least as large, which is the same for most batches of a read."""
    return 1 << (count - 1).bit_length()


def _repeated_texts(texts: tuple[str, ...], times: int) -> Column:
    one: Column = pa.array(texts, pa.string())
    return one.take(np.arange(times * len(texts)) % len(texts))


_shared = lru_cache(maxsize=32)(_repeated_texts)


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


def mask_of(column: Column) -> npt.NDArray[np.bool_]:
    """Return the mask of true elements of a column."""
    mask: npt.NDArray[np.bool_] = column.to_numpy(zero_copy_only=False)
    return mask


def in_order(parts: list[Column], rows: list[Int64s]) -> Column:
    """Merge arrays whose elements belong to these rows."""
    order = np.argsort(np.concatenate(rows), kind="stable")
    return pa.concat_arrays(parts).take(order)
