"""Reads of messages that are not in memory: the disk reads them while others are served."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brokers import SMALL_STORE, Client, pulled, running_broker, views
from turbopump.broker.broker import Broker
from turbopump.broker.config import LimitsConfig, LongPollingConfig
from turbopump.errors import ConnectionLost
from turbopump.store import StoreConfig
from turbopump.testing import Disk, virtual_loop, virtual_time
from turbopump.wire.bodies import (
    ConsumerData,
    Heartbeat,
    KeyValues,
    MessageModel,
    QueuePositions,
    Subscription,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.headers import (
    ConsumeStatsOf,
    QueryMessage,
    QueueOfTopic,
    ResetOffset,
    SearchOffset,
    SendBack,
    TopicAndGroup,
    TopicName,
    UpdateConsumerOffset,
    ViewMessage,
)
from turbopump.wire.sysflag import PULL_SUSPEND

READ_MS = 700
BODIES = [b"%03d" % number * 300 for number in range(120)]
LIMITS = LimitsConfig(message_bytes_max=50_000)
STORE = replace(SMALL_STORE, segment_bytes=131_072, record_bytes_max=120_000)


def now_ms() -> int:
    return virtual_loop().clock.monotonic_ms()


@asynccontextmanager
async def cold_broker(
    directory: Path, store: StoreConfig = STORE, **sections: Any
) -> AsyncIterator[tuple[Broker, Client, Disk]]:
    """Run a broker whose messages, every third of tag A, are on a slow disk and not in memory."""
    disk = Disk(virtual_loop())
    async with running_broker(directory, files=disk, store=store, limits=LIMITS) as (_, client):
        for number, body in enumerate(BODIES):
            tags = "B" if number % 3 else "A"
            await client.send(body, named={"TAGS": tags, "KEYS": f"k{number // 60}"})
    disk.close_all()
    async with running_broker(directory, files=disk, store=store, limits=LIMITS, **sections) as (
        broker,
        client,
    ):
        # Units of queues are 20 bytes for each message, and read by the loop.
        disk.drop_caches("*/commitlog/*")
        disk.drop_caches("*/index/*")
        disk.read_time = READ_MS / 1000
        yield broker, client, disk
        disk.heal()


def beat(tag: str, version: int) -> bytes:
    """Return the heartbeat of a client whose group subscribes to a tag."""
    wanted = Subscription(
        topic="T", sub_string=tag, tags_set=[tag], code_set=[ord(tag)], sub_version=version
    )
    group = ConsumerData(
        group_name="g", message_model=MessageModel.CLUSTERING, subscription_data_set=[wanted]
    )
    return Heartbeat(client_id="c", consumer_data_set=[group]).encode()


def is_cold(broker: Broker) -> bool:
    """Whether the first messages are not in memory."""
    return broker.store.cold_part(broker.store.min_offset, len(BODIES[0])) is not None


@pytest.mark.parametrize("tags", ["*", "A"])
@virtual_time()
async def test_sends_are_answered_while_the_disk_reads_for_a_pull(
    tmp_path: Path, tags: str
) -> None:
    async with cold_broker(tmp_path) as (broker, client, _):
        assert is_cold(broker)
        begun_ms = now_ms()
        pull = asyncio.create_task(client.pull(0, tags=tags))
        await asyncio.sleep(0.001)
        assert (await client.send(b"meanwhile", queue_id=1)).code == ResponseCode.SUCCESS
        assert now_ms() - begun_ms < 50
        assert not pull.done()
        answer = await pull
        assert now_ms() - begun_ms >= READ_MS
        # What the loop has touched was in memory by then.
        assert not is_cold(broker)
        wanted = BODIES[::3] if tags == "A" else BODIES
        bodies = [view.body for view in views(answer)]
        assert bodies == wanted[: len(bodies)]
        # The following messages were read at the same time.
        begun_ms = now_ms()
        following = await client.pull(pulled(answer).next_begin_offset, tags=tags)
        assert views(following)[0].body == wanted[len(bodies)]
        assert now_ms() - begun_ms < 50


@virtual_time()
async def test_a_cold_backlog_is_drained_completely(tmp_path: Path) -> None:
    async with cold_broker(tmp_path) as (_, client, disk):
        begun_ms = now_ms()
        assert [view.body for view in await client.messages()] == BODIES
        assert disk.operations["fetch"] > 0
        # Much is read at once.
        assert now_ms() - begun_ms < 4 * READ_MS


@virtual_time()
async def test_a_pull_is_refused_as_busy_if_too_many_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop does not read in their place."""
    polling = LongPollingConfig(held_max=2)
    async with cold_broker(tmp_path, long_polling=polling) as (_, client, disk):
        fetch = disk.fetch

        def fetch_late(fd: int, at: int, size: int) -> None:
            disk.background.take_time(READ_MS)
            fetch(fd, at, size)

        monkeypatch.setattr(disk, "fetch", fetch_late)
        *first, refused = await asyncio.gather(*(client.pull(0) for _ in range(3)))
        assert [answer.code for answer in first] == [ResponseCode.SUCCESS] * 2
        assert refused.code == ResponseCode.SYSTEM_BUSY
        assert refused.remark == (
            "too many pulls wait for the disk: pullThreadPoolQueueCapacity is 2; pull later"
        )
        assert (await client.pull(0)).code == ResponseCode.SUCCESS


