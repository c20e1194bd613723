"""Pulling manually: results, waits, positions, sending back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from clusters import Cluster, Recorder, cluster
from turbopump.client.calls import Found, NothingMatched, NothingNew, OffsetIllegal
from turbopump.client.producer import Producer
from turbopump.client.pull_config import PullConfig, PullTimes
from turbopump.client.pull_consumer import PullConsumer
from turbopump.errors import InvalidArgument, NoRoute, NotRunning
from turbopump.message import Message, MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.codes import RequestCode
from turbopump.wire.headers import PullMessage
from turbopump.wire.record import MessageView

QUEUE = MessageQueue("T", "a", 0)


@asynccontextmanager
async def world_with_consumer(
    directory: Path, count: int = 10, **arguments: Any
) -> AsyncIterator[tuple[Cluster, Producer, PullConsumer]]:
    """Run a cluster with some messages in one queue."""
    async with cluster(directory) as world, Producer("pg", session=world.session()) as producer:
        for number in range(count):
            message = Message("T", b"%d" % number, tags="odd" if number % 2 else "even")
            await producer.send(message, to=lambda queues: queues[0])
        defaults = {"session": world.session("10.0.1.2")}
        async with PullConsumer("g", **{**defaults, **arguments}) as consumer:
            yield world, producer, consumer


@virtual_time()
async def test_messages_are_read_from_any_offset(tmp_path: Path) -> None:
    async with world_with_consumer(tmp_path) as (_, _, consumer):
        assert await consumer.queues("T") == tuple(MessageQueue("T", "a", n) for n in range(4))
        found = await consumer.pull(QUEUE, 4, count_max=3)
        assert isinstance(found, Found)
        assert [message.body for message in found.messages] == [b"4", b"5", b"6"]
        assert (found.next_offset, found.min_offset, found.max_offset) == (7, 0, 10)


@virtual_time()
async def test_other_outcomes_of_a_pull(tmp_path: Path) -> None:
    async with world_with_consumer(tmp_path) as (world, _, consumer):
        start_ms = world.clock.monotonic_ms()
        assert isinstance(await consumer.pull(QUEUE, 10), NothingNew)
        assert isinstance(await consumer.pull(QUEUE, 0, tags="other"), NothingMatched)
        illegal = await consumer.pull(QUEUE, 11)
        assert isinstance(illegal, OffsetIllegal)
        assert illegal.next_offset == 10
        assert world.clock.monotonic_ms() - start_ms < 50
        found = await consumer.pull(QUEUE, 0, tags="odd || none")
        assert isinstance(found, Found)
        assert [message.body for message in found.messages] == [b"1", b"3", b"5", b"7", b"9"]


class OnlyOdd:
    def keeps(self, group: str, message: MessageView, queue: MessageQueue) -> bool:
        return (group, queue) == ("g", QUEUE) and message.tags == "odd"


@virtual_time()
async def test_a_filter_hook_chooses_among_pulled_messages(tmp_path: Path) -> None:
    async with world_with_consumer(tmp_path, 4, hooks=[OnlyOdd()]) as (_, _, consumer):
        found = await consumer.pull(QUEUE, 0)
        assert isinstance(found, Found)
        assert [message.body for message in found.messages] == [b"1", b"3"]
        none = await consumer.pull(QUEUE, 0, count_max=1)
        assert isinstance(none, NothingMatched)
        assert none.next_offset == 1


@virtual_time()
async def test_tags_with_the_same_hash_are_distinguished(tmp_path: Path) -> None:
    async with world_with_consumer(tmp_path, 0) as (_, producer, consumer):
        await producer.send(Message("T", b"x", tags="Aa"), to=lambda queues: queues[0])
        outcome = await consumer.pull(QUEUE, 0, tags="BB")
        assert isinstance(outcome, NothingMatched)
        assert outcome.next_offset == 1


@virtual_time()
async def test_waiting_at_the_broker(tmp_path: Path) -> None:
    config = PullConfig(times=PullTimes(hold=5, held_timeout=8))
    async with world_with_consumer(tmp_path, config=config) as (world, producer, consumer):
        start_ms = world.clock.monotonic_ms()
        assert isinstance(await consumer.pull_when_found(QUEUE, 10), NothingNew)
        assert 5000 <= world.clock.monotonic_ms() - start_ms < 10_500
        assert isinstance(await consumer.pull_when_found(QUEUE, 10, timeout=0.1), NothingNew)
        waiting = asyncio.create_task(consumer.pull_when_found(QUEUE, 10))
        await asyncio.sleep(1)
        await producer.send(Message("T", b"10"), to=lambda queues: queues[0])
        assert isinstance(await waiting, Found)


@virtual_time()
async def test_positions(tmp_path: Path) -> None:
    async with world_with_consumer(tmp_path) as (world, producer, consumer):
        await consumer.commit(QUEUE, 7)
        assert await consumer.committed(QUEUE) == 7
        assert await consumer.min_offset(QUEUE) == 0
        assert await consumer.max_offset(QUEUE) == 10
        await asyncio.sleep(60)
        moment = datetime.fromtimestamp(world.clock.now_ms() / 1000, UTC)
        await producer.send(Message("T", b"10"), to=lambda queues: queues[0])
        assert await consumer.offset_at(QUEUE, moment) == 10
        with pytest.raises(InvalidArgument, match="offset must be 0 or more, got -1"):
            await consumer.commit(QUEUE, -1)
        with pytest.raises(InvalidArgument, match="offset must be 0 or more, got -2"):
            await consumer.pull(QUEUE, -2)


@virtual_time()
async def test_a_message_sent_back_is_redelivered_in_the_retry_topic(tmp_path: Path) -> None:
    async with world_with_consumer(tmp_path) as (_, _, consumer):
        found = await consumer.pull(QUEUE, 0, count_max=1)
        assert isinstance(found, Found)
        await consumer.send_back(found.messages[0], QUEUE)
        await consumer.send_back(found.messages[0], QUEUE, delay_level=-1)
        await asyncio.sleep(11)
        for topic in ("%RETRY%g", "%DLQ%g"):
            again = await consumer.pull(MessageQueue(topic, "a", 0), 0)
            assert isinstance(again, Found)
            assert [message.body for message in again.messages] == [b"0"]


@virtual_time()
async def test_new_queues_are_reported(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []

    def note(topic: str, queues: Sequence[MessageQueue]) -> None:
        heard.append((topic, len(queues)))

    async with world_with_consumer(tmp_path, topics=["T"], on_queues=note) as (world, _, _):
        assert heard == [("T", 4)]
        await world.start_broker("b")
        await world.make_topic("T", "b")
        await wait_until(lambda: heard[-1] == ("T", 8), 120)


@virtual_time()
async def test_a_pull_has_the_fields_of_the_classic_consumer(tmp_path: Path) -> None:
    recorder = Recorder()
    async with cluster(tmp_path) as world:
        session = world.session(hooks=[recorder])
        async with Producer("pg", session=session) as producer:
            await producer.send(Message("T", b"x"), to=lambda queues: queues[0])
            async with PullConsumer("g", session=session) as consumer:
                await consumer.pull(QUEUE, 0, tags="a || b")
                await consumer.pull_when_found(QUEUE, 0)
    plain, held = (
        PullMessage.from_ext_fields(command.ext_fields)
        for command in recorder.of(RequestCode.PULL_MESSAGE)
    )
    assert (plain.sys_flag, plain.sub_version, plain.subscription) == (4, 0, "a || b")
    assert (plain.suspend_timeout_millis, held.suspend_timeout_millis) == (20_000, 20_000)
    assert (held.sys_flag, held.expression_type, held.max_msg_nums) == (6, "TAG", 32)


@virtual_time()
async def test_queues_that_cannot_be_read(tmp_path: Path) -> None:
    async with world_with_consumer(tmp_path) as (_, _, consumer):
        with pytest.raises(NoRoute, match="'nowhere'"):
            await consumer.queues("nowhere")
        with pytest.raises(NoRoute, match="broker 'z'"):
            await consumer.pull(MessageQueue("T", "z", 0), 0)
        with pytest.raises(InvalidArgument, match="of topic 'T' is ' ', which has no tag"):
            await consumer.pull(QUEUE, 0, tags=" ")
    with pytest.raises(NotRunning):
        await consumer.queues("T")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PullConfig(count_max=0), "count_max must be .*, got 0"),
        (lambda: PullConfig(max_attempts=-1), "max_attempts must be .*, got -1"),
        (lambda: PullTimes(timeout=0), "timeout must be .*, got 0"),
        (lambda: PullConsumer("g", nameserver="a:1", topics=["a b"]), "topic must .* got 'a b'"),
        (lambda: PullConsumer("DEFAULT_CONSUMER", nameserver="a:1"), "name of your own"),
    ],
)
def test_settings_are_checked(make: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        make()
