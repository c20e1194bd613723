"""Streams whose queues are no longer readable, in virtual time: deleted, closed, reopened."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import clusters
from turbopump.admin.administration import Admin
from turbopump.broker.config import FiltersConfig
from turbopump.broker.offsets import Offsets as GroupOffsets
from turbopump.broker.progress import Progress
from turbopump.client.producer import Producer
from turbopump.client.pull_config import PullTimes
from turbopump.client.queue_reader import QueueReader
from turbopump.client.session import Session
from turbopump.errors import DataLost, NoRoute, RemoteError
from turbopump.message import Message, MessageQueue
from turbopump.nameserver.routes import Registration
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.micro_batch_planner import MicroBatchPlanner
from turbopump.spark.reading.offsets import Offsets, flat, flat_marks, nested
from turbopump.spark.reading.options import Pulling, SourceOptions
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.reading.retrying_pull import RetryingPull
from turbopump.spark.reading.unreadable_queues import QueueChecks, Unreadable, ask_master
from turbopump.testing import virtual_time
from turbopump.wire.bodies import DataVersion
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command

T0, T3, U0 = MessageQueue("T", "a", 0), MessageQueue("T", "a", 3), MessageQueue("U", "a", 0)
B0 = MessageQueue("T", "b", 0)
LOOSE = {"failOnDataLoss": "false"}


@dataclass(frozen=True)
class World:
    """A cluster with the topics T and U, of four queues each."""

    made: clusters.Cluster
    producer: Producer
    session: Session

    @property
    def topics(self) -> Admin:
        return Admin(session=self.session)

    def following(self, **options: str) -> MicroBatchPlanner:
        return self.following_with(self.session, **options)

    def following_with(self, session: Session, **options: str) -> MicroBatchPlanner:
        given = {"nameserver": self.made.nameserver, "startingOffsets": "earliest"}
        if "assign" not in options:
            given["topics"] = "T,U"
        chosen = SourceOptions.for_stream(given | options)
        return MicroBatchPlanner(Cluster(session, chosen), chosen, session.clock)

    async def send(self, count: int, queue: MessageQueue = T0) -> None:
        for number in range(count):
            message = Message(queue.topic, b"%d" % number)
            await self.producer.send(message, to=lambda _: queue)


@asynccontextmanager
async def world(directory: Path, **settings: Any) -> AsyncIterator[World]:
    async with (
        clusters.cluster(directory, **settings) as made,
        Producer("pg", session=made.session()) as producer,
        made.session("10.0.1.2", route_interval=5) as session,
    ):
        found = World(made, producer, session)
        for queue in (T0, U0):
            await made.make_topic(queue.topic)
        yield found


async def followed(follow: MicroBatchPlanner, start: Offsets, looks: int = 1) -> Offsets:
    """Plan batches as Spark does, which commits the last one after requesting the next."""
    at = start
    for _ in range(looks):
        end = await follow.latest(at, is_limited=False, has_begun=bool(start))
        if at and end != at:
            await follow.commit(at)
        at = end
    return at


async def committed(found: World, queue: MessageQueue, group: str = "g") -> int | None:
    options = SourceOptions.for_stream(
        {"nameserver": found.made.nameserver, "topic": queue.topic, "group": group}
    )
    return (await Cluster(found.session, options).committed([queue]))[queue]


def read(at: Offsets) -> dict[str, int]:
    """Return the queues that were read from, in short form."""
    return {f"{queue.topic}{queue.queue_id}": offset for queue, offset in at.items() if offset}


@virtual_time()
@pytest.mark.parametrize("keeps_offsets", [False, True])
async def test_an_idle_stream_continues_without_a_deleted_topic(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    keeps_offsets: bool,
) -> None:
    if keeps_offsets:
        # As older brokers do it.
        monkeypatch.setattr(Progress, "_queue_ids", lambda *_: range(1000))
        monkeypatch.setattr(GroupOffsets, "remove_topic", lambda *_: None)
    async with world(tmp_path) as found:
        await found.send(10)
        await found.send(5, U0)
        follow = found.following(**LOOSE, group="g", startingOffsets="group,earliest")
        at = await followed(follow, {}, 3)
        assert read(at) == {"T0": 10, "U0": 5}
        assert await committed(found, T0) == 10
        await found.topics.topics.delete("T")
        with caplog.at_level(logging.WARNING):
            at = await followed(follow, at, 20)
        assert {queue.topic for queue in at} == {"U"}
        assert caplog.text.count("T@a:0 cannot be read from offset 10: the topic was deleted") == 1
        assert await committed(found, T0) == (0 if keeps_offsets else None)
        await found.send(1, U0)
        at = await followed(follow, at)
        assert at[U0] == 6
        # Re-created, it grows beyond what was read of the old one, and is read completely.
        await found.made.make_topic("T")
        await found.send(12)
        await asyncio.sleep(60)
        at = await followed(follow, at)
        assert at[T0] == 0
        assert (await followed(follow, at))[T0] == 12


@virtual_time()
async def test_an_idle_stream_reports_the_deletion_of_an_unread_topic(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as found:
        await found.send(5, U0)
        strict, loose = found.following(), found.following(**LOOSE)
        at = await followed(strict, {}, 3)
        assert read(at) == {"U0": 5}
        assert await followed(loose, at) == at
        await found.topics.topics.delete("T")
        assert await followed(strict, at) == at, "the broker reports it when asked to wait"
        with pytest.raises(
            DataLost, match="T@a:0 cannot be read from offset 0: the topic was deleted"
        ):
            await followed(strict, at)
        assert {queue.topic for queue in await followed(loose, at, 3)} == {"U"}
        assert "T@a:0 and 3 more queues: the broker refuses long polls: code 17" in caplog.text


@virtual_time()
async def test_an_idle_stream_fails_on_its_own_errors(tmp_path: Path) -> None:
    async with world(tmp_path, filters=FiltersConfig(sql_enabled=False)) as found:
        with pytest.raises(RemoteError, match="filter"):
            await followed(found.following(sql="price > 1"), {}, 3)


@virtual_time()
async def test_a_topic_deleted_while_the_query_was_down_is_reported_missing(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        await found.send(10)
        await found.send(5, U0)
        at = await followed(found.following(), {}, 2)
        await found.topics.topics.delete("T")
        for only in ({}, {"assign": '{"T": [0]}'}):
            async with found.made.session("10.0.1.3") as later:
                # The broker is known from another topic, or not at all.
                start = {queue: at[queue] for queue in at if not only or queue == T0}
                with pytest.raises(
                    DataLost, match="T@a:0 cannot be read from offset 10: the topic"
                ):
                    await followed(found.following_with(later, **only), start)
                for group in ({}, {"group": "g"}):
                    loose = found.following_with(later, **LOOSE, **only, **group)
                    assert {queue.topic for queue in await followed(loose, start)} <= {"U"}
                now = found.following_with(later, **only)
                await now.freeze()
                with pytest.raises(DataLost, match="the topic was deleted"):
                    await followed(now, start)


@virtual_time()
async def test_a_topic_whose_only_broker_is_down_does_not_count_as_deleted(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        await found.send(10)
        at = await followed(found.following(), {}, 2)
        await found.made.stop_broker("a")
        async with found.made.session("10.0.1.3") as later:
            follow = found.following_with(later)
            assert await followed(follow, at, 5) == at
            await found.made.start_broker("a")
            await asyncio.sleep(60)
            await found.send(1)
            assert (await followed(follow, at))[T0] == 11


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_queue_closed_after_it_was_read_is_not_a_loss(
    tmp_path: Path, *, is_restarted: bool
) -> None:
    @virtual_time()
    async def run() -> None:
        async with world(tmp_path) as found, found.made.session("10.0.1.3") as later:
            await found.send(10)
            await found.send(4, T3)
            follow = found.following()
            at = await followed(follow, {}, 3)
            assert read(at) == {"T0": 10, "T3": 4}
            await found.topics.topics.update("T", queues=2, read_queues=2)
            if is_restarted:
                follow = found.following_with(later)
            assert await followed(follow, at, 20) == at
            await found.send(1)
            at = await followed(follow, at)
            assert read(at) == {"T0": 11, "T3": 4}
            # Reopened, it resumes where it was, and so do new ones.
            await found.topics.topics.update("T", queues=5, read_queues=5)
            await found.send(2, T3)
            assert read(await followed(follow, at)) == {"T0": 11, "T3": 6}
            await asyncio.sleep(60)
            at = await followed(follow, at, 2)
            assert read(at) == {"T0": 11, "T3": 6}
            assert MessageQueue("T", "a", 4) in at

    run()


@virtual_time()
async def test_a_closed_queue_of_a_recreated_topic_is_read_from_its_beginning(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as found:
        strict, loose = found.following(), found.following(**LOOSE)
        await found.send(4, T3)
        at = await followed(strict, {}, 3)
        await found.topics.topics.update("T", queues=2, read_queues=2)
        await asyncio.sleep(60)
        assert await followed(strict, at, 3) == await followed(loose, at, 3) == at
        await found.topics.topics.delete("T")
        await found.made.make_topic("T", queues=2)
        with pytest.raises(DataLost, match="T@a:3 ends at offset 0 but was read to 4"):
            await followed(strict, at)
        at = await followed(loose, at)
        await found.topics.topics.update("T", queues=4, read_queues=4)
        await found.send(6, T3)
        await asyncio.sleep(60)
        assert at[T3] == 0
        assert read(await followed(loose, at)) == {"T3": 6}


@virtual_time()
async def test_messages_in_a_closed_queue_are_reported_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as found, found.made.session("10.0.1.3") as later:
        strict, loose = found.following(), found.following(**LOOSE)
        await found.send(4, T3)
        at = await followed(strict, {}, 3)
        await found.send(2, T3)
        await found.topics.topics.update("T", queues=2, read_queues=2)
        await asyncio.sleep(60)
        for follow in (strict, found.following_with(later)):
            with pytest.raises(
                DataLost, match=r"T@a:3 cannot be read from offset 4: .*fewer queues"
            ):
                await followed(follow, at)
        with caplog.at_level(logging.WARNING):
            assert await followed(loose, at, 10) == at
        assert caplog.text.count("T@a:3 cannot be read from offset 4") == 1
        await found.topics.topics.update("T", queues=4, read_queues=4)
        await asyncio.sleep(60)
        assert read(await followed(loose, at)) == {"T3": 6}


@virtual_time()
async def test_a_deleted_topic_stays_deleted_when_its_broker_restarts(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        await found.send(10)
        follow = found.following(**LOOSE)
        at = await followed(follow, await followed(follow, {}, 3))
        await found.topics.topics.delete("T")
        at = await followed(follow, at, 3)
        await found.made.crash("a")
        await followed(follow, at, 20)
        await found.made.start_broker("a")
        for _ in range(20):
            at = await followed(follow, at)
            assert {queue.topic for queue in at} == {"U"}


# --- which server to believe ----------------------------------------------------------------------


@asynccontextmanager
async def world_of_two(directory: Path, nameservers: int = 1) -> AsyncIterator[World]:
    """Run brokers a and b, each with one queue of T; b's has ten messages."""
    async with (
        clusters.cluster(directory, names=("a", "b"), nameservers=nameservers) as made,
        Producer("pg", session=made.session()) as producer,
        made.session("10.0.1.2", route_interval=5) as session,
    ):
        found = World(made, producer, session)
        for queue in (T0, B0):
            await made.make_topic("T", queue.broker, queues=1)
        await found.send(10, B0)
        yield found


