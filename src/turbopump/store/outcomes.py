"""Outcomes of the store's calls, as frozen values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from turbopump.message import PhysicalOffset, QueueOffset

UNIT_DTYPE = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
"""One entry of a consume queue, as numpy sees it."""

Ints: TypeAlias = NDArray[np.int64]

Units: TypeAlias = NDArray[np.void]
"""A run of consume queue entries; each has the fields of `UNIT_DTYPE`."""


class Appended(Struct, frozen=True):
    """Where and when a message or a batch was stored."""

    physical_offsets: Sequence[PhysicalOffset]
    """Position of each message of the batch."""
    queue_offset: QueueOffset
    """Of the first message; the others of a batch follow. 0 for prepared and rolled back ones."""
    store_timestamp_ms: int
    end_offset: PhysicalOffset
    """Position after the last message."""
    durable: Future[None]
    """Done when the messages are as durable as the mode promises: immediately in asynchronous mode,
    after the flush in synchronous mode. All callers of one flush share it. An error means: not
    stored."""

    @property
    def physical_offset(self) -> PhysicalOffset:
        """Of the first message."""
        return self.physical_offsets[0]


class Arrival(Struct, frozen=True, gc=False):
    """A message that has just become readable."""

    topic: str
    queue_id: int
    queue_offset: QueueOffset
    tags_code: int
    store_timestamp_ms: int
    properties: bytes
    """In their text form, encoded; parse them only if a filter needs them."""


class Filter(Struct, frozen=True):
    """Which messages a read wants; all three tests must pass, and None passes everything."""

    tags_codes: frozenset[int] | None = None
    """Hashes of the wanted tags, compared as 32-bit numbers."""
    units: Callable[[Units], NDArray[np.bool_]] | None = None
    """Returns which units of a run to consider; called with whole arrays, never one by one."""
    properties: Callable[[bytes], bool] | None = None
    """Returns whether a message is wanted, given its properties in their text form."""
    weight: int = 0
    """Cost of a call of ``properties``, in bytes of properties that take as long to read."""


EVERYTHING = Filter()


class _Answered(Struct, frozen=True, kw_only=True):
    next_offset: QueueOffset
    """Where to read next."""
    min_offset: QueueOffset
    max_offset: QueueOffset
    """One past the last message."""


class Found(_Answered, frozen=True, kw_only=True):
    """Messages as views into the log: pass them to the socket and release them."""

    pieces: Sequence[memoryview]
    """All messages in order; contiguous ones may share a piece."""
    sizes: Sequence[int]
    """Of each message."""
    queue_offsets: Sequence[QueueOffset]
    size: int
    """Bytes of all messages."""
    suggest_slave: bool
    """Whether the reader is so far behind that the messages are hardly in memory any more."""

    @property
    def messages(self) -> Sequence[memoryview]:
        """The messages, one by one."""
        if len(self.pieces) == len(self.sizes):
            return self.pieces
        return list(_cut(self.pieces, self.sizes))


def _cut(pieces: Sequence[memoryview], sizes: Sequence[int]) -> Iterator[memoryview]:
    """Yield the messages in the pieces."""
    left = iter(sizes)
    for piece in pieces:
        at = 0
        while at < len(piece):
            size = next(left)
            yield piece[at : at + size]
            at += size


class FoundByKey(Struct, frozen=True):
    """Messages found by key, oldest first; others with the same hash may be among them."""

    messages: list[memoryview]
    is_complete: bool
    """False if the search was stopped at its limit: there may be older ones."""


class NoMatch(_Answered, frozen=True, kw_only=True):
    """The filter wanted none of the units examined [NO_MATCHED_MESSAGE]."""

    suggest_slave: bool


class MessagesRemoved(_Answered, frozen=True, kw_only=True):
    """The messages are no longer in the log [MESSAGE_WAS_REMOVING]."""

    suggest_slave: bool


class MessageDamaged(_Answered, frozen=True, kw_only=True):
    """The messages before ``next_offset`` are damaged, or the search for them is not finished."""


class QueueUnknown(_Answered, frozen=True, kw_only=True):
    """No such queue can exist [NO_MATCHED_LOGIC_QUEUE]."""


class QueueEmpty(_Answered, frozen=True, kw_only=True):
    """Nothing was ever stored in the queue [NO_MESSAGE_IN_QUEUE]."""


class OffsetTooSmall(_Answered, frozen=True, kw_only=True):
    """The offset lies before the first message [OFFSET_TOO_SMALL]."""


class UpToDate(_Answered, frozen=True, kw_only=True):
    """The offset is that of the next message [OFFSET_OVERFLOW_ONE]."""


class OffsetTooLarge(_Answered, frozen=True, kw_only=True):
    """The offset lies beyond the next message [OFFSET_OVERFLOW_BADLY]."""


class UnitsMissing(_Answered, frozen=True, kw_only=True):
    """The queue's file at the offset cannot be read [OFFSET_FOUND_NULL]."""


class FilePart(NamedTuple):
    """Some bytes of a file of the store."""

    path: Path
    at: int
    size: int


class Cold(Struct, frozen=True):
    """What a read needs is not in memory: fetch these parts, and read again."""

    parts: tuple[FilePart, ...]


ReadOutcome: TypeAlias = (
    Found
    | NoMatch
    | MessagesRemoved
    | MessageDamaged
    | QueueUnknown
    | QueueEmpty
    | OffsetTooSmall
    | UpToDate
    | OffsetTooLarge
    | UnitsMissing
)
