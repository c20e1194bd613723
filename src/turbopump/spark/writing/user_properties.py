"""User properties of rows, one map each, encoded as in messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turbopump.spark.records.arrow_arrays import Column, cells, contents
from turbopump.spark.writing.batch_entries import Pieces, joined
from turbopump.wire import properties

MARKS = (properties.NAME_END, properties.ENTRY_END)


def is_text(text: str) -> bool:
    """Whether a property may have this value."""
    return bool(text.strip()) and not any(mark in text for mark in MARKS)


def user_properties(
    column: Column, left_out: Iterable[str], refused: frozenset[str]
) -> Pieces | None:
    """Return the maps as encoded after other properties; None if one needs further checks."""
    entries = _Entries.of(column)
    if entries is None:
        return None
    entries = entries.without(frozenset(left_out))
    if not len(entries.values):
        return []
    if not entries.are_allowed(refused):
        return None
    parts: Pieces = [
        properties.ENTRY_END.encode(),
        entries.names.cast(pa.binary()),
        properties.NAME_END.encode(),
        entries.values.cast(pa.binary()),
    ]
    flat = joined(parts)
    firsts = contents(flat)[0][entries.offsets]
    buffers = [None, pa.py_buffer(firsts.data), flat.buffers()[2]]
    return [pa.Array.from_buffers(pa.binary(), len(column), buffers)]


class _Entries:
    """The entries of many maps, back to back."""

    def __init__(self, offsets: npt.NDArray[np.int32], names: Column, values: Column) -> None:
        self.offsets = offsets
        """Where the entries of each map start, and the end."""
        self.names = names
        self.values = values
        found = cast("Any", names.dictionary_encode())
        self._codes: npt.NDArray[np.int32] = found.indices.to_numpy()
        self._known = cells(found.dictionary)

    @classmethod
    def of(cls, column: Column) -> _Entries | None:
        """Return the entries; None if one is null, or a map that is null has some."""
        given = cast("Any", column)
        offsets = given.offsets.to_numpy()
        counts = np.diff(offsets)
        if column.null_count and counts[column.is_null().to_numpy(zero_copy_only=False)].any():
            return None
        start, count = int(offsets[0]), int(offsets[-1] - offsets[0])
        names, values = given.keys.slice(start, count), given.items.slice(start, count)
        if names.null_count or values.null_count:
            return None
        return cls(offsets - offsets[0], names.cast(pa.string()), values.cast(pa.string()))

    def without(self, names: frozenset[str]) -> _Entries:
        """Drop entries with some names."""
        if not names.intersection(self._known):
            return self
        kept = ~np.isin(self._codes, [n for n, name in enumerate(self._known) if name in names])
        places = np.concatenate(([0], np.cumsum(kept))).astype(np.int32)
        mask = pa.array(kept)
        return _Entries(places[self.offsets], self.names.filter(mask), self.values.filter(mask))

    def are_allowed(self, refused: frozenset[str]) -> bool:
        """Whether all entries are valid, and no map has a duplicate name."""
        if any(name in refused or not is_text(name) for name in self._known):
            return False
        if not all(map(is_text, cells(self.values.unique()))):
            return False
        rows = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        pairs = rows * len(self._known) + self._codes
        return len(np.unique(pairs)) == len(pairs)
