"""A broker loses messages in a power failure: consumers skip no message that reuses an offset."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clusters import Cluster, cluster
from consumers import Seen, consuming, send
from turbopump.client import calls, continuity
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.subscriptions import Expression
from turbopump.filters.sql92 import Sql
from turbopump.message import MessageQueue
from turbopump.testing import virtual_time, wait_until

pytestmark = pytest.mark.slow

QUEUE = MessageQueue("T", "a", 0)
NEW = [1, 5, 20]
"""Fewer messages than were lost, the same number, and more."""


def bodies(first: int, end: int, prefix: bytes = b"") -> list[bytes]:
    return [prefix + b"%d" % number for number in range(first, end)]


async def store_some(world: Cluster, unflushed: str = "a") -> None:
    """Store ten messages, the last five of which are not flushed yet and have tag ``unflushed``."""
    await send(world, bodies(0, 5), tags="a", to=QUEUE)
    await asyncio.sleep(120)
    await send(world, bodies(5, 10), tags=unflushed, to=QUEUE)


async def lose_the_end(world: Cluster, new: int) -> int:
    """Restart without the unflushed messages, and store new ones before consumers reconnect.

    Return how many of the old ones are left.
    """
    await world.crash("a", lose_unflushed=True)
    world.network.partition("10.0.1.1", "10.0.0.1")
    await world.start_broker("a")
    kept = world.broker("a").store.queue_range("T", 0)[1]
    assert kept < 10
    await send(world, bodies(0, new, b"new"), tags="a", to=QUEUE)
    world.network.heal()
    return kept


def committed(world: Cluster) -> int:
    return world.broker("a").state.offsets.find("g", "T", 0) or 0


@pytest.mark.parametrize("new", NEW)
def test_a_push_consumer(tmp_path: Path, new: int) -> None:
    @virtual_time()
    async def run() -> None:
        async with cluster(tmp_path) as world:
            seen = Seen()
            async with consuming(world, seen):
                await store_some(world)
                await wait_until(lambda: seen.count == 10)
                await lose_the_end(world, new)
                wanted = {*bodies(0, 10), *bodies(0, new, b"new")}
                await wait_until(lambda: set(seen.bodies) == wanted, 120)

    run()


@virtual_time()
async def test_a_push_consumer_that_does_not_pull_commits_no_offset_of_lost_messages(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        seen = Seen()
        async with consuming(world, seen) as consumer:
            await store_some(world)
            await wait_until(lambda: seen.count == 10)
            consumer.suspend()
            kept = await lose_the_end(world, 20)
            await asyncio.sleep(60)
            assert committed(world) <= kept
        assert committed(world) <= kept
        second = Seen()
        async with consuming(world, second):
            await wait_until(lambda: {*bodies(0, 20, b"new")} <= {*second.bodies}, 120)


@virtual_time()
async def test_a_push_consumer_that_stops_before_it_rewinds_skips_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as world:
        seen = Seen()
        async with consuming(world, seen):
            await store_some(world)
            await wait_until(lambda: seen.count == 10)
            await lose_the_end(world, 20)
            await wait_until(lambda: "has other messages" in caplog.text, 60)
            # It waits for running listeners.
            await asyncio.sleep(6)
        second = Seen()
        async with consuming(world, second):
            await wait_until(lambda: {*bodies(0, 20, b"new")} <= {*second.bodies}, 120)


@virtual_time()
async def test_a_push_consumer_rewinds_although_its_commits_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits are one-way, and go to a slave if the master has just been replaced."""

    async def lost(*_: object, **__: object) -> None:
        pass

    async with cluster(tmp_path) as world:
        seen = Seen()
        async with consuming(world, seen):
            await store_some(world)
            await wait_until(lambda: seen.count == 10)
            await lose_the_end(world, 20)
            await wait_until(lambda: "has other messages" in caplog.text, 60)
            world.broker("a").state.offsets.commit("g", "T", 0, 10)
            monkeypatch.setattr(calls, "commit_offset", lost)
            await wait_until(lambda: {*bodies(0, 20, b"new")} <= {*seen.bodies}, 120)


@pytest.mark.parametrize("new", NEW)
def test_a_lite_pull_consumer(tmp_path: Path, new: int) -> None:
    @virtual_time()
    async def run() -> None:
        async with cluster(tmp_path) as world:
            await store_some(world)
            got: list[bytes] = []
            async with LitePullConsumer(
                "g",
                subscriptions={"T": "*"},
                start_from="first",
                session=world.session("10.0.1.1"),
            ) as consumer:
                while len(got) < 10:
                    got += [message.body for message in await consumer.poll()]
                await lose_the_end(world, new)
                for _ in range(40):
                    got += [message.body for message in await consumer.poll()]
            assert set(got) == {*bodies(0, 10), *bodies(0, new, b"new")}

    run()


@pytest.mark.parametrize("wanted", ["a", Sql("TAGS = 'a'")], ids=["tag", "sql"])
@pytest.mark.parametrize("new", NEW)
def test_a_filtered_push_consumer(tmp_path: Path, new: int, wanted: Expression) -> None:
    @virtual_time()
    async def run() -> None:
        async with cluster(tmp_path) as world:
            seen = Seen()
            async with consuming(world, seen, subscriptions={"T": wanted}) as consumer:
                await store_some(world, "b")
                await wait_until(lambda: consumer.progress("T").get(QUEUE) == 10, 60)
                await lose_the_end(world, new)
                await wait_until(lambda: b"new%d" % (new - 1) in seen.bodies, 120)
                await asyncio.sleep(60)
        assert sorted(seen.bodies) == sorted([*bodies(0, 5), *bodies(0, new, b"new")])

    run()


