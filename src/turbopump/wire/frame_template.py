"""Frames that are the same except for some numbers, as in consecutive reads of one queue.

Reading such a frame takes no JSON parsing: its text is compared, and its numbers are where they
were in the previous one. Only frames of the same size can match, so numbers have the same number of
digits; a frame with a longer one is parsed normally, and becomes the next template. Frames are also
parsed normally where not every number with these digits is valid, as in a request's own number of
ten.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from operator import ge, itemgetter

from msgspec import Struct

from turbopump.errors import WireError
from turbopump.wire.command import Buffer

Numbers = tuple[int, ...]
Span = tuple[int, int]

_PROBES = (b"9", b"8")
"""Digits that replace numbers to verify what they mean: the largest possible, and others.

Two, as a number that also occurs elsewhere may happen to have the same digits there.
"""
_DIGITS_MAX = 19
"""No number in a frame has more, and Python refuses to parse thousands."""


class VaryingFields(Struct, frozen=True):
    """The numbers that differ between frames of one kind; at least two."""

    places: tuple[re.Pattern[bytes], ...]
    """Find where each of them is: its digits are the first group."""
    read: Callable[[bytes], Numbers]
    """Parses them normally."""


class FrameTemplate:
    """Recognises frames that differ from a sample only in some numbers."""

    __slots__ = ("_cut", "_least", "_pick", "_texts", "size", "varying")

    def __init__(self, sample: bytes, spans: Sequence[Span], varying: VaryingFields) -> None:
        self.varying = varying
        self.size = len(sample)
        """Of each of these frames, in bytes."""
        bounds = (0, *chain.from_iterable(sorted(spans)), len(sample))
        self._cut = struct.Struct("".join(f"{end - start}s" for start, end in pairwise(bounds)))
        self._texts = self._cut.unpack(sample)[::2]
        self._pick = itemgetter(*(bounds.index(start) for start, _ in spans))
        # Leading zeros are not part of a number.
        self._least = tuple(10 ** (end - start - 1) * (end - start > 1) for start, end in spans)

    @classmethod
    def from_sample(
        cls, sample: bytes, other: bytes, varying: VaryingFields
    ) -> FrameTemplate | None:
        """Return a template made from a sample.

        None if the other frame does not match, or if the numbers are not read from where they seem
        to be: names may occur twice, or be written differently.
        """
        spans: list[Span] = []
        for place in varying.places:
            found = place.search(sample)
            if found is None or not (spans or other.startswith(sample[: found.start(1)])):
                return None
            start, end = found.span(1)
            if end - start > _DIGITS_MAX:
                return None
            spans.append((start, end))
        alike = cls(sample, spans, varying)
        if alike.numbers(other) is None:
            return None
        is_sound = all(_is_read(sample, spans, varying, digit) for digit in _PROBES)
        return alike if is_sound else None

    def numbers(self, data: Buffer, at: int = 0) -> Numbers | None:
        """Return the numbers of the frame at a position; None if it does not match the sample."""
        if len(data) - at < self.size:
            return None
        pieces = self._cut.unpack_from(data, at)
        if pieces[::2] != self._texts:
            return None
        digits = self._pick(pieces)
        if not b"".join(digits).isdigit():
            return None
        numbers = tuple(map(int, digits))
        return numbers if all(map(ge, numbers, self._least)) else None


def _is_read(sample: bytes, spans: Sequence[Span], varying: VaryingFields, digit: bytes) -> bool:
    """Whether numbers written with one digit in these places are read as such."""
    probe = bytearray(sample)
    for start, end in spans:
        probe[start:end] = digit * (end - start)
    try:
        return varying.read(bytes(probe)) == tuple(int(probe[start:end]) for start, end in spans)
    except WireError:
        return False
