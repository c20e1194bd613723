"""Frames that repeat one another but for some numbers, as when one queue is read on and on.

Reading such a frame takes no JSON: its texts are compared, and its numbers stand where they stood
in the one before. Only frames of the same size can be alike, so numbers have as many digits as
there; one that gets longer is read the usual way, and is what the next ones are compared with.
Where not all numbers of so many digits are allowed, as in a request's own number of ten, frames are
read the usual way too.
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
"""Digits that numbers are written with to see what they mean: the largest possible, and others.

Two, as one that stands elsewhere too may happen to have the same digits there.
"""
_DIGITS_MAX = 19
"""No number of a frame has more, and Python refuses to read thousands."""


class VaryingFields(Struct, frozen=True):
    """The numbers that differ between frames of one kind, of which there are at least two."""

    places: tuple[re.Pattern[bytes], ...]
    """Find where each of them stands: its digits are the first group."""
    read: Callable[[bytes], Numbers]
    """Reads them the usual way."""


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
        # Zeros before a number are no part of it.
        self._least = tuple(10 ** (end - start - 1) * (end - start > 1) for start, end in spans)

    @classmethod
    def from_sample(
        cls, sample: bytes, other: bytes, varying: VaryingFields
    ) -> FrameTemplate | None:
        """Return a template made from a sample.

        None if the other one is not, or if the numbers are not read from where they seem to stand:
        names may be there twice, or written in other ways.
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
        """Return the numbers of the frame at a position, None if it is not like the sample."""
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
    """Whether numbers that are written with one digit, in these places, are read as such."""
    probe = bytearray(sample)
    for start, end in spans:
        probe[start:end] = digit * (end - start)
    try:
        return varying.read(bytes(probe)) == tuple(int(probe[start:end]) for start, end in spans)
    except WireError:
        return False
