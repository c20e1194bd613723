"""Appending many messages to a store with one write, for benchmarks of the store."""

from __future__ import annotations

from collections.abc import Iterable

from turbopump.store import Appended, Store
from turbopump.store.append import add_record
from turbopump.wire.record import Record


def append_all(store: Store, records: Iterable[Record]) -> list[Appended]:
    """Store messages as one block."""
    block = store.new_block()
    for record in records:
        add_record(block, record)
    return store.append(block)
