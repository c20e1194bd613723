"""Idempotent writes in virtual time: what an attempt finds, awaits and rejects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clusters import BROKERS, Cluster, Recorder, cluster
from sink_tasks import encoded, take
from turbopump.client.session import Session
from turbopump.errors import ConnectionLost, SparkError
from turbopump.message import Message
from turbopump.net.request_protocol import Request
from turbopump.spark.writing.idempotent_write import SentRows, TaskWrite, finish, survey
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.retrying_sender import RetryingSender
from turbopump.spark.writing.row_encoder import STAMP_PROPERTY, EncodedRows, Origin
from turbopump.spark.writing.write_marks import MARKS_TOPIC, Mark
from turbopump.testing import virtual_time
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, as_command
from turbopump.wire.headers import PullMessage

ORIGIN = Origin("query", "7", 3)
OPTIONS = SinkOptions(
    nameserver="10.0.0.1:9876", topic="T", idempotent=True, batch_size=10, max_in_flight=4
)


def numbered(count: int, sent: Iterable[int] = (), origin: Origin = ORIGIN) -> EncodedRows:
    messages = [
        Message("T", str(n).encode(), properties={STAMP_PROPERTY: f"{origin.prefix}{n}"})
        for n in range(count)
    ]
    return encoded(messages, sent=frozenset(sent))


@asynccontextmanager
async def attempt(
    world: Cluster, *, host: str = "10.0.1.1", origin: Origin = ORIGIN, **more: Any
) -> AsyncIterator[tuple[TaskWrite, RetryingSender]]:
    """An attempt of a task in its own process, which ends like tasks that fail or succeed."""
    async with world.session(host, **more) as session:
        sending = RetryingSender(session, OPTIONS, origin.partition)
        task = TaskWrite(session, sending.producer, OPTIONS, origin)
        sending.lease = task.lease
        try:
            yield task, sending
        finally:
            await sending.producer.close()
            await task.lease.stop()


def bodies(world: Cluster) -> list[int]:
    return sorted(int(message.body) for message in world.messages("T"))


def marks(world: Cluster) -> list[Mark]:
    stored = (message.body for message in world.messages(MARKS_TOPIC))
    return [msgspec.json.decode(body, type=Mark) for body in stored if is_mark(body)]


@virtual_time()
async def test_next_attempt_skips_what_an_earlier_one_stored(tmp_path: Path) -> None:
    async with cluster(tmp_path, BROKERS) as world:
        async with attempt(world) as (task, sending):
            assert not (await task.begin()).rows
            await take(sending, numbered(40))
        other = Origin("query", "7", 4)
        async with attempt(world, origin=other) as (task, sending):
            assert not (await task.begin()).rows
            await take(sending, numbered(5, origin=other))
        async with attempt(world) as (task, sending):
            found = await task.begin()
            assert sorted(found.rows) == list(range(40))
            await take(sending, numbered(60, found.rows))
        assert bodies(world) == sorted([*range(60), *range(5)])


@virtual_time()
async def test_batch_that_is_complete_is_not_sent_again(tmp_path: Path) -> None:
    recorder = Recorder()
    async with cluster(tmp_path) as world:
        async with attempt(world) as (task, sending):
            await task.begin()
            await take(sending, numbered(40))
        async with world.session() as session:
            await finish(session, OPTIONS, [task.begun()], is_stream=True)
        async with attempt(world) as (task, _):
            assert (await task.begin()).is_all
        # The next batch does not read the marks of all earlier batches.
        async with attempt(world, origin=replace(ORIGIN, batch="8"), hooks=[recorder]) as (task, _):
            assert not (await task.begin()).rows
        pulls = [
            PullMessage.from_ext_fields(each.ext_fields)
            for each in recorder.of(RequestCode.PULL_MESSAGE)
        ]
        first = min(each.queue_offset for each in pulls if each.topic == MARKS_TOPIC)
        assert first == task.begun().marks["a"] - 3


@virtual_time()
async def test_attempts_do_not_overlap(tmp_path: Path) -> None:
    async with cluster(tmp_path, BROKERS) as world, attempt(world, host="10.0.1.2") as (later, _):
        async with attempt(world) as (task, sending):
            await task.begin()
            waiting = asyncio.create_task(later.begin())
            await asyncio.sleep(15)
            assert not waiting.done()
            await take(sending, numbered(20))
        assert sorted((await waiting).rows) == list(range(20))


@virtual_time()
async def test_an_isolated_attempt_stops_before_the_next_one_sends(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as world,
        attempt(world, host="10.0.1.2") as (later, _),
        attempt(world) as (task, sending),
    ):
        await task.begin()
        await take(sending, numbered(20))
        world.network.isolate("10.0.1.1")
        waiting = asyncio.create_task(later.begin())
        await asyncio.sleep(6)
        assert not waiting.done()
        with pytest.raises(SparkError, match="no heartbeat could be stored for 5000 ms"):
            await take(sending, numbered(21, range(20)))
        assert sorted((await waiting).rows) == list(range(20))
        world.heal()
        await asyncio.sleep(10)
        with pytest.raises(SparkError, match="another attempt may have started"):
            task.lease.require()


@virtual_time()
async def test_marks_survive_a_crash_of_the_broker(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        async with attempt(world) as (task, sending):
            await task.begin()
            await take(sending, numbered(20))
            await world.crash("a")
            await world.start_broker("a")
        async with attempt(world) as (task, _):
            assert sorted((await task.begin()).rows) == list(range(20))


class Silenced(Session):
    """Loses the response to the first send of rows, which the broker has stored."""

    lost = 1

    async def request(self, address: str, command: Any, timeout_ms: int) -> Any:
        answer = as_command(await super().request(address, command, timeout_ms))
        if self.lost and self.is_lost(command):
            self.lost -= 1
            raise ConnectionLost("by a test")
        return answer

    def is_lost(self, request: Request) -> bool:
        return request.code == RequestCode.SEND_BATCH_MESSAGE


class SilencedMarks(Silenced):
    """Loses the response to the first mark."""

    def is_lost(self, request: Request) -> bool:
        body = (request if isinstance(request, Command) else request.command()).body
        return isinstance(body, bytes) and is_mark(body)


def is_mark(body: bytes) -> bool:
    return b'"attempt"' in body


@virtual_time()
async def test_a_mark_stored_twice_does_not_count_as_an_earlier_attempt(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as world, attempt(world, kind=SilencedMarks) as (task, sending):
        start_ms = world.clock.monotonic_ms()
        assert not (await task.begin()).rows
        assert world.clock.monotonic_ms() - start_ms < 5000
        await take(sending, numbered(20))
        assert [each.attempt for each in marks(world)] == [task.lease.attempt] * 2
        assert bodies(world) == list(range(20))
        async with attempt(world, host="10.0.1.2") as (later, _):
            waiting = asyncio.create_task(later.begin())
            await asyncio.sleep(15)
            assert not waiting.done()
            await task.lease.stop()
            assert sorted((await waiting).rows) == list(range(20))


@virtual_time()
async def test_attempts_whose_marks_alternate_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, attempt(world, host="10.0.1.2") as (later, _):
        waiting: list[asyncio.Task[SentRows]] = []

        class LetsAnotherBegin(SilencedMarks):
            """Sends its mark again after the mark of another attempt."""

            async def request(self, address: str, command: Any, timeout_ms: int) -> Any:
                try:
                    return await super().request(address, command, timeout_ms)
                except ConnectionLost:
                    waiting.append(asyncio.create_task(later.begin()))
                    await asyncio.sleep(1)
                    raise

        async with attempt(world, kind=LetsAnotherBegin) as (task, sending):
            assert not (await task.begin()).rows
            first, between, last = marks(world)
            assert first.attempt == last.attempt != between.attempt
            await take(sending, numbered(20))
            assert not waiting[0].done()
        assert sorted((await waiting[0]).rows) == list(range(20))


@virtual_time()
async def test_send_without_response_is_looked_up_not_repeated(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        async with attempt(world, kind=Silenced) as (task, sending):
            await task.begin()
            with pytest.raises(SparkError, match="by a test; whether it was stored is looked up"):
                await take(sending, numbered(40))
        async with attempt(world) as (task, sending):
            found = await task.begin()
            assert found.rows
            await take(sending, numbered(40, found.rows))
        assert bodies(world) == list(range(40))


@virtual_time()
async def test_driver_reads_marks_once_for_all_tasks_of_a_batch_write(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, world.session() as session:
        found = await survey(session, OPTIONS, "query")
        assert (found.ends, found.marks) == ({"a": 0}, ())
        async with attempt(world, host="10.0.1.2") as (task, sending):
            await task.begin()
            await take(sending, numbered(10))
        found = await survey(session, OPTIONS, "query")
        starts = {"a": {0: 0, 1: 0, 2: 0, 3: 0}}
        mark = Mark("query", "7", "T", 3, task.lease.attempt, starts)
        assert [each.mark for each in found.marks] == [mark]
        assert (await survey(session, OPTIONS, "another")).marks == ()


@virtual_time()
async def test_a_broker_that_may_have_rows_must_be_reachable(tmp_path: Path) -> None:
    async with cluster(tmp_path, BROKERS) as world:
        async with attempt(world) as (task, sending):
            await task.begin()
            await take(sending, numbered(40))
        await world.stop_broker("b")
        async with attempt(world) as (task, _):
            with pytest.raises(SparkError, match="broker b may have rows of an earlier attempt"):
                await task.begin()


@virtual_time()
async def test_rows_that_differ_from_stored_ones_are_not_skipped(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        async with attempt(world) as (task, sending):
            await task.begin()
            await take(sending, numbered(3))
        async with attempt(world) as (task, _):
            found = await task.begin()
    found.require_same(numbered(3))
    found.require_no_more(3)
    swapped = encoded([Message("T", b"2"), Message("T", b"1")], 1)
    with pytest.raises(SparkError, match="row 1 of partition 3 of write query, batch 7 differs"):
        found.require_same(swapped)
    with pytest.raises(SparkError, match="has 2 rows now, but an earlier attempt stored row 2"):
        found.require_no_more(2)
