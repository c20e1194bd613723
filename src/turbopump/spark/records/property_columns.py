"""The properties of many messages at once: a map column, and single properties as columns.

Their text form is split at its separators for all messages together. What one message says wrongly
is passed over as `wire.properties.decode` does; of a name given twice the last value counts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from turbopump.spark.records.arrays import Column, Numbers, cells, contents, maps, optional, texts
from turbopump.spark.records.record_run import Parts, RecordRun
from turbopump.wire.properties import ENTRY_END, NAME_END

_NAME_END = ord(NAME_END)
_ENTRY_END = ord(ENTRY_END)
_BITS_MAX = 48
"""With so few names the sum of a message's bits, 32,767 of them at most, cannot overflow."""

# An entry makes four links of a chain of stretches: its name, what ends that, its value, the rest.
_LINKS = 4
_NAME, _VALUE = 0, 2


class PropertyColumns:
    """The properties of a run of messages, taken apart."""

    def __init__(self, run: RecordRun) -> None:
        text, offsets = _joined(run)
        start, name_end, end = _entries(text)
        self._count = len(run)
        self._firsts = np.searchsorted(start, offsets)
        """Where the entries of each message begin, and of the last one end."""
        self._chain = _chain(text, start, name_end, end)
        self._names = self._every(_NAME).dictionary_encode()
        self._codes: npt.NDArray[np.int32] = self._names.indices.to_numpy()

    def column(self, name: str) -> Column:
        """Return one property of each message, null where it has none."""
        found = np.full(self._count, -1, np.int32)
        code = pc.index(self._names.dictionary, name).as_py()
        if code >= 0:
            entries = np.flatnonzero(self._codes == code)
            # Where a name comes twice, the later assignment stays.
            found[self._rows_of(entries)] = entries
        return self._chain.take(optional(found * _LINKS + _VALUE, found < 0))

    def maps(self) -> Column:
        """Return all properties of each message."""
        kept = self._kept()
        names = self._names.dictionary.take(self._names.indices)
        values, firsts = self._every(_VALUE), self._firsts
        if not kept.all():
            names, values = names.filter(pa.array(kept)), values.filter(pa.array(kept))
            firsts = np.concatenate(([0], np.cumsum(kept)))[firsts]
        return maps(firsts.astype(np.int32), names, values)

    def _every(self, link: int) -> Column:
        return self._chain.take(np.arange(link, len(self._chain), _LINKS, dtype=np.int32))

    def _rows_of(self, entries: Numbers) -> Numbers:
        return np.searchsorted(self._firsts, entries, side="right") - 1

    def _kept(self) -> npt.NDArray[np.bool_]:
        """Tell which entries stay: a map must not have a name twice."""
        kept = np.ones(len(self._codes), np.bool_)
        if self._surely_differ():
            return kept
        rows = self._rows_of(np.arange(len(kept)))
        pairs = rows * len(self._names.dictionary) + self._codes
        order = np.argsort(pairs, kind="stable")
        kept[order[:-1][pairs[order][1:] == pairs[order][:-1]]] = False
        return kept

    def _surely_differ(self) -> bool:
        filled = self._firsts[:-1][self._firsts[1:] > self._firsts[:-1]]
        if not len(filled):
            return True
        if len(self._names.dictionary) > _BITS_MAX:
            return False
        bits = np.left_shift(1, self._codes, dtype=np.int64)
        # A sum of different bits is what joining them gives; a repeated one makes it larger.
        joined = np.bitwise_or.reduceat(bits, filled)
        return bool((np.add.reduceat(bits, filled) == joined).all())


def _joined(run: RecordRun) -> tuple[npt.NDArray[np.uint8], Numbers]:
    """Return all texts in one, with an end of entry before each of them and behind the last."""
    # The byte before a text belongs to its length: room for the separator.
    stored = run.binary(Parts(run.properties.start - 1, run.properties.end))
    joined, offsets = _separated(stored)
    return (joined, offsets) if _is_utf8(joined) else _separated(_mended(stored))


def _mended(stored: Column) -> Column:
    mended = [text[1:].decode("utf-8", "replace").encode() for text in cells(stored)]
    return pa.array([b"\0" + text for text in mended], pa.binary())


def _separated(column: Column) -> tuple[npt.NDArray[np.uint8], Numbers]:
    ends, data = contents(column)
    offsets = ends.astype(np.int64)
    joined = np.empty(len(data) + 1, np.uint8)
    joined[:-1] = data
    joined[offsets] = _ENTRY_END
    return joined, offsets


def _is_utf8(text: npt.NDArray[np.uint8]) -> bool:
    whole = texts(np.array([0, len(text)], np.int32), text)
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _entries(text: npt.NDArray[np.uint8]) -> tuple[Numbers, Numbers, Numbers]:
    """Return where the entries that make sense start, where their names end, and where they do."""
    marks = np.flatnonzero((text - np.uint8(_NAME_END)) <= _ENTRY_END - _NAME_END)
    kinds = text[marks]
    closes = kinds == _ENTRY_END
    # What follows the end of an entry is the first mark of the next one; it ends a name, or the
    # entry has none. The text both begins and ends with the end of an entry.
    opening = np.flatnonzero(closes[:-1] & ~closes[1:])
    start, name_end = marks[opening] + 1, marks[opening + 1]
    if closes[opening + 2].all():
        end = marks[opening + 2]
    else:
        # A value with more marks of the other kind in it, which belong to it.
        ends = np.flatnonzero(closes)
        end = marks[ends[np.searchsorted(ends, opening + 2)]]
    good = (name_end > start) & (end > name_end + 1)
    return (start, name_end, end) if good.all() else (start[good], name_end[good], end[good])


def _chain(text: npt.NDArray[np.uint8], start: Numbers, name_end: Numbers, end: Numbers) -> Column:
    """Return the stretches that the entries cut the text into; no byte is copied."""
    offsets = np.empty(_LINKS * len(start) + 1, np.int32)
    offsets[0:-1:_LINKS] = start
    offsets[1::_LINKS] = name_end
    offsets[2::_LINKS] = name_end + 1
    offsets[3::_LINKS] = end
    offsets[-1] = end[-1] if len(end) else 0
    return texts(offsets, text)