@virtual_time()
async def test_a_pull_fails_if_the_disk_cannot_read(tmp_path: Path) -> None:
    async with cold_broker(tmp_path) as (_, client, disk):
        disk.fail("fetch")
        answer = await client.pull(0)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "cannot read: Input/output error" in (answer.remark or "")
        disk.heal()
        disk.fail("open_to_read", number=errno.ENOENT, matching="*/commitlog/*")
        # As if a file expired meanwhile: the pull finds out itself, with the files it has open.
        assert views(await client.pull(0))[0].body == BODIES[0]


@virtual_time()
async def test_a_pull_is_answered_if_the_disk_cannot_read_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Recent messages are checked together with those that follow.
    limits = replace(STORE.limits, recent_bytes=1)
    async with cold_broker(tmp_path, replace(STORE, limits=limits)) as (_, client, disk):
        fetch = disk.fetch

        def fetch_first_part(fd: int, at: int, size: int) -> None:
            fetch(fd, at, min(size, 8192))
            raise OSError(errno.EIO, "cannot read")

        monkeypatch.setattr(disk, "fetch", fetch_first_part)
        assert views(await client.pull(0, max_msg_nums=1))[0].body == BODIES[0]
        assert (await client.pull(0)).code == ResponseCode.SYSTEM_ERROR


@virtual_time()
async def test_memory_that_keeps_nothing_does_not_stop_a_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cold_broker(tmp_path) as (_, client, disk):
        fetch = disk.fetch

        def fetch_and_drop(fd: int, at: int, size: int) -> None:
            fetch(fd, at, size)
            disk.drop_caches()

        monkeypatch.setattr(disk, "fetch", fetch_and_drop)
        assert views(await client.pull(0))[0].body == BODIES[0]
        # Of the log and of its queue, three times.
        assert disk.operations["fetch"] == 6


@virtual_time()
async def test_a_pull_waits_for_messages_after_it_waited_for_the_disk(tmp_path: Path) -> None:
    """Its queue was emptied meanwhile: it is held in the turn in which it has found that out."""
    async with cold_broker(tmp_path) as (broker, client, _):
        pull = asyncio.create_task(client.pull(0, hold_ms=10_000))
        await asyncio.sleep(0.001)
        broker.store.remove_topic("T")
        await asyncio.sleep(READ_MS / 1000 + 0.1)
        assert not pull.done()
        assert len(broker.path.arrivals) == 1
        begun_ms = now_ms()
        await client.send(b"new")
        assert [view.body for view in views(await pull)] == [b"new"]
        assert now_ms() - begun_ms < 50


