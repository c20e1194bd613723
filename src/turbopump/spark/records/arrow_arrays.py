"""Arrow arrays of any kind, and the memory that they are in."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Column: TypeAlias = "pa.Array[Any]"
Encoded: TypeAlias = "pa.DictionaryArray[Any, Any]"
"""A dictionary column: each distinct value once."""
Int64s: TypeAlias = npt.NDArray[np.int64]

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


def cells(column: Column) -> list[Any]:
    """Return one object for each element."""
    values: list[Any] = column.to_pylist()
    return values


def renamed(column: Column, rename: Callable[[str], str]) -> Column:
    """Return texts changed by a function, which is called once for each distinct text."""
    names: Encoded = column.dictionary_encode()
    return pa.array(map(rename, cells(names.dictionary)), pa.string()).take(names.indices)
