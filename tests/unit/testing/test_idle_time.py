"""Idle hours are skipped, which changes nothing except the cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from turbopump.aio import (
    Admin,
    ConsumeContext,
    ConsumeResult,
    LitePullConsumer,
    Message,
    MessageView,
    PushConsumer,
)
from turbopump.testing import Cluster, running_cluster, virtual_loop

T = TypeVar("T")

HOUR_S = 3600.0
TURNS_OF_AN_HOUR = 7000
"""Loop iterations with an idle consumer of four queues when nothing is skipped; about 7,300."""


def consumer_of(world: Cluster, listener: Any, group: str = "billing") -> PushConsumer:
    return PushConsumer(
        group,
        listener,
        nameserver=world.nameserver,
        subscriptions={"orders": "*"},
        start_from="first",
    )


async def consume(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
    return ConsumeResult.SUCCESS


def run(
    directory: Path,
    work: Callable[[Cluster], Coroutine[Any, Any, T]],
    *,
    skips_idle_time: bool = True,
) -> tuple[T, int]:
    """Run something in a cluster with one topic; return its result and the loop iterations."""

    async def main(world: Cluster) -> tuple[T, int]:
        await world.make_topic("orders")
        before = virtual_loop().turns
        result = await work(world)
        return result, virtual_loop().turns - before

    with running_cluster(directory, skips_idle_time=skips_idle_time) as world:
        return world.run(main(world))


def test_work_repeated_for_hours_is_skipped(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> list[float]:
        loop, clock = virtual_loop(), world.clock
        before = clock.now_ms(), clock.monotonic_ms(), loop.time()
        async with consumer_of(world, consume):
            await world.advance(hours=10)
            after = clock.now_ms(), clock.monotonic_ms(), loop.time()
        return [now - then for now, then in zip(after, before, strict=True)]

    (wall_ms, monotonic_ms, loop_s), turns = run(tmp_path, wait)
    assert wall_ms == pytest.approx(10 * HOUR_S * 1000, abs=1000)
    assert monotonic_ms == pytest.approx(wall_ms, abs=1)
    assert loop_s == pytest.approx(wall_ms / 1000, abs=0.01)
    assert turns < TURNS_OF_AN_HOUR


def test_nothing_is_skipped_if_disabled(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> None:
        async with consumer_of(world, consume):
            await world.advance(minutes=30)

    _, turns = run(tmp_path, wait, skips_idle_time=False)
    assert turns > TURNS_OF_AN_HOUR / 2


@pytest.mark.slow
def test_all_members_are_present_afterwards(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> None:
        seen: list[bytes] = []

        async def handle(messages: Sequence[MessageView], context: object) -> ConsumeResult:
            seen.extend(each.body for each in messages)
            return ConsumeResult.SUCCESS

        async with (
            consumer_of(world, handle) as consumer,
            Admin(nameserver=world.nameserver) as admin,
        ):
            for day in range(3):
                await world.advance(days=1)
                assert len(consumer.assignment()) == 5
                assert len((await admin.groups.members("billing")).members) == 1
                await world.send(Message("orders", b"%d" % day))
                await world.until(lambda: len(seen) == day + 1, seconds=1)  # noqa: B023 - at once
                await world.until_consumed("billing", seconds=20)

    run(tmp_path, wait)


def test_a_waiter_for_a_deadline_is_woken_at_that_deadline(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> list[float]:
        times_s = []

        async def wake_now_and_then() -> None:
            for _ in range(4):
                await asyncio.sleep(HOUR_S)
                times_s.append(virtual_loop().time())

        start_s = virtual_loop().time()
        async with consumer_of(world, consume):
            waking = asyncio.create_task(wake_now_and_then())
            await world.advance(hours=5)
            await waking
        return [each - start_s for each in times_s]

    times_s, turns = run(tmp_path, wait)
    assert times_s == pytest.approx([HOUR_S * each for each in (1, 2, 3, 4)], abs=0.5)
    assert turns < TURNS_OF_AN_HOUR


def test_delayed_message_is_neither_early_nor_late(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> int:
        got_ms = []

        async def handle(messages: Sequence[MessageView], context: object) -> ConsumeResult:
            got_ms.append(world.clock.now_ms())
            return ConsumeResult.SUCCESS

        async with consumer_of(world, handle):
            await world.advance(hours=1)
            sent_ms = world.clock.now_ms()
            await world.send(Message("orders", b"in two hours", delay_level=18))
            await world.until(lambda: got_ms, hours=3)
        return got_ms[0] - sent_ms

    waited_ms, turns = run(tmp_path, wait)
    assert 0 <= waited_ms - 2 * HOUR_S * 1000 < 200
    assert turns < TURNS_OF_AN_HOUR


@pytest.mark.slow
@pytest.mark.parametrize("skips_idle_time", [True, False])
def test_message_that_is_never_finished_is_sent_back_in_time(
    tmp_path: Path, skips_idle_time: bool
) -> None:
    async def wait(world: Cluster) -> int:
        times_ms = []

        async def hang(messages: Sequence[MessageView], context: object) -> ConsumeResult:
            times_ms.append(world.clock.now_ms())
            if len(times_ms) == 1:
                await asyncio.Event().wait()
            return ConsumeResult.SUCCESS

        async with consumer_of(world, hang):
            await world.send(Message("orders", b"1"))
            await world.advance(minutes=40)
        return times_ms[1] - times_ms[0]

    # 15 minutes, the next check for slow messages, and the delay of a message sent back.
    waited_ms, _ = run(tmp_path, wait, skips_idle_time=skips_idle_time)
    assert 15 * 60_000 < waited_ms < 33 * 60_000


def test_a_vanished_client_is_detected_in_time(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> None:
        async with (
            consumer_of(world, consume, "gone"),
            Admin(nameserver=world.nameserver) as admin,
        ):
            await world.advance(minutes=1)
            assert (await admin.groups.members("gone")).members
            world.isolate("gone")
            await world.advance(minutes=3)
            assert "gone" not in world.broker().state.consumers.groups
            world.heal()
            await world.advance(hours=1)
            assert (await admin.groups.members("gone")).members

    run(tmp_path, wait)


@pytest.mark.slow
def test_a_poller_gets_its_answer_after_its_own_timeout(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> float:
        async with LitePullConsumer(
            "lite", nameserver=world.nameserver, subscriptions={"orders": "*"}, start_from="first"
        ) as lite:
            await world.send(Message("orders", b"in two hours", delay_level=18))
            start_s = virtual_loop().time()
            assert await lite.poll(timeout=HOUR_S) == []
            return virtual_loop().time() - start_s

    waited_s, _ = run(tmp_path, wait)
    assert waited_s == pytest.approx(HOUR_S, abs=1)


def both_ways(
    directory: Path, work: Callable[[Cluster], Coroutine[Any, Any, T]], **settings: str
) -> tuple[T, T]:
    """Return the results with all repeated work, and without."""
    found = []
    for skips in (False, True):
        path = directory / str(skips)
        with running_cluster(path, settings=settings, skips_idle_time=skips) as world:
            found.append(world.run(work(world)))
    return found[0], found[1]


@pytest.mark.slow
def test_messages_expire_at_their_hour(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> int:
        await world.make_topic("orders", queues=1)
        for _ in range(60):
            await world.send(Message("orders", bytes(1500)))
        await world.advance(hours=20)
        return len(world.messages("orders"))

    settings = {"fileReservedTime": "2", "deleteWhen": "08", "maxMessageSize": "2000"}
    with_all, without = both_ways(tmp_path, wait, mappedFileSizeCommitLog="70000", **settings)
    assert with_all == without < 60


@pytest.mark.slow
def test_rarely_repeated_work_is_done(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> int:
        await world.make_topic("orders", queues=2)
        async with world.session(route_interval=600) as session:
            subscribed = PushConsumer("g", consume, session=session, subscriptions={"orders": "*"})
            async with subscribed as consumer:
                await world.advance(minutes=5)
                await world.make_topic("orders", queues=4)
                await world.advance(hours=1)
                return len(consumer.assignment())

    assert both_ways(tmp_path, wait) == (5, 5)


def test_unflushed_data_reaches_the_disk(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> int:
        await world.send(Message("orders", b"1"), Message("orders", b"2"))
        await world.advance(hours=2)
        await world.crash(lose_unflushed=True)
        await world.start_broker()
        return len(world.messages("orders"))

    slow = {"flushIntervalCommitLog": "600000", "flushCommitLogThoroughInterval": "600000"}
    assert both_ways(tmp_path, wait, **slow) == (2, 2)


@pytest.mark.parametrize(
    "disturb",
    [
        lambda world: world.disk().fail_writes(),
        lambda world: world.disk().stall(),
        lambda world: setattr(world.disk(), "fullness", 0.95),
        lambda world: world.isolate(),
    ],
)
def test_nothing_is_skipped_during_a_fault(
    tmp_path: Path, disturb: Callable[[Cluster], None]
) -> None:
    async def wait(world: Cluster) -> int:
        disturb(world)
        await world.advance(minutes=20)
        turns = virtual_loop().turns
        world.heal()
        await world.advance(minutes=20)
        return turns - (virtual_loop().turns - turns)

    more_turns, _ = run(tmp_path, wait)
    assert more_turns > 0


@pytest.mark.slow
def test_two_clusters_in_one_loop_do_not_disturb_each_other(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> None:
        seen: list[bytes] = []

        async def handle(messages: Sequence[MessageView], context: object) -> ConsumeResult:
            seen.extend(each.body for each in messages)
            return ConsumeResult.SUCCESS

        async with consumer_of(world, handle) as consumer:
            async with Cluster(tmp_path / "other", skips_idle_time=False):
                made = world.network.connections_made
                await world.advance(hours=1)
                assert world.network.connections_made == made
            before = virtual_loop().turns
            await world.advance(hours=1)
            assert virtual_loop().turns - before < TURNS_OF_AN_HOUR / 4
            assert len(consumer.assignment()) == 5
            await world.send(Message("orders", b"1"))
            await world.until(lambda: seen, seconds=1)

    run(tmp_path / "first", wait)


def test_a_condition_on_time_is_seen_within_a_minute(tmp_path: Path) -> None:
    async def wait(world: Cluster) -> float:
        start_ms = world.clock.now_ms()
        async with consumer_of(world, consume):
            await world.until(lambda: world.clock.now_ms() >= start_ms + 2 * 3_600_000, hours=5)
        return (world.clock.now_ms() - start_ms) / 1000

    waited_s, _ = run(tmp_path, wait)
    assert 2 * HOUR_S <= waited_s <= 2 * HOUR_S + 60
