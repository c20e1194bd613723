"""SYNC_MASTER: the answers to sends, with slaves that are present, slow or missing."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest

from brokers import client_of
from log_replicas import MASTER, LogReplicas, log_replicas
from turbopump.broker.durability import Outcome, Promise, Report
from turbopump.message import QueueOffset
from turbopump.store.outcomes import Appended
from turbopump.testing import virtual_loop, virtual_time
from turbopump.testing.simulate.false_slave import follow_falsely
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command

SLAVE = f"{MASTER}-1"
MASTER_HOST, SLAVE_HOST = "10.0.0.1", "10.0.0.2"
SYNC = {"brokerRole": "SYNC_MASTER", "slaveTimeout": "1000"}
"""The clients of these tests time out after 3 s, as long as a SYNC_MASTER waits by default."""


async def connected(cluster: LogReplicas) -> None:
    await cluster.until(lambda: cluster.master.replication.slaves.following)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@virtual_time()
async def test_acknowledged_messages_are_on_the_slave(tmp_path: Path, flush: str) -> None:
    async with log_replicas(tmp_path, settings={**SYNC, "flushDiskType": flush}) as cluster:
        await connected(cluster)
        if flush == "SYNC_FLUSH":
            cluster.disk(SLAVE).sync_time = 0.05
        async with client_of(cluster.network, cluster.master.address) as client:
            for _ in range(5):
                begin = virtual_loop().time()
                answer = await client.send(topic="BenchmarkTest")
                assert answer.code == ResponseCode.SUCCESS
                end = cluster.master.store.written_end
                slave = cluster.slave().store
                assert slave.written_end == end
                assert flush == "ASYNC_FLUSH" or slave.flushed_end == end
                assert (virtual_loop().time() - begin > 0.05) == (flush == "SYNC_FLUSH")


@virtual_time()
async def test_without_a_slave(tmp_path: Path) -> None:
    async with (
        log_replicas(tmp_path, slaves=0, settings=SYNC) as cluster,
        client_of(cluster.network, cluster.master.address) as client,
    ):
        begin = virtual_loop().time()
        answer = await client.send(topic="BenchmarkTest")
        assert answer.code == ResponseCode.SLAVE_NOT_AVAILABLE
        assert virtual_loop().time() - begin < 0.1
        assert "no slave is in sync" in (answer.remark or "")
        assert len(await client.messages("BenchmarkTest")) == 1
        waits_not = await client.send(topic="BenchmarkTest", named={"WAIT": "false"})
        assert waits_not.code == ResponseCode.SUCCESS
        # A consumer's retry is stored once, and not sent back repeatedly.
        [message, _] = await client.messages("BenchmarkTest")
        assert (await client.send_back(message)).code == ResponseCode.SUCCESS


@virtual_time()
async def test_a_slave_that_does_not_answer(tmp_path: Path) -> None:
    async with log_replicas(tmp_path, settings=SYNC) as cluster:
        await connected(cluster)
        cluster.network.partition(MASTER_HOST, SLAVE_HOST)
        async with client_of(cluster.network, cluster.master.address) as client:
            begin = virtual_loop().time()
            answer = await client.send(topic="BenchmarkTest")
            assert answer.code == ResponseCode.FLUSH_SLAVE_TIMEOUT
            assert 0.9 < virtual_loop().time() - begin < 1.2
            assert "slaveTimeout" in (answer.remark or "")
            [message] = await client.messages("BenchmarkTest")
            # The slave would get this copy before a second one, so there is no reason for a second.
            assert (await client.send_back(message)).code == ResponseCode.SUCCESS
            cluster.network.heal()
            await cluster.until_copied()
            assert (await client.send(topic="BenchmarkTest")).code == ResponseCode.SUCCESS


@virtual_time()
async def test_a_slave_that_is_far_behind_is_not_waited_for(tmp_path: Path) -> None:
    settings = {**SYNC, "haSlaveFallbehindMax": "5000"}
    async with log_replicas(tmp_path, settings=settings) as cluster:
        await connected(cluster)
        cluster.network.stop_reading(SLAVE_HOST)
        async with client_of(cluster.network, cluster.master.address) as client:
            codes = []
            for _ in range(5):
                answer = await client.send(
                    b"x" * 900, topic="BenchmarkTest", named={"WAIT": "false"}
                )
                assert answer.code == ResponseCode.SUCCESS
                codes.append((await client.send(b"x" * 900, topic="BenchmarkTest")).code)
        late, missing = ResponseCode.FLUSH_SLAVE_TIMEOUT, ResponseCode.SLAVE_NOT_AVAILABLE
        assert codes == [late, late, missing, missing, missing]
        [status] = cluster.master.replication.slaves.following
        assert not status.is_in_sync
        assert cluster.master.store.readable_end - status.acknowledged > 5000


@virtual_time()
async def test_any_slave_will_do(tmp_path: Path) -> None:
    async with log_replicas(tmp_path, slaves=2, settings=SYNC) as cluster:
        await cluster.until(lambda: len(cluster.master.replication.slaves.following) == 2)
        cluster.network.partition(MASTER_HOST, SLAVE_HOST)
        async with client_of(cluster.network, cluster.master.address) as client:
            assert (await client.send(topic="BenchmarkTest")).code == ResponseCode.SUCCESS
        assert cluster.slave(2).store.written_end == cluster.master.store.written_end
        assert cluster.slave(1).store.written_end == 0


@virtual_time()
async def test_a_slave_that_reports_before_the_master_waits_for_it(tmp_path: Path) -> None:
    """The flush that makes bytes readable for slaves may be another one than the send's."""
    async with log_replicas(tmp_path, settings={**SYNC, "flushDiskType": "SYNC_FLUSH"}) as cluster:
        await connected(cluster)
        gate, outcomes = cluster.master.path.durability, list[Outcome]()
        async with client_of(cluster.network, cluster.master.address) as client:
            assert (await client.send(topic="BenchmarkTest")).code == ResponseCode.SUCCESS
            end = cluster.master.store.written_end
            flushed: Future[None] = Future()
            flushed.set_result(None)
            stored = Appended((end,), QueueOffset(0), 0, end, flushed)
            for promise in (Promise.DURABLE, Promise.DURABLE_EVENTUALLY):
                gate.acknowledge(stored, Report(promise, outcomes.append))
            await asyncio.sleep(0.1)
        assert outcomes == [stored, stored]
        assert len(gate) == 0


