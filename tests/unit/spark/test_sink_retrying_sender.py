"""Sending the rows of a task, in virtual time: order, failures, retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from clusters import BROKERS, Cluster, Recorder, cluster
from sink_tasks import encoded, take
from turbopump.client.calls import SendStatus
from turbopump.client.session import Session
from turbopump.errors import InvalidArgument, RemoteError, SparkError
from turbopump.message import Message, QueueOffset
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.retrying_sender import RetryingSender, SendWindow
from turbopump.spark.writing.row_encoder import EncodedRows
from turbopump.store.outcomes import Found
from turbopump.testing import virtual_time
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, as_command
from turbopump.wire.record import MessageView, decode_records

SENDS = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)


def stored(world: Cluster, topic: str = "T") -> list[MessageView]:
    """Return all messages of a topic, queue by queue."""
    found: list[MessageView] = []
    for broker in world.brokers.values():
        for queue_id in range(4):
            offset = 0
            while isinstance(
                read := broker.store.read(topic, queue_id, QueueOffset(offset), 1000), Found
            ):
                messages = list(decode_records(b"".join(read.messages)))
                found += messages
                offset += len(messages)
    return found


def numbered(count: int, first_row: int = 0, **more: Any) -> EncodedRows:
    messages = [Message("T", str(first_row + n).encode()) for n in range(count)]
    return encoded(messages, first_row, **more)


class Refusal:
    """Fails some sends with a response code."""

    def __init__(self, code: int, times: int = 1 << 30, after: int = 0) -> None:
        self.code = code
        self.left = times
        self.passing = after
        self.seen = 0

    def __call__(self, address: str, command: Command) -> None:
        if command.code not in SENDS:
            return
        self.seen += 1
        if self.passing:
            self.passing -= 1
        elif self.left:
            self.left -= 1
            raise RemoteError(self.code, "in the broker's words")


@asynccontextmanager
async def sending(
    directory: Path,
    refuse: Any = None,
    names: tuple[str, ...] = BROKERS[:1],
    kind: type[Session] = Session,
    **options: Any,
) -> AsyncIterator[tuple[RetryingSender, Cluster]]:
    given = {"batch_size": 10, "max_in_flight": 4, **options}
    async with (
        cluster(directory, names) as world,
        world.session(hooks=[Recorder(refuse=refuse)], kind=kind) as session,
    ):
        task = RetryingSender(
            session, SinkOptions(nameserver="10.0.0.1:9876", **given), partition=3
        )
        try:
            yield task, world
        finally:
            await task.producer.close()


@virtual_time()
async def test_all_rows_are_stored_when_it_is_finished(tmp_path: Path) -> None:
    async with sending(tmp_path) as (task, world):
        for start in range(0, 500, 100):
            await take(task, numbered(100, start))
        counts = task.counts
        assert (counts.rows, counts.sends, counts.repeated) == (500, 50, 0)
        assert sorted(int(message.body) for message in stored(world)) == list(range(500))


@virtual_time()
async def test_messages_of_a_task_get_their_ids_from_one_generator(tmp_path: Path) -> None:
    """Ids of different generators differ only by chance."""
    async with sending(tmp_path, batch_size=1) as (task, world):
        await take(task, numbered(20))
        ids = [str(message.unique_key) for message in stored(world)]
        assert len(set(ids)) == 20
        # Address, process and generator; the time and a counter follow.
        assert len({each[:20] for each in ids}) == 1


@virtual_time()
async def test_no_rows_open_no_connection(tmp_path: Path) -> None:
    async with sending(tmp_path) as (task, _):
        await take(task, encoded([]))
        assert task.counts.rows == 0


@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_BUSY, 215])
@virtual_time()
async def test_a_busy_broker_is_retried_and_order_is_preserved(tmp_path: Path, code: int) -> None:
    refusal = Refusal(code, times=4, after=2)
    async with sending(tmp_path, refusal) as (task, world):
        start_ms = world.clock.monotonic_ms()
        await take(task, numbered(200, sharding_keys=["one"] * 200))
        counts = task.counts
        assert counts.repeated == 4
        assert world.clock.monotonic_ms() - start_ms > (100 + 200 + 400 + 800) / 2
        assert [int(message.body) for message in stored(world)] == list(range(200))


@virtual_time()
async def test_the_retry_limit_fails_with_the_brokers_message(tmp_path: Path) -> None:
    refusal = Refusal(ResponseCode.SYSTEM_BUSY)
    limits: dict[str, Any] = {"retries": 2, "max_in_flight": 1, "send_timeout_ms": 50}
    async with sending(tmp_path, refusal, **limits) as (task, world):
        with pytest.raises(SparkError) as raised:
            await take(task, numbered(25, 100))
        text = str(raised.value)
        assert "10 rows, 100 to 109, of partition 3 could not be sent to T@a:" in text
        assert "code 2: in the broker's words" in text
        assert refusal.seen == 4, "one within its timeout, and two retries of the next"
        assert not stored(world)


@virtual_time()
async def test_without_retries_a_busy_broker_is_awaited_for_the_send_timeout(
    tmp_path: Path,
) -> None:
    refusal = Refusal(ResponseCode.SYSTEM_BUSY, times=4)
    async with sending(tmp_path / "passing", refusal, retries=0) as (task, world):
        await take(task, numbered(10))
        assert task.counts.repeated == 4
        assert len(stored(world)) == 10
    refusal = Refusal(ResponseCode.SYSTEM_BUSY)
    async with sending(tmp_path / "lasting", refusal, retries=0) as (task, world):
        start_ms = world.clock.monotonic_ms()
        with pytest.raises(SparkError, match="code 2: in the broker's words"):
            await take(task, numbered(10))
        assert 3000 <= world.clock.monotonic_ms() - start_ms < 5000


@virtual_time()
async def test_without_retries_a_restarting_broker_is_awaited(tmp_path: Path) -> None:
    async with sending(tmp_path, retries=0) as (task, world):
        await take(task, numbered(10))
        await world.stop_broker()
        await asyncio.sleep(1)
        taking = asyncio.create_task(take(task, numbered(10, 10)))
        await asyncio.sleep(1)
        await world.start_broker()
        await taking
        assert sorted(int(message.body) for message in stored(world)) == list(range(20))


@virtual_time()
async def test_a_permanent_error_fails_immediately_and_stops_the_rest(tmp_path: Path) -> None:
    refusal = Refusal(ResponseCode.NO_PERMISSION)
    async with sending(tmp_path, refusal) as (task, _):
        with pytest.raises(SparkError, match="code 16: in the broker's words"):
            await take(task, numbered(1000))
        assert refusal.seen <= 2 * 4


@virtual_time()
async def test_another_broker_accepts_what_one_rejects(tmp_path: Path) -> None:
    def refuse(address: str, command: Command) -> None:
        if command.code in SENDS and address.startswith("10.0.0.1"):
            raise RemoteError(ResponseCode.NO_PERMISSION, "not here")

    async with sending(tmp_path, refuse, BROKERS) as (task, world):
        await take(task, numbered(200))
        assert sorted(int(message.body) for message in stored(world)) == list(range(200))
        assert not isinstance(world.brokers["a"].store.read("T", 0, QueueOffset(0), 1), Found)


@virtual_time()
async def test_a_lost_connection_may_repeat_but_loses_nothing(tmp_path: Path) -> None:
    async with sending(tmp_path, send_timeout_ms=300) as (task, world):
        await take(task, numbered(100, sharding_keys=["one"] * 100))
        world.network.stop_reading("10.0.0.1")
        taking = asyncio.create_task(take(task, numbered(20, 100, sharding_keys=["one"] * 20)))
        await asyncio.sleep(1)
        world.network.resume_reading("10.0.0.1")
        await taking
        counts = task.counts
        assert counts.rows == 120
        assert {int(message.body) for message in stored(world)} == set(range(120))


@virtual_time()
async def test_window_is_small_for_a_busy_broker_and_grows_again() -> None:
    window = SendWindow(8)
    assert window.size == 4
    for _ in range(50):
        window.answered(150)
    async with AsyncExitStack() as stack:
        cuts = [await stack.enter_async_context(window.place()) for _ in range(8)]
        waiting = asyncio.create_task(stack.enter_async_context(window.place()))
        await asyncio.sleep(1)
        assert not waiting.done()
        for seen in cuts:
            window.busy(seen)
        assert window.size == 4
    assert await waiting == 1
    for _ in range(3):
        window.busy(window.cuts)
    assert window.size == 1
    for _ in range(100):
        window.answered(150)
    assert window.size == 8
    for _ in range(100):
        window.answered(240)
    assert window.size == 1


class Narrow(Session):
    """Rejects sends that arrive while two others are in flight."""

    active = 0

    async def request(self, address: str, command: Any, timeout_ms: int) -> Any:
        if command.code not in SENDS:
            return await super().request(address, command, timeout_ms)
        if Narrow.active >= 2:
            await asyncio.sleep(0.2)
            raise RemoteError(ResponseCode.SYSTEM_BUSY, "start flow control for a while")
        Narrow.active += 1
        try:
            await asyncio.sleep(0.02)
            return await super().request(address, command, timeout_ms)
        finally:
            Narrow.active -= 1


@pytest.mark.slow
@virtual_time()
async def test_a_slow_broker_gets_few_rows(tmp_path: Path) -> None:
    async with sending(tmp_path, kind=Narrow, max_in_flight=32) as (task, world):
        await take(task, numbered(5000))
        counts = task.counts
        assert counts.sends == 500
        assert sorted(int(message.body) for message in stored(world)) == list(range(5000))


@pytest.mark.parametrize(
    ("message", "column", "words"),
    [
        (Message("T", b""), "body", "0 bytes"),
        (Message("T", b"x" * 2000), "body", "got 2000"),
        (Message("T", b"x", tags=" "), "tags", "blank"),
        (Message("T", b"x", keys=["a b"]), "keys", "blanks"),
        (Message("T", b"x", properties={"TAGS": "x"}), "properties", "reserved"),
        (Message("T", b"x", delay_level=-1), "delayLevel", "-1"),
        (Message("no topic", b"x"), "topic", "no topic"),
    ],
)
@virtual_time()
async def test_the_error_names_row_and_column(
    tmp_path: Path, message: Message, column: str, words: str
) -> None:
    async with sending(tmp_path, body_bytes_max=1000) as (task, _):
        messages = [Message("T", b"x"), Message("T", b"x"), message]
        limits = {"body_bytes_max": 1000}
        with pytest.raises(InvalidArgument, match=f"row 44 of partition 3, column {column}: ") as (
            raised
        ):
            await take(task, encoded(messages, 42, options=limits))
        assert words in str(raised.value)


class Unflushed(Session):
    """Gets the status "stored, but not flushed in time" for every send."""

    async def request(self, address: str, command: Any, timeout_ms: int) -> Any:
        answer = as_command(await super().request(address, command, timeout_ms))
        if command.code not in SENDS:
            return answer
        return replace(answer, code=ResponseCode.FLUSH_DISK_TIMEOUT)


@virtual_time()
async def test_a_flush_timeout_is_retried_if_configured(tmp_path: Path) -> None:
    async with sending(tmp_path / "a", kind=Unflushed) as (task, world):
        await take(task, numbered(5))
        assert task.counts.repeated == 0
        assert len(stored(world)) == 5
    demanding: dict[str, Any] = {"retry_unless_ok": True, "retries": 1}
    async with sending(tmp_path / "b", kind=Unflushed, **demanding) as (task, world):
        with pytest.raises(SparkError, match=f"stored, but {SendStatus.FLUSH_DISK_TIMEOUT.name}"):
            await take(task, numbered(5))
        assert len(stored(world)) == 10


@virtual_time()
async def test_an_unreachable_name_server_is_reported_after_all_retries(tmp_path: Path) -> None:
    async with sending(tmp_path, retries=1) as (task, world):
        world.network.refuse(world.nameserver.rpartition(":")[0])
        with pytest.raises(SparkError, match="row 7 of partition 3 could not be sent to T: "):
            await take(task, numbered(1, 7))
