"""Consumers that read from a slave: when they switch and return, and what they never do there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from brokers import SMALL_STORE
from clusters import Recorder
from consumers import Seen, consuming, send
from replicas import MASTER, Replicas, replicas
from turbopump.broker.config import SlaveReadsConfig
from turbopump.client.calls import Found, NothingNew
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.producer import Producer
from turbopump.client.pull_consumer import PullConsumer
from turbopump.client.push_config import Pulling
from turbopump.errors import RemoteError
from turbopump.message import Message, MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.codes import RequestCode
from turbopump.wire.headers import PullMessage
from turbopump.wire.record import MessageView
from turbopump.wire.sysflag import PULL_COMMIT_OFFSET

pytestmark = pytest.mark.slow

QUEUE = MessageQueue("T", MASTER, 0)
FAR_BEHIND = replace(SMALL_STORE, limits=replace(SMALL_STORE.limits, recent_bytes=1000))
ENABLED = SlaveReadsConfig(enabled=True)
SMALL_PULLS = Pulling(batch_size=8)


def bodies(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def pulls(seen: Recorder) -> list[tuple[str, PullMessage]]:
    """Return the pulls of the queue, with their addresses."""
    found = [
        (address, PullMessage.from_ext_fields(command.ext_fields))
        for address, command in seen.requests
        if command.code == RequestCode.PULL_MESSAGE
    ]
    return [(to, head) for to, head in found if (head.topic, head.queue_id) == ("T", 0)]


async def polled(consumer: LitePullConsumer, count: int) -> AsyncIterator[MessageView]:
    """Poll for some messages."""
    while count > 0:
        for message in await consumer.poll(timeout=10):
            count -= 1
            yield message


def committed(cluster: Replicas, group: str = "g") -> int | None:
    return cluster.master.state.offsets.find(group, "T", 0)


@virtual_time()
async def test_a_push_consumer_follows_the_suggestion_and_returns(tmp_path: Path) -> None:
    async with replicas(tmp_path, store=FAR_BEHIND, slave_reads=ENABLED) as cluster:
        await send(cluster, bodies(0, 60), to=QUEUE)
        await cluster.copy()
        requests, seen = Recorder(), Seen()
        session = cluster.session(hooks=[requests])
        async with consuming(cluster, seen, session=session, pulling=SMALL_PULLS):
            await wait_until(lambda: seen.count == 60)
            assert sorted(seen.bodies, key=int) == bodies(0, 60)
            asked = [address for address, _ in pulls(requests)]
            assert asked[0] == cluster.master.address
            assert asked.count(cluster.slave.address) > 2
            assert asked[-1] == cluster.master.address, "redirected once it has caught up"
            on_slave = [head for to, head in pulls(requests) if to == cluster.slave.address]
            assert not any(head.sys_flag & PULL_COMMIT_OFFSET for head in on_slave)
            await wait_until(lambda: committed(cluster) == 60, 60)
        commits = requests.addresses_of(RequestCode.UPDATE_CONSUMER_OFFSET)
        assert set(commits) == {cluster.master.address}


@virtual_time()
async def test_without_the_setting_no_consumer_reads_from_the_slave(tmp_path: Path) -> None:
    async with replicas(tmp_path, store=FAR_BEHIND) as cluster:
        await send(cluster, bodies(0, 30), to=QUEUE)
        await cluster.copy()
        requests, seen = Recorder(), Seen()
        async with consuming(cluster, seen, session=cluster.session(hooks=[requests])):
            await wait_until(lambda: seen.count == 30)
        assert {address for address, _ in pulls(requests)} == {cluster.master.address}


@virtual_time()
async def test_a_slave_that_lags_moves_no_offset(tmp_path: Path) -> None:
    async with replicas(tmp_path, store=FAR_BEHIND, slave_reads=ENABLED) as cluster:
        await send(cluster, bodies(0, 10), to=QUEUE)
        await cluster.copy()
        await send(cluster, bodies(10, 60), to=QUEUE)
        requests, seen = Recorder(), Seen()
        session = cluster.session(hooks=[requests])
        async with consuming(cluster, seen, session=session, pulling=SMALL_PULLS):
            await wait_until(lambda: seen.count == 60)
            await asyncio.sleep(30)
            assert sorted(seen.bodies, key=int) == bodies(0, 60), "none skipped, none repeated"
        assert cluster.slave.address in {address for address, _ in pulls(requests)}


@virtual_time()
async def test_consumption_continues_from_the_slave_when_the_master_dies(tmp_path: Path) -> None:
    async with replicas(tmp_path) as cluster:
        await send(cluster, bodies(0, 5), to=QUEUE)
        requests, seen = Recorder(), Seen()
        seen.hold.clear()
        async with consuming(cluster, seen, session=cluster.session(hooks=[requests])):
            await wait_until(lambda: seen.count)
            await send(cluster, bodies(5, 50), to=QUEUE)
            await cluster.copy()
            await cluster.crash(MASTER)
            seen.hold.set()
            await wait_until(lambda: seen.count == 50)
            await asyncio.sleep(60)
            await cluster.start_broker(MASTER)
            await wait_until(lambda: committed(cluster) == 50, 60)
            await send(cluster, bodies(50, 60), to=QUEUE)
            await wait_until(lambda: seen.count >= 60)
            await asyncio.sleep(60)
            assert sorted(seen.bodies, key=int) == bodies(0, 60)
            assert pulls(requests)[-1][0] == cluster.master.address


@virtual_time()
async def test_the_slave_is_read_while_the_dead_master_is_still_in_the_routes(
    tmp_path: Path,
) -> None:
    async with replicas(tmp_path) as cluster:
        await send(cluster, bodies(0, 5), to=QUEUE)
        seen = Seen()
        session = cluster.session()
        async with consuming(cluster, seen, session=session):
            await wait_until(lambda: seen.count == 5)
            await send(cluster, bodies(5, 6), to=QUEUE)
            await wait_until(lambda: seen.count == 6)
            await send(cluster, bodies(6, 8), to=QUEUE)
            await cluster.copy()
            cluster.refuse(MASTER)
            await wait_until(lambda: seen.count == 8)
            assert session.has_master(MASTER)


@virtual_time()
async def test_a_consumer_ahead_of_the_slave_waits_for_the_master(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas(tmp_path) as cluster:
        await send(cluster, bodies(0, 5), to=QUEUE)
        await cluster.copy()
        await send(cluster, bodies(5, 20), to=QUEUE)
        requests, seen = Recorder(), Seen()
        async with consuming(cluster, seen, session=cluster.session(hooks=[requests])):
            await wait_until(lambda: seen.count == 20)
            await cluster.crash(MASTER)
            before = len(pulls(requests))
            with caplog.at_level(logging.WARNING, "turbopump.client.puller"):
                await asyncio.sleep(60)
            asked = pulls(requests)[before:]
            assert len(asked) < 200, "it does not poll constantly"
            assert {head.queue_offset for _, head in asked} == {20}
            waits = [each for each in caplog.messages if "waits for the master" in each]
            assert len(waits) == 1
            assert "0 to 5, not 20" in waits[0]
            await cluster.start_broker(MASTER)
            await send(cluster, bodies(20, 25), to=QUEUE)
            await wait_until(lambda: seen.count == 25)
            await asyncio.sleep(30)
            assert sorted(seen.bodies, key=int) == bodies(0, 25)


@virtual_time()
async def test_a_consumer_that_starts_without_the_master_repeats_but_skips_nothing(
    tmp_path: Path,
) -> None:
    async with replicas(tmp_path) as cluster:
        await send(cluster, bodies(0, 10), to=QUEUE)
        first = Seen()
        async with consuming(cluster, first, start_from="last"):
            await wait_until(lambda: first.count == 10)
        await cluster.copy()
        await send(cluster, bodies(10, 20), to=QUEUE)
        cluster.copy_log()
        async with consuming(cluster, first, start_from="last"):
            await wait_until(lambda: first.count == 20)
        await cluster.crash(MASTER)
        await asyncio.sleep(60)
        again = Seen()
        async with consuming(cluster, again, start_from="last"):
            await wait_until(lambda: again.count == 10)
            assert sorted(again.bodies, key=int) == bodies(10, 20), "from the slave's older offsets"
            await cluster.start_broker(MASTER)
            await wait_until(lambda: committed(cluster) == 20, 60)


@virtual_time()
async def test_a_group_that_the_slave_does_not_know_waits_for_the_master(tmp_path: Path) -> None:
    """The slave's end may be past the offset that the group has committed to the master."""
    store = replace(SMALL_STORE, limits=replace(SMALL_STORE.limits, recent_bytes=1))
    async with replicas(tmp_path, store=store) as cluster:
        await send(cluster, bodies(0, 10), to=QUEUE)
        await cluster.copy()
        cluster.master.state.offsets.commit("g", "T", 0, 4)
        await cluster.crash(MASTER)
        await asyncio.sleep(60)
        seen = Seen()
        async with consuming(cluster, seen, start_from="last") as consumer:
            await asyncio.sleep(60)
            assert QUEUE not in consumer.assignment()
        first = Seen()
        async with consuming(cluster, first, group="new", start_from="first"):
            await wait_until(lambda: first.count == 10)


