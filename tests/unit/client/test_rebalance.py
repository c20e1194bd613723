"""Members join, leave and die, and each queue has one owner."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from clusters import BROKERS, Cluster, Recorder, cluster
from consumers import Seen, committed, consuming, make_topic, send, sleep_ms
from turbopump.client.allocation import ConsistentHash, FixedQueues, average_by_circle
from turbopump.client.push_consumer import PushConsumer
from turbopump.message import MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command

QUEUE = MessageQueue("T", "a", 0)


def owned(consumer: PushConsumer, topic: str = "T") -> set[MessageQueue]:
    running = consumer._running
    assert running is not None
    return {
        queue
        for queue, each in running.owned.items()
        if queue.topic == topic and not each.is_dropped
    }


def is_shared_evenly(consumers: Sequence[PushConsumer], count: int) -> bool:
    """Whether every queue has exactly one owner, and all have their share."""
    shares = [owned(each) for each in consumers]
    sizes = {len(share) for share in shares}
    everything = set().union(*shares)
    return sum(map(len, shares)) == len(everything) == count and max(sizes) - min(sizes) <= 1


@virtual_time()
async def test_queues_move_as_members_join_and_leave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "turbopump.client.rebalance")
    async with cluster(tmp_path, names=BROKERS) as world:
        await send(world, [b"x"] * 20)
        async with AsyncExitStack() as rest:
            consumers = []
            for number in range(1, 5):
                host = f"10.0.1.{number}"
                consumers.append(await rest.enter_async_context(consuming(world, Seen(), host)))
                # The broker notifies the members, so none waits for the next 20 s.
                await wait_until(lambda: is_shared_evenly(consumers, 8), 5)
            while len(consumers) > 1:
                await consumers.pop(0).close()
                await wait_until(lambda: is_shared_evenly(consumers, 8), 5)
    assert re.search(r"lost \[T@\S+:\d", caplog.text)


@virtual_time()
async def test_running_orderly_calls_delay_the_loss_of_their_queues_together(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, names=BROKERS) as world:
        await send(world, [b"x"] * 20)
        seen = Seen()
        seen.hold.clear()
        async with consuming(world, seen, orderly=True) as consumer:
            await wait_until(lambda: seen.running == 8)
            start_ms = world.clock.monotonic_ms()
            await consumer.unsubscribe("T")
            # A second for each of two rounds, not for each of 8 queues.
            assert world.clock.monotonic_ms() - start_ms < 3000
            seen.hold.set()


@pytest.mark.slow
@virtual_time()
async def test_nothing_is_lost_or_committed_backwards_while_members_change(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        seen = Seen()
        sent = 0
        offsets = [0] * 4
        async with AsyncExitStack() as rest:
            consumers: list[PushConsumer] = []
            for number in range(8):
                if number % 3 == 2:
                    await consumers.pop(0).close()
                else:
                    host = f"10.0.1.{number + 1}"
                    consumers.append(await rest.enter_async_context(consuming(world, seen, host)))
                await send(world, [b"%d" % (sent + extra) for extra in range(50)])
                sent += 50
                now = [await committed(world, queue_id) or 0 for queue_id in range(4)]
                assert all(new >= old for new, old in zip(now, offsets, strict=True))
                offsets = now
            await wait_until(lambda: len(set(seen.bodies)) == sent + 1, 60)
        # Every message at least once; those in flight when a queue moved may be delivered twice.
        assert seen.count - len(set(seen.bodies)) < sent / 4


@virtual_time()
async def test_a_member_that_dies_is_replaced_immediately(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with consuming(world, Seen(), "10.0.1.1") as one:
            # Referenced: a generator that is collected closes its consumer.
            context = consuming(world, Seen(), "10.0.1.2")
            dead = await context.__aenter__()
            await wait_until(lambda: is_shared_evenly([one, dead], 4), 5)
            world.network.refuse("10.0.0.1")
            world.network.cut("10.0.1.2")
            await wait_until(lambda: len(owned(one)) == 4, 5)
            world.network.accept("10.0.0.1")
            await dead.close()


@virtual_time()
async def test_a_member_that_falls_silent_is_replaced_after_two_minutes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with consuming(world, Seen(), "10.0.1.1") as one:
            # Referenced: a generator that is collected closes its consumer.
            context = consuming(world, Seen(), "10.0.1.2")
            silent = await context.__aenter__()
            await wait_until(lambda: is_shared_evenly([one, silent], 4), 5)
            world.network.partition("10.0.1.2", "10.0.0.1")
            await sleep_ms(100_000)
            assert len(owned(one)) == 2
            await wait_until(lambda: len(owned(one)) == 4, 60)
            world.network.heal()
            await silent.close()


@virtual_time()
async def test_a_listeners_result_for_a_lost_queue_is_ignored(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        for number in range(4):
            await send(world, [b"%d" % number], to=MessageQueue("T", "a", number))
        first, second = Seen(), Seen()
        first.hold.clear()
        async with consuming(world, first, "10.0.1.1") as one:
            await wait_until(lambda: first.running == 4)
            async with consuming(world, second, "10.0.1.2") as two:
                # The other one starts where nothing is committed: these messages are redelivered.
                await wait_until(lambda: second.count == 2, 5)
                lost = owned(two)
                first.hold.set()
                await sleep_ms(6000)
                progress = one.progress("T")
                assert not set(progress) & lost
                assert len(progress) == 2
        assert [await committed(world, number) for number in range(4)] == [1] * 4


@virtual_time()
async def test_a_queue_whose_puller_died_is_restarted(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"x"], to=QUEUE)
        seen = Seen()
        async with consuming(world, seen) as consumer:
            await wait_until(lambda: seen.count == 1)
            running = consumer._running
            assert running is not None
            running._pullers[running.owned[QUEUE]].cancel()
            await send(world, [b"later"], to=QUEUE)
            await sleep_ms(100_000)
            assert seen.count == 1
            await wait_until(lambda: seen.count == 2, 60)


@virtual_time()
async def test_queues_are_kept_when_the_group_cannot_be_queried(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        seen = Seen()
        async with consuming(world, seen) as consumer:
            world.network.partition("10.0.1.1", "10.0.0.1")
            await sleep_ms(60_000)
            assert len(owned(consumer)) == 4
            world.network.heal()
            await send(world, [b"x"] * 4)
            await wait_until(lambda: seen.count == 5, 120)


def forget_client(world: Cluster, host: str) -> None:
    """Let a broker forget a client whose connection stays open."""
    broker = world.brokers["a"]
    for connection in broker.connections:
        if connection.peer_address.startswith(f"{host}:"):
            broker.state.consumers.connection_closed(connection)


@virtual_time()
async def test_a_member_missing_from_the_list_sends_a_heartbeat_before_it_drops_queues(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with (
            consuming(world, Seen(), "10.0.1.1") as first,
            consuming(world, Seen(), "10.0.1.2") as second,
        ):
            await wait_until(lambda: is_shared_evenly([first, second], 4), 5)
            before = dict(first._running.owned)  # type: ignore[union-attr]
            forget_client(world, "10.0.1.1")
            await first._running.rebalancer.balance()  # type: ignore[union-attr]
            assert first._running.owned == before  # type: ignore[union-attr]
            assert len(world.brokers["a"].state.consumers.members("g")) == 2


@virtual_time()
async def test_a_member_that_is_not_listed_after_its_heartbeat_drops_its_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with (
            consuming(world, Seen(), "10.0.1.1") as first,
            consuming(world, Seen(), "10.0.1.2") as second,
        ):
            await wait_until(lambda: is_shared_evenly([first, second], 4), 5)
            consumers = world.brokers["a"].state.consumers
            with monkeypatch.context() as patch:
                patch.setattr(consumers, "heartbeat", lambda member, data: None)
                forget_client(world, "10.0.1.1")
                await wait_until(lambda: owned(first) == set(), 30)
                assert "it owns no queues until the list names it" in caplog.text
                await wait_until(lambda: len(owned(second)) == 4, 30)
            await wait_until(lambda: is_shared_evenly([first, second], 4), 60)


@virtual_time()
async def test_new_queues_of_a_topic_are_found(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with consuming(world, Seen()) as consumer:
            await world.start_broker("b")
            session = world.session("10.0.9.9", instance="late")
            async with session:
                await session.refresh_route("T")
            await send(world, [b"x"] * 20, topic="T2")
            assert len(owned(consumer)) == 4
            await consumer.subscribe("T2")
            await wait_until(lambda: len(owned(consumer, "T2")) == 8, 60)


@pytest.mark.parametrize("strategy", [average_by_circle, ConsistentHash()], ids=["circle", "ring"])
@virtual_time()
async def test_members_agree_whatever_the_strategy(tmp_path: Path, strategy: object) -> None:
    async with cluster(tmp_path, names=BROKERS) as world:
        await send(world, [b"x"] * 20)
        async with AsyncExitStack() as rest:
            consumers = [
                await rest.enter_async_context(
                    consuming(world, Seen(), f"10.0.1.{number}", strategy=strategy)
                )
                for number in range(3)
            ]

            def has_one_owner_each() -> bool:
                shares = [owned(each) for each in consumers]
                return sum(map(len, shares)) == len(set().union(*shares)) == 8

            await wait_until(has_one_owner_each, 5)


@virtual_time()
async def test_the_group_is_checked_every_twenty_seconds(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        recorder = Recorder()
        async with consuming(world, Seen(), session=world.session(hooks=[recorder])):
            await sleep_ms(1000)
            recorder.requests.clear()
            await sleep_ms(100_000)
            asked = recorder.of(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
        assert len(asked) == 5, "once for its topic and the retry topic"


@virtual_time()
async def test_broadcasting_gives_every_message_to_every_member(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        first, second = Seen(), Seen()
        directory = tmp_path / "offsets"

        async with (
            consuming(world, first, "10.0.1.1", broadcast=True, offsets_directory=directory) as one,
            consuming(
                world, second, "10.0.1.2", broadcast=True, offsets_directory=directory
            ) as two,
        ):
            await send(world, [b"%d" % number for number in range(20)])
            await wait_until(lambda: first.count == second.count == 21)
            assert len(owned(one)) == len(owned(two)) == 4
            assert not owned(one, "%RETRY%g")
        assert await committed(world) == 0, "brokers do not learn of it"
        await send(world, [b"later"])
        again = Seen()
        async with consuming(world, again, "10.0.1.1", broadcast=True, offsets_directory=directory):
            await wait_until(lambda: again.count == 1)
            await sleep_ms(5000)
        assert again.bodies == [b"later"], "it resumes from its own file"


@virtual_time()
async def test_a_strategy_that_fails_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing: list[bool] = []

    def strategy(
        queues: Sequence[MessageQueue], members: Sequence[str], me: str
    ) -> Sequence[MessageQueue]:
        if failing:
            raise RuntimeError("a bug")
        return [*queues, *queues, MessageQueue("Other", "a", 0)]

    async with cluster(tmp_path) as world:
        await make_topic(world)
        async with consuming(world, Seen(), strategy=strategy) as consumer:
            assert len(owned(consumer)) == 4
            assert not owned(consumer, "Other")
            failing.append(True)
            await sleep_ms(25_000)
            assert "strategy of g failed" in caplog.text
            failing.clear()
            await sleep_ms(25_000)
            assert len(owned(consumer)) == 4


@virtual_time()
async def test_fixed_queues_are_all_that_is_consumed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, [b"%d" % number for number in range(8)])
        seen, fixed = Seen(), FixedQueues((QUEUE,))
        async with consuming(world, seen, strategy=fixed) as consumer:
            await sleep_ms(10_000)
            assert consumer.assignment() == [QUEUE]
        assert {message.queue_id for message in seen.messages} == {0}


@virtual_time()
async def test_concurrent_rebalances_gain_a_queue_once(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        await make_topic(world, "T2")
        seen = Seen()
        async with consuming(world, seen) as consumer:
            running = consumer._running
            assert running is not None
            await consumer.subscribe("T2")
            async with asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(running.rebalancer.balance())
            assert len(running._pullers) == len(running.owned)
            await send(world, [b"x"] * 8, topic="T2")
            await sleep_ms(5000)
        assert seen.count == 10


@virtual_time()
async def test_queues_gained_are_pulled_even_if_the_round_is_cancelled(tmp_path: Path) -> None:
    is_sharing = False

    def strategy(
        queues: Sequence[MessageQueue], members: Sequence[str], me: str
    ) -> Sequence[MessageQueue]:
        return queues if is_sharing else ()

    def stop_broker(address: str, command: Command) -> None:
        is_asked = command.code == RequestCode.GET_CONSUMER_LIST_BY_GROUP
        if is_sharing and is_asked and address == stopped:
            world.network.partition("10.0.1.1", address.partition(":")[0])

    async with cluster(tmp_path, names=BROKERS) as world:
        stopped = world.brokers["b"].address
        await world.make_topic("T", "a")
        await world.make_topic("U", "b")
        seen, session = Seen(), world.session(hooks=[Recorder(refuse=stop_broker)])
        topics = {"T": "*", "U": "*"}
        async with consuming(
            world, seen, session=session, subscriptions=topics, strategy=strategy
        ) as consumer:
            running = consumer._running
            assert running is not None
            # Until the rounds of the start are over.
            await sleep_ms(10_000)
            is_sharing = True
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(running.rebalancer.balance(), 1)
            await send(world, [b"x"], to=QUEUE)
            await wait_until(lambda: seen.count == 1, 10)


@virtual_time()
async def test_a_bug_met_with_one_topic_does_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: str, command: Command) -> None:
        is_query = command.code == RequestCode.QUERY_CONSUMER_OFFSET
        if is_query and (command.ext_fields or {})["topic"] == "U":
            raise RuntimeError("a bug")

    async with cluster(tmp_path) as world:
        for topic in "TU":
            await world.make_topic(topic)
        seen, session = Seen(), world.session(hooks=[Recorder(refuse=refuse)])
        async with consuming(world, seen, session=session, subscriptions={"V": "*"}) as consumer:
            async with asyncio.TaskGroup() as group:
                for topic in "TU":
                    group.create_task(consumer.subscribe(topic))
            await wait_until(lambda: "rebalance failed and is started again" in caplog.text)
            await send(world, [b"x"], to=QUEUE)
            await wait_until(lambda: seen.count == 1, 10)
