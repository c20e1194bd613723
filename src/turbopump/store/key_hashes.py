"""The keys of many messages at a time, as the key index wants them: their Java hashes.

A loop over keys, or worse over their characters, would cost more than all the rest of storing a
message. So the properties of many messages are put one behind the other and looked at as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turbopump.wire import properties
from turbopump.wire.hashing import INT_MAX, string_hash

Ints = NDArray[np.int64]

_MASK = 0xFFFF_FFFF
_ENTRY_END = properties.ENTRY_END.encode()
_NAME_END = ord(properties.NAME_END)
_SPACE = ord(" ")
_ASCII_MAX = 127
_WORD = np.dtype(">u8")
_PADDING = bytes(_WORD.itemsize)
_INVERSE_OF_31 = pow(31, -1, 1 << 32)


class Powers:
    """The powers of 31 modulo 2**32, and those of its inverse; as many as were ever needed."""

    def __init__(self) -> None:
        self.up = self.down = np.ones(0, np.uint32)

    def reach(self, count: int) -> None:
        """Have at least so many."""
        if len(self.up) < count:
            size = 1 << count.bit_length()
            self.up, self.down = _powers(31, size), _powers(_INVERSE_OF_31, size)


def _powers(base: int, count: int) -> NDArray[np.uint32]:
    factors = np.full(count, base, np.uint32)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint32)


_powers_of_31 = Powers()


def key_hashes(topics: Sequence[bytes], texts: Sequence[bytes]) -> tuple[Ints, Ints]:
    """Find the keys in messages' properties; return whose each is, and its hash for the index.

    They stand in the order of the messages: the unique key first, then the sender's.
    """
    keys = _Keys(texts)
    messages, starts, ends = keys.ranges()
    prefixes = {topic: string_hash(f"{topic.decode()}#") & _MASK for topic in set(topics)}
    of_topics = np.array([prefixes[topic] for topic in topics], np.uint32)[messages]
    hashes = keys.hashes(starts, ends) + of_topics * _powers_of_31.up[ends - starts]
    for number in keys.foreign(starts, ends):
        # Java hashes UTF-16.
        key = keys.text(starts[number], ends[number])
        topic = topics[messages[number]].decode()
        hashes[number] = string_hash(f"{topic}#{key}") & _MASK
    magnitudes = np.abs(hashes.view(np.int32).astype(np.int64))
    magnitudes[magnitudes > INT_MAX] = 0
    return messages, magnitudes


class _Keys:
    """Properties of several messages one behind the other, each entry between two marks."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._text = _ENTRY_END.join((b"", *texts, b"")) + _PADDING
        self._bytes = np.frombuffer(self._text, np.uint8)
        # Eight bytes from each position on, as one number.
        count = len(self._text) - len(_PADDING)
        words = np.ndarray((count,), _WORD, self._text, strides=(1,))
        marks = np.flatnonzero(self._bytes[:count] == _ENTRY_END[0])
        self._starts, self._ends = marks[:-1] + 1, marks[1:]
        self._names = words[self._starts].astype(np.uint64)
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        # Where the next message begins.
        self._limits = np.cumsum(lengths + 1) + 1
        _powers_of_31.reach(len(self._text))

    def ranges(self) -> tuple[Ints, Ints, Ints]:
        """Return of each key whose it is, where it starts and ends; in the order of the index."""
        unique = self._of_message(*self._values(properties.UNIQUE_KEY))
        given = self._split(*self._of_message(*self._values(properties.KEYS)))
        messages, starts, ends = (np.concatenate(both) for both in zip(unique, given, strict=True))
        is_given = np.arange(len(messages)) >= len(unique[0])
        order = np.argsort(messages * 2 + is_given, kind="stable")
        return messages[order], starts[order], ends[order]

    def hashes(self, starts: Ints, ends: Ints) -> NDArray[np.uint32]:
        """Return Java's hash of each range.

        With sums over the whole text of each byte times the inverse of 31 to the power of its
        place, the hash of any range is a difference of two sums, raised to where the range ends.
        """
        size = len(self._text)
        sums = np.zeros(size + 1, np.uint32)
        weighted = np.multiply(self._bytes, _powers_of_31.down[:size], dtype=np.uint32)
        np.cumsum(weighted, dtype=np.uint32, out=sums[1:])
        return (sums[ends] - sums[starts]) * _powers_of_31.up[ends - 1]

    def foreign(self, starts: Ints, ends: Ints) -> list[int]:
        """Return which of the ranges are not ASCII."""
        if self._text.isascii():
            return []
        counts = np.append(0, np.cumsum(self._bytes > _ASCII_MAX))
        return np.flatnonzero(counts[ends] > counts[starts]).tolist()

    def text(self, start: int, end: int) -> str:
        return self._text[start:end].decode("utf-8", "replace")

    def _values(self, name: str) -> tuple[Ints, Ints]:
        """Return where the values of a property start and end, without the empty ones."""
        letters = name.encode()
        shift = np.uint64(8 * (_WORD.itemsize - len(letters)))
        named = self._names >> shift == int.from_bytes(letters, "big")
        starts, ends = self._starts[named] + len(letters), self._ends[named]
        full = (self._bytes[starts] == _NAME_END) & (ends > starts + 1)
        return starts[full] + 1, ends[full]

    def _of_message(self, starts: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
        """Return whose values these are; of several of one message the last one counts."""
        messages = np.searchsorted(self._limits, starts, "right")
        last = np.append(messages[1:] != messages[:-1], True)[: len(messages)]
        return messages[last], starts[last], ends[last]

    def _split(self, messages: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
        """Split values at spaces."""
        spaces = np.flatnonzero(self._bytes == _SPACE)
        within = np.searchsorted(starts, spaces, "right") - 1
        # A space before all values is held against the last one, which ends behind it.
        spaces = spaces[(within >= 0) & (spaces < ends[within])] if len(starts) else spaces[:0]
        if not len(spaces):
            return messages, starts, ends
        starts = np.sort(np.concatenate((starts, spaces + 1)))
        ends = np.sort(np.concatenate((ends, spaces)))
        full = ends > starts
        starts, ends = starts[full], ends[full]
        return np.searchsorted(self._limits, starts, "right"), starts, ends