@virtual_time()
async def test_waiting_sends_are_bounded(tmp_path: Path) -> None:
    settings = {**SYNC, "sendThreadPoolQueueCapacity": "3"}
    async with log_replicas(tmp_path, settings=settings) as cluster:
        await connected(cluster)
        cluster.network.partition(MASTER_HOST, SLAVE_HOST)
        async with client_of(cluster.network, cluster.master.address) as client:
            waves = []
            for _ in range(3):
                wave = (client.send(topic="BenchmarkTest") for _ in range(3))
                waves.append(asyncio.gather(*wave))
                await asyncio.sleep(0.1)
            answers: list[Command] = [answer for wave in waves for answer in await wave]
        codes = [answer.code for answer in answers]
        assert ResponseCode.SYSTEM_BUSY in codes
        assert ResponseCode.FLUSH_SLAVE_TIMEOUT in codes
        assert any("for a slave" in (answer.remark or "") for answer in answers)
        assert len(cluster.master.path.durability) == 0
        assert not cluster.master.replication.slaves.waiting, "timed-out sends stay in memory"


@virtual_time()
async def test_delayed_messages_are_delivered_without_a_slave(tmp_path: Path) -> None:
    async with (
        log_replicas(tmp_path, slaves=1, settings=SYNC) as cluster,
        client_of(cluster.network, cluster.master.address) as client,
    ):
        await connected(cluster)
        assert (await client.send(topic="BenchmarkTest", named={"DELAY": "2"})).code == 0
        cluster.network.partition(MASTER_HOST, SLAVE_HOST)
        await cluster.until(lambda: cluster.messages("BenchmarkTest"))
        await cluster.advance(seconds=40)
        assert cluster.master.path.delays.progress.offset_table[2] == 1


@virtual_time()
async def test_a_slave_that_stores_nothing_does_not_stop_the_master(tmp_path: Path) -> None:
    """Its link stays, so what the broker itself stores would wait for it for ever."""
    settings = {**SYNC, "sendThreadPoolQueueCapacity": "2"}
    async with (
        log_replicas(tmp_path, slaves=0, settings=settings) as cluster,
        client_of(cluster.network, cluster.master.address) as client,
    ):
        replication = cluster.master.replication
        mute = follow_falsely(
            cluster.network.host("10.0.0.7"), lambda: replication.ha_address, lies=False
        )
        following = asyncio.create_task(mute)
        await connected(cluster)
        for _ in range(4):
            answer = await client.send(topic="BenchmarkTest", named={"DELAY": "1"})
            assert answer.code == ResponseCode.FLUSH_SLAVE_TIMEOUT
        await cluster.until(lambda: len(cluster.messages("BenchmarkTest")) == 4)
        await cluster.advance(seconds=10)
        assert cluster.master.path.delays.progress.offset_table[1] == 4
        assert len(cluster.master.path.durability) == 0
        answer = await client.send(topic="BenchmarkTest")
        assert answer.code == ResponseCode.FLUSH_SLAVE_TIMEOUT
        assert replication.slaves.following
        following.cancel()