@virtual_time()
async def test_a_client_that_left_while_the_disk_read_holds_no_pull(tmp_path: Path) -> None:
    async with cold_broker(tmp_path) as (broker, client, _):
        pull = asyncio.create_task(client.pull(0, hold_ms=10_000))
        await asyncio.sleep(0.001)
        broker.store.remove_topic("T")
        (await client.pool.connection(client.address)).close()
        await asyncio.sleep(READ_MS / 1000 + 0.1)
        with pytest.raises(ConnectionLost):
            await pull
        assert len(broker.path.arrivals) == 0


@virtual_time()
async def test_a_pull_waits_for_what_its_group_subscribed_to_while_the_disk_read(
    tmp_path: Path,
) -> None:
    async with cold_broker(tmp_path) as (broker, client, _):
        await client.ask(RequestCode.HEART_BEAT, body=beat("A", 1))
        waiting = client.pull(0, hold_ms=10_000, sys_flag=PULL_SUSPEND)
        pull = asyncio.create_task(waiting)
        await asyncio.sleep(0.001)
        broker.store.remove_topic("T")
        await client.ask(RequestCode.HEART_BEAT, body=beat("C", 2))
        await asyncio.sleep(READ_MS / 1000 + 0.1)
        await client.send(b"new", named={"TAGS": "C"})
        begun_ms = now_ms()
        assert [view.body for view in views(await pull)] == [b"new"]
        assert now_ms() - begun_ms < 50


@virtual_time()
async def test_a_broker_stops_while_the_disk_reads(tmp_path: Path) -> None:
    async with cold_broker(tmp_path) as (_, client, _):
        pull = asyncio.create_task(client.pull(0))
        await asyncio.sleep(0.001)
    await asyncio.wait([pull])
    assert pull.exception() is not None or views(pull.result())[0].body == BODIES[0]


async def view(client: Client, position: int) -> Command:
    return await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessage(offset=position))


async def send_back(client: Client, position: int) -> Command:
    header = SendBack(offset=position, group="g", delay_level=1, origin_topic="T")
    return await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, header)


async def query(client: Client, _position: int) -> Command:
    header = QueryMessage(topic="T", key="k0", max_num=32, begin_timestamp=0, end_timestamp=1 << 62)
    return await client.ask(RequestCode.QUERY_MESSAGE, header)


async def search_time(client: Client, _position: int) -> Command:
    header = SearchOffset(topic="T", queue_id=0, timestamp=1)
    return await client.ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, header)


async def earliest_time(client: Client, _position: int) -> Command:
    header = QueueOfTopic(topic="T", queue_id=0)
    return await client.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, header)


async def marks(client: Client, _position: int) -> Command:
    body = QueuePositions(queue_ids=[0, 0], offsets=[0, 1]).encode()
    return await client.ask(RequestCode.GET_MESSAGE_MARKS, TopicName(topic="T"), body)


async def topic_stats(client: Client, _position: int) -> Command:
    return await client.ask(RequestCode.GET_TOPIC_STATS_INFO, TopicName(topic="T"))


async def commit_two(client: Client) -> None:
    header = UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=2)
    await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header)


async def consume_stats(client: Client, _position: int) -> Command:
    await commit_two(client)
    header = ConsumeStatsOf(consumer_group="g", topic="T")
    return await client.ask(RequestCode.GET_CONSUME_STATS, header)


async def time_span(client: Client, _position: int) -> Command:
    await commit_two(client)
    header = TopicAndGroup(topic="T", group="g")
    return await client.ask(RequestCode.QUERY_CONSUME_TIME_SPAN, header)


async def runtime_info(client: Client, _position: int) -> Command:
    return await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)