def test_a_filtered_push_consumer_that_has_skipped_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuity, "_PASSED_OVER_MAX", 3)

    @virtual_time()
    async def run() -> None:
        async with cluster(tmp_path) as world:
            seen = Seen()
            async with consuming(world, seen, subscriptions={"T": "a"}) as consumer:
                await store_some(world, "b")
                await wait_until(lambda: consumer.progress("T").get(QUEUE) == 10, 60)
                await lose_the_end(world, 20)
                await wait_until(lambda: b"new19" in seen.bodies, 120)
        assert set(seen.bodies) == {*bodies(0, 5), *bodies(0, 20, b"new")}

    run()


@virtual_time()
async def test_a_new_filter_does_not_apply_to_messages_already_skipped(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        seen = Seen()
        async with consuming(world, seen, subscriptions={"T": "a"}) as consumer:
            await store_some(world, "b")
            await wait_until(lambda: consumer.progress("T").get(QUEUE) == 10, 60)
            await consumer.subscribe("T", "a || b")
            await asyncio.sleep(10)
            await world.crash("a")
            await world.start_broker("a")
            await send(world, bodies(10, 20), tags="b", to=QUEUE)
            await wait_until(lambda: seen.count == 15, 120)
            await asyncio.sleep(60)
        assert sorted(seen.bodies, key=int) == [*bodies(0, 5), *bodies(10, 20)]


@virtual_time()
async def test_a_push_consumer_that_stops_commits_nothing_before_it_has_compared(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        seen = Seen()
        async with consuming(world, seen):
            await store_some(world)
            await wait_until(lambda: seen.count == 10)
            await lose_the_end(world, 20)
        async with consuming(world, seen):
            wanted = {*bodies(0, 10), *bodies(0, 20, b"new")}
            await wait_until(lambda: set(seen.bodies) == wanted, 120)


@virtual_time()
async def test_a_queue_that_is_released_is_compared_before_its_position_is_committed(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        seen = Seen()
        async with consuming(world, seen) as consumer:
            await store_some(world)
            await wait_until(lambda: seen.count == 10)
            await lose_the_end(world, 20)
            await consumer.unsubscribe("T")
            await wait_until(lambda: QUEUE not in consumer.progress("T"))
            await consumer.subscribe("T")
            wanted = {*bodies(0, 10), *bodies(0, 20, b"new")}
            await wait_until(lambda: set(seen.bodies) == wanted, 120)


@virtual_time()
async def test_a_push_consumer_that_waits_for_its_first_message(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        before, seen = Seen(), Seen()
        await store_some(world)
        async with consuming(world, before):
            await wait_until(lambda: before.count == 10)
        async with consuming(world, seen):
            await asyncio.sleep(1)
            await lose_the_end(world, 20)
            await wait_until(lambda: set(seen.bodies) >= set(bodies(0, 20, b"new")), 120)


def lite(world: Cluster) -> LitePullConsumer:
    session = world.session("10.0.1.1")
    return LitePullConsumer("g", subscriptions={"T": "*"}, start_from="first", session=session)


async def polled(consumer: LitePullConsumer, times: int) -> set[bytes]:
    return {message.body for _ in range(times) for message in await consumer.poll()}


@virtual_time()
async def test_a_lite_pull_consumer_that_stops_commits_nothing_before_it_has_compared(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        await store_some(world)
        got: set[bytes] = set()
        async with lite(world) as consumer:
            while len(got) < 10:
                got |= await polled(consumer, 1)
            await lose_the_end(world, 20)
        async with lite(world) as consumer:
            got |= await polled(consumer, 40)
        assert got == {*bodies(0, 10), *bodies(0, 20, b"new")}


@virtual_time()
async def test_a_lite_pull_consumer_that_waits_for_its_first_message(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await store_some(world)
        got: set[bytes] = set()
        async with lite(world) as consumer:
            while len(got) < 10:
                got |= await polled(consumer, 1)
        async with lite(world) as consumer:
            assert not await polled(consumer, 1)
            await lose_the_end(world, 20)
            got |= await polled(consumer, 40)
        assert got == {*bodies(0, 10), *bodies(0, 20, b"new")}


@virtual_time()
async def test_a_lite_pull_consumer_that_does_not_fetch_commits_no_offset_of_lost_messages(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        await store_some(world)
        count = 0
        async with LitePullConsumer(
            "g", subscriptions={"T": "*"}, start_from="first", session=world.session("10.0.1.1")
        ) as consumer:
            while count < 10:
                count += len(await consumer.poll())
            consumer.pause(QUEUE)
            kept = await lose_the_end(world, 20)
            for _ in range(20):
                await consumer.poll()
            assert committed(world) <= kept
            await consumer.commit()
            assert committed(world) <= kept
        assert committed(world) <= kept


@virtual_time()
async def test_nothing_is_redelivered_where_nothing_was_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        seen = Seen()
        async with consuming(world, seen):
            await store_some(world)
            await wait_until(lambda: seen.count == 10)
            # Committed by now.
            await asyncio.sleep(10)
            await world.crash("a")
            await world.start_broker("a")
            await send(world, bodies(10, 20), to=QUEUE)
            await wait_until(lambda: seen.count == 20, 120)
            await asyncio.sleep(60)
        assert sorted(seen.bodies, key=int) == bodies(0, 20)
