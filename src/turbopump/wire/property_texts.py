"""Properties of many messages: where some of them are, and their Java hashes.

A loop over messages, or worse over characters, would cost more than all the rest of storing a
message. So the texts are concatenated and processed as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from turbopump.wire import properties
from turbopump.wire.aligned_properties import (
    ROWS_MIN,
    AlignedProperties,
    Hashes,
    Ints,
    aligned_properties,
    falling_powers,
)

Equal: TypeAlias = NDArray[np.void]
"""Byte strings of the same nonzero length; those of texts are contiguous."""

_ENTRY_END = properties.ENTRY_END.encode()
_MARK = _ENTRY_END[0]
_NAME_END = ord(properties.NAME_END)
_SPACE = ord(" ")
_ASCII_MAX = 127
_WORD = np.dtype(">u8")
_WORD_BYTES = _WORD.itemsize
_LONG_BYTES = 256
"""Longer values are hashed one by one."""

_PADDING = bytes((_NAME_END,)) * _LONG_BYTES
"""Surrounds the texts, so that words and windows can be read everywhere; no mark, no zero."""


class PropertyTexts:
    """The text forms of properties, one per message.

    Texts with the same layout are processed as columns (`AlignedProperties`). Others become one
    text, with each entry between marks.
    """

    def __init__(self, given: Sequence[bytes] | Equal) -> None:
        self.given = given

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, some: slice) -> PropertyTexts:
        return PropertyTexts(self.given[some])

    @cached_property
    def lengths(self) -> Ints:
        given = self.given
        if isinstance(given, np.ndarray):
            return np.full(len(given), given.itemsize)
        return np.fromiter(map(len, given), np.int64, len(given))

    @cached_property
    def parts(self) -> Sequence[bytes]:
        return self.given.tolist() if isinstance(self.given, np.ndarray) else self.given

    @cached_property
    def columns(self) -> AlignedProperties | None:
        """The texts as columns of characters; None unless they certainly have the same layout."""
        given, lengths = self.given, self.lengths
        if len(given) < ROWS_MIN or not lengths[0] or (lengths != lengths[0]).any():
            return None
        letters = (
            given.view(np.uint8)
            if isinstance(given, np.ndarray)
            else np.frombuffer(b"".join(given), np.uint8)
        )
        return aligned_properties(letters.reshape(len(given), -1))

    @cached_property
    def _text(self) -> bytes:
        return _ENTRY_END.join((_PADDING, *self.parts, _PADDING))

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._text, np.uint8)

    @cached_property
    def _text_ends(self) -> Ints:
        """Where each text ends, at the mark after it."""
        ends: Ints = np.cumsum(self.lengths + 1) + len(_PADDING)
        return ends

    def has_zero(self) -> bool:
        """Return whether any of them contains a zero byte."""
        return self.columns is None and b"\0" in self._text

    def spaces(self) -> int:
        """Count the spaces in all of them."""
        if self.columns is not None:
            return self.columns.first.count(b" ") * len(self)
        return self._text.count(b" ")

    def ending_with_mark(self) -> NDArray[np.bool_]:
        """Return which of the texts are empty or end with the end mark of an entry."""
        if self.columns is not None:
            return np.full(len(self), self.columns.first.endswith(_ENTRY_END))
        ended: NDArray[np.bool_] = self._bytes[self._text_ends - 1] == _MARK
        return ended

    @cached_property
    def _entries(self) -> tuple[Ints, Ints, NDArray[np.uint64]]:
        """Where entries start and end, and their first characters as one number."""
        marks = np.flatnonzero(self._bytes == _MARK)
        starts = marks[:-1] + 1
        # Eight bytes from each position on, as one number.
        count = len(self._text) - _WORD_BYTES + 1
        words = np.ndarray((count,), _WORD, self._text, strides=(1,))
        return starts, marks[1:], words[starts].astype(np.uint64)

    def values(self, name: str) -> tuple[Ints, Ints, Ints]:
        """Return the message, start and end of each value of a property.

        Empty ones are ignored, and the last of several in one message counts.
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
        """Return the messages whose texts contain ascending positions."""
        text_ends = self._text_ends
        if len(positions) == len(text_ends):
            # Mostly each message has one.
            each = positions < text_ends
            each[1:] &= positions[1:] > text_ends[:-1]
            if each.all():
                return np.arange(len(positions))
        return np.searchsorted(text_ends, positions, "right")

    def split(self, owners: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
        spaces = np.flatnonzero(self._bytes == _SPACE)
        within = np.searchsorted(starts, spaces, "right") - 1
        # A space before all values is assigned to the last one, which ends after it.
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
        """Return Java's hash of each value, as if all were ASCII; none of them is empty.

        It is a sum of characters times powers of 31: for many values, a matrix product. Values of
        one length are processed together, or of similar lengths if there are too many.
        """
        lengths = ends - starts
        found = np.zeros(len(starts), np.uint32)
        for number in np.flatnonzero(lengths > _LONG_BYTES).tolist():
            letters = self._bytes[starts[number] : ends[number]]
            found[number] = letters @ falling_powers(len(letters))
        widths = np.flatnonzero(np.bincount(np.minimum(lengths, _LONG_BYTES + 1))).tolist()
        are_exact = len(widths) <= len(_WIDTHS)
        for below, width in pairwise((0, *(widths if are_exact else _WIDTHS))):
            which = np.flatnonzero((lengths > below) & (lengths <= width))
            if width <= _LONG_BYTES and len(which):
                letters = self._windows(width)[ends[which] - width]
                if not are_exact:
                    letters *= np.arange(width, 0, -1) <= lengths[which, None]
                found[which] = letters @ falling_powers(width)
        return found

    def _windows(self, width: int) -> NDArray[np.uint8]:
        """View the text as overlapping windows of ``width`` bytes."""
        return np.ndarray((len(self._text) - width + 1, width), np.uint8, self._text, 0, (1, 1))

    def foreign(self, starts: Ints, ends: Ints) -> list[int]:
        """Return which values are not ASCII: Java hashes their UTF-16 code units."""
        if self._text.isascii():
            return []
        counts = np.append(0, np.cumsum(self._bytes > _ASCII_MAX))
        return np.flatnonzero(counts[ends] > counts[starts]).tolist()

    def value(self, start: int, end: int) -> str:
        return self._text[start:end].decode("utf-8", "replace")


_WIDTHS = (8, 16, 24, 32, 48, 64, 128, _LONG_BYTES)
"""Widths that lengths are grouped into if there are too many."""