async def reset(client: Client, _position: int) -> Command:
    for queue_id in range(4):
        header = UpdateConsumerOffset(
            consumer_group="g", topic="T", queue_id=queue_id, commit_offset=0
        )
        await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, header)
    wanted = ResetOffset(topic="T", group="g", timestamp=1, is_force=True)
    return await client.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, wanted)


@virtual_time()
async def test_send_backs_of_messages_on_disk_are_stored_without_further_requests(
    tmp_path: Path,
) -> None:
    async with cold_broker(tmp_path) as (broker, client, _):
        begun_ms = now_ms()
        ends = broker.store.min_offset, broker.store.last_message()
        answers = await asyncio.gather(*(send_back(client, position) for position in ends))
        assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
        assert now_ms() - begun_ms < 2 * READ_MS


LOOKUPS = (
    view,
    query,
    send_back,
    search_time,
    earliest_time,
    marks,
    topic_stats,
    consume_stats,
    time_span,
    runtime_info,
    reset,
)


@pytest.mark.parametrize("request_of", LOOKUPS, ids=lambda each: each.__name__)
def test_sends_are_answered_while_the_disk_reads_for_a_lookup(
    tmp_path: Path, request_of: Callable[[Client, int], Awaitable[Command]]
) -> None:
    @virtual_time()
    async def run() -> None:
        async with cold_broker(tmp_path) as (broker, client, _):
            await client.ask(RequestCode.HEART_BEAT, body=beat("A", 1))
            begun_ms = now_ms()
            answer = asyncio.ensure_future(request_of(client, broker.store.min_offset))
            await asyncio.sleep(0.001)
            assert (await client.send(b"meanwhile", queue_id=1)).code == ResponseCode.SUCCESS
            assert now_ms() - begun_ms < 50
            assert not answer.done()
            assert (await answer).code == ResponseCode.SUCCESS
            # One read has nearly all of them; of the index, its slot and its entries.
            assert READ_MS <= now_ms() - begun_ms <= 3 * READ_MS + 50
            # It is in memory now.
            begun_ms = now_ms()
            assert (await request_of(client, broker.store.min_offset)).code == ResponseCode.SUCCESS
            assert now_ms() - begun_ms < 50

    run()


@virtual_time()
async def test_sends_are_answered_while_the_disk_reads_for_a_search_of_the_log(
    tmp_path: Path,
) -> None:
    async with cold_broker(tmp_path) as (broker, client, disk):
        last = broker.store.last_message()
        await broker.administration.operations.delete_topic("T")
        answer = asyncio.create_task(view(client, last))
        await asyncio.sleep(READ_MS / 1000 + 0.1)
        assert disk.operations["fetch"] == 2, "of the message, and of the log before it"
        begun_ms = now_ms()
        assert (await client.send(b"meanwhile", topic="U")).code == ResponseCode.SUCCESS
        assert now_ms() - begun_ms < 50
        assert not answer.done()
        [found] = views(await answer)
        assert found.body == BODIES[-1]


@pytest.mark.parametrize(
    "request_of",
    [each for each in LOOKUPS if each is not runtime_info],
    ids=lambda each: each.__name__,
)
def test_a_lookup_fails_if_the_disk_cannot_read(
    tmp_path: Path, request_of: Callable[[Client, int], Awaitable[Command]]
) -> None:
    """A page of a mapped file that cannot be read would end the process."""

    @virtual_time()
    async def run() -> None:
        async with cold_broker(tmp_path) as (broker, client, disk):
            disk.fail("fetch")
            answer = await request_of(client, broker.store.min_offset)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert "cannot read: Input/output error" in (answer.remark or "")

    run()


@virtual_time()
async def test_a_disk_that_cannot_read_hides_nothing_else_about_a_broker(tmp_path: Path) -> None:
    async with cold_broker(tmp_path) as (_, client, disk):
        disk.fail("fetch")
        answer = await runtime_info(client, 0)
        table = KeyValues.decode(whole_body(answer)).table
        assert table["earliestMessageTimeStamp"] == "-1"
        assert table["commitLogMinOffset"] == "0"
