"""A broker is killed, restarts on what its predecessor left in the page cache, and loses power."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from appending import append
from store_work import sync_log, sync_tables, write_tables
from turbopump.machine import Machine
from turbopump.store import FlushMode, Store, StoreConfig
from turbopump.testing import Disk
from unit.store.support import ManualClock, bodies, record, small_config

ROOT = Path("/store")
LARGE = {"segment_bytes": 1 << 16, "queue_segment_units": 1000}
"""Files of many sectors: data that shares a sector with later writes is rewritten by them."""
SYNC, ASYNC = small_config(FlushMode.SYNC, **LARGE), small_config(FlushMode.ASYNC, **LARGE)


@contextmanager
def crashing(
    disk: Disk, config: StoreConfig = SYNC, *, loses_power: bool = False
) -> Iterator[Store]:
    """Open a store whose process or machine dies at the end of the block."""
    store = Store.open(ROOT, config, Machine(disk, disk.background, ManualClock()))
    yield store
    disk.die()
    store.close()
    if loses_power:
        disk.lose_unsynced()
    disk.close_all()


def test_names_of_the_log_that_a_killed_broker_could_not_sync() -> None:
    disk = Disk()
    with crashing(disk, ASYNC) as store:
        disk.fail("sync_directory", matching="*commitlog")
        append(store, [record(b"first")])
    disk.heal()
    with crashing(disk, loses_power=True) as store:
        append(store, [record(b"second")]).durable.result()
    with crashing(disk) as store:
        assert bodies(store) == [b"first", b"second"]


@pytest.mark.parametrize("what", ["commitlog", "consumequeue"])
def test_data_dropped_by_a_failed_sync_before_the_kill(what: str) -> None:
    disk = Disk()
    with crashing(disk, ASYNC) as store:
        append(store, [record(b"kept")])
        store.flush()
    with crashing(disk, ASYNC) as store:
        for number in range(60):
            append(store, [record(b"%d" % number * 300)])
        disk.fail("sync", "sync_file_system", matching=f"*{what}*")
        store.flush()
        write_tables(store)
        sync_tables(store)
        expected = bodies(store)
    disk.heal()
    with crashing(disk, loses_power=True) as store:
        assert bodies(store) == expected
    with crashing(disk) as store:
        assert bodies(store) == expected


def test_units_of_lost_messages_do_not_reappear_after_the_next_power_loss() -> None:
    disk = Disk()
    with crashing(disk, ASYNC) as store:
        append(store, [record(b"kept", topic="Other")])
        store.flush()
    with crashing(disk, ASYNC, loses_power=True) as store:
        for number in range(3):
            append(store, [record(b"lost %d" % number)])
        # The disk wrote the queues before the log.
        write_tables(store)
        sync_tables(store)
    with crashing(disk, ASYNC, loses_power=True) as store:
        assert bodies(store) == []
        for number in range(5):
            append(store, [record(b"new %d" % number, topic="Other")])
        sync_log(store)
    with crashing(disk) as store:
        assert bodies(store) == []
        assert store.queue_range("Topic", 0) == (0, 0)
        assert append(store, [record(b"next")]).durable.result() is None
        assert bodies(store) == [b"next"]


def test_queues_of_an_entirely_lost_log_do_not_reappear() -> None:
    disk = Disk()
    with crashing(disk, ASYNC, loses_power=True) as store:
        for _ in range(3):
            append(store, [record(b"lost")])
        store.dispatch()
        write_tables(store)
        sync_tables(store)
    with crashing(disk, ASYNC, loses_power=True) as store:
        assert bodies(store) == []
        append(store, [record(b"new" * 100, topic="Other")])
        append(store, [record(b"first")])
        sync_log(store)
    with crashing(disk) as store:
        assert store.queue_range("Topic", 0) == (0, 1)
        assert bodies(store) == [b"first"]
