"""Spark's source reads from slaves: when redirected, and while a master is down."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brokers import SMALL_STORE
from clusters import Recorder
from consumers import send
from replicas import MASTER, SLAVE, replicas
from stored_rows import one_batch
from turbopump.broker.config import SlaveReadsConfig
from turbopump.client.session import Session
from turbopump.errors import NoRoute
from turbopump.message import MessageQueue
from turbopump.spark.reading.blocking_pull import _replica
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.offsets import Limits
from turbopump.spark.reading.options import Pulling, SourceOptions
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.reading.positions import Earliest, OfGroup
from turbopump.spark.reading.retrying_pull import RetryingPull
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.testing import virtual_time
from turbopump.wire.codes import RequestCode

QUEUE = MessageQueue("T", MASTER, 0)
FROM_SLAVE = Pulling(prefers_slave=True, count_max=5, in_flight_max=2, retries=1)


def bodies(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def range_of(start: int, end: int) -> QueueRange:
    return QueueRange("T", MASTER, 0, start, end)


async def offsets_of(session: Session, start: int, end: int, pulling: Pulling) -> list[int]:
    """Read a range as a task does."""
    pull = RetryingPull(session, range_of(start, end), "g", pulling, fail_on_data_loss=True)
    columns, found = RecordColumns(["queueOffset"]), list[int]()
    try:
        while (chunk := await pull.next_chunk()) is not None:
            batch = one_batch(columns, chunk.records, start=chunk.start, end=chunk.end)
            found += [int(str(each)) for each in batch.column(0).to_pylist()]
    finally:
        await pull.close()
    return found


def source(session: Session, **options: str) -> Cluster:
    given = {
        "nameserver": ";".join(session.config.nameserver_addresses),
        "topic": "T",
        "retries": "1",
        **options,
    }
    return Cluster(session, SourceOptions.for_stream(given))


def pulled_from(requests: Recorder) -> list[str]:
    return requests.addresses_of(RequestCode.PULL_MESSAGE)


@virtual_time()
async def test_a_task_that_prefers_the_slave_spares_the_master(tmp_path: Path) -> None:
    requests = Recorder()
    async with replicas(tmp_path) as cluster, cluster.session(hooks=[requests]) as session:
        await send(cluster, bodies(0, 30), to=QUEUE)
        await cluster.copy()
        assert await offsets_of(session, 0, 30, FROM_SLAVE) == list(range(30))
        assert set(pulled_from(requests)) == {cluster.slave.address}
        assert (await _replica(session, range_of(0, 30), FROM_SLAVE)).broker_id == 1
        assert (await _replica(session, range_of(0, 30), Pulling())).is_master


@virtual_time()
async def test_without_a_slave_the_master_is_read(tmp_path: Path) -> None:
    requests = Recorder()
    async with replicas(tmp_path) as cluster, cluster.session(hooks=[requests]) as session:
        await send(cluster, bodies(0, 30), to=QUEUE)
        await cluster.stop_broker(SLAVE)
        assert await offsets_of(session, 0, 30, FROM_SLAVE) == list(range(30))
        assert set(pulled_from(requests)) == {cluster.master.address}


@pytest.mark.parametrize("copied", [0, 1, 12, 29])
def test_where_the_slave_lags_the_rest_comes_from_the_master(tmp_path: Path, copied: int) -> None:
    @virtual_time()
    async def run() -> None:
        requests = Recorder()
        async with replicas(tmp_path) as cluster, cluster.session(hooks=[requests]) as session:
            await send(cluster, bodies(0, copied), to=QUEUE)
            await cluster.copy()
            await send(cluster, bodies(copied, 30), to=QUEUE)
            assert await offsets_of(session, 0, 30, FROM_SLAVE) == list(range(30))
            assert set(pulled_from(requests)) == {cluster.slave.address, cluster.master.address}

    run()


@virtual_time()
async def test_a_slave_that_dies_is_replaced_by_the_master(tmp_path: Path) -> None:
    async with replicas(tmp_path) as cluster, cluster.session() as session:
        await send(cluster, bodies(0, 30), to=QUEUE)
        await cluster.copy()
        await session.route("T")
        await cluster.crash(SLAVE)
        assert await offsets_of(session, 0, 30, FROM_SLAVE) == list(range(30))


@virtual_time()
async def test_suggestions_are_followed_unless_the_slave_is_preferred(tmp_path: Path) -> None:
    store = replace(SMALL_STORE, limits=replace(SMALL_STORE.limits, recent_bytes=1000))
    reads: dict[str, Any] = {"store": store, "slave_reads": SlaveReadsConfig(enabled=True)}
    requests = Recorder()
    async with replicas(tmp_path, **reads) as cluster, cluster.session(hooks=[requests]) as session:
        await send(cluster, bodies(0, 30), to=QUEUE)
        await cluster.copy()
        follows = replace(FROM_SLAVE, prefers_slave=False, in_flight_max=1)
        assert await offsets_of(session, 0, 30, follows) == list(range(30))
        asked = pulled_from(requests)
        assert asked[0] == cluster.master.address
        assert asked.count(cluster.slave.address) >= 3
        requests.requests.clear()
        assert await offsets_of(session, 0, 30, FROM_SLAVE) == list(range(30))
        assert set(pulled_from(requests)) == {cluster.slave.address}


@virtual_time()
async def test_a_range_beyond_the_copy_is_not_a_loss_while_the_master_is_down(
    tmp_path: Path,
) -> None:
    async with replicas(tmp_path) as cluster, cluster.session() as session:
        await send(cluster, bodies(0, 10), to=QUEUE)
        await cluster.copy()
        await send(cluster, bodies(10, 20), to=QUEUE)
        await session.route("T")
        await cluster.crash(MASTER)
        assert await offsets_of(session, 0, 10, Pulling(retries=2)) == list(range(10))
        with pytest.raises(NoRoute, match="only the master can have message 10, and it is away"):
            await offsets_of(session, 0, 20, Pulling(retries=2))
        await cluster.start_broker(MASTER)
        await asyncio.sleep(30)
        assert await offsets_of(session, 0, 20, Pulling(retries=2)) == list(range(20))


@virtual_time()
async def test_limits_of_a_slave_are_not_certain(tmp_path: Path) -> None:
    async with replicas(tmp_path) as cluster, cluster.session() as session:
        await send(cluster, bodies(0, 10), to=QUEUE)
        await cluster.copy()
        await send(cluster, bodies(10, 20), to=QUEUE)
        asked = source(session, group="g")
        assert (await asked.limits([QUEUE]))[QUEUE] == Limits(0, 20)
        cluster.refuse(MASTER)
        cluster.cut(MASTER)
        # Name servers still know the master.
        assert (await asked.limits([QUEUE]))[QUEUE] == Limits(0, 10, is_certain=False)
        found = await source(session).resolve("startingOffsets", Earliest(), [QUEUE])
        assert found == {QUEUE: 0}


@virtual_time()
async def test_a_group_that_the_slave_does_not_know_does_not_start_at_the_end(
    tmp_path: Path,
) -> None:
    store = replace(SMALL_STORE, limits=replace(SMALL_STORE.limits, recent_bytes=1))
    async with replicas(tmp_path, store=store) as cluster, cluster.session() as session:
        await send(cluster, bodies(0, 10), to=QUEUE)
        await cluster.copy()
        cluster.slave.state.offsets.commit("known", "T", 0, 4)
        await session.route("T")
        await cluster.crash(MASTER)
        await asyncio.sleep(60)
        with pytest.raises(NoRoute, match="knows no offset of group 'new'"):
            await source(session, group="new").resolve("startingOffsets", OfGroup(), [QUEUE])
        found = await source(session, group="known").resolve("startingOffsets", OfGroup(), [QUEUE])
        assert found == {QUEUE: 4}
