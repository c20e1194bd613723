"""The messages of a batch, built from Arrow columns: the bytes of `turbopump.wire.batch`."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turbopump.spark.records.arrow_arrays import Column, Int64s, contents
from turbopump.wire import properties

Pieces: TypeAlias = "list[bytes | Column]"
"""The adjacent pieces of each row: the same bytes in all rows, or binaries."""

_HEAD = np.dtype(
    [("size", ">i4"), ("magic", ">i4"), ("crc", ">i4"), ("flag", ">i4"), ("body_size", ">i4")]
)
_PROPERTIES_SIZE = np.dtype(">i2")
_BYTES_MAX = 2**31 - 1
"""The maximum of Arrow's offsets."""


def entries(bodies: Column, named: Pieces) -> Column | None:
    """Return a batch's message for each body and its properties; None if one is too large.

    The result's bytes are adjacent: a slice of them is the body of a batch.
    """
    body_sizes = sizes(bodies)
    named_sizes = np.zeros(len(bodies), np.int64)
    for piece in named:
        named_sizes += len(piece) if isinstance(piece, bytes) else sizes(piece)
    own = _HEAD.itemsize + _PROPERTIES_SIZE.itemsize
    totals = body_sizes + named_sizes + own
    if named_sizes.max() > properties.BYTES_MAX or totals.sum() > _BYTES_MAX:
        return None
    heads = np.zeros(len(bodies), _HEAD)
    heads["size"] = totals
    heads["body_size"] = body_sizes
    return joined([equal_pieces(heads), bodies, equal_pieces(named_sizes.astype(">i2")), *named])


def joined(pieces: Pieces) -> Column:
    """Concatenate the pieces of each row; none of them is null."""
    kind = pa.binary()
    given: list[Any] = [
        pa.scalar(each, kind) if isinstance(each, bytes) else each for each in _merged(pieces)
    ]
    made: Column = pc.binary_join_element_wise(*given, pa.scalar(b"", kind))
    return made


def _merged(pieces: Pieces) -> Pieces:
    """Join neighbours that are the same in all rows: the cost depends on the number of pieces."""
    merged: Pieces = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, bytes) and isinstance(last, bytes):
            merged[-1] = last + piece
        else:
            merged.append(piece)
    return merged


def equal_pieces(data: npt.NDArray[Any], size: int | None = None) -> Column:
    """Return memory as binaries of one size, by default that of an element."""
    each = data.itemsize if size is None else size
    count = data.nbytes // each
    offsets = np.arange(0, data.nbytes + 1, each, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets.data), pa.py_buffer(data.view(np.uint8).data)]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def sizes(column: Column) -> Int64s:
    """Return the sizes of texts or binaries, of which none is null."""
    return np.diff(contents(column)[0]).astype(np.int64)
