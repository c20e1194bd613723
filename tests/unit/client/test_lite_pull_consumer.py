"""Polling: assigned and shared queues, positions, pauses, commits, iteration."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from clusters import BROKERS, Cluster, cluster
from turbopump.client.allocation import average
from turbopump.client.calls import require_success
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.producer import Producer
from turbopump.client.pull_config import FetchLimits, LitePullConfig, PullTimes
from turbopump.errors import InvalidArgument, NotRunning
from turbopump.message import Message, MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.bodies import ConsumerStatus
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.headers import ConsumeDirectly, ConsumerStatusOf, ResetOffset
from turbopump.wire.record import MessageView

TOPIC = "T"
TAGS = ("even", "odd")
QUICK = PullTimes(hold=1, held_timeout=2)


async def produce(world: Cluster, count: int, start: int = 0, host: str = "10.0.1.9") -> None:
    async with Producer("pg", session=world.session(host)) as producer:
        for number in range(start, start + count):
            await producer.send(Message(TOPIC, b"%d" % number, tags=TAGS[number % 2]))


def consumer_of(world: Cluster, name: str = "10.0.1.1", **arguments: Any) -> LitePullConsumer:
    defaults = {"session": world.session(name), "start_from": "first"}
    return LitePullConsumer("g", **{**defaults, **arguments})


async def poll_all(consumer: LitePullConsumer, count: int) -> list[MessageView]:
    found: list[MessageView] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await consumer.poll()
    return found


def numbers(messages: Sequence[MessageView]) -> list[int]:
    return sorted(int(message.body) for message in messages)


@virtual_time()
async def test_assigned_queues_are_read_from_the_start(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await produce(world, 100)
        async with consumer_of(world) as consumer:
            await consumer.assign(await consumer.queues(TOPIC))
            messages = await poll_all(consumer, 100)
            assert numbers(messages) == list(range(100))
            for queue in consumer.assignment():
                offsets = [m.queue_offset for m in messages if m.queue_id == queue.queue_id]
                assert offsets == sorted(offsets)


@virtual_time()
async def test_a_message_that_arrives_during_a_poll_is_returned_immediately(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await produce(world, 4)
        async with consumer_of(world) as consumer:
            await consumer.assign(await consumer.queues(TOPIC))
            await poll_all(consumer, 4)
            poll = asyncio.create_task(consumer.poll())
            await asyncio.sleep(2)
            start_ms = world.clock.monotonic_ms()
            await produce(world, 1, 4)
            assert numbers(await poll) == [4]
            assert world.clock.monotonic_ms() - start_ms < 50


class OnlyOdd:
    def keeps(self, group: str, message: MessageView, queue: MessageQueue) -> bool:
        return group == "g" and queue.topic == TOPIC and message.tags == "odd"


@virtual_time()
async def test_a_filter_hook_chooses_among_pulled_messages(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await produce(world, 20)
        async with consumer_of(world, subscriptions={TOPIC: "*"}, hooks=[OnlyOdd()]) as consumer:
            assert numbers(await poll_all(consumer, 10)) == list(range(1, 20, 2))
            assert await consumer.poll() == []


@virtual_time()
async def test_a_poll_without_messages_ends_in_time(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as world,
        consumer_of(world, subscriptions={TOPIC: "*"}) as consumer,
    ):
        start_ms = world.clock.monotonic_ms()
        assert await consumer.poll(timeout=0.7) == []
        assert 700 <= world.clock.monotonic_ms() - start_ms < 750


@virtual_time()
async def test_seeking_to_a_timestamp(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await produce(world, 8)
        await asyncio.sleep(60)
        moment = datetime.fromtimestamp(world.clock.now_ms() / 1000, UTC)
        await produce(world, 8, 8)
        async with consumer_of(world) as consumer:
            queue = MessageQueue(TOPIC, "a", 0)
            await consumer.assign([queue])
            await consumer.seek(queue, await consumer.offset_at(queue, moment))
            assert [message.queue_offset for message in await consumer.poll()] == [2, 3]


@virtual_time()
async def test_seeking_pausing_and_resuming(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await produce(world, 40)
        async with consumer_of(world) as consumer:
            queue = MessageQueue(TOPIC, "a", 0)
            await consumer.assign([queue])
            first = await poll_all(consumer, 10)
            await consumer.seek(queue, 5)
            assert [m.queue_offset for m in await poll_all(consumer, 5)] == [5, 6, 7, 8, 9]
            await consumer.seek_to_begin(queue)
            consumer.pause(queue)
            assert await consumer.poll(timeout=3) == []
            consumer.resume(queue)
            assert numbers(await poll_all(consumer, 10)) == numbers(first)
            await consumer.seek_to_begin(queue)
            await consumer.seek_to_end(queue)
            assert await consumer.poll(timeout=3) == []
            with pytest.raises(InvalidArgument, match="not assigned"):
                consumer.pause(MessageQueue(TOPIC, "a", 1))
            with pytest.raises(InvalidArgument, match="offset must be 0 or more, got -1"):
                await consumer.seek(queue, -1)


@virtual_time()
async def test_processed_messages_are_committed_and_the_rest_redelivered(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await produce(world, 40)
        queue = MessageQueue(TOPIC, "a", 0)

        async def fail_at(offset: int) -> None:
            async with consumer_of(world) as consumer:
                await consumer.assign([queue])
                async for message in consumer:
                    if message.queue_offset == offset:
                        raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail_at(3)
        async with consumer_of(world) as consumer:
            assert await consumer.committed(queue) == 3
            await consumer.assign([queue])
            assert [m.queue_offset for m in await consumer.poll(count_max=2)] == [3, 4]
        async with consumer_of(world) as consumer:
            assert await consumer.committed(queue) == 5


@virtual_time()
async def test_manual_and_periodic_commits(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await produce(world, 48)
        queue = MessageQueue(TOPIC, "a", 0)
        by_hand = LitePullConfig(auto_commit=False, poll_count_max=4, times=QUICK)
        async with consumer_of(world, config=by_hand) as consumer:
            await consumer.assign([queue])
            await consumer.poll()
            await asyncio.sleep(20)
            await consumer.poll()
            await consumer.commit()
            assert await consumer.committed(queue) == 8
            await consumer.poll()
        by_clock = LitePullConfig(commit_interval=2, poll_count_max=1)
        async with consumer_of(world, config=by_clock) as consumer:
            await consumer.assign([queue])
            assert (await consumer.poll())[0].queue_offset == 8
            await consumer.poll()
            assert await consumer.committed(queue) == 8
            await asyncio.sleep(3)
            assert (await consumer.poll())[0].queue_offset == 10
            assert await consumer.committed(queue) == 10


@virtual_time()
async def test_polls_that_do_not_wait_commit_too(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await produce(world, 16)
        queue = MessageQueue(TOPIC, "a", 0)
        async with consumer_of(world) as consumer:
            await consumer.assign([queue])
            await asyncio.sleep(1)
            assert len(await consumer.poll(timeout=0)) == 4
            await asyncio.sleep(5)
            assert await consumer.poll(timeout=0) == []
            assert await consumer.committed(queue) == 4
            for arguments in ({"timeout": -1}, {"count_max": 0}):
                with pytest.raises(InvalidArgument, match=next(iter(arguments))):
                    await consumer.poll(**arguments)


@virtual_time()
async def test_a_failed_start_leaves_the_group_to_others(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        session = world.session()
        async with consumer_of(world, session=session) as consumer:
            with pytest.raises(InvalidArgument, match="already"):
                await consumer_of(world, session=session).start()
            assert session.members.consumers == {"g": consumer}


@virtual_time()
async def test_subscribed_queues_are_shared_as_members_join_and_leave(tmp_path: Path) -> None:
    async with cluster(tmp_path, BROKERS) as world:
        await produce(world, 16)
        first = consumer_of(world, "10.0.1.1", subscriptions={TOPIC: "*"})
        second = consumer_of(world, "10.0.1.2", subscriptions={TOPIC: "*"})
        async with first:
            await wait_until(lambda: len(first.assignment()) == 8)
            async with second:
                await wait_until(
                    lambda: [len(first.assignment()), len(second.assignment())] == [4, 4]
                )
                assert not first.assignment() & second.assignment()
                found = await poll_all(first, 8) + await poll_all(second, 8)
                assert len({message.message_id for message in found}) == 16
            await wait_until(lambda: len(first.assignment()) == 8)
            assert await first.poll(timeout=2) == []


@virtual_time()
async def test_tags_and_subscriptions_while_running(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await produce(world, 20)
        async with consumer_of(world) as consumer:
            await consumer.subscribe(TOPIC, "odd")
            assert numbers(await poll_all(consumer, 10)) == list(range(1, 20, 2))
            with pytest.raises(InvalidArgument, match="is ' ', which has no tag"):
                await consumer.subscribe("other", " ")
            assert consumer._expressions.keys() == {TOPIC}, "a rejected subscription is not kept"
            with pytest.raises(InvalidArgument, match="not both"):
                await consumer.assign([])
            await consumer.unsubscribe(TOPIC)
            assert consumer.assignment() == frozenset()
            await consumer.assign([MessageQueue(TOPIC, "a", 0)])
            with pytest.raises(InvalidArgument, match="are assigned by assign"):
                await consumer.subscribe(TOPIC)


def test_tags_are_checked_before_the_start() -> None:
    with pytest.raises(InvalidArgument, match="of topic 'T' is ' ', which has no tag"):
        LitePullConsumer("g", nameserver="127.0.0.1:1", subscriptions={TOPIC: " "})


@virtual_time()
async def test_prefetching_is_bounded(tmp_path: Path) -> None:
    limits = FetchLimits(messages_per_queue=10, messages_of_all=15)
    config = LitePullConfig(ahead=limits, fetch_count_max=5)
    async with cluster(tmp_path) as world:
        await produce(world, 200)
        async with consumer_of(world, config=config) as consumer:
            await consumer.assign(await consumer.queues(TOPIC))
            await asyncio.sleep(5)
            assert consumer._running is not None
            assert 15 <= len(consumer._running.buffer) < 15 + 4 * 5
            assert numbers(await poll_all(consumer, 200)) == list(range(200))


@virtual_time()
async def test_reading_resumes_when_a_broker_returns(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await produce(world, 8)
        async with consumer_of(world) as consumer:
            await consumer.assign(await consumer.queues(TOPIC))
            await poll_all(consumer, 8)
            world.network.cut("10.0.0.1", "10.0.1.1")
            await produce(world, 8, 8)
            assert numbers(await poll_all(consumer, 8)) == list(range(8, 16))


@virtual_time()
async def test_closing_ends_iteration(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        consumer = consumer_of(world, subscriptions={TOPIC: "*"})
        await consumer.start()

        async def read() -> list[MessageView]:
            return [message async for message in consumer]

        reading = asyncio.create_task(read())
        await asyncio.sleep(1)
        await consumer.close()
        assert await reading == []
        with pytest.raises(NotRunning):
            await consumer.poll()


@virtual_time()
async def test_a_namespace_is_not_shown_to_the_user(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        session = world.session(namespace="ns")
        async with (
            Producer("pg", session=session) as producer,
            consumer_of(world, session=session, subscriptions={TOPIC: "*"}) as consumer,
        ):
            await producer.send(Message(TOPIC, b"1"))
            await wait_until(lambda: consumer.assignment(), 60)
            (message,) = await poll_all(consumer, 1)
            assert message.topic == TOPIC
            assert {queue.topic for queue in consumer.assignment()} == {TOPIC}


NEW: Any = "new"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LitePullConfig(commit_interval=0.999), "commit_interval must be .*, got 0.999"),
        (lambda: LitePullConfig(poll_timeout=-1), "poll_timeout must be .*, got -1"),
        (lambda: LitePullConfig(poll_count_max=0), "poll_count_max must be .*, got 0"),
        (lambda: LitePullConfig(fetch_count_max=0), "fetch_count_max must be .*, got 0"),
        (lambda: FetchLimits(messages_per_queue=0), "messages_per_queue must be .*, got 0"),
        (lambda: FetchLimits(bytes_per_queue=0), "bytes_per_queue must be .*, got 0"),
        (lambda: FetchLimits(messages_of_all=0), "messages_of_all must be .*, got 0"),
        (lambda: PullTimes(hold=0.01, held_timeout=0.01), "held_timeout must be .*, got 0.01"),
        (
            lambda: LitePullConsumer("g", nameserver="a:1", start_from=NEW),
            "start_from .* got 'new'",
        ),
        (lambda: LitePullConsumer("", nameserver="a:1"), "group must .* got ''"),
    ],
)
def test_settings_are_checked(make: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        make()


@virtual_time()
async def test_operators_reset_and_inspect_a_running_consumer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, world.session("10.0.1.5") as operator:
        await produce(world, 20)
        async with consumer_of(world, subscriptions={TOPIC: "*"}) as consumer:
            assert numbers(await poll_all(consumer, 20)) == list(range(20))
            await consumer.commit()
            address = world.brokers["a"].address
            status = ConsumerStatusOf(topic=TOPIC, group="g")
            command = request(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, status)
            answer = require_success(await operator.request(address, command, 5000))
            (progress,) = ConsumerStatus.decode(whole_body(answer)).consumer_table.values()
            assert progress == {MessageQueue(TOPIC, "a", number): 5 for number in range(4)}
            reset = ResetOffset(topic=TOPIC, group="g", timestamp=0, is_force=True)
            command = request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)
            require_success(await operator.request(address, command, 5000))
            assert numbers(await poll_all(consumer, 20)) == list(range(20))


@virtual_time()
async def test_a_pull_consumer_does_not_consume_directly(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, world.session("10.0.1.5") as operator:
        await produce(world, 1)
        async with consumer_of(world, subscriptions={TOPIC: "*"}) as consumer:
            (message,) = await poll_all(consumer, 1)
            asked = ConsumeDirectly(
                consumer_group="g", client_id="10.0.1.1@test", msg_id=message.offset_id
            )
            command = request(RequestCode.CONSUME_MESSAGE_DIRECTLY, asked)
            answer = await operator.request(world.brokers["a"].address, command, 15_000)
            assert answer.code == 1
            assert "does not consume by push" in (answer.remark or "")


@virtual_time()
async def test_many_subscriptions_in_a_row(tmp_path: Path) -> None:
    topics = [f"T{number}" for number in range(6)]
    async with cluster(tmp_path) as world:
        async with Producer("pg", session=world.session("10.0.1.9")) as producer:
            for topic in topics:
                await producer.send(Message(topic, b"x"))
        async with consumer_of(world) as consumer:
            for topic in topics:
                await consumer.subscribe(topic)
            found = await poll_all(consumer, len(topics))
            assert sorted(message.topic for message in found) == topics


@virtual_time()
async def test_a_strategy_that_fails_once_is_called_again(tmp_path: Path) -> None:
    calls = 0

    def flaky(
        queues: Sequence[MessageQueue], members: Sequence[str], me: str
    ) -> Sequence[MessageQueue]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyError("not today")
        return average(queues, members, me)

    async with cluster(tmp_path) as world:
        await produce(world, 4)
        async with consumer_of(world, strategy=flaky) as consumer:
            await consumer.subscribe(TOPIC)
            assert numbers(await poll_all(consumer, 4)) == [0, 1, 2, 3]
