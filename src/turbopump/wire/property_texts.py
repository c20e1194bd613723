"""The properties of many messages at a time: where some of them stand, and their Java hashes.

A loop over messages, or worse over characters, would cost more than all the rest of storing a
message. So the texts are put one behind the other and looked at as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from turbopump.wire import properties

Ints: TypeAlias = NDArray[np.int64]
Hashes: TypeAlias = NDArray[np.uint32]

_ENTRY_END = properties.ENTRY_END.encode()
_MARK = _ENTRY_END[0]
_NAME_END = ord(properties.NAME_END)
_SPACE = ord(" ")
_ASCII_MAX = 127
_WORD = np.dtype(">u8")
_WORD_BYTES = _WORD.itemsize
_PADDING = bytes((_NAME_END,)) * _WORD_BYTES
"""Lies around the texts, so that a word can be read from everywhere; no mark, no zero."""

_LONG_BYTES = 256
"""Longer values are hashed one by one."""


class PropertyTexts:
    """The text forms of properties, one of each message, as one text: each entry between marks."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.parts = parts
        self.lengths: Ints = np.fromiter(map(len, parts), np.int64, len(parts))
        self._text = _ENTRY_END.join((_PADDING, *parts, _PADDING))
        self._bytes = np.frombuffer(self._text, np.uint8)
        # Eight bytes from each position on, as one number.
        count = len(self._text) - _WORD_BYTES + 1
        self._words = np.ndarray((count,), _WORD, self._text, strides=(1,))
        # Where each text ends, at the mark behind it.
        self._text_ends: Ints = np.cumsum(self.lengths + 1) + _WORD_BYTES

    def __contains__(self, piece: bytes) -> bool:
        return piece in self._text

    def ending_with_mark(self) -> NDArray[np.bool_]:
        """Say which of the texts are empty or end with what ends an entry."""
        ended: NDArray[np.bool_] = self._bytes[self._text_ends - 1] == _MARK
        return ended

    @cached_property
    def _entries(self) -> tuple[Ints, Ints, NDArray[np.uint64]]:
        """Where entries start and end, and their first letters as one number."""
        marks = np.flatnonzero(self._bytes == _MARK)
        starts = marks[:-1] + 1
        return starts, marks[1:], self._words[starts].astype(np.uint64)

    def values(self, name: str) -> tuple[Ints, Ints, Ints]:
        """Return of each value of a property whose it is, and where it starts and ends.

        Empty ones do not count, and of several of one message the last one does.
        """
        all_starts, all_ends, names = self._entries
        letters = name.encode()
        shift = np.uint64(8 * (_WORD_BYTES - len(letters)))
        named = np.flatnonzero(names >> shift == int.from_bytes(letters, "big"))
        starts, ends = all_starts[named] + len(letters), all_ends[named]
        full = (self._bytes[starts] == _NAME_END) & (ends > starts + 1)
        if not full.all():
            starts, ends = starts[full], ends[full]
        owners = self._owners(starts)
        last = owners[1:] != owners[:-1]
        if not last.all():
            last = np.append(last, True)
            owners, starts, ends = owners[last], starts[last], ends[last]
        return owners, starts + 1, ends

    def _owners(self, positions: Ints) -> Ints:
        """Return in whose text positions lie, which are in order."""
        text_ends = self._text_ends
        if len(positions) == len(text_ends):
            # Mostly each message has one.
            each = positions < text_ends
            each[1:] &= positions[1:] > text_ends[:-1]
            if each.all():
                return np.arange(len(positions))
        return np.searchsorted(text_ends, positions, "right")

    def split(self, owners: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
        """Split values at spaces."""
        spaces = np.flatnonzero(self._bytes == _SPACE)
        within = np.searchsorted(starts, spaces, "right") - 1
        # A space before all values is held against the last one, which ends behind it.
        inside = (within >= 0) & (spaces < ends[within]) if len(starts) else within > 0
        if not inside.any():
            return owners, starts, ends
        spaces = spaces[inside]
        starts = np.sort(np.concatenate((starts, spaces + 1)), kind="stable")
        ends = np.sort(np.concatenate((ends, spaces)), kind="stable")
        full = ends > starts
        if not full.all():
            starts, ends = starts[full], ends[full]
        return np.searchsorted(self._text_ends, starts, "right"), starts, ends

    def hashes(self, starts: Ints, ends: Ints) -> Hashes:
        """Return Java's hash of each value, as if all were ASCII; none of them is empty."""
        lengths = ends - starts
        found = np.zeros(len(starts), np.uint32)
        for number in np.flatnonzero(lengths > _LONG_BYTES).tolist():
            found[number] = _hash(self._bytes[starts[number] : ends[number]])
        # The others eight letters at a time, from the end.
        left, done = np.flatnonzero(lengths <= _LONG_BYTES), 0
        while len(left):
            rest = lengths[left] - done
            words = self._words[ends[left] - (done + _WORD_BYTES)].astype(np.uint64)
            words &= _LAST_LETTERS[np.minimum(rest, _WORD_BYTES)]
            found[left] += _word_hashes(words) * POWERS_OF_31[done]
            done += _WORD_BYTES
            left = left[rest > _WORD_BYTES]
        return found

    def foreign(self, starts: Ints, ends: Ints) -> list[int]:
        """Return which of the values are not ASCII, whose hashes Java takes of UTF-16."""
        if self._text.isascii():
            return []
        counts = np.append(0, np.cumsum(self._bytes > _ASCII_MAX))
        return np.flatnonzero(counts[ends] > counts[starts]).tolist()

    def value(self, start: int, end: int) -> str:
        return self._text[start:end].decode("utf-8", "replace")


POWERS_OF_31: Hashes = np.cumprod(
    np.insert(np.full(properties.BYTES_MAX, 31, np.uint32), 0, 1), dtype=np.uint32
)
"""Modulo 2**32, for the longest properties there can be."""

_LAST_LETTERS = np.array([(1 << 8 * count) - 1 for count in range(_WORD_BYTES + 1)], np.uint64)
"""By how many of the last letters of a word count."""


def _word_hashes(words: NDArray[np.uint64]) -> Hashes:
    """Return Java's hashes of eight letters each; zeros at the start do not count.

    All pairs of a word are hashed with one multiplication, as no sum runs into its neighbour, then
    pairs of these, and so on.
    """
    for bits, mask in ((8, 0x00FF_00FF_00FF_00FF), (16, 0x0000_FFFF_0000_FFFF)):
        words = (words >> bits & mask) * 31 ** (bits // 8) + (words & mask)
    return ((words >> 32) * 31**4 + (words & 0xFFFF_FFFF)).astype(np.uint32)


def _hash(letters: NDArray[np.uint8]) -> np.uint32:
    powers = POWERS_OF_31[: len(letters)][::-1]
    return np.sum(letters * powers, dtype=np.uint32)
