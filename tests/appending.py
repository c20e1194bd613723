"""Store single records, or batches given as their records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from turbopump.core import Block
from turbopump.store.append import add_record
from turbopump.store.outcomes import Appended
from turbopump.store.store import Store
from turbopump.wire.batch import encode_entries
from turbopump.wire.record import Record


@dataclass(frozen=True)
class Batch:
    """The records of a batch, and the properties that each gets after its own."""

    records: Sequence[Record]
    shared: bytes = b""

    def stored(self) -> list[Record]:
        """Return the records as they are stored."""
        return [
            replace(
                each, properties=each.properties + b"\x02" * bool(each.properties) + self.shared
            )
            for each in self.records
        ]


Group: TypeAlias = Sequence[Record] | Batch


def block_of(store: Store, groups: Sequence[Group]) -> Block:
    """Return a block of messages, and batches of several."""
    block = store.new_block()
    for group in groups:
        if isinstance(group, Batch):
            _add_batch(block, group)
        elif len(group) == 1:
            add_record(block, group[0])
        else:
            _add_batch(block, Batch(group))
    return block


def _add_batch(block: Block, batch: Batch) -> None:
    records = batch.records
    first = records[0]
    assert all((each.topic, each.queue_id) == (first.topic, first.queue_id) for each in records)
    block.add_batch(
        first.topic,
        first.queue_id,
        encode_entries((each.body, each.properties, each.flag) for each in records),
        batch.shared,
        first.sys_flag,
        first.born_timestamp_ms,
        first.born_host.packed,
        first.store_host.packed,
        first.reconsume_times,
    )


def append_all(
    store: Store, groups: Sequence[Group], *, defer_dispatch: bool = False
) -> list[Appended]:
    """Store several messages or batches with one write."""
    return store.append(block_of(store, groups), defer_dispatch=defer_dispatch)


def append(store: Store, records: Group, *, defer_dispatch: bool = False) -> Appended:
    """Store one message, or a batch."""
    return append_all(store, [records], defer_dispatch=defer_dispatch)[0]