def lose(found: World, nameserver: int, *, knows_slave: bool = False) -> None:
    """Let a name server lose broker b until it registers again; a slave may be listed before it."""
    routes = found.made.nameservers[nameserver]._routes
    assert routes.remove(found.made.broker("b").address)
    if knows_slave:
        slave = Registration(
            name="b",
            address="10.0.0.77:10911",
            cluster="DefaultCluster",
            broker_id=1,
            ha_address="",
            version=DataVersion(timestamp=1, counter=1),
        )
        routes.register(slave, found.made.clock.monotonic_ms())


@pytest.mark.parametrize("options", [{}, LOOSE])
@pytest.mark.parametrize(("nameservers", "knows_slave"), [(2, False), (1, True)])
def test_a_broker_missing_at_name_servers_is_not_a_deleted_topic(
    tmp_path: Path, options: dict[str, str], nameservers: int, *, knows_slave: bool
) -> None:
    @virtual_time()
    async def run() -> None:
        async with world_of_two(tmp_path, nameservers) as found:
            follow = found.following(topics="T", **options)
            at = await followed(follow, {}, 3)
            assert at == {T0: 0, B0: 10}
            for nameserver in range(nameservers):
                lose(found, nameserver, knows_slave=knows_slave)
                assert await followed(follow, at, 50) == at
                await asyncio.sleep(60)
            await found.send(1, B0)
            assert await followed(follow, at) == {T0: 0, B0: 11}

    run()


