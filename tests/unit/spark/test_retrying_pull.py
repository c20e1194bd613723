"""Pulling ranges from a broker in virtual time: everything once, however responses are cut."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as with_fields

from brokers import SMALL_STORE
from clusters import Cluster, Recorder, cluster
from stored_rows import one_batch
from turbopump.admin.administration import Admin
from turbopump.broker.config import LimitsConfig
from turbopump.client.calls import FoundRecords, NothingMatched, OffsetIllegal
from turbopump.client.producer import Producer
from turbopump.client.session import Session
from turbopump.errors import ConnectionLost, DataLost, NoRoute, RemoteError
from turbopump.filters.sql92 import Sql
from turbopump.message import Message, QueueOffset
from turbopump.spark.reading.options import Pulling
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.reading.retrying_pull import RetryingPull
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.store.config import ReadLimits
from turbopump.testing import virtual_time
from turbopump.wire.bodies import TopicRoute
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, as_command, request
from turbopump.wire.headers import PullMessage

COUNT = 300


@asynccontextmanager
async def world_with_messages(
    directory: Path, count: int = COUNT, **limits: int
) -> AsyncIterator[tuple[Cluster, Session, Recorder]]:
    """Run a cluster with messages of different sizes in one queue, every tenth with tag x.

    With limits, the broker makes no exception for clients that request large responses.
    """
    store = replace(SMALL_STORE, limits=replace(ReadLimits(), **limits))
    most = LimitsConfig(bulk_count_max=1, bulk_bytes_max=1) if limits else LimitsConfig()
    asked = Recorder()
    async with cluster(directory, store=store, limits=most) as world:
        async with Producer("pg", session=world.session()) as producer:
            for start in range(0, count, 50):
                messages = [
                    Message("T", b"%d" % number * (1 + number % 7), tags="xy"[number % 10 > 0])
                    for number in range(start, start + 50)
                ]
                await producer.send_batch(messages, to=lambda queues: queues[0])
        async with world.session("10.0.1.2", hooks=[asked]) as session:
            yield world, session, asked


def pull_of(session: Session, start: int, end: int, **options: Any) -> RetryingPull:
    fails = options.pop("fail_on_data_loss", True)
    pulling = Pulling(**options)
    of = QueueRange("T", "a", 0, start, end)
    return RetryingPull(session, of, "g", pulling, fail_on_data_loss=fails)


async def offsets_of(pull: RetryingPull, tags: frozenset[str] | None = None) -> list[int]:
    """Return the offsets of everything read, decoded as in a task."""
    columns = RecordColumns(["queueOffset"], tags=tags)
    found: list[int] = []
    try:
        while (chunk := await pull.next_chunk()) is not None:
            batch = one_batch(columns, chunk.records, start=chunk.start, end=chunk.end)
            found += [int(str(each)) for each in batch.column(0).to_pylist()]
    finally:
        await pull.close()
    return found


@pytest.mark.parametrize(
    ("limits", "options"),
    [
        ({}, {}),
        ({}, {"in_flight_max": 1}),
        ({"memory_count_max": 32}, {}),
        ({}, {"count_max": 1, "in_flight_max": 50}),
        ({"memory_count_max": 5}, {}),
        ({"memory_count_max": 100}, {"count_max": 1000}),
        # Responses end where the bytes do, each elsewhere: gaps and overlaps.
        ({"memory_bytes_max": 1500}, {"count_max": 32}),
        ({"memory_bytes_max": 150}, {"count_max": 8}),
    ],
)
def test_everything_is_read_once_and_in_order(
    tmp_path: Path, limits: dict[str, int], options: dict[str, int]
) -> None:
    @virtual_time()
    async def run() -> None:
        async with world_with_messages(tmp_path, **limits) as (_, session, _):
            pull = pull_of(session, 7, COUNT - 3, **options)
            assert await offsets_of(pull) == list(range(7, COUNT - 3))

    run()


@pytest.mark.parametrize("scanned", [800, 16, 3])
def test_a_filtered_range_is_read_to_its_end(tmp_path: Path, scanned: int) -> None:
    @virtual_time()
    async def run() -> None:
        async with world_with_messages(tmp_path, scan_units_max=scanned) as (_, session, _):
            tags = frozenset({"x"})
            pull = pull_of(session, 5, COUNT, tags=tags, expression="x")
            assert await offsets_of(pull, tags) == list(range(10, COUNT, 10))
            nothing = pull_of(session, 0, COUNT, tags=frozenset({"z"}), expression="z")
            assert await offsets_of(nothing) == []

    run()


@virtual_time()
async def test_an_empty_range_sends_no_request(tmp_path: Path) -> None:
    async with world_with_messages(tmp_path, 50) as (_, session, asked):
        assert await offsets_of(pull_of(session, 5, 5)) == []
        assert asked.of(RequestCode.PULL_MESSAGE) == []


@virtual_time()
async def test_large_responses_are_requested(tmp_path: Path) -> None:
    async with world_with_messages(tmp_path) as (_, session, asked):
        assert len(await offsets_of(pull_of(session, 0, COUNT))) == COUNT
        assert len(asked.of(RequestCode.PULL_MESSAGE)) == 1


@virtual_time()
async def test_no_more_is_requested_than_the_range_has(tmp_path: Path) -> None:
    async with world_with_messages(tmp_path, 100) as (_, session, asked):
        assert len(await offsets_of(pull_of(session, 0, 40, count_max=32))) == 40
        headers = [
            PullMessage.from_ext_fields(each.ext_fields)
            for each in asked.of(RequestCode.PULL_MESSAGE)
        ]
        assert [(each.queue_offset, each.max_msg_nums) for each in headers] == [(0, 32), (32, 8)]


@virtual_time()
async def test_lost_connections_are_reestablished(tmp_path: Path) -> None:
    async with world_with_messages(tmp_path) as (_, session, asked):
        failures = iter(range(5))

        def refuse(address: str, command: Command) -> None:
            if command.code == RequestCode.PULL_MESSAGE and next(failures, None) is not None:
                raise ConnectionLost(f"{address} is away")

        asked.refuse = refuse
        assert await offsets_of(pull_of(session, 0, COUNT)) == list(range(COUNT))


@virtual_time()
async def test_a_broker_that_stays_down_ends_the_task_with_its_error(tmp_path: Path) -> None:
    async with world_with_messages(tmp_path, 50) as (_, session, asked):

        def refuse(address: str, command: Command) -> None:
            if command.code == RequestCode.PULL_MESSAGE:
                raise ConnectionLost(f"{address} is away")

        asked.refuse = refuse
        with pytest.raises(ConnectionLost, match="is away"):
            await offsets_of(pull_of(session, 0, 50, retries=3, in_flight_max=1))
        assert len(asked.of(RequestCode.PULL_MESSAGE)) == 4


@virtual_time()
async def test_the_error_names_what_a_broker_does_not_support(tmp_path: Path) -> None:
    async with world_with_messages(tmp_path, 50) as (world, session, _):
        address = world.broker("a").address
        off = request(RequestCode.UPDATE_BROKER_CONFIG, body=b"enablePropertyFilter=false")
        await session.request(address, off, 3000)
        pull = pull_of(session, 0, 50, expression=Sql("price > 3"))
        with pytest.raises(
            RemoteError, match="does not support consumer to filter message by SQL92"
        ):
            await offsets_of(pull)


@virtual_time()
async def test_messages_the_queue_no_longer_has_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_with_messages(tmp_path, 50) as (_, session, _):
        with pytest.raises(
            DataLost, match=r"T@a:0: messages 50 to 59 are lost: the queue ends at 50"
        ):
            await offsets_of(pull_of(session, 40, 60))
        with caplog.at_level(logging.WARNING):
            found = await offsets_of(pull_of(session, 40, 60, fail_on_data_loss=False))
        assert found == list(range(40, 50))
        assert "continuing without them" in caplog.text
        with pytest.raises(DataLost, match="messages 70 to 79 are lost"):
            await offsets_of(pull_of(session, 70, 80))


class Expiring:
    """Pulls of a queue that has lost its beginning; every response has ten records."""

    def __init__(self, low: int, *, is_deleted: bool) -> None:
        self._low = low
        self._is_deleted = is_deleted

    async def pull_records(self, _queue: object, offset: int, *_: Any, **__: Any) -> Any:
        low = QueueOffset(self._low)
        if offset >= self._low:
            after = QueueOffset(offset + 10)
            return FoundRecords(after, low, QueueOffset(1000), 0, records=b"r")
        if self._is_deleted:
            # The file is gone, and the queue does not know it yet.
            return NothingMatched(low, QueueOffset(0), QueueOffset(1000), 0)
        return OffsetIllegal(low, low, QueueOffset(1000), 0)


@pytest.mark.parametrize(
    ("is_deleted", "told"),
    [(False, "they expired, the queue starts at 25"), (True, "were deleted")],
)
def test_messages_expired_before_they_were_read_are_lost(
    tmp_path: Path, *, is_deleted: bool, told: str
) -> None:
    @virtual_time()
    async def run() -> None:
        async with world_with_messages(tmp_path, 50) as (_, session, _):
            strict = pull_of(session, 10, 60)
            strict._reader = Expiring(25, is_deleted=is_deleted)  # type: ignore[assignment]
            with pytest.raises(DataLost, match=rf"messages 10 to 24 are lost: .*{told}"):
                await strict.next_chunk()
            await strict.close()
            lenient = pull_of(session, 10, 60, fail_on_data_loss=False, in_flight_max=2)
            lenient._reader = Expiring(25, is_deleted=is_deleted)  # type: ignore[assignment]
            at = 25
            while (chunk := await lenient.next_chunk()) is not None:
                assert chunk.start == at
                at = chunk.end
            assert at == 60
            await lenient.close()

    run()


@virtual_time()
async def test_messages_deleted_with_their_topic_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_with_messages(tmp_path, 50) as (world, session, _):
        begun = pull_of(session, 0, 50, fail_on_data_loss=False, count_max=20, in_flight_max=1)
        assert await begun.next_chunk() is not None
        await begun.close()
        await Admin(session=session).topics.delete("T")
        await asyncio.sleep(60)
        async with world.session("10.0.1.3") as stranger:
            # One still knows the broker, the other never did.
            for each in (session, stranger):
                with pytest.raises(DataLost, match="messages 0 to 49 are lost: the topic was del"):
                    await offsets_of(pull_of(each, 0, 50, retries=1))
                lenient = pull_of(each, 0, 50, retries=1, fail_on_data_loss=False)
                assert await offsets_of(lenient) == []
        assert "the topic was deleted; continuing without them" in caplog.text
        away = QueueRange("T", "b", 0, 0, 5)
        pull = RetryingPull(session, away, "g", Pulling(retries=0), fail_on_data_loss=False)
        with pytest.raises(NoRoute, match="broker 'b' is not known"):
            await offsets_of(pull)


@virtual_time()
async def test_messages_in_a_queue_that_is_no_longer_readable_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_with_messages(tmp_path, 50) as (_, session, _):
        of = QueueRange("T", "a", 3, 2, 5)
        await Admin(session=session).topics.update("T", queues=2, read_queues=2)
        strict = RetryingPull(session, of, "g", Pulling(retries=1), fail_on_data_loss=True)
        with pytest.raises(DataLost, match="messages 2 to 4 are lost: the topic has fewer queues"):
            await offsets_of(strict)
        lenient = RetryingPull(session, of, "g", Pulling(retries=1), fail_on_data_loss=False)
        assert await offsets_of(lenient) == []
        assert "the topic has fewer queues to read now; continuing without them" in caplog.text


SLAVE = "10.0.0.99:10911"


class WithSlave(Session):
    """Knows a slave that has everything the master has; the master suggests reading from it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.pulled_from: list[str] = []
        self.master = ""

    async def _ask_route(self, nameserver: str, topic: str) -> TopicRoute:
        found = await super()._ask_route(nameserver, topic)
        for broker in found.broker_datas:
            self.master = broker.broker_addrs[0]
            broker.broker_addrs[1] = SLAVE
        return found

    async def request(self, address: str, command: Any, timeout_ms: int) -> Any:
        to = self.master if address == SLAVE else address
        answer = as_command(await super().request(to, command, timeout_ms))
        if command.code == RequestCode.PULL_MESSAGE:
            self.pulled_from.append(address)
            fields = {**(answer.ext_fields or {}), "suggestWhichBrokerId": "1"}
            return with_fields(answer, ext_fields=fields)
        return answer


