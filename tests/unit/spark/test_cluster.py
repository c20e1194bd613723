"""What a driver requests from a cluster in virtual time: queues, positions, times, arrivals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import clusters
from turbopump.admin.administration import Admin
from turbopump.client.producer import Producer
from turbopump.client.session import Session
from turbopump.errors import (
    ConnectFailed,
    DataLost,
    InvalidArgument,
    NoRoute,
    RemoteError,
    RequestTimeout,
    TurbopumpError,
)
from turbopump.message import Message, MessageQueue
from turbopump.spark.reading.batch_planner import plan_batch
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.offsets import Limits
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.positions import AtTime, Earliest, Latest, OfGroup, parse_position
from turbopump.testing import virtual_time
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command

COMMITS = RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSETS
Q0 = MessageQueue("T", "a", 0)
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS


@asynccontextmanager
async def world(
    directory: Path, **changes: Any
) -> AsyncIterator[tuple[clusters.Cluster, Producer, Session]]:
    async with (
        clusters.cluster(directory, **changes) as made,
        Producer("pg", session=made.session()) as producer,
        made.session("10.0.1.2") as session,
    ):
        yield made, producer, session


def asking(session: Session, **options: str) -> Cluster:
    given = {"nameserver": ";".join(session.config.nameserver_addresses), **options}
    given.setdefault("topic", "T")
    if {"topics", "topicPattern", "assign"} & options.keys():
        del given["topic"]
    return Cluster(session, SourceOptions.for_stream(given))


async def fill(producer: Producer, count: int, topic: str = "T", pause_ms: int = 0) -> None:
    for number in range(count):
        message = Message(topic, b"%d" % number, keys=[f"k{number % 5}", "all"])
        await producer.send(message, to=lambda queues: queues[0])
        await asyncio.sleep(pause_ms / 1000)


@virtual_time()
async def test_queues_are_found_in_four_ways(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, producer, session):
        await fill(producer, 1, "T")
        await fill(producer, 1, "orders-eu")
        await fill(producer, 1, "orders-us")
        assert await asking(session).queues() == tuple(
            MessageQueue("T", "a", number) for number in range(4)
        )
        both = await asking(session, topicPattern="orders-.*").queues()
        assert {queue.topic for queue in both} == {"orders-eu", "orders-us"}
        assert await asking(session, topics="orders-eu,orders-us").queues() == both
        everything = await asking(session, topicPattern=".*").queues()
        assert {queue.topic for queue in everything} == {"T", "orders-eu", "orders-us"}
        assert await asking(session, topicPattern="nothing").queues() == ()
        assigned = asking(session, assign='{"T": [0, 2]}')
        assert [queue.queue_id for queue in await assigned.queues()] == [0, 2]
        with pytest.raises(InvalidArgument, match="queue 7 of topic 'T' does not exist"):
            await asking(session, assign='{"T": [7]}').queues()
        with pytest.raises(NoRoute, match="topic 'wrong' is not known"):
            await asking(session, topic="wrong").queues()


@virtual_time()
async def test_a_topic_without_a_route_does_not_hide_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as (_, producer, session):
        await fill(producer, 1, "T")
        found = asking(session, topics="T,gone")
        with pytest.raises(NoRoute):
            await found.queues()
        for _ in range(2):
            assert len(await found.known_queues()) == 4
        assert caplog.text.count("topic 'gone' is not known") == 1
        assigned = asking(session, assign='{"T": [0, 7], "gone": [1]}')
        assert await assigned.known_queues() == (Q0,)


@virtual_time()
async def test_new_topics_are_found_and_remembered_while_no_server_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = clusters.Recorder()
    async with (
        clusters.cluster(tmp_path) as made,
        Producer("pg", session=made.session()) as producer,
        made.session("10.0.1.2", hooks=[asked]) as session,
    ):
        found = asking(session, topicPattern="orders-.*")
        await fill(producer, 1, "orders-eu")
        assert {queue.topic for queue in await found.queues()} == {"orders-eu"}
        await fill(producer, 1, "orders-us")
        assert {queue.topic for queue in await found.queues()} == {"orders-eu"}
        await asyncio.sleep(session.config.route_interval_ms / 1000)
        both = await found.queues()
        assert {queue.topic for queue in both} == {"orders-eu", "orders-us"}

        def refuse(address: str, command: Command) -> None:
            if command.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
                raise ConnectFailed(f"{address} is away")

        asked.refuse = refuse
        await asyncio.sleep(session.config.route_interval_ms / 1000)
        assert await found.queues() == both
        assert "cannot look up new topics" in caplog.text


@virtual_time()
async def test_positions_become_offsets(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, producer, session):
        await fill(producer, 10)
        found = asking(session, group="g")
        queues = (Q0, MessageQueue("T", "a", 1))

        async def at(text: str, name: str = "startingOffsets") -> list[int]:
            resolved = await found.resolve(name, parse_position(name, text), queues)
            return [resolved[queue] for queue in queues]

        assert await at("earliest") == [0, 0]
        assert await at("latest") == [10, 0]
        assert await at('{"T": {"a": {"0": 4}}}') == [4, 0]
        assert await at('{"T": {"0": 4}}', "endingOffsets") == [4, 0]
        assert await at('{"T": {"0": -1, "1": -2}}') == [10, 0]
        # A group that has committed nothing starts as a stream does without one.
        assert await at("group") == [10, 0]
        assert await at("group,earliest") == [0, 0]
        assert await found.commit({Q0: 3}) == {Q0: 3}
        assert await at("group") == [3, 0]
        with pytest.raises(InvalidArgument, match="ends at offset 10, got 11"):
            await at('{"T": {"0": 11}}')
        # Beyond the end of the queue: it was re-created, and nothing of it has been read.
        made.brokers["a"].state.offsets.commit("g", "T", 0, 25)
        with pytest.raises(
            DataLost, match=r"group 'g' cannot resume .* ends at offset 10 .* read to 25"
        ):
            await at("group")
        found = asking(session, group="g", failOnDataLoss="false")
        assert await at("group") == [0, 0]


@virtual_time()
async def test_a_batch_that_ends_before_it_starts_is_rejected(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, producer, session):
        before_ms = made.clock.now_ms()
        await fill(producer, 10)
        given = {
            "nameserver": ";".join(session.config.nameserver_addresses),
            "topic": "T",
            "group": "g",
        }

        async def planned(start: str, end: str) -> int:
            options = SourceOptions.for_batch(
                given | {"startingOffsets": start, "endingOffsets": end}
            )
            partitions = await plan_batch(Cluster(session, options), options)
            return sum(each.rows for partition in partitions for each in partition)

        assert await planned("earliest", '{"T": {"0": 4}}') == 4
        with pytest.raises(InvalidArgument, match=r"T@a:0 would be read from 8 to 0"):
            await planned('{"T": {"0": 8}}', str(before_ms))
        # The user did not give the group's position.
        await asking(session, group="g").commit({Q0: 8})
        assert await planned("group", str(before_ms)) == 0


@pytest.mark.parametrize("pause_ms", [0, 3])
def test_a_time_is_the_first_message_since(tmp_path: Path, pause_ms: int) -> None:
    @virtual_time()
    async def run() -> None:
        async with world(tmp_path) as (made, producer, session):
            begin_ms = made.clock.now_ms()
            await fill(producer, 40, pause_ms=pause_ms)
            found = asking(session)
            marks = [await found.marks({Q0: offset + 1}) for offset in range(40)]
            stored = [mark[0] for each in marks if (mark := each[Q0]) is not None]
            for moment in range(begin_ms - 1, stored[-1] + 2):
                since = await found.since(moment, {Q0: Limits(0, 40)})
                expected = next((n for n, at in enumerate(stored) if at >= moment), 40)
                assert since == {Q0: expected}
            empty = await found.since(begin_ms, {MessageQueue("T", "a", 1): Limits(0, 0)})
            assert empty == {MessageQueue("T", "a", 1): 0}
            of_20 = {Q0: stored.index(stored[20])}
            assert await found.resolve("startingOffsets", AtTime(stored[20]), [Q0]) == of_20
            # Beside it, a queue with its own offset.
            other = MessageQueue("T", "a", 1)
            each = parse_position(
                "startingOffsets", f'{{"T": {{"a": {{"0": "{stored[20]}", "1": -2}}}}}}'
            )
            both = await found.resolve("startingOffsets", each, [Q0, other])
            assert both == {**of_20, other: 0}

    run()


@virtual_time()
async def test_a_start_after_the_last_message_is_the_end_or_an_error(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, producer, session):
        await fill(producer, 10)
        after_ms, other = made.clock.now_ms() + 1, MessageQueue("T", "a", 1)

        async def started(text: str, strategy: str, name: str = "startingOffsets") -> list[int]:
            found = asking(
                session,
                group="g",
                startingOffsets=text,
                startingOffsetsByTimestampStrategy=strategy,
            )
            offsets = await found.resolve(name, parse_position(name, text), [Q0, other])
            return [offsets[Q0], offsets[other]]

        of_queue = f'{{"T": {{"0": "{after_ms}", "1": -1}}}}'
        for text in (f"{after_ms}", f"group,{after_ms}", of_queue):
            assert await started(text, "latest") == [10, 0]
            assert await started(text, "error", "endingOffsets") == [10, 0]
            wrong = r"T@a:0.*: no message was stored at or after 20.*; .*Strategy=latest starts at"
            with pytest.raises(InvalidArgument, match=wrong):
                await started(text, "error")
        # An empty queue has no message either.
        with pytest.raises(InvalidArgument, match=r"startingOffsets: T@a:1: no message"):
            await started(f"{made.clock.now_ms() - 60_000}", "error")
        assert await started(f'{{"T": {{"0": "{after_ms - 60_000}", "1": -1}}}}', "error") == [0, 0]


@virtual_time()
async def test_an_arrival_ends_the_wait(tmp_path: Path) -> None:
    async with world(tmp_path) as (made, producer, session):
        await fill(producer, 2)
        found = asking(session)
        queues = await found.queues()
        ends = {queue: limits.high for queue, limits in (await found.limits(queues)).items()}
        started_ms = made.clock.monotonic_ms()
        assert not await found.wait_for_messages(ends, 500)
        assert made.clock.monotonic_ms() - started_ms == pytest.approx(500, abs=20)
        waiting = asyncio.create_task(found.wait_for_messages(ends, 60_000))
        await asyncio.sleep(1)
        assert not waiting.done()
        await fill(producer, 1)
        await asyncio.wait_for(waiting, 1)


@virtual_time()
async def test_the_size_of_messages_is_estimated(tmp_path: Path) -> None:
    async with world(tmp_path) as (_, producer, session):
        await fill(producer, 3)
        found = asking(session)
        assert await found.bytes_per_row({Q0: 3}) == {Q0: 1}
        sizes = await found.bytes_per_row({Q0: 0})
        assert 100 < sizes[Q0] < 300
        assert await found.bytes_per_row({Q0: 3}) == sizes, "the latest ones known"


@virtual_time()
async def test_the_size_of_messages_in_a_queue_that_is_closed_is_not_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as (_, producer, session):
        await fill(producer, 1)
        closed = MessageQueue("T", "a", 3)
        await Admin(session=session).topics.update("T", queues=2, read_queues=2)
        found = asking(session)
        for _ in range(2):
            assert await found.bytes_per_row({closed: 0}) == {closed: 1}
        assert caplog.text.count("T@a:3: cannot sample message sizes") == 1


@virtual_time()
async def test_an_unresponsive_broker_is_not_asked_what_it_has_deleted(tmp_path: Path) -> None:
    asked = clusters.Recorder()
    async with (
        clusters.cluster(tmp_path) as made,
        made.session("10.0.1.2", hooks=[asked]) as session,
    ):
        await made.make_topic("T")
        found = asking(session)
        await found.queues()

        def refuse(address: str, command: Command) -> None:
            raise RequestTimeout(f"{address} does not answer {command.code}")

        asked.refuse = refuse
        assert await found.known_limits([Q0]) == {}
        asked.refuse = None
        asked.requests.clear()
        assert await found.unreadable([Q0], [Q0]) == {}
        assert asked.requests == []
        await asyncio.sleep(60)
        await found.unreadable([Q0], [Q0])
        assert asked.of(RequestCode.PULL_MESSAGE)


@virtual_time()
async def test_what_brokers_do_not_record_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = clusters.Recorder()
    async with (
        clusters.cluster(tmp_path) as made,
        made.session("10.0.1.2", hooks=[asked]) as session,
    ):
        await made.make_topic("T")
        async with Producer("pg", session=session) as producer:
            await fill(producer, 5)
        found = asking(session, group="g")
        refusal: TurbopumpError = ConnectFailed("the broker is away")

        def refuse(_address: str, command: Command) -> None:
            if command.code in COMMITS:
                raise refusal

        asked.refuse = refuse
        for _ in range(3):
            assert await found.commit({Q0: 5}) == {}
        assert caplog.text.count("T@a:0: offset not committed: the broker is away") == 1
        refusal = RemoteError(ResponseCode.TOPIC_NOT_EXIST, "there is none")
        assert await found.commit({Q0: 5}) == {}
        assert await found.commit({Q0: 0}) == {Q0: 0}, "there the group starts at the beginning"
        asked.refuse = None
        away = MessageQueue("T", "b", 0)
        for offset, looked_for in ((5, 0), (0, 1)):
            assert await found.commit({away: offset}) == {}
            assert len(asked.of(RequestCode.GET_BROKER_CLUSTER_INFO)) == looked_for
        assert await found.commit({Q0: 5}) == {Q0: 5}
        asked.refuse = refuse
        assert await found.commit({Q0: 6}) == {}
        assert caplog.text.count("there is none") == 2


@virtual_time()
async def test_names_lie_within_a_namespace(tmp_path: Path) -> None:
    async with clusters.cluster(tmp_path) as made:
        spaced = made.session(namespace="staging")
        async with Producer("pg", session=spaced) as producer:
            await fill(producer, 3)
        async with made.session("10.0.1.3", namespace="staging") as session:
            found = asking(session, topicPattern=".*")
            queues = await found.queues()
            assert {queue.topic for queue in queues} == {"T"}
            assert (await found.limits(queues))[Q0] == Limits(0, 3)
            assert await found.resolve("startingOffsets", Earliest(), [Q0]) == {Q0: 0}
            assert await found.resolve("startingOffsets", Latest(), [Q0]) == {Q0: 3}
            assert OfGroup() == parse_position("startingOffsets", "group")


@virtual_time()
async def test_few_requests_are_sent_for_idle_queues_and_unresponsive_brokers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = clusters.Recorder()
    async with (
        clusters.cluster(tmp_path) as made,
        Producer("pg", session=made.session()) as producer,
        made.session("10.0.1.2", hooks=[asked]) as session,
    ):
        await fill(producer, 3)
        found = asking(session, group="g")
        queues = await found.queues()
        at = {queue: 3 if queue == Q0 else 0 for queue in queues}
        limits = await found.known_limits(queues)
        assert {queue: ends.high for queue, ends in limits.items()} == at
        assert len(asked.of(RequestCode.GET_QUEUE_ENDS)) == 1
        assert await found.known_limits(queues) == limits
        assert (await found.known_limits([Q0]))[Q0] == Limits(0, 3)

        def hang(address: str, command: Command) -> None:
            if command.code == RequestCode.GET_QUEUE_ENDS:
                raise RequestTimeout(f"{address} does not answer")

        asked.refuse = hang
        before = len(asked.of(RequestCode.GET_QUEUE_ENDS))
        for _ in range(3):
            assert await found.known_limits(queues) == {}
            assert await found.commit({Q0: 1}) == {}
        assert len(asked.of(RequestCode.GET_QUEUE_ENDS)) == before + 1, "requested once"
        assert not any(asked.of(code) for code in COMMITS)
        assert caplog.text.count("T@a:0 and 3 more queues: not available") == 1
        asked.refuse = None
        await asyncio.sleep(3 * session.config.request_timeout_ms / 1000)
        assert await found.known_limits(queues) == limits
        assert await found.commit({Q0: 1}) == {Q0: 1}