@pytest.mark.parametrize(("nameservers", "knows_slave"), [(2, False), (1, True)])
def test_a_task_skips_nothing_of_a_broker_missing_at_name_servers(
    tmp_path: Path, nameservers: int, *, knows_slave: bool
) -> None:
    @virtual_time()
    async def run() -> None:
        async with world_of_two(tmp_path, nameservers) as found:
            lose(found, 0, knows_slave=knows_slave)
            outcomes = [await outcome_in_task(found, f"10.0.1.{number}") for number in range(3, 9)]
            # Some query the other name server, which knows the broker.
            assert set(outcomes) == ({"no route", "all"} if nameservers > 1 else {"no route"})

    run()


async def outcome_in_task(found: World, host: str) -> str:
    async with found.made.session(host) as session:
        of = QueueRange("T", "b", 0, 0, 10)
        pull = RetryingPull(session, of, "g", Pulling(retries=0), fail_on_data_loss=False)
        try:
            return "lost" if await pull.next_chunk() is None else "all"
        except NoRoute:
            return "no route"
        finally:
            await pull.close()


@virtual_time()
async def test_a_broker_at_another_brokers_old_address_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of_two(tmp_path) as found:
        reader = QueueReader(found.session, "g", PullTimes())
        only_b = MessageQueue("V", "b", 0)
        await found.made.make_topic("V", "b", queues=1)
        await found.session.route("V")
        elsewhere = found.made.broker("a").address
        monkeypatch.setattr(found.session, "address_to_write", lambda _: elsewhere)
        assert await ask_master(found.session, reader, only_b) is None
        await found.topics.topics.delete("V")
        assert await ask_master(found.session, reader, only_b) is Unreadable.DELETED


