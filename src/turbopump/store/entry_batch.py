"""What queues and the key index need of a stored batch, for all its messages together."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import TypeAlias, final

import numpy as np
from msgspec import Struct

from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.outcomes import UNIT_DTYPE
from turbopump.wire import properties
from turbopump.wire.aligned_properties import Hashes, Ints
from turbopump.wire.hashing import tags_code
from turbopump.wire.property_texts import PropertyTexts
from turbopump.wire.record import RecordEntry
from turbopump.wire.record_batch import RecordBatch
from turbopump.wire.record_list import RecordList

Batch: TypeAlias = RecordBatch | RecordList
BATCH_TYPES: frozenset[type[object]] = frozenset({RecordBatch, RecordList})


# Final, so that its type can be compared, as with RecordBatch.
@final
class EntryBatch(Struct, frozen=True, eq=False):
    """The messages of a batch, stored contiguously: a `RecordEntry` for all of them.

    Fields of the same names have the same meaning; offsets are those of the first message.
    """

    batch: Batch
    size: int
    queue_offset: QueueOffset
    physical_offset: PhysicalOffset
    positions: Ints | list[int]
    """Of each message."""
    store_timestamp_ms: int

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def topic(self) -> bytes:
        return self.batch.first.topic

    @property
    def queue_id(self) -> int:
        return self.batch.first.queue_id

    @property
    def sys_flag(self) -> int:
        return self.batch.first.sys_flag

    def entries(self) -> list[RecordEntry]:
        """Return the messages one by one."""
        first, positions, sizes = self.batch.first, self.position_list(), self.batch.sizes
        sizes = sizes if isinstance(sizes, list) else sizes.tolist()
        numbered = enumerate(zip(positions, sizes, self.batch.stored_texts, strict=True))
        return [
            RecordEntry(
                size,
                first.queue_id,
                QueueOffset(self.queue_offset + number),
                PhysicalOffset(position),
                first.sys_flag,
                self.store_timestamp_ms,
                first.topic,
                text,
            )
            for number, (position, size, text) in numbered
        ]

    def position_list(self) -> list[int]:
        """Return the position of each message."""
        positions = self.positions
        return positions if isinstance(positions, list) else positions.tolist()

    def units(self, codes: Sequence[int] | Ints) -> bytes:
        """Return the queue units for messages with these tag hashes."""
        sizes = self.batch.sizes
        if isinstance(sizes, list):
            fields = chain.from_iterable(zip(self.position_list(), sizes, codes, strict=True))
            return _units_layout(len(sizes)).pack(*fields)
        units = np.empty(len(self.batch), UNIT_DTYPE)
        units["physical_offset"] = self.positions
        units["size"] = sizes
        units["tags_code"] = codes
        return units.tobytes()


@lru_cache(maxsize=256)
def _units_layout(count: int) -> struct.Struct:
    return struct.Struct(">" + "qiq" * count)


def tags_codes(texts: PropertyTexts) -> Ints:
    """Return the tags code of each message."""
    if texts.columns is not None:
        place = texts.columns.place(properties.TAGS)
        return _signed(texts.columns.hashes(*place)) if place else np.zeros(len(texts), np.int64)
    codes = np.zeros(len(texts), np.int64)
    owners, starts, ends = texts.values(properties.TAGS)
    codes[owners] = _signed(texts.hashes(starts, ends))
    for number in texts.foreign(starts, ends):
        codes[owners[number]] = tags_code(texts.value(starts[number], ends[number]))
    return codes


def _signed(hashes: Hashes) -> Ints:
    return hashes.view(np.int32).astype(np.int64)
