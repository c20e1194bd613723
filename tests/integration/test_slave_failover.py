"""Consumers of a master and its slave, while the master dies and returns."""

from __future__ import annotations

import asyncio
from pathlib import Path

from brokers import client_of, views
from consumers import Seen, consuming, send
from replicas import MASTER, SLAVE, LinkedReplicas, Replicas, replicas
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.message import MessageQueue
from turbopump.testing import virtual_loop, virtual_time, wait_until

QUEUE = MessageQueue("T", MASTER, 0)


def bodies(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


async def copied(cluster: Replicas) -> None:
    """Wait until the slave has the master's log."""
    end = cluster.master.store.written_end
    await wait_until(lambda: cluster.slave.store.written_end >= end, 60)


@virtual_time()
async def test_replication_wakes_pulls_that_wait_at_the_slave(tmp_path: Path) -> None:
    async with (
        replicas(tmp_path, LinkedReplicas) as cluster,
        client_of(cluster.network, cluster.slave.address, "10.0.2.2") as slave,
    ):
        await send(cluster, bodies(0, 1), to=QUEUE)
        await asyncio.sleep(30)
        held = asyncio.create_task(slave.pull(1, hold_ms=15_000))
        await asyncio.sleep(1)
        assert not held.done()
        await send(cluster, bodies(1, 2), to=QUEUE)
        begin_s = virtual_loop().time()
        assert [view.body for view in views(await held)] == [b"1"]
        assert virtual_loop().time() - begin_s < 1


@virtual_time()
async def test_a_group_consumes_through_the_death_and_return_of_its_master(tmp_path: Path) -> None:
    async with replicas(tmp_path, LinkedReplicas) as cluster:
        await send(cluster, bodies(0, 20), to=QUEUE)
        await asyncio.sleep(30)
        seen = Seen()
        async with consuming(cluster, seen):
            await wait_until(lambda: seen.count == 20)
            seen.hold.clear()
            await send(cluster, bodies(20, 60), to=QUEUE)
            await copied(cluster)
            await cluster.crash(MASTER)
            seen.hold.set()
            await wait_until(lambda: seen.count >= 60, 60)
            await asyncio.sleep(60)
            await cluster.start_broker(MASTER)
            await send(cluster, bodies(60, 80), to=QUEUE)
            await wait_until(lambda: set(seen.bodies) == set(bodies(0, 80)), 120)
            await wait_until(lambda: cluster.master.state.offsets.find("g", "T", 0) == 80, 60)
        assert sorted(seen.bodies, key=int) == bodies(0, 80), "nothing was repeated"


@virtual_time()
async def test_a_group_that_restarts_without_its_master_skips_nothing(tmp_path: Path) -> None:
    async with replicas(tmp_path, LinkedReplicas) as cluster:
        await send(cluster, bodies(0, 20), to=QUEUE)
        first = Seen()
        async with consuming(cluster, first):
            await wait_until(lambda: first.count == 20)
        await asyncio.sleep(30)
        await send(cluster, bodies(20, 40), to=QUEUE)
        await copied(cluster)
        await cluster.crash(MASTER)
        await asyncio.sleep(60)
        again = Seen()
        async with consuming(cluster, again, start_from="last"):
            await wait_until(lambda: again.count == 20, 60)
            assert sorted(again.bodies, key=int) == bodies(20, 40), "from offsets the slave copied"
        async with consuming(cluster, again, start_from="last"):
            await wait_until(lambda: again.count == 40, 60)
            await cluster.start_broker(MASTER)
            await wait_until(lambda: cluster.master.state.offsets.find("g", "T", 0) == 40, 60)


@virtual_time()
async def test_consumers_leave_a_slave_that_dies(tmp_path: Path) -> None:
    async with replicas(tmp_path, LinkedReplicas) as cluster:
        await send(cluster, bodies(0, 20), to=QUEUE)
        await asyncio.sleep(30)
        await cluster.crash(MASTER)
        await asyncio.sleep(60)
        async with LitePullConsumer(
            "g", subscriptions={"T": "*"}, start_from="first", session=cluster.session()
        ) as consumer:
            assert [(await anext(consumer)).body for _ in range(20)] == bodies(0, 20)
            await cluster.start_broker(MASTER)
            await cluster.crash(SLAVE)
            await send(cluster, bodies(20, 30), to=QUEUE)
            assert [(await anext(consumer)).body for _ in range(10)] == bodies(20, 30)