@virtual_time()
async def test_other_errors_do_not_mark_a_queue_as_missing(tmp_path: Path) -> None:
    asked = clusters.Recorder()
    async with world(tmp_path) as found, found.made.session("10.0.1.3", [asked]) as session:
        reader = QueueReader(session, "g", PullTimes())
        await session.route("T")

        def refuse(_address: str, command: Command) -> None:
            if command.code == RequestCode.PULL_MESSAGE:
                raise RemoteError(ResponseCode.NO_PERMISSION, "no")

        asked.refuse = refuse
        with pytest.raises(RemoteError, match="no"):
            await ask_master(session, reader, T0)


@virtual_time()
async def test_findings_are_checked_again_when_a_broker_rejects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = RemoteError(ResponseCode.TOPIC_NOT_EXIST, "there is none")
    async with world(tmp_path) as found:
        doubts = QueueChecks(found.session, QueueReader(found.session, "g", PullTimes()))
        assert await doubts.find_unreadable([T0]) == {}
        await found.topics.topics.delete("T")
        assert await doubts.find_unreadable([T0]) == {}, "the finding is trusted for a while"
        for _ in range(2):
            doubts.refuse({T0: (Unreadable.DELETED, str(refusal))})
            assert await doubts.find_unreadable([T0]) == {T0: Unreadable.DELETED}
        await found.made.crash("a")
        for _ in range(3):
            doubts.refuse({T0: (Unreadable.DELETED, str(refusal))})
            assert await doubts.find_unreadable([T0]) == {T0: Unreadable.DELETED}, (
                "no server contradicts"
            )
        assert caplog.text.count("refuses long polls") == 1
        assert doubts.refused == {T0}