@virtual_time()
async def test_a_slave_is_read_from_when_the_master_suggests_it(tmp_path: Path) -> None:
    async with (
        world_with_messages(tmp_path) as (world, _, _),
        world.session("10.0.1.4", kind=WithSlave) as session,
    ):
        assert isinstance(session, WithSlave)
        pull = pull_of(session, 0, COUNT, count_max=100, in_flight_max=1)
        assert await offsets_of(pull) == list(range(COUNT))
        assert session.pulled_from == [session.master, SLAVE, SLAVE]


class WithIgnorantSlave(WithSlave):
    """Has a slave that does not know the topic yet, or its newest queues."""

    refusal = ResponseCode.TOPIC_NOT_EXIST, "topic[T] not exist"

    async def request(self, address: str, command: Any, timeout_ms: int) -> Any:
        answer = as_command(await super().request(address, command, timeout_ms))
        if address == SLAVE and command.code == RequestCode.PULL_MESSAGE:
            code, remark = self.refusal
            return with_fields(answer, code=code, remark=remark, ext_fields={}, body=b"")
        return answer


@pytest.mark.parametrize(
    "refusal",
    [WithIgnorantSlave.refusal, (ResponseCode.SYSTEM_ERROR, "queueId[0] is illegal, topic:[T]")],
)
def test_a_slaves_answer_that_a_queue_is_missing_is_ignored(
    tmp_path: Path, refusal: tuple[ResponseCode, str]
) -> None:
    @virtual_time()
    async def run() -> None:
        async with (
            world_with_messages(tmp_path) as (world, _, _),
            world.session("10.0.1.4", kind=WithIgnorantSlave) as session,
        ):
            assert isinstance(session, WithIgnorantSlave)
            session.refusal = refusal
            for in_flight_max in (1, 4):
                pull = pull_of(
                    session,
                    0,
                    COUNT,
                    count_max=50,
                    in_flight_max=in_flight_max,
                    fail_on_data_loss=False,
                )
                assert await offsets_of(pull) == list(range(COUNT))
            assert SLAVE in session.pulled_from

    run()
