"""Properties of many messages with the same layout: they differ in single characters only.

Ids of one width, the same tag, numbers with as many digits: then names, values and spaces are in
the same columns of all texts. What is found in the first one is found in all others, and only the
columns that vary are examined.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from turbopump.wire import properties
from turbopump.wire.hashing import string_hash

Ints: TypeAlias = NDArray[np.int64]
Hashes: TypeAlias = NDArray[np.uint32]
Letters: TypeAlias = NDArray[np.uint8]
"""Texts of one length, one per row."""

ROWS_MIN = 16
"""Fewer texts are not examined. Also the number of rows that are compared in one step."""

_ENTRY_END = properties.ENTRY_END.encode()
_NAME_END = properties.NAME_END.encode()
_SPACE = ord(" ")
_ASCII_MAX = 127
_MASK = 0xFFFF_FFFF

POWERS_OF_31: Hashes = np.cumprod(
    np.insert(np.full(properties.BYTES_MAX, 31, np.uint32), 0, 1), dtype=np.uint32
)
"""Modulo 2**32, for the longest properties there can be."""

_FALLING_POWERS = np.ascontiguousarray(POWERS_OF_31[::-1])


def falling_powers(count: int) -> Hashes:
    """Return the multipliers of ``count`` characters in Java's hash.

    They are 32 bits wide, as its sums are. numpy multiplies integers itself; for other numbers it
    uses a library whose threads keep a second processor busy waiting for more.
    """
    return _FALLING_POWERS[len(_FALLING_POWERS) - count :]


class AlignedProperties:
    """Properties of messages whose entries are in the same columns, all of them ASCII."""

    def __init__(self, rows: Letters, first: bytes, varying: list[int]) -> None:
        self.first = first
        """The text of the first message."""
        self._rows = rows
        self._varying = varying

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, name: str) -> tuple[int, int] | None:
        """Return where the value of a property starts and ends in each text.

        Empty ones are ignored, and the last of several counts.
        """
        # The mark before it shifts all positions by one.
        text = _ENTRY_END + self.first + _ENTRY_END
        before = _ENTRY_END + name.encode() + _NAME_END
        at = text.rfind(before)
        while at >= 0:
            start = at + len(before)
            end = text.index(_ENTRY_END, start)
            if end > start:
                return start - 1, end - 1
            at = text.rfind(before, 0, at)
        return None

    def words(self, start: int, end: int) -> list[tuple[int, int]]:
        """Split a value at spaces."""
        found = []
        for word in self.first[start:end].split(b" "):
            if word:
                found.append((start, start + len(word)))
            start += len(word) + 1
        return found

    def hashes(self, start: int, end: int, before: str = "") -> Hashes:
        """Return Java's hash of a range of columns in each text, with a prefix."""
        varying = self._varying[bisect_left(self._varying, start) : bisect_left(self._varying, end)]
        sums: Hashes = np.zeros(len(self), np.uint32)
        if varying:
            first, behind = varying[0], varying[-1] + 1
            powers = falling_powers(end - first)[: behind - first]
            sums = self._rows[:, first:behind] @ powers
        # All other characters are those of the first text.
        rest = string_hash(before + self.first[start:end].decode()) - int(sums[0])
        return sums + np.uint32(rest & _MASK)


def aligned_properties(rows: Letters) -> AlignedProperties | None:
    """Examine texts of one length; None unless they certainly have the same layout."""
    lowest, highest = _extremes(rows, np.minimum), _extremes(rows, np.maximum)
    varying = np.flatnonzero(lowest != highest)
    # End marks of names and entries are below the space. None of them may be where characters vary.
    if not lowest.all() or highest.max() > _ASCII_MAX or (lowest[varying] <= _SPACE).any():
        return None
    first, columns = rows[0].tobytes(), varying.tolist()
    return None if _is_in_names(first, columns) else AlignedProperties(rows, first, columns)


def _is_in_names(first: bytes, columns: list[int]) -> bool:
    """Return whether any of the columns is in the name of a property, or what might be one."""
    start = 0
    for entry in first.split(_ENTRY_END):
        name_end = start + len(entry.partition(_NAME_END)[0])
        if bisect_left(columns, start) < bisect_left(columns, name_end):
            return True
        start += len(entry) + 1
    return False


def _extremes(rows: Letters, extreme: np.ufunc) -> Letters:
    """Return the lowest or the highest character of each column.

    Blocks of rows are compared in one step: row by row would take four times as long.
    """
    length = rows.shape[1]
    whole = rows[: len(rows) - len(rows) % ROWS_MIN].reshape(-1, ROWS_MIN * length)
    of_whole = extreme.reduce(whole, axis=0).reshape(ROWS_MIN, length)
    found: Letters = extreme.reduce(extreme(of_whole, rows[-ROWS_MIN:]), axis=0)
    return found