@virtual_time()
async def test_orderly_groups_stop_until_the_master_grants_locks_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas(tmp_path) as cluster:
        await send(cluster, bodies(0, 5), to=QUEUE)
        seen = Seen()
        async with consuming(cluster, seen, orderly=True):
            await wait_until(lambda: seen.count == 5)
            await send(cluster, bodies(5, 6), to=QUEUE)
            await wait_until(lambda: seen.count == 6)
            await cluster.copy()
            await cluster.crash(MASTER)
            with caplog.at_level(logging.WARNING, "turbopump.client.queue_locks"):
                await asyncio.sleep(120)
            warnings = [each for each in caplog.messages if "not consumed in order" in each]
            assert len(warnings) == 1
            assert seen.count == 6
            await cluster.start_broker(MASTER)
            await send(cluster, bodies(6, 9), to=QUEUE)
            await wait_until(lambda: seen.count == 9)
            assert seen.bodies == bodies(0, 9)


@virtual_time()
async def test_sends_go_to_other_brokers_while_a_master_is_down(tmp_path: Path) -> None:
    async with replicas(tmp_path) as cluster:
        await cluster.start_broker("b")
        await cluster.make_topic("T", MASTER, 2)
        await cluster.make_topic("T", "b", 2)
        await cluster.copy()
        async with Producer("p", session=cluster.session()) as producer:
            await producer.send(Message("T", b"x"))
            await cluster.crash(MASTER)
            for _ in range(8):
                assert (await producer.send(Message("T", b"x"))).queue.broker == "b"


