"""A master loses messages that its slave had copied: those that reuse their offsets arrive too."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from brokers import SMALL_STORE
from consumers import Seen, consuming, send, session_of
from replicas import MASTER, Replicas, replicas
from turbopump.broker.config import SlaveReadsConfig
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.subscriptions import Expression
from turbopump.filters.sql92 import Sql
from turbopump.message import MessageQueue, PhysicalOffset
from turbopump.testing import virtual_time, wait_until

pytestmark = pytest.mark.slow

QUEUE = MessageQueue("T", MASTER, 0)
CONSUMER_HOST = "10.0.1.1"
FILTERS = pytest.mark.parametrize("wanted", ["a", Sql("TAGS = 'a'")], ids=["tag", "sql"])


def bodies(first: int, end: int, prefix: bytes = b"") -> list[bytes]:
    return [prefix + b"%d" % number for number in range(first, end)]


async def lose_the_end(cluster: Replicas, flushed: str = "a", lost: str = "a") -> None:
    """Leave about 5 messages on the master, and 10 on the slave, with these tags."""
    await send(cluster, bodies(0, 5), tags=flushed, to=QUEUE)
    await asyncio.sleep(120)
    await send(cluster, bodies(5, 10), tags=lost, to=QUEUE)
    await cluster.copy()
    await cluster.crash(MASTER, lose_unflushed=True)


@pytest.mark.parametrize("new", [3, 5, 20])
def test_a_push_consumer_skips_no_message_that_replaced_a_lost_one(
    tmp_path: Path, new: int, caplog: pytest.LogCaptureFixture
) -> None:
    @virtual_time()
    async def run() -> None:
        async with replicas(tmp_path) as cluster:
            await lose_the_end(cluster)
            await asyncio.sleep(60)
            seen = Seen()
            with caplog.at_level(logging.WARNING):
                async with consuming(cluster, seen):
                    await wait_until(lambda: seen.count == 10)
                    await cluster.start_broker(MASTER)
                    _, kept = cluster.master.store.queue_range("T", 0)
                    assert kept < 10
                    await send(cluster, bodies(0, new, b"new"), to=QUEUE)
                    wanted = {*bodies(0, 10), *bodies(0, new, b"new")}
                    await wait_until(lambda: set(seen.bodies) == wanted, 120)
                    await asyncio.sleep(60)
                    await send(cluster, [b"last"], to=QUEUE)
                    await wait_until(lambda: b"last" in seen.bodies, 60)
                    await asyncio.sleep(60)
            assert cluster.master.state.offsets.find("g", "T", 0) == kept + new + 1
            assert "has other messages than" in caplog.text

    run()


@virtual_time()
async def test_messages_only_the_slave_has_are_not_read_in_turn_with_the_masters(
    tmp_path: Path,
) -> None:
    # The master suggests the slave for all but the newest message.
    store = replace(SMALL_STORE, limits=replace(SMALL_STORE.limits, recent_bytes=1))
    reads = SlaveReadsConfig(enabled=True)
    async with replicas(tmp_path, store=store, slave_reads=reads) as cluster:
        await lose_the_end(cluster)
        await asyncio.sleep(60)
        seen = Seen()
        async with consuming(cluster, seen):
            await wait_until(lambda: seen.count == 10)
            await cluster.start_broker(MASTER)
            await asyncio.sleep(50)
            await send(cluster, [b"last"], to=QUEUE)
            await wait_until(lambda: b"last" in seen.bodies, 60)
        assert max(Counter(seen.bodies).values()) == 2


@virtual_time()
async def test_positions_in_the_slave_are_not_committed_to_a_master_with_other_messages(
    tmp_path: Path,
) -> None:
    async with replicas(tmp_path) as cluster:
        await lose_the_end(cluster)
        await asyncio.sleep(60)
        seen = Seen()
        async with consuming(cluster, seen) as consumer:
            await wait_until(lambda: seen.count == 10)
            await cluster.start_broker(MASTER)
            await send(cluster, bodies(0, 20, b"new"), to=QUEUE)
            # So that it knows where to commit on shutdown.
            await session_of(consumer).refresh_routes()
        async with consuming(cluster, seen):
            wanted = {*bodies(0, 10), *bodies(0, 20, b"new")}
            await wait_until(lambda: set(seen.bodies) == wanted, 120)


@pytest.mark.parametrize("new", [3, 20])
def test_a_lite_pull_consumer_skips_no_message_that_replaced_a_lost_one(
    tmp_path: Path, new: int
) -> None:
    @virtual_time()
    async def run() -> None:
        async with replicas(tmp_path) as cluster:
            await lose_the_end(cluster)
            await asyncio.sleep(60)
            got: list[bytes] = []
            async with LitePullConsumer(
                "g", subscriptions={"T": "*"}, start_from="first", session=cluster.session()
            ) as consumer:
                while len(got) < 10:
                    got += [message.body for message in await consumer.poll()]
                await cluster.start_broker(MASTER)
                await send(cluster, bodies(0, new, b"new"), to=QUEUE)
                wanted = {*bodies(0, 10), *bodies(0, new, b"new")}
                for _ in range(40):
                    got += [message.body for message in await consumer.poll()]
                assert set(got) == wanted

    run()


@FILTERS
@pytest.mark.parametrize("flushed", ["a", "b"], ids=["some match", "none matches"])
def test_a_filtered_push_consumer_skips_nothing_after_messages_it_filtered_out(
    tmp_path: Path, wanted: Expression, flushed: str
) -> None:
    @virtual_time()
    async def run() -> None:
        async with replicas(tmp_path) as cluster:
            await lose_the_end(cluster, flushed, "b")
            await asyncio.sleep(60)
            seen = Seen()
            first = bodies(0, 5) if flushed == "a" else []
            async with consuming(cluster, seen, subscriptions={"T": wanted}) as consumer:
                await wait_until(lambda: consumer.progress("T").get(QUEUE) == 10, 60)
                await cluster.start_broker(MASTER)
                await send(cluster, bodies(0, 8, b"new"), tags="a", to=QUEUE)
                await wait_until(lambda: b"new7" in seen.bodies, 120)
                await asyncio.sleep(60)
            assert sorted(seen.bodies) == sorted([*first, *bodies(0, 8, b"new")])

    run()


@FILTERS
def test_a_filtered_lite_pull_consumer_skips_nothing_after_messages_it_filtered_out(
    tmp_path: Path, wanted: Expression
) -> None:
    @virtual_time()
    async def run() -> None:
        async with replicas(tmp_path) as cluster:
            await lose_the_end(cluster, "a", "b")
            await asyncio.sleep(60)
            got: list[bytes] = []
            async with LitePullConsumer(
                "g", subscriptions={"T": wanted}, start_from="first", session=cluster.session()
            ) as consumer:
                while consumer.progress("T").get(QUEUE) != 10:
                    got += [message.body for message in await consumer.poll(timeout=1)]
                await cluster.start_broker(MASTER)
                await send(cluster, bodies(0, 8, b"new"), tags="a", to=QUEUE)
                for _ in range(40):
                    got += [message.body for message in await consumer.poll()]
            assert sorted(got) == [*bodies(0, 5), *bodies(0, 8, b"new")]

    run()


@FILTERS
def test_nothing_is_redelivered_after_messages_that_were_filtered_out(
    tmp_path: Path, wanted: Expression, caplog: pytest.LogCaptureFixture
) -> None:
    @virtual_time()
    async def run() -> None:
        async with replicas(tmp_path) as cluster:
            await send(cluster, bodies(0, 5), tags="a", to=QUEUE)
            await send(cluster, bodies(5, 10), tags="b", to=QUEUE)
            await cluster.copy()
            await cluster.crash(MASTER)
            await asyncio.sleep(60)
            seen = Seen()
            async with consuming(cluster, seen, subscriptions={"T": wanted}) as consumer:
                await wait_until(lambda: consumer.progress("T").get(QUEUE) == 10, 60)
                await cluster.start_broker(MASTER)
                await send(cluster, bodies(10, 15), tags="a", to=QUEUE)
                await wait_until(lambda: seen.count == 10, 120)
                await asyncio.sleep(60)
            assert sorted(seen.bodies, key=int) == [*bodies(0, 5), *bodies(10, 15)]
            assert "has other messages than" not in caplog.text

    run()


@virtual_time()
async def test_nothing_is_redelivered_where_the_master_lost_nothing(tmp_path: Path) -> None:
    async with replicas(tmp_path) as cluster:
        await send(cluster, bodies(0, 10), to=QUEUE)
        await cluster.copy()
        await cluster.crash(MASTER)
        await asyncio.sleep(60)
        seen = Seen()
        async with consuming(cluster, seen):
            await wait_until(lambda: seen.count == 10)
            await cluster.start_broker(MASTER)
            await send(cluster, bodies(10, 20), to=QUEUE)
            await wait_until(lambda: seen.count == 20, 120)
            await asyncio.sleep(60)
        assert sorted(seen.bodies, key=int) == bodies(0, 20)


async def replace_what_the_slave_had(cluster: Replicas, bodies: list[bytes]) -> None:
    """Lose all messages on the master; have the slave replace its only one, and run alone."""
    await cluster.crash(MASTER, lose_unflushed=True)
    cluster.network.partition(CONSUMER_HOST, "10.0.0.1")
    await cluster.start_broker(MASTER)
    await send(cluster, bodies, to=QUEUE)
    assert cluster.slave.store.queue_range("T", 0) == (0, 1)
    cluster.slave.store.cut(PhysicalOffset(0))
    await cluster.copy()
    await cluster.crash(MASTER)


@asynccontextmanager
async def polling(cluster: Replicas, got: Seen) -> AsyncIterator[None]:
    """Run a lite pull consumer, and record what it returns."""
    async with LitePullConsumer(
        "g", subscriptions={"T": "*"}, start_from="first", session=cluster.session(CONSUMER_HOST)
    ) as consumer:

        async def poll() -> None:
            while True:
                got.messages += await consumer.poll()

        async with asyncio.TaskGroup() as group:
            task = group.create_task(poll())
            try:
                yield
            finally:
                task.cancel()


@pytest.mark.parametrize("consumer", [consuming, polling], ids=["push", "lite pull"])
def test_a_consumer_skips_nothing_on_a_slave_that_has_removed_messages(
    tmp_path: Path, consumer: Callable[[Replicas, Seen], AbstractAsyncContextManager[object]]
) -> None:
    """The slave serves what follows them, but cannot compare them: only the master can."""
    old, new = bodies(0, 2, b"old"), bodies(0, 4, b"new")

    @virtual_time()
    async def run() -> None:
        async with replicas(tmp_path) as cluster:
            await send(cluster, old[:1], to=QUEUE)
            await cluster.copy()
            await send(cluster, old[1:], to=QUEUE)
            seen = Seen()
            async with consumer(cluster, seen):
                await wait_until(lambda: seen.bodies == old)
                await replace_what_the_slave_had(cluster, new)
                await asyncio.sleep(60)
                assert seen.bodies == old
                cluster.network.heal()
                await cluster.start_broker(MASTER)
                await wait_until(lambda: seen.bodies == [*old, *new], 120)

    run()