@virtual_time()
async def test_a_reader_returns_to_the_master_that_knows_better(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        reader = QueueReader(found.session, "g", PullTimes())
        reader._broker_ids[T0] = 1
        doubts = QueueChecks(found.session, reader)
        doubts.refuse({T0: (Unreadable.DELETED, "not here yet")})
        assert await doubts.find_unreadable([T0]) == {}
        assert doubts.refused == frozenset()
        assert not reader.back_to_master(T0), "the master is queried next in any case"


@virtual_time()
async def test_the_group_commits_what_is_read_unless_disabled(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        await found.send(10)
        for option, noted in (("false", None), ("true", 10)):
            group = f"g-{option}"
            given = {"group": group, "commitOffsets": option}
            follow = found.following(**given)
            at = await followed(follow, {}, 4)
            assert at[T0] == 10
            await follow.commit(at)
            assert await committed(found, T0, group) == noted


@virtual_time()
async def test_an_assigned_queue_is_not_searched_on_brokers_added_later(
    tmp_path: Path,
) -> None:
    async with (
        clusters.cluster(tmp_path, names=("a", "b")) as made,
        Producer("pg", session=made.session()) as producer,
        made.session("10.0.1.2", route_interval=5) as session,
    ):
        found = World(made, producer, session)
        await made.make_topic("T", "a", queues=2)
        await found.send(3)
        follow = found.following(assign='{"T": [0, 1]}')
        at = await followed(follow, {}, 2)
        await made.make_topic("T", "b", queues=2)
        await asyncio.sleep(60)
        assert len((await session.route("T")).readable) == 4
        await found.send(1)
        for each in (follow, found.following(assign='{"T": [0, 1]}')):
            end = await followed(each, at)
            assert read(end) == {"T0": 4}
            assert {queue.broker for queue in end} == {"a"}
        now = found.following(assign='{"T": [0, 1]}')
        await now.freeze()
        assert read(await followed(now, at)) == {"T0": 4}


@virtual_time()
async def test_a_topic_recreated_while_the_query_was_down_is_not_read_from_the_middle(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as found:
        await found.send(10)
        first = found.following()
        at = await followed(first, {}, 2)
        assert read(at) == {"T0": 10}
        saved = json.dumps(nested(at, first.marks))
        await found.topics.topics.delete("T")
        await found.made.make_topic("T")
        await found.send(25)
        await asyncio.sleep(60)
        start, marks = flat(json.loads(saved)), flat_marks(json.loads(saved))
        with pytest.raises(DataLost, match="T@a:0 was re-created: the message at offset 9 is not"):
            await found.following().latest(start, is_limited=False, has_begun=True, marks=marks)
        loose = found.following(**LOOSE)
        back = await loose.latest(start, is_limited=False, has_begun=True, marks=marks)
        assert read(back) == {}
        end = await followed(loose, back)
        assert read(end) == {"T0": 25}


@virtual_time()
async def test_a_topic_that_only_grew_is_read_on(tmp_path: Path) -> None:
    async with world(tmp_path) as found:
        await found.send(10)
        first = found.following()
        at = await followed(first, {}, 2)
        await found.made.stop_broker()
        await found.made.start_broker()
        await found.send(25)
        again = found.following()
        assert read(await again.latest(at, is_limited=False, marks=first.marks)) == {"T0": 35}