@virtual_time()
async def test_a_lite_pull_consumer_reads_from_the_slave_and_returns(tmp_path: Path) -> None:
    async with replicas(tmp_path, store=FAR_BEHIND, slave_reads=ENABLED) as cluster:
        await send(cluster, bodies(0, 60), to=QUEUE)
        await cluster.copy()
        requests = Recorder()
        async with LitePullConsumer(
            "g",
            subscriptions={"T": "*"},
            start_from="first",
            session=cluster.session(hooks=[requests]),
        ) as consumer:
            got = [(await anext(consumer)).body for _ in range(60)]
            assert got == bodies(0, 60)
            asked = [address for address, _ in pulls(requests)]
            assert asked.count(cluster.slave.address) > 2
            await wait_until(lambda: pulls(requests)[-1][0] == cluster.master.address)
            await cluster.copy()
            await cluster.crash(MASTER)
            await asyncio.sleep(60)
            assert await consumer.poll(timeout=0.1) == []
            with pytest.raises(RemoteError, match="slave"):
                await consumer.commit()
            await cluster.start_broker(MASTER)
            await send(cluster, bodies(60, 65), to=QUEUE)
            assert [(await anext(consumer)).body for _ in range(5)] == bodies(60, 65)
        commits = requests.addresses_of(RequestCode.UPDATE_CONSUMER_OFFSET)
        assert cluster.master.address in commits
        assert committed(cluster) == 65


