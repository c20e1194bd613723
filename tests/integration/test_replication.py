"""Replication of the log from master to slaves, in virtual time: bytes are compared at the end."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path

import pytest

from brokers import client_of
from log_replicas import MASTER, SEGMENT_BYTES, LogReplicas, link, log_bytes, log_replicas
from turbopump.broker.broker import Broker
from turbopump.broker.replication.copying import COMPARED_BYTES
from turbopump.broker.replication.slave import LinkState, MasterLink
from turbopump.broker.replication.table_copy import Copy
from turbopump.message import PhysicalOffset
from turbopump.testing import LinkQuality, virtual_loop, virtual_time, wait_until
from turbopump.wire import headers
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.mastership import PromoteBroker

SLAVE = f"{MASTER}-1"


def master_link(slave: Broker) -> MasterLink:
    follower = slave.replication.follower
    assert follower is not None
    return follower.status


def saved_bytes(cluster: LogReplicas) -> bytes:
    """Return what a slave has cut off its log, without trailing zeros."""
    disk = cluster.disk(SLAVE)
    [kept] = [
        path
        for path in disk.entries(cluster.slave().config.directory)
        if path.name.startswith("diverged-")
    ]
    parts = []
    for path in sorted(disk.entries(kept)):
        fd = disk.open_to_read(path)
        parts.append(disk.read(fd, disk.file_size(path), 0))
        disk.close(fd)
    return b"".join(parts)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@virtual_time()
async def test_slaves_copy_byte_for_byte(tmp_path: Path, flush: str) -> None:
    async with log_replicas(tmp_path, slaves=2, settings={"flushDiskType": flush}) as cluster:
        await cluster.fill(200)
        await cluster.until_copied()
        assert cluster.master.store.written_end > 2 * SEGMENT_BYTES
        for slave in cluster.slaves:
            assert link(slave) is LinkState.IN_SYNC
            assert slave.store.min_offset == 0
        statuses = cluster.master.replication.slaves.following
        end = cluster.master.store.readable_end
        assert [(each.acknowledged, each.is_in_sync) for each in statuses] == [(end, True)] * 2


@virtual_time()
async def test_a_new_slave_copies_all_existing_files(tmp_path: Path) -> None:
    async with log_replicas(tmp_path, slaves=0) as cluster:
        await cluster.fill(200)
        slave = await cluster.start_broker(SLAVE)
        await cluster.until_copied()
        assert slave.store.min_offset == 0
        await cluster.fill(20)
        await cluster.until_copied()


@virtual_time()
async def test_the_slave_of_an_empty_master_is_in_sync(tmp_path: Path) -> None:
    async with log_replicas(tmp_path) as cluster:
        slave = cluster.slave()
        assert cluster.master.store.written_end == 0
        await cluster.advance(seconds=30)
        assert master_link(slave).state is LinkState.IN_SYNC
        assert slave.administration.runtime_info()["replicationLagMillis"] == "0"
        await cluster.fill(20)
        await cluster.until_copied()
        assert master_link(slave).cut_bytes == 0


@virtual_time()
async def test_a_slave_that_was_down_resumes_where_it_stopped(tmp_path: Path) -> None:
    async with log_replicas(tmp_path) as cluster:
        for crash in (False, True):
            await cluster.fill(30)
            await cluster.until_copied()
            end = cluster.slave().store.written_end
            await (cluster.crash(SLAVE) if crash else cluster.stop_broker(SLAVE))
            await cluster.fill(100)
            slave = await cluster.start_broker(SLAVE)
            assert slave.store.written_end == end
            await cluster.until_copied()
            assert master_link(slave).cut_bytes == 0


@virtual_time()
async def test_the_first_files_of_the_master_are_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with log_replicas(tmp_path, settings={"fileReservedTime": "0"}) as cluster:
        await cluster.fill(10)
        await cluster.until_copied()
        await cluster.stop_broker(SLAVE)
        await cluster.fill(200)
        await cluster.advance(seconds=30)
        cluster.master.store.retain(at_any_hour=True)
        first = cluster.master.store.min_offset
        assert first >= SEGMENT_BYTES
        # One that was down for too long, and a new one.
        await cluster.start_broker(SLAVE)
        await cluster.start_broker(f"{MASTER}-2")
        await cluster.until_copied()
        assert [slave.store.min_offset for slave in cluster.slaves] == [first, first]
        assert f"the master's log begins at {first}" in caplog.text
        assert len(saved_bytes(cluster)) == SEGMENT_BYTES


async def begin_after_retention(cluster: LogReplicas, broker: Broker) -> int:
    """Apply retention, as operators do and in the background; return where the log begins then."""
    # Only what is on disk may be deleted.
    await cluster.advance(seconds=30)
    async with client_of(cluster.network, broker.address) as client:
        await client.ask(RequestCode.DELETE_EXPIRED_COMMITLOG)
    await cluster.advance(seconds=80)
    return broker.store.min_offset


async def promotion(cluster: LogReplicas, *, forced: bool | None = None) -> Command:
    async with client_of(cluster.network, cluster.slave().address) as client:
        header = PromoteBroker(broker_role="ASYNC_MASTER", forced=forced)
        return await client.ask(RequestCode.PROMOTE_BROKER, header, timeout_ms=20_000)


@virtual_time()
async def test_a_slave_deletes_only_what_its_master_has_deleted(tmp_path: Path) -> None:
    """Neither when its disk is full, nor by age, nor after a restart without its master."""
    settings = {"diskSpaceCleanForciblyRatio": "80", "fileReservedTime": "1"}
    async with log_replicas(tmp_path, settings=settings) as cluster:
        await cluster.fill(200)
        await cluster.until_copied()
        cluster.disk(SLAVE).fullness = 0.85
        assert await begin_after_retention(cluster, cluster.slave()) == 0
        cluster.disk(MASTER).fullness = 0.85
        begin = await begin_after_retention(cluster, cluster.master)
        assert begin > 0
        cluster.disk(MASTER).heal()
        await cluster.fill(200)
        await cluster.until_copied()
        assert await begin_after_retention(cluster, cluster.slave()) == begin
        await cluster.stop_broker(MASTER)
        await cluster.stop_broker(SLAVE)
        await cluster.start_broker(SLAVE)
        await cluster.advance(hours=1)
        assert await begin_after_retention(cluster, cluster.slave()) == begin
        assert (await promotion(cluster)).code == ResponseCode.SUCCESS


@virtual_time()
async def test_a_slave_that_has_deleted_more_than_its_master_is_not_promoted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"diskSpaceCleanForciblyRatio": "80", "slaveDeletesOnItsOwn": "true"}
    async with log_replicas(tmp_path, settings=settings) as cluster:
        await cluster.fill(200)
        await cluster.until_copied()
        cluster.disk(SLAVE).fullness = 0.85
        assert await begin_after_retention(cluster, cluster.slave()) > 0
        assert "85% of the disk is used: 2 log files were deleted before their time" in caplog.text
        await cluster.stop_broker(MASTER)
        await cluster.stop_broker(SLAVE)
        await cluster.start_broker(SLAVE)
        answer = await promotion(cluster)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        begin = cluster.slave().store.min_offset
        refusal = answer.remark or ""
        assert f"log begins at {begin}, its master's at 0" in refusal
        assert "the messages between would be lost" in refusal
        assert "--force" in refusal
        assert (await promotion(cluster, forced=True)).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("lost", [5, 200], ids=["a few", "files"])
@pytest.mark.parametrize("new", [0, 3, pytest.param(300, marks=pytest.mark.slow)])
@virtual_time()
async def test_messages_only_the_slave_has_are_truncated_and_saved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: int, new: int
) -> None:
    async with log_replicas(tmp_path) as cluster:
        await cluster.fill(100)
        await cluster.advance(seconds=20)
        await cluster.until_copied()
        common = cluster.master.store.flushed_end
        assert common == cluster.master.store.written_end
        cluster.disk(MASTER).sync_time = 10000
        await cluster.fill(lost, text="lost")
        await cluster.until(lambda: cluster.slave().store.written_end > common)
        await cluster.until_copied()
        tail = log_bytes(cluster.slave(), common)
        assert (len(tail) > COMPARED_BYTES) == (lost > 5)
        cluster.network.partition("10.0.0.1", "10.0.0.2")
        cluster.disk(MASTER).sync_time = 0
        await cluster.crash(MASTER, lose_unflushed=True)
        await cluster.start_broker(MASTER)
        assert cluster.master.store.written_end == common
        await cluster.fill(new, text="other")
        cluster.network.heal()
        await cluster.until_copied()
        assert master_link(cluster.slave()).cut_bytes == len(tail)
        assert saved_bytes(cluster).startswith(tail[:1000])
        assert tail[-500:] in saved_bytes(cluster)
        [record] = [r for r in caplog.records if "cut off and kept in" in r.getMessage()]
        assert record.levelno == logging.ERROR
        assert str(len(tail)) in record.getMessage()


@virtual_time()
async def test_a_log_without_anything_in_common_is_not_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with log_replicas(tmp_path) as cluster:
        await cluster.fill(50)
        await cluster.until_copied()
        before = log_bytes(cluster.slave(), PhysicalOffset(0))
        await cluster.stop_broker(MASTER)
        disk = cluster.disk(MASTER)
        await cluster.stop_broker(SLAVE)
        # The master returns with an empty disk.
        disk._root.entries.clear()
        await cluster.start_broker(MASTER)
        slave = await cluster.start_broker(SLAVE)
        await cluster.fill(5)
        await cluster.until(lambda: "right master" in master_link(slave).last_error)
        assert link(slave) is LinkState.DISCONNECTED
        assert log_bytes(slave, PhysicalOffset(0)) == before
        assert caplog.text.count("is it the right master?") == 1
        # If dropping everything is permitted, the slave follows the new log.
        follower = slave.replication.follower
        assert follower is not None
        follower.may_drop_all = True
        await cluster.advance(minutes=2)
        await cluster.until_copied()
        assert saved_bytes(cluster).startswith(before[:1000])


@virtual_time()
async def test_a_slave_of_a_replaced_master_drops_messages_only_that_master_had(
    tmp_path: Path,
) -> None:
    async with log_replicas(tmp_path) as cluster:
        await cluster.fill(50)
        await cluster.until_copied()
        slave, follower = cluster.slave(), cluster.slave().replication.follower
        assert follower is not None
        before = log_bytes(slave, PhysicalOffset(0))
        await cluster.stop_broker(MASTER)
        cluster.disk(MASTER)._root.entries.clear()
        await cluster.start_broker(MASTER)
        await cluster.fill(5)
        await cluster.until(lambda: "right master" in master_link(slave).last_error)
        assert log_bytes(slave, PhysicalOffset(0)) == before
        answer = Copy(b"", headers.TableCopyAnswer(table_version="", log_end=0, broker_epoch=1))
        slave.replica._note_answer(answer)
        await cluster.advance(minutes=2)
        await cluster.until_copied()
        assert saved_bytes(cluster).startswith(before[:1000])
        assert not follower.may_drop_all, "only what came from the old master"


@pytest.mark.slow
@virtual_time()
async def test_links_that_are_cut_at_any_byte(tmp_path: Path) -> None:
    async with log_replicas(tmp_path) as cluster:
        cluster.network.quality = LinkQuality(cut_chance=1)
        for number in range(20):
            await cluster.fill(20, text=f"round {number}")
            await asyncio.sleep(0.0003 * number)
            cluster.network.cut("10.0.0.1", "10.0.0.2")
            await cluster.advance(seconds=5.2)
        await cluster.until_copied()
        assert master_link(cluster.slave()).cut_bytes == 0


@virtual_time()
async def test_a_silent_link_is_closed_by_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with log_replicas(tmp_path) as cluster:
        await cluster.until(lambda: cluster.master.replication.slaves.following)
        # Heartbeats keep it alive.
        await cluster.advance(seconds=60)
        assert cluster.network.connections_made < 20
        cluster.network.partition("10.0.0.1", "10.0.0.2")
        await cluster.fill(3)
        await cluster.advance(seconds=27)
        assert not cluster.master.replication.slaves.following
        assert link(cluster.slave()) is LinkState.DISCONNECTED
        assert caplog.text.count("haHousekeepingInterval") >= 2
        cluster.network.heal()
        await cluster.until_copied()


@pytest.mark.slow
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@virtual_time()
async def test_a_slave_loses_power_under_load(tmp_path: Path, flush: str) -> None:
    async with log_replicas(tmp_path, settings={"flushDiskType": flush}) as cluster:
        for number in range(6):
            sending = asyncio.ensure_future(cluster.fill(60, text=f"round {number}"))
            await asyncio.sleep(0.013 * (number + 1))
            acknowledged = [s.acknowledged for s in cluster.master.replication.slaves.following]
            await cluster.crash(SLAVE, lose_unflushed=True)
            await sending
            slave = await cluster.start_broker(SLAVE)
            if flush == "SYNC_FLUSH":
                # What it has reported is on its disk, except for a partial last message.
                assert all(slave.store.written_end >= at - 1500 for at in acknowledged)
            await cluster.until_copied()


@pytest.mark.slow
@virtual_time()
async def test_a_slave_with_a_full_disk_retries(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with log_replicas(tmp_path) as cluster:
        await cluster.fill(10)
        await cluster.until_copied()
        disk, slave = cluster.disk(SLAVE), cluster.slave()
        disk.fail_writes(errno.ENOSPC)
        await cluster.fill(10)
        await cluster.until(lambda: link(slave) is LinkState.DISCONNECTED)
        assert "No space left" in master_link(slave).last_error
        connections = cluster.network.connections_made
        await cluster.advance(minutes=10)
        assert cluster.network.connections_made - connections < 40
        assert caplog.text.count("is interrupted") < 4
        disk.heal()
        await cluster.until_copied()
        assert master_link(slave).last_error == ""


@virtual_time()
async def test_the_master_sends_no_faster_than_allowed(tmp_path: Path) -> None:
    settings = {"maxHaTransferByteInSecond": "50000"}
    async with log_replicas(tmp_path, slaves=0, settings=settings) as cluster:
        await cluster.fill(200)
        size = cluster.master.store.written_end
        await cluster.start_broker(SLAVE)
        await cluster.until(lambda: cluster.master.replication.slaves.following)
        begin = virtual_loop().time()
        await cluster.until_copied()
        took_s = virtual_loop().time() - begin
        assert size / 50_000 - 2 < took_s < size / 50_000 + 2


@virtual_time()
async def test_a_slave_that_is_far_behind_knows_it(tmp_path: Path) -> None:
    settings = {"maxHaTransferByteInSecond": "10000"}
    async with log_replicas(tmp_path, slaves=0, settings=settings) as cluster:
        await cluster.fill(200)
        slave = await cluster.start_broker(SLAVE)
        await cluster.advance(seconds=11)
        behind = cluster.master.store.written_end - slave.store.written_end
        assert behind > 50_000
        assert master_link(slave).lag_bytes == behind
        assert link(slave) is LinkState.CATCHING_UP
        assert int(slave.administration.runtime_info()["replicationLagMillis"]) >= 9000
        await cluster.until_copied()
        assert link(slave) is LinkState.IN_SYNC
        assert slave.administration.runtime_info()["replicationLagMillis"] == "0"


@pytest.mark.slow
@pytest.mark.parametrize("slaves", [1, 3])
@virtual_time()
async def test_a_frame_that_takes_longer_than_a_link_may_be_silent(
    tmp_path: Path, slaves: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"maxHaTransferByteInSecond": "1500"}
    async with log_replicas(tmp_path, slaves=slaves, settings=settings) as cluster:
        await cluster.until(lambda: len(cluster.master.replication.slaves.following) == slaves)
        await cluster.fill(100)
        await cluster.advance(minutes=5)
        await cluster.until_copied()
        assert "haHousekeepingInterval" not in caplog.text


@virtual_time()
async def test_a_slave_reads_delayed_and_keyed_messages_too(tmp_path: Path) -> None:
    async with log_replicas(tmp_path) as cluster:
        await cluster.fill(10)
        await cluster.until_copied()
        slave, master = cluster.slave().store, cluster.master.store
        for topic, queue_id in master.queue_ids():
            assert slave.queue_range(topic, queue_id) == master.queue_range(topic, queue_id)
        # Restarted, it needs no recovery.
        await cluster.stop_broker(SLAVE)
        again = await cluster.start_broker(SLAVE)
        assert not again.store.recovered.crashed
        assert again.store.recovered.cut_bytes == 0


@virtual_time()
async def test_a_slave_is_sent_what_is_not_in_memory_while_others_are_served(
    tmp_path: Path,
) -> None:
    async with log_replicas(tmp_path) as cluster:
        await cluster.stop_broker(SLAVE)
        await cluster.fill(200)
        await cluster.stop_broker(MASTER)
        await cluster.start_broker(MASTER)
        disk = cluster.disk(MASTER)
        disk.drop_caches()
        disk.read_time = 0.5
        slave = asyncio.create_task(cluster.start_broker(SLAVE))
        await wait_until(lambda: disk.operations["fetch"] > 0)
        begun_ms = virtual_loop().clock.monotonic_ms()
        await cluster.fill(1)
        assert virtual_loop().clock.monotonic_ms() - begun_ms < 100
        await slave
        await cluster.until_copied()
        disk.heal()
