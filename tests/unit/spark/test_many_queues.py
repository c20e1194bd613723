"""Queries for many queues in one request, with brokers that support them and others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import clusters
from brokers import SMALL_STORE
from turbopump.admin import GroupSettings
from turbopump.admin.administration import Admin
from turbopump.broker import administration, message_path
from turbopump.broker.config import LimitsConfig, LongPollingConfig
from turbopump.broker.handlers.common import handler_table
from turbopump.client.concurrent_calls import IN_FLIGHT_MAX, gather_by_key
from turbopump.client.producer import Producer
from turbopump.errors import ConnectFailed, DataLost, RemoteError, SparkError
from turbopump.message import Message, MessageQueue
from turbopump.spark.reading.batch_planner import plan_batch
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.message_probes import SAMPLED_QUEUES
from turbopump.spark.reading.micro_batch_planner import MicroBatchPlanner
from turbopump.spark.reading.offsets import NOTHING_BELOW, Limits
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.retry import gather_available
from turbopump.store.config import RetentionConfig
from turbopump.testing import virtual_time
from turbopump.wire.bodies import QueuePositions
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request
from turbopump.wire.headers import OffsetsOfGroup

OWN = {
    RequestCode.GET_QUEUE_ENDS,
    RequestCode.GET_MESSAGE_MARKS,
    RequestCode.UPDATE_CONSUMER_OFFSETS,
    RequestCode.GET_CONSUMER_OFFSETS,
}
TURBOPUMP: set[RequestCode] = set()
WITHOUT_STATISTICS = OWN | {RequestCode.GET_TOPIC_STATS_INFO}
EVERY_KIND = pytest.mark.parametrize("refused", [TURBOPUMP, OWN, WITHOUT_STATISTICS])
T = [MessageQueue("T", "a", number) for number in range(4)]


class World:
    """A cluster with a topic, and what a driver requests from it."""

    def __init__(
        self, made: clusters.Cluster, producer: Producer, asked: clusters.Recorder
    ) -> None:
        self.made = made
        self.producer = producer
        self.asked = asked
        self.session = made.session("10.0.1.2", hooks=[asked])

    def asking(self, **options: str) -> Cluster:
        return Cluster(self.session, self.options(**options))

    @property
    def nameserver(self) -> str:
        return ";".join(self.session.config.nameserver_addresses)

    def options(self, **options: str) -> SourceOptions:
        given = {"nameserver": self.nameserver, "group": "g"}
        given |= {} if "topics" in options else {"topic": "T"}
        return SourceOptions.for_stream({**given, **options})

    async def send(self, queue: MessageQueue, count: int = 1) -> None:
        for number in range(count):
            await self.producer.send(Message(queue.topic, b"%d" % number), to=queue)

    def codes(self) -> list[int]:
        """Return the codes of the requests since the last call, without heartbeats."""
        found = [command.code for _, command in self.asked.requests]
        self.asked.requests.clear()
        return [code for code in found if code != RequestCode.HEART_BEAT]


@asynccontextmanager
async def world(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: set[RequestCode],
    *,
    queues: int = 4,
    **settings: Any,
) -> AsyncIterator[World]:
    """Run a broker that does not support some requests."""

    def without(served: Any) -> dict[int, Any]:
        return {code: serve for code, serve in handler_table(served).items() if code not in refused}

    for module in (message_path, administration):
        monkeypatch.setattr(module, "handler_table", without)
    async with (
        clusters.cluster(directory, **settings) as made,
        Producer("pg", session=made.session()) as producer,
    ):
        await made.make_topic("T", queues=queues)
        found = World(made, producer, clusters.Recorder())
        async with found.session:
            yield found


@EVERY_KIND
@virtual_time()
async def test_brokers_of_any_kind_give_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[RequestCode]
) -> None:
    async with world(tmp_path, monkeypatch, refused) as found:
        await found.send(T[0], 5)
        await found.send(T[2], 1)
        asking = found.asking()
        ends = dict(zip(T, [Limits(0, 5), Limits(0, 0), Limits(0, 1), Limits(0, 0)], strict=True))
        assert await asking.limits(T) == ends
        assert await asking.known_limits(T) == ends
        marks = await asking.marks({T[0]: 5, T[1]: 0, T[2]: 2})
        assert marks[T[0]] is not None
        assert marks == {T[0]: marks[T[0]], T[1]: None, T[2]: None}
        before = await asking.marks({T[0]: 4})
        assert before[T[0]] not in (None, marks[T[0]])
        assert await asking.committed(T) == dict.fromkeys(T)
        assert await asking.commit({T[0]: 4, T[1]: 0, T[2]: 9}) == {T[0]: 4, T[1]: 0}
        assert await asking.committed(T) == {T[0]: 4, T[1]: 0, T[2]: None, T[3]: None}
        await Admin(session=found.session).topics.delete("T")
        assert await asking.limits(T) == dict.fromkeys(T, Limits(0, 0))
        assert await asking.marks({T[0]: 5}) == {T[0]: None}


@EVERY_KIND
@virtual_time()
async def test_brokers_of_any_kind_tell_which_offsets_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[RequestCode]
) -> None:
    async with world(tmp_path, monkeypatch, refused) as found:
        await found.send(T[0], 5)
        asking = found.asking()
        await asking.commit({T[0]: 4})
        assert await asking.stored_offsets([T[0]]) == {T[0]: 4}
        found.made.brokers["a"].state.offsets.commit("g", "T", 0, 1)
        found.codes()
        assert await asking.stored_offsets([T[0]]) == {T[0]: 1}
        assert len(found.codes()) == 1
        await Admin(session=found.session).topics.delete("T")
        assert (await asking.stored_offsets([T[0]])).get(T[0]) is None


@EVERY_KIND
@virtual_time()
async def test_queues_that_are_only_read_have_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[RequestCode]
) -> None:
    async with world(tmp_path, monkeypatch, refused) as found:
        await found.send(T[3], 2)
        await Admin(session=found.session).topics.update("T", queues=2, read_queues=4)
        asking = found.asking()
        for _ in range(2):
            assert (await asking.known_limits(T))[T[3]] == Limits(0, 2)


@virtual_time()
async def test_one_request_per_topic_and_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch, TURBOPUMP) as found:
        await found.send(T[0], 5)
        asking = found.asking()
        await asking.queues()
        found.codes()
        limits = await asking.known_limits(T)
        assert await asking.known_limits(T) == limits
        await asking.marks(dict.fromkeys(T, 1))
        await asking.commit(dict.fromkeys(T, 0))
        await asking.committed(T)
        assert found.codes() == [
            RequestCode.GET_QUEUE_ENDS,
            RequestCode.GET_QUEUE_ENDS,
            RequestCode.GET_MESSAGE_MARKS,
            RequestCode.UPDATE_CONSUMER_OFFSETS,
            RequestCode.GET_CONSUMER_OFFSETS,
        ]
        await found.send(T[0], 1)
        assert (await asking.known_limits(T))[T[0]] == Limits(0, 6)


@virtual_time()
async def test_a_broker_rejects_each_kind_of_request_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch, OWN) as found:
        asking = found.asking()
        await asking.queues()
        found.codes()
        for _ in range(3):
            await asking.known_limits(T)
            await asking.commit({T[0]: 0})
        codes = found.codes()
        assert [code for code in codes if code in OWN] == [RequestCode.GET_QUEUE_ENDS]
        assert codes.count(RequestCode.GET_TOPIC_STATS_INFO) == 3
        assert RequestCode.GET_MAX_OFFSET not in codes


@EVERY_KIND
@virtual_time()
async def test_a_wait_ends_when_a_message_arrives_in_one_of_the_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[RequestCode]
) -> None:
    async with world(tmp_path, monkeypatch, refused) as found:
        await found.send(T[0], 2)
        asking, clock = found.asking(), found.session.clock
        await asking.known_limits(T)
        at = {T[0]: 2, T[1]: 0}
        begun_ms = clock.monotonic_ms()
        assert not await asking.wait_for_messages(at, 500)
        assert 490 <= clock.monotonic_ms() - begun_ms <= 600

        async def send() -> None:
            await asyncio.sleep(0.1)
            await found.send(T[3])
            await asyncio.sleep(0.1)
            await found.send(T[1])

        sending = asyncio.create_task(send())
        begun_ms = clock.monotonic_ms()
        assert await asking.wait_for_messages(at, 5000)
        assert 195 <= clock.monotonic_ms() - begun_ms <= 300
        await sending
        assert await asking.wait_for_messages(at, 5000), "it arrived before the wait"


@virtual_time()
async def test_a_wait_that_the_broker_refuses_as_busy_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = LongPollingConfig(held_max=1)
    async with world(tmp_path, monkeypatch, TURBOPUMP, long_polling=full) as found:
        await found.send(T[0])
        asking, other, clock = found.asking(), found.asking(), found.session.clock
        at = {T[0]: 1}
        for each in (asking, other):
            await each.known_limits(T)
        held = asyncio.create_task(other.wait_for_messages(at, 5000))
        await asyncio.sleep(0.1)
        found.codes()
        begun_ms = clock.monotonic_ms()
        assert not await asking.wait_for_messages(at, 500)
        assert clock.monotonic_ms() - begun_ms >= 490
        assert found.codes() == [RequestCode.GET_QUEUE_ENDS]
        await found.send(T[0])
        assert await held
        assert await asking.wait_for_messages(at, 500)


@virtual_time()
async def test_a_stream_waits_in_one_request_and_rechecks_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch, TURBOPUMP) as found:
        await found.send(T[0], 2)
        options = found.options(startingOffsets="earliest")
        follow = MicroBatchPlanner(Cluster(found.session, options), options, found.session.clock)
        at = await follow.latest({}, is_limited=False)
        end = await follow.latest(at, is_limited=False)
        assert end[T[0]] == 2
        assert await follow.latest(end, is_limited=False) == end
        found.codes()
        for _ in range(3):
            assert await follow.latest(end, is_limited=False) == end
        assert found.codes() == [RequestCode.GET_QUEUE_ENDS] * 6, "one query and one wait each"
        await found.send(T[3], 1)
        assert await follow.latest(end, is_limited=False) == {**end, T[3]: 1}


@pytest.mark.parametrize("refused", [TURBOPUMP, OWN])
@virtual_time()
async def test_a_topic_recreated_with_as_many_messages_is_noticed_by_a_running_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[RequestCode]
) -> None:
    async with world(tmp_path, monkeypatch, refused) as found:
        await found.send(T[1], 2)
        options = found.options(startingOffsets="latest", discoveryInterval="1m")
        follow = MicroBatchPlanner(Cluster(found.session, options), options, found.session.clock)
        at = await follow.latest({}, is_limited=False)
        for _ in range(2):
            assert await follow.latest(at, is_limited=False) == at
        admin = Admin(session=found.session)
        await admin.topics.delete("T")
        await found.made.make_topic("T", queues=4)
        await found.send(T[1], 2)
        with pytest.raises(DataLost, match="T@a:1 was re-created: the message at offset 1 is not"):
            await follow.latest(at, is_limited=False)


@EVERY_KIND
@virtual_time()
async def test_a_time_is_found_in_all_queues_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[RequestCode]
) -> None:
    async with world(tmp_path, monkeypatch, refused) as found:
        clock = found.made.clock
        begun_ms = clock.now_ms()
        for queue, count in ((T[0], 3), (T[1], 9), (T[0], 2)):
            await asyncio.sleep(1)
            await found.send(queue, count)
        asking = found.asking()
        limits = await asking.limits(T)
        found.codes()
        for seconds, expected in ((0, (0, 0, 0, 0)), (1.5, (3, 0, 0, 0)), (2.5, (3, 9, 0, 0))):
            since = await asking.since(begun_ms + int(seconds * 1000), limits)
            assert since == dict(zip(T, expected, strict=True))
        assert await asking.since(clock.now_ms() + 1, limits) == dict(
            zip(T, (5, 9, 0, 0), strict=True)
        )
        if refused is TURBOPUMP:
            codes = found.codes()
            assert set(codes) == {RequestCode.GET_MESSAGE_MARKS}
            assert len(codes) <= 4 * 4, "a request halves the range of every queue"


@virtual_time()
async def test_the_sizes_of_messages_in_many_queues_are_estimated_from_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, monkeypatch, TURBOPUMP, queues=300) as found:
        asking = found.asking()
        queues = await asking.queues()
        for queue in queues:
            await found.send(queue)
        found.codes()
        sizes = await asking.bytes_per_row(dict.fromkeys(queues, 0))
        assert sizes.keys() == set(queues)
        assert len(set(sizes.values())) == 1
        assert min(sizes.values()) > 100
        assert 0 < len(found.codes()) <= SAMPLED_QUEUES
        await Admin(session=found.session).topics.update("T", queues=1, read_queues=1)
        assert await asking.bytes_per_row(dict.fromkeys(queues, 0)) == sizes
        assert caplog.text.count("more queues: cannot sample message sizes") == 1


@pytest.mark.parametrize("refused", [TURBOPUMP, OWN])
@virtual_time()
async def test_deleted_topics_of_a_broker_are_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: set[RequestCode],
) -> None:
    async with world(tmp_path, monkeypatch, refused) as found:
        await found.made.make_topic("U", queues=4)
        asking = found.asking(topics="T,U")
        queues = await asking.queues()
        await asking.known_limits(queues)
        at = dict.fromkeys(queues, 0)
        for topic in ("T", "U"):
            await Admin(session=found.session).topics.delete(topic)
        for _ in range(2):
            assert not await asking.wait_for_messages(at, 100)
        assert caplog.text.count("refuses long polls") == 1
        assert "T@a:0 and 7 more queues: the broker refuses long polls" in caplog.text
        assert set(await asking.unreadable(queues, ())) == set(queues)


@virtual_time()
async def test_a_rejected_query_for_committed_offsets_is_one_warning_per_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, monkeypatch, OWN, queues=300) as found:
        asking = found.asking(retries="2")
        queues = await asking.queues()

        def busy(_address: str, command: Command) -> None:
            if command.code == RequestCode.QUERY_CONSUMER_OFFSET:
                raise ConnectFailed("busy")

        found.asked.refuse = busy
        with pytest.raises(ConnectFailed):
            await asking.committed(queues)
        assert caplog.text.count("retrying in") == 2


@virtual_time()
async def test_thousands_of_queues_of_an_apache_broker_are_not_waited_for_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch, OWN, queues=300) as found:
        asking = found.asking()
        queues = await asking.queues()
        await asking.known_limits(queues)
        found.codes()
        assert not await asking.wait_for_messages(dict.fromkeys(queues, 0), 500)
        assert found.codes() == []


@pytest.mark.slow
@virtual_time()
async def test_64_000_queues_cause_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, monkeypatch, TURBOPUMP, queues=64_000) as found:
        options = found.options(startingOffsets="group")
        follow = MicroBatchPlanner(Cluster(found.session, options), options, found.session.clock)
        caplog.clear()
        at = await follow.latest({}, is_limited=False)
        assert len(at) == 64_000
        last = MessageQueue("T", "a", 63_999)
        await found.send(last)
        assert await follow.latest(at, is_limited=False) == {**at, last: 1}
        assert follow.committed == at
        assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


@virtual_time()
async def test_a_brokers_rejection_of_many_queues_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, monkeypatch, TURBOPUMP, queues=300) as found:
        asking = found.asking()
        queues = await asking.queues()
        many = dict.fromkeys(queues, 7)
        for _ in range(2):
            assert await asking.commit(many) == {}, "beyond the ends"
        assert caplog.text.count("offset not committed") == 1
        assert "T@a:0 and 299 more queues: offset not committed" in caplog.text

        def away(_address: str, _command: Command) -> None:
            raise ConnectFailed(f"next try in {len(found.asked.requests)} ms")

        found.asked.refuse = away
        for _ in range(3):
            assert await asking.known_limits(queues) == {}
            assert await asking.commit(many) == {}
        assert caplog.text.count("T@a:0 and 299 more queues: not available") == 1
        assert caplog.text.count("offset not committed") == 2
        found.asked.refuse = None
        assert len(await asking.known_limits(queues)) == 300
        found.asked.refuse = away
        assert await asking.known_limits(queues) == {}
        assert caplog.text.count("not available") == 2


@EVERY_KIND
@virtual_time()
async def test_a_topic_recreated_after_its_messages_expired_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[RequestCode]
) -> None:
    retention = RetentionConfig(reserved_ms=60_000)
    store = replace(
        SMALL_STORE, segment_bytes=180_000, record_bytes_max=170_000, retention=retention
    )
    limits = LimitsConfig(message_bytes_max=100_000)
    async with world(tmp_path, monkeypatch, refused, store=store, limits=limits) as found:
        await found.send(T[1], 5)
        for _ in range(4):
            await found.producer.send(Message("T", Random(1).randbytes(60_000)), to=T[0])
        broker = found.made.brokers["a"]
        await asyncio.sleep(120)
        assert broker.store.retain(at_any_hour=True).segments > 0
        options = found.options(startingOffsets="earliest")
        cluster = Cluster(found.session, options)
        assert (await cluster.limits(T))[T[1]] == Limits(5, 5)
        follow = MicroBatchPlanner(cluster, options, found.session.clock)
        at = await follow.latest({}, is_limited=False)
        marks = follow.marks
        assert (at[T[1]], marks[T[1]]) == (5, NOTHING_BELOW)
        assert await follow.latest(at, is_limited=False, marks=marks) != at
        await Admin(session=found.session).topics.delete("T")
        await found.made.make_topic("T", queues=4)
        await found.send(T[1], 8)
        again = MicroBatchPlanner(Cluster(found.session, options), options, found.session.clock)
        for planner in (follow, again):
            with pytest.raises(DataLost, match="T@a:1 was re-created: the message at offset 4 is"):
                await planner.latest({T[1]: 5}, has_begun=True, marks={T[1]: marks[T[1]]})


@pytest.mark.parametrize("refused", [TURBOPUMP, OWN])
@virtual_time()
async def test_no_queue_is_read_whose_last_message_cannot_be_looked_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: set[RequestCode],
) -> None:
    async with world(tmp_path, monkeypatch, refused) as found:
        for queue in T:
            await found.send(queue, 2)
        asking = found.asking(retries="2")
        batch = SourceOptions.for_batch(
            {"nameserver": found.nameserver, "topic": "T", "retries": "2"}
        )
        failures = 0

        def unmarked(_address: str, command: Command) -> None:
            nonlocal failures
            if command.code in (RequestCode.GET_MESSAGE_MARKS, RequestCode.PULL_MESSAGE):
                failures -= 1
                if failures >= 0:
                    raise ConnectFailed("busy")

        found.asked.refuse = unmarked
        failures = 2
        (planned,) = await plan_batch(Cluster(found.session, batch), batch)
        assert [each.last is not None for each in planned] == [True] * 4, "it has been retried"
        failures = 1000
        unknown = r"T@a:0 and 3 more queues: cannot look up the last message.*busy"
        with pytest.raises(SparkError, match=unknown):
            await plan_batch(Cluster(found.session, batch), batch)
        caplog.clear()
        for _ in range(3):
            assert await asking.marks(dict.fromkeys(T, 2)) == {}
        assert caplog.text.count("cannot check for a re-created topic: busy") == 1
        failures = 0
        assert None not in (await asking.marks(dict.fromkeys(T, 2))).values()


@virtual_time()
async def test_a_wait_notices_topics_that_are_deleted_or_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, monkeypatch, TURBOPUMP) as found:
        asking, admin = found.asking(), Admin(session=found.session)
        at = dict.fromkeys(T, 0)
        await asking.known_limits(T)
        await admin.topics.update("T", queues=2, read_queues=2)
        await asking.known_limits(T)
        assert not await asking.wait_for_messages(at, 100)
        assert set(await asking.unreadable(T, ())) == {T[2], T[3]}
        await admin.topics.delete("T")
        assert not await asking.wait_for_messages(at, 100)
        assert set(await asking.unreadable(T, ())) == set(T)
        assert caplog.text.count("T@a:0 and 3 more queues: the broker refuses long polls") == 1


@virtual_time()
async def test_a_group_that_may_not_read_fails_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch, TURBOPUMP) as found:
        asking, admin = found.asking(), Admin(session=found.session)
        await asking.known_limits(T)
        await admin.groups.create(GroupSettings("g", can_consume=False))
        with pytest.raises(RemoteError, match="no permission"):
            await asking.wait_for_messages(dict.fromkeys(T, 0), 100)


@virtual_time()
async def test_offsets_without_queues_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch, TURBOPUMP) as found:
        await found.session.refresh_route("T")
        body = QueuePositions(queue_ids=[0, 1], offsets=[0]).encode()
        header = OffsetsOfGroup(consumer_group="g", topic="T")
        command = request(RequestCode.UPDATE_CONSUMER_OFFSETS, header, body=body)
        answer = await found.session.request(found.session.address_to_write("a"), command, 1000)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "queueIds and offsets must be as many, got 2 and 1" in (answer.remark or "")
        assert await found.asking().committed(T) == dict.fromkeys(T)


@virtual_time()
@pytest.mark.parametrize("gather", [gather_by_key, gather_available])
async def test_requests_for_thousands_of_queues_are_not_all_concurrent(
    gather: Callable[..., Any],
) -> None:
    running = most = 0

    async def ask(key: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return key * 2

    found = await gather(range(1000), ask)
    results = found[0] if isinstance(found, tuple) else found
    assert results == {key: key * 2 for key in range(1000)}
    assert most == IN_FLIGHT_MAX