@virtual_time()
async def test_a_lite_pull_consumer_ahead_of_the_slave_waits(tmp_path: Path) -> None:
    async with replicas(tmp_path) as cluster:
        await send(cluster, bodies(0, 5), to=QUEUE)
        await cluster.copy()
        await send(cluster, bodies(5, 9), to=QUEUE)
        requests = Recorder()
        async with LitePullConsumer(
            "g",
            subscriptions={"T": "*"},
            start_from="first",
            session=cluster.session(hooks=[requests]),
        ) as consumer:
            assert [(await anext(consumer)).body for _ in range(9)] == bodies(0, 9)
            await cluster.crash(MASTER)
            before = len(pulls(requests))
            assert await consumer.poll(timeout=60) == []
            asked = pulls(requests)[before:]
            assert len(asked) < 200
            assert {head.queue_offset for _, head in asked} == {9}


@virtual_time()
async def test_a_pull_consumer_gets_no_illegal_offset_error(tmp_path: Path) -> None:
    async with replicas(tmp_path, store=FAR_BEHIND, slave_reads=ENABLED) as cluster:
        await send(cluster, bodies(0, 10), to=QUEUE)
        await cluster.copy()
        await send(cluster, bodies(10, 30), to=QUEUE)
        async with PullConsumer("g", session=cluster.session()) as consumer:
            first = await consumer.pull(QUEUE, 0)
            assert first.broker_id == 1
            beyond = await consumer.pull(QUEUE, 12)
            assert isinstance(beyond, Found), "pulled from the master: the slave lacks it"
            await cluster.crash(MASTER)
            await asyncio.sleep(60)
            waits = await consumer.pull(QUEUE, 12)
            assert isinstance(waits, NothingNew)
            assert waits.next_offset == 12
            assert isinstance(await consumer.pull(QUEUE, 5), Found)
            assert await consumer.max_offset(QUEUE) == 10


@pytest.mark.parametrize("is_push", [True, False])
@virtual_time()
async def test_consumers_of_a_replaced_master_look_for_the_new_one(
    tmp_path: Path, *, is_push: bool
) -> None:
    async with replicas(tmp_path) as cluster:
        await send(cluster, bodies(0, 5), to=QUEUE)
        await cluster.copy()
        await send(cluster, bodies(5, 10), to=QUEUE)
        requests, seen = Recorder(), Seen()
        session = cluster.session(hooks=[requests])
        async with AsyncExitStack() as stack:
            if is_push:
                await stack.enter_async_context(consuming(cluster, seen, session=session))
                await wait_until(lambda: seen.count == 10)
            else:
                consumer = LitePullConsumer(
                    "g", subscriptions={"T": "*"}, start_from="first", session=session
                )
                await stack.enter_async_context(consumer)
                assert len([each async for each in polled(consumer, 10)]) == 10
            # Outdated routes, from when the slave was the only master.
            session._routes.brokers = {MASTER: {0: cluster.slave.address}}
            requests.requests.clear()
            await asyncio.sleep(28)
            asked = [address for address, _ in pulls(requests)]
            assert 1 <= asked.count(cluster.slave.address) < 5, "no loop"
            assert asked[-1] == cluster.master.address
