"""A slave's answers to pulls, and where a master redirects consumers that are far behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from brokers import SMALL_STORE, TIMEOUT_MS, Client, client_of, pulled, running_broker, views
from replicas import Replicas, replicas
from turbopump.broker.config import SlaveReadsConfig
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.testing import virtual_loop, virtual_time
from turbopump.wire import framing
from turbopump.wire.bodies import GroupConfig, TopicConfig
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import whole_body
from turbopump.wire.hosts import host
from turbopump.wire.record import Record, decode_records
from vectors import frame

FAR_BEHIND = replace(SMALL_STORE, limits=replace(SMALL_STORE.limits, recent_bytes=500))
"""Only the last two or three messages of these tests count as in memory."""
ENABLED = SlaveReadsConfig(enabled=True)


async def send(client: Client, count: int) -> None:
    for number in range(count):
        await client.send(b"%d" % number)


@asynccontextmanager
async def plain_clients(cluster: Replicas) -> AsyncIterator[tuple[Client, Client]]:
    """Connect to the master and to the slave."""
    async with (
        client_of(cluster.network, cluster.master.address, "10.0.2.1") as master,
        client_of(cluster.network, cluster.slave.address, "10.0.2.2") as slave,
    ):
        yield master, slave


@pytest.mark.parametrize(("reads", "old", "new"), [(SlaveReadsConfig(), 0, 0), (ENABLED, 1, 0)])
def test_a_master_suggests_the_slave_to_pullers_far_behind(
    tmp_path: Path, reads: SlaveReadsConfig, old: int, new: int
) -> None:
    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path, store=FAR_BEHIND, slave_reads=reads) as (_, client):
            await send(client, 40)
            far = await client.pull(0)
            assert pulled(far).suggest_which_broker_id == old
            filtered = await client.pull(0, tags="none", max_msg_nums=1)
            assert filtered.code == ResponseCode.PULL_RETRY_IMMEDIATELY
            assert pulled(filtered).suggest_which_broker_id in {old, new}
            near = await client.pull(39)
            assert pulled(near).suggest_which_broker_id == new
            end = await client.pull(40, hold_ms=1000)
            assert end.code == ResponseCode.PULL_NOT_FOUND
            assert pulled(end).suggest_which_broker_id == new
            beyond = await client.pull(50)
            assert beyond.code == ResponseCode.PULL_OFFSET_MOVED
            assert pulled(beyond).suggest_which_broker_id == new

    run()


@virtual_time()
async def test_a_group_chooses_its_brokers(tmp_path: Path) -> None:
    async with running_broker(tmp_path, store=FAR_BEHIND, slave_reads=ENABLED) as (_, client):
        await send(client, 40)
        group = GroupConfig(group_name="g", broker_id=2, which_broker_when_consume_slowly=5)
        answer = await client.ask(
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group.encode()
        )
        assert answer.code == ResponseCode.SUCCESS
        assert pulled(await client.pull(0)).suggest_which_broker_id == 5
        assert pulled(await client.pull(39)).suggest_which_broker_id == 2
        held = asyncio.create_task(client.pull(40, hold_ms=15_000))
        await asyncio.sleep(1)
        await client.send(b"arrives")
        assert pulled(await held).suggest_which_broker_id == 2
        assert pulled(await client.pull(41, hold_ms=100)).suggest_which_broker_id == 2


@virtual_time()
async def test_pulls_in_a_row_suggest_the_slave_as_long_as_they_are_far_behind(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path, store=FAR_BEHIND, slave_reads=ENABLED) as (_, client):
        await send(client, 40)
        answers = await asyncio.gather(
            *(client.pull(offset, max_msg_nums=1) for offset in range(40))
        )
        suggested = [pulled(answer).suggest_which_broker_id for answer in answers]
        assert suggested[0] == 1
        assert suggested[-1] == 0
        assert suggested == sorted(suggested, reverse=True)


@virtual_time()
async def test_a_slave_serves_what_it_has_and_corrects_no_offset(tmp_path: Path) -> None:
    async with replicas(tmp_path) as cluster, plain_clients(cluster) as (master, slave):
        await send(master, 5)
        await cluster.copy()
        assert [view.body for view in views(await slave.pull(0))] == [b"%d" % n for n in range(5)]
        beyond = await slave.pull(9)
        assert beyond.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert beyond.remark == "OFFSET_OVERFLOW_BADLY"
        fields = pulled(beyond)
        assert (fields.next_begin_offset, fields.max_offset) == (9, 5)
        assert fields.suggest_which_broker_id == 0
        empty = await slave.pull(3, queue_id=1)
        assert empty.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert pulled(empty).next_begin_offset == 3
        assert await slave.messages("OFFSET_MOVED_EVENT") == []


@virtual_time()
async def test_a_slave_holds_pulls_until_the_copy_brings_messages(tmp_path: Path) -> None:
    async with replicas(tmp_path) as cluster, plain_clients(cluster) as (master, slave):
        await send(master, 1)
        await cluster.copy()
        held = asyncio.create_task(slave.pull(1, hold_ms=15_000))
        await asyncio.sleep(1)
        await send(master, 1)
        assert not held.done()
        await cluster.copy()
        begin_s = virtual_loop().time()
        assert len(views(await held)) == 1
        assert virtual_loop().time() - begin_s < 1


@virtual_time()
async def test_a_slave_that_checks_offsets_corrects_them(tmp_path: Path) -> None:
    reads = SlaveReadsConfig(corrects_offsets=True)
    async with (
        replicas(tmp_path, slave_reads=reads) as cluster,
        plain_clients(cluster) as (master, slave),
    ):
        await send(master, 2)
        await cluster.copy()
        beyond = await slave.pull(9)
        assert beyond.code == ResponseCode.PULL_OFFSET_MOVED
        assert pulled(beyond).next_begin_offset == 2


@virtual_time()
async def test_a_slave_serves_no_reader_of_messages_that_it_has_cut_off(tmp_path: Path) -> None:
    async with replicas(tmp_path) as cluster, plain_clients(cluster) as (master, slave):
        await send(master, 3)
        await cluster.copy()
        common = cluster.slave.store.written_end
        await send(master, 2)
        cluster.copy_log()
        held = asyncio.create_task(slave.pull(5, hold_ms=10_000))
        await asyncio.sleep(1)
        cluster.slave.store.cut(common)
        # As far as the slave knows, other messages take their places.
        await send(master, 2)
        cluster.copy_log()
        for answer, offset in ((await held, 5), (await slave.pull(4), 4)):
            assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
            assert pulled(answer).next_begin_offset == offset
            assert pulled(answer).suggest_which_broker_id == 0
        for offset in (3, 6):
            assert views(await slave.pull(offset))[0].queue_offset == offset


@virtual_time()
async def test_a_slave_answers_as_apache_rocketmq_did(tmp_path: Path) -> None:
    """The recorded messages are at their recorded positions, with filler messages between them."""
    asked, answer = (frame(f"slave_pull.{kind}") for kind in ("request", "response"))
    records = whole_body(framing.decode(answer))
    async with replicas(tmp_path) as cluster, plain_clients(cluster) as (_, slave):
        await cluster.slave.state.topics.update(TopicConfig(topic_name="HaTopic"))
        store = cluster.slave.store
        for view in decode_records(records):
            store.append_raw(store.written_end, filler(store.written_end, view.physical_offset))
            store.append_raw(store.written_end, records[: view.size])
            records = records[view.size :]
        ours = await slave.pool.request(slave.address, framing.decode(asked), TIMEOUT_MS)
        theirs = framing.decode(answer)
        assert whole_body(ours) == whole_body(theirs)
        assert (ours.code, ours.remark) == (theirs.code, theirs.remark)
        assert ours.ext_fields == theirs.ext_fields


def filler(start: int, end: int) -> bytes:
    """Return one message of another topic that exactly fills the bytes between two positions."""
    plain = Record(
        topic=b"Other",
        queue_id=0,
        body=b"",
        properties=b"",
        born_timestamp_ms=1,
        born_host=host("127.0.0.1", 1),
        store_host=host("127.0.0.1", 2),
    )
    size = len(plain.encode(QueueOffset(0), PhysicalOffset(start), 1))
    filled = msgspec.structs.replace(plain, body=b"x" * (end - start - size))
    return filled.encode(QueueOffset(start), PhysicalOffset(start), 1)
