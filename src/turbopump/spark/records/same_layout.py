"""The properties of messages whose texts differ only in the bytes of values.

One producer's messages do, while its keys and tags keep their lengths: each value is then at the
same columns of all texts, and separators must be searched for in only one of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turbopump.spark.records.arrow_arrays import (
    Column,
    maps,
    offsets_of,
    repeated,
    same_width_texts,
)
from turbopump.spark.records.record_run import Mask, Span
from turbopump.wire.properties import ENTRY_END, NAME_END

_ASCII_MAX = 0x7F
_ENTRY_END = ord(ENTRY_END)
"""The larger one of the separators. Below them is a byte that is never written."""
_FOLDED_ROWS = 32
"""This many rows are reduced as one: the time depends on the rows, hardly on the bytes."""


class SameLayout:
    """The properties of such messages: names, and one field for each value of a message."""

    def __init__(self, names: tuple[str, ...], values: npt.NDArray[np.void]) -> None:
        self._names = names
        self._values = values

    def column(self, name: str) -> Column:
        """Return one property of each message, null if it has none."""
        if name not in self._names:
            return pa.nulls(len(self._values), pa.string())
        found = self._values[_field(self._names.index(name))].copy()
        return same_width_texts((found.dtype.itemsize,), found)

    def maps(self) -> Column:
        """Return all properties of each message."""
        rows, each = len(self._values), len(self._names)
        kind = self._values.dtype
        widths = tuple(kind[at].itemsize for at in range(each))
        values = same_width_texts(widths, self._values)
        return maps(rows, offsets_of((each,), rows), repeated(self._names, rows), values)


def same_layout(texts: npt.NDArray[np.void]) -> SameLayout | None:
    """Parse texts of the same length; None if they differ in more, or are not ASCII."""
    if texts.view(np.uint8).max() > _ASCII_MAX:
        return None
    layout = _layout(texts[0].tobytes().decode())
    if layout is None:
        return None
    is_value, stored, packed = _fields(tuple(layout.values()), texts.dtype.itemsize)
    if not (is_value | _same_bytes(texts)).all():
        return None
    values = texts.view(stored).astype(packed)
    has_marks = values.view(np.uint8).min() <= _ENTRY_END
    return None if has_marks else SameLayout(tuple(layout), values)


def _layout(text: str) -> dict[str, Span] | None:
    """Return the spans of values by name; None for a text with a malformed entry, or without any.

    Separators within values are not searched for: the caller does so in all texts together.
    """
    found: dict[str, Span] = {}
    at = 0
    for entry in text.split(ENTRY_END):
        name, _, value = entry.partition(NAME_END)
        end = at + len(entry)
        if entry:
            if not name or not value:
                return None
            # Of a duplicate name, the last value counts.
            found.pop(name, None)
            found[name] = end - len(value), end
        at = end + len(ENTRY_END)
    return found or None


@lru_cache(maxsize=32)
def _fields(spans: tuple[Span, ...], width: int) -> tuple[Mask, np.dtype[Any], np.dtype[Any]]:
    """Return which bytes of a text belong to values, and values with and without the rest."""
    is_value = np.zeros(width, np.bool_)
    for start, end in spans:
        is_value[start:end] = True
    names = [_field(at) for at in range(len(spans))]
    formats = [f"V{end - start}" for start, end in spans]
    offsets = [start for start, _ in spans]
    stored = np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": width},
    )
    return is_value, stored, np.dtype(list(zip(names, formats, strict=True)))


def _field(at: int) -> str:
    return f"value{at}"


def _same_bytes(rows: npt.NDArray[np.void]) -> Mask:
    """Return which bytes are the same in all rows."""
    table = rows.view(np.uint8).reshape(len(rows), -1)
    is_same: Mask = np.equal(_reduced(np.bitwise_and, table), _reduced(np.bitwise_or, table))
    return is_same


def _reduced(by: np.ufunc, table: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Reduce a table to one row."""
    rows, width = table.shape
    folded = rows - rows % _FOLDED_ROWS
    wide = by.reduce(table[:folded].reshape(-1, _FOLDED_ROWS * width), axis=0)
    few = np.concatenate((wide.reshape(_FOLDED_ROWS, width), table[folded:]))
    reduced: npt.NDArray[np.uint8] = by.reduce(few, axis=0)
    return reduced
