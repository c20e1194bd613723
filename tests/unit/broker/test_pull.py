from __future__ import annotations

import asyncio
import dataclasses
import gc
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from brokers import SMALL_STORE, client_of, pulled, running_broker, views
from turbopump.broker.arrivals import HeldPull, Holder
from turbopump.broker.config import AccessConfig, LimitsConfig, LongPollingConfig
from turbopump.broker.pull import Held, Pull
from turbopump.client.subscriptions import subscription
from turbopump.store.consume_queue import ConsumeQueue
from turbopump.store.outcomes import ReadOutcome
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time, wait_until
from turbopump.wire.bodies import ConsumerData, GroupConfig, Heartbeat, MessageModel, TopicConfig
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.headers import (
    QueryMessage,
    QueueEndsOf,
    QueueOfTopic,
    SearchOffset,
    TopicName,
)
from turbopump.wire.sysflag import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND


@virtual_time()
async def test_outcomes_and_corrected_offsets(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        for tag in ("a", "a", "b"):
            await client.send(named={"TAGS": tag})
        cases: list[tuple[dict[str, Any], int, str, int]] = [
            ({"offset": 0}, 0, "FOUND", 3),
            ({"offset": 1}, 0, "FOUND", 3),
            ({"offset": 0, "tags": "b"}, 0, "FOUND", 3),
            ({"offset": 0, "tags": "zz"}, 20, "NO_MATCHED_MESSAGE", 3),
            ({"offset": 3}, 19, "OFFSET_OVERFLOW_ONE", 3),
            ({"offset": 9}, 21, "OFFSET_OVERFLOW_BADLY", 3),
            ({"offset": -1}, 21, "OFFSET_TOO_SMALL", 0),
            ({"offset": 0, "queue_id": 1}, 19, "NO_MESSAGE_IN_QUEUE", 0),
            ({"offset": 5, "queue_id": 1}, 21, "NO_MESSAGE_IN_QUEUE", 0),
        ]
        for fields, code, remark, following in cases:
            answer = await client.pull(**fields)
            assert (answer.code, answer.remark) == (code, remark), fields
            assert pulled(answer).next_begin_offset == following, fields
        found = pulled(await client.pull(0))
        assert (found.min_offset, found.max_offset, found.suggest_which_broker_id) == (0, 3, 0)


@virtual_time()
async def test_at_most_32_messages(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        for _ in range(40):
            await client.send()
        assert len(views(await client.pull(0, max_msg_nums=1000))) == 32
        assert len(views(await client.pull(0, max_msg_nums=5))) == 5


@pytest.mark.parametrize("recent_bytes", [1, 1 << 30])
@pytest.mark.parametrize(
    ("most", "usual", "count"),
    [
        (LimitsConfig(), {}, 40),
        (LimitsConfig(bulk_count_max=35), {}, 35),
        # Of a hundred and some bytes each.
        (LimitsConfig(bulk_bytes_max=500), {"memory_bytes_max": 1, "disk_bytes_max": 1}, 4),
        (LimitsConfig(bulk_count_max=5), {"memory_count_max": 20, "disk_count_max": 20}, 20),
    ],
)
def test_clients_that_request_large_answers_get_more(
    tmp_path: Path, most: LimitsConfig, usual: dict[str, int], count: int, recent_bytes: int
) -> None:
    reading = dataclasses.replace(SMALL_STORE.limits, recent_bytes=recent_bytes, **usual)
    store = dataclasses.replace(SMALL_STORE, limits=reading)

    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path, store=store, limits=most) as (_, client):
            for _ in range(40):
                await client.send()
            found = views(await client.pull(0, max_msg_nums=1000, bulk_pull=True))
            assert [view.queue_offset for view in found] == list(range(count))
            assert len(views(await client.pull(0, max_msg_nums=1, bulk_pull=True))) == 1
            for plainly in (None, False):
                others = views(await client.pull(0, max_msg_nums=1000, bulk_pull=plainly))
                assert len(others) < 40

    run()


@virtual_time()
async def test_limits_of_large_answers_change_while_the_broker_runs(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        for _ in range(60):
            await client.send()
        assert len(views(await client.pull(0, max_msg_nums=1000, bulk_pull=True))) == 60
        await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"maxTransferCountOnBulkPull=50")
        assert len(views(await client.pull(0, max_msg_nums=1000, bulk_pull=True))) == 50


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "Unknown"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"queue_id": 4}, ResponseCode.SYSTEM_ERROR),
        ({"queue_id": -1}, ResponseCode.SYSTEM_ERROR),
        ({"tags": "||"}, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ({"tags": "x" * 16_385}, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ({"expression_type": "SQL92", "tags": "a ="}, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ({"expression_type": "SQL92", "tags": ""}, ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ({"sys_flag": 0}, ResponseCode.SUBSCRIPTION_NOT_EXIST),
        ({"consumer_group": "off"}, ResponseCode.NO_PERMISSION),
        ({"topic": "WriteOnly"}, ResponseCode.NO_PERMISSION),
    ],
)
def test_rejected_pulls(tmp_path: Path, fields: dict[str, Any], code: ResponseCode) -> None:
    @virtual_time()
    async def run() -> None:
        async with running_broker(tmp_path) as (broker, client):
            await client.send()
            await broker.state.groups.update(GroupConfig(group_name="off", consume_enable=False))
            await broker.state.topics.update(TopicConfig(topic_name="WriteOnly", perm=2))
            answer = await client.pull(**fields)
            assert answer.code == code, answer
            assert answer.remark

    run()


@virtual_time()
async def test_a_broker_that_must_not_be_read(tmp_path: Path) -> None:
    async with running_broker(tmp_path, access=AccessConfig(permission=2)) as (_, client):
        assert (await client.pull(0)).code == ResponseCode.NO_PERMISSION


@virtual_time()
async def test_a_held_pull_is_answered_when_a_message_arrives(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send(b"first")
        loop = virtual_loop()
        held = asyncio.create_task(client.pull(1, hold_ms=15_000))
        await asyncio.sleep(5)
        assert not held.done()
        assert len(broker.path.arrivals) == 1
        sent_s = loop.time()
        await client.send(b"second")
        answer = await held
        assert [view.body for view in views(answer)] == [b"second"]
        assert loop.time() - sent_s < 0.01
        assert len(broker.path.arrivals) == 0


@virtual_time()
async def test_a_pull_of_missing_messages_is_soon_answered_with_the_next_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dataclasses.replace(SMALL_STORE, queue_segment_units=10)
    async with running_broker(tmp_path, store=store) as (_, client):
        for _ in range(25):
            await client.send()
        waits = asyncio.create_task(client.pull(25, tags="none", hold_ms=60_000))
        await asyncio.sleep(1)
        await client.send()
        await asyncio.sleep(20)
        monkeypatch.setattr(ConsumeQueue, "_read", lambda *_: b"")
        for offset, following in ((0, 10), (10, 20)):
            started_s = virtual_loop().time()
            answer = await client.pull(offset, hold_ms=15_000)
            assert (answer.code, answer.remark) == (19, "OFFSET_FOUND_NULL")
            assert pulled(answer).next_begin_offset == following
            assert 0.1 < virtual_loop().time() - started_s < 5.1
        assert not waits.done(), "a pull that waits for new messages is not affected"
        monkeypatch.undo()


@virtual_time()
async def test_held_pulls_are_swept_after_an_arrival_until_a_sweep_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps: list[float] = []

    def sweep(_: object) -> None:
        sweeps.append(virtual_loop().time())
        if len(sweeps) < 3:
            raise OSError("the disk is slow")

    async with running_broker(tmp_path) as (broker, client):
        await client.send()
        await asyncio.sleep(10)
        held = asyncio.create_task(client.pull(1, hold_ms=600_000))
        await asyncio.sleep(10)
        monkeypatch.setattr(broker.path.arrivals, "sweep", sweep)
        await asyncio.sleep(60)
        assert not sweeps
        await client.send(queue_id=1)
        await asyncio.sleep(60)
        assert len(sweeps) == 3, "retried after failures, and then no more"
        held.cancel()


@virtual_time()
async def test_only_the_pull_that_matches_the_message_wakes(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send()
        red = asyncio.create_task(client.pull(1, tags="red", hold_ms=15_000))
        blue = asyncio.create_task(client.pull(1, tags="blue", hold_ms=15_000))
        await asyncio.sleep(0.1)
        await client.send(b"b", named={"TAGS": "blue"})
        assert [view.body for view in views(await blue)] == [b"b"]
        assert not red.done()
        await asyncio.sleep(14)
        assert not red.done(), "a sweep does not wake it either"
        red_answer = await red
        assert red_answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY, (
            "its deadline has passed, although nothing matched"
        )
        assert pulled(red_answer).next_begin_offset == 2


@virtual_time()
async def test_each_of_many_held_pulls_gets_its_matches_of_one_burst(tmp_path: Path) -> None:
    tags = [f"t{number}" for number in range(40)]
    async with running_broker(tmp_path) as (broker, client):
        await client.send()
        held = [asyncio.create_task(client.pull(1, tags=tag, hold_ms=15_000)) for tag in tags]
        await asyncio.sleep(0.1)
        # Sent together, so they are stored and dispatched in parts.
        wanted = [*tags[::2], "nobody"]
        await asyncio.gather(*(client.send(tag.encode(), named={"TAGS": tag}) for tag in wanted))
        for tag, pull in zip(tags[::2], held[::2], strict=True):
            assert [view.body for view in views(await pull)] == [tag.encode()]
        assert not any(pull.done() for pull in held[1::2])
        assert len(broker.path.arrivals) == len(held) // 2
        await asyncio.gather(*held)


@virtual_time()
async def test_no_message_arrives(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send()
        started_s = virtual_loop().time()
        answer = await client.pull(1, hold_ms=15_000)
        assert answer.code == ResponseCode.PULL_NOT_FOUND
        assert pulled(answer).next_begin_offset == 1
        assert 15 <= virtual_loop().time() - started_s < 15.2


@virtual_time()
async def test_short_polling(tmp_path: Path) -> None:
    polling = LongPollingConfig(enabled=False, short_hold_ms=1000)
    async with running_broker(tmp_path, long_polling=polling) as (_, client):
        await client.send()
        started_s = virtual_loop().time()
        assert (await client.pull(1, hold_ms=15_000)).code == ResponseCode.PULL_NOT_FOUND
        assert 1 <= virtual_loop().time() - started_s < 1.2


@virtual_time()
async def test_no_pull_is_held_longer_than_the_limit(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send()
        started_s = virtual_loop().time()
        assert (await client.pull(1, hold_ms=3_600_000)).code == ResponseCode.PULL_NOT_FOUND
        assert 60 <= virtual_loop().time() - started_s < 60.2
        await client.ask(RequestCode.UPDATE_BROKER_CONFIG, body=b"longPollingTimeMax=1000")
        started_s = virtual_loop().time()
        assert (await client.pull(1, hold_ms=3_600_000)).code == ResponseCode.PULL_NOT_FOUND
        assert 1 <= virtual_loop().time() - started_s < 1.2


@pytest.mark.parametrize(
    ("limit", "named", "holders"),
    [
        (LongPollingConfig(held_max=2), "this broker: pullThreadPoolQueueCapacity", "0g 1h"),
        (
            LongPollingConfig(connection_held_max=2),
            "this connection: longPollsPerConnectionMax",
            "1g 1h",
        ),
        (LongPollingConfig(group_held_max=2), "group g: longPollsPerGroupMax", "1g 0g"),
        (LongPollingConfig(host_held_max=2), "host 10.0.0.8: longPollsPerHostMax", "1g 2h"),
    ],
)
def test_pulls_beyond_a_limit_are_refused_as_busy(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    limit: LongPollingConfig,
    named: str,
    holders: str,
) -> None:
    @virtual_time()
    async def run() -> None:
        network = MemoryNetwork()
        async with (
            running_broker(tmp_path, network, long_polling=limit) as (broker, first),
            client_of(network, broker.address, "10.0.0.8") as second,
            client_of(network, broker.address, "10.0.0.8") as third,
            asyncio.TaskGroup() as tasks,
        ):
            clients = (first, second, third)
            await first.send()
            for holder in holders.split():
                client, group = clients[int(holder[0])], holder[1]
                pull = client.pull(1, hold_ms=15_000, consumer_group=group)
                tasks.create_task(pull)
            await asyncio.sleep(0.1)
            assert len(broker.path.arrivals) == 2
            for count in range(1, 4):
                refused = await second.pull(1, hold_ms=15_000)
                assert refused.code == ResponseCode.SYSTEM_BUSY
                assert f"too many long polls of {named} is 2" in (refused.remark or "")
                assert broker.path.load.pulls_refused == count
            whole = QueueEndsOf(topic="T", consumer_group="g", since=1 << 40, wait_ms=15_000)
            refused = await second.ask(RequestCode.GET_QUEUE_ENDS, whole)
            assert refused.code == ResponseCode.SYSTEM_BUSY
            assert broker.path.load.pulls_refused == 4
            assert caplog.text.count("too many long polls") == 1, "logged at a limited rate"
            assert (await second.pull(0, hold_ms=15_000)).code == ResponseCode.SUCCESS
            assert (await second.pull(1)).code == ResponseCode.PULL_NOT_FOUND
            if limit.held_max > 2:
                tasks.create_task(first.pull(1, hold_ms=15_000, consumer_group="other"))
                await asyncio.sleep(0.1)
                assert len(broker.path.arrivals) == 3, "others are not affected"
            await asyncio.sleep(60)
            await asyncio.gather(*(second.pull(1, hold_ms=1000) for _ in range(3)))
            assert caplog.text.count("too many long polls") == 2

    run()


@pytest.mark.parametrize(
    "filter_of",
    [
        {"tags": "||".join(map(str, range(100, 260)))},
        {"tags": f"a = '{'x' * 1300}'", "expression_type": "SQL92"},
    ],
)
def test_large_filters_count_as_several_pulls(tmp_path: Path, filter_of: dict[str, Any]) -> None:
    @virtual_time()
    async def run() -> None:
        polling = LongPollingConfig(connection_held_max=40)
        async with running_broker(tmp_path, long_polling=polling) as (broker, client):
            await client.send()
            for _ in range(2):
                pulls = [client.pull(1, hold_ms=15_000, **filter_of) for _ in range(10)]
                codes = Counter(answer.code for answer in await asyncio.gather(*pulls))
                assert codes == {ResponseCode.PULL_NOT_FOUND: 2, ResponseCode.SYSTEM_BUSY: 8}
                assert len(broker.path.arrivals) == 0

    run()


@virtual_time()
async def test_nothing_is_left_of_pulls_whose_client_has_left(tmp_path: Path) -> None:
    network = MemoryNetwork()

    def objects() -> Counter[str]:
        kinds = (Held, HeldPull, Holder, Pull)
        return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)

    gc.collect()
    gc.disable()
    try:
        async with running_broker(tmp_path, network) as (broker, client):
            await client.send()
            before = objects()
            async with client_of(network, broker.address, "10.0.0.8") as other:
                pulls = [
                    asyncio.create_task(
                        other.pull(1, hold_ms=60_000 + 50 * number, tags=f"{number}")
                    )
                    for number in range(100)
                ]
                await asyncio.sleep(0.1)
                assert len(broker.path.arrivals) == 100
                assert objects()["HeldPull"] == 100
                network.cut("10.0.0.8")
                await asyncio.gather(*pulls, return_exceptions=True)
            await asyncio.sleep(0.1)
            assert objects() - before == Counter()
    finally:
        gc.enable()


@virtual_time()
async def test_requests_that_wait_for_a_topic_keep_no_body(tmp_path: Path) -> None:
    sent = b"unread" * 10_000

    def kept() -> int:
        # The client keeps its own until it is answered; bytes are not known to the collector.
        return tracemalloc.get_traced_memory()[0]

    async with running_broker(tmp_path) as (broker, client):
        await client.send()
        header = QueueEndsOf(topic="T", consumer_group="g", since=1 << 40, wait_ms=1000)
        tracemalloc.start()
        try:
            waiting = [
                asyncio.create_task(client.ask(RequestCode.GET_QUEUE_ENDS, header, sent))
                for _ in range(10)
            ]
            await wait_until(lambda: len(broker.path.arrivals) == 10)
            assert kept() < 3 * len(sent)
        finally:
            tracemalloc.stop()
        assert {answer.code for answer in await asyncio.gather(*waiting)} == {ResponseCode.SUCCESS}


@virtual_time()
async def test_a_changed_subscription_releases_only_pulls_that_use_it(tmp_path: Path) -> None:
    def beat(group: str, version: int) -> bytes:
        topics = [subscription(topic, f"v{version}", version) for topic in ("T", "U")]
        data = ConsumerData(
            group_name=group,
            message_model=MessageModel.CLUSTERING,
            subscription_data_set=topics,
        )
        return Heartbeat(client_id=group, consumer_data_set=[data]).encode()

    async with running_broker(tmp_path) as (broker, client):
        for topic in ("T", "U"):
            await client.send(topic=topic)
        for group in ("g", "h"):
            await client.ask(RequestCode.HEART_BEAT, body=beat(group, 1))
        held = {
            (group, topic, queue_id, flag): asyncio.create_task(
                client.pull(
                    int(queue_id == 0),
                    topic,
                    queue_id,
                    consumer_group=group,
                    sys_flag=flag,
                    suspend_timeout_millis=15_000,
                )
            )
            for group in ("g", "h")
            for topic in ("T", "U")
            for queue_id in range(4)
            for flag in (PULL_SUSPEND, PULL_SUSPEND | PULL_SUBSCRIPTION)
        }
        await asyncio.sleep(0.1)
        assert len(broker.path.arrivals) == len(held)
        await client.ask(RequestCode.HEART_BEAT, body=beat("g", 2))
        await asyncio.sleep(0.1)
        released = {key for key, pull in held.items() if pull.done()}
        assert released == {key for key in held if key[0] == "g" and key[3] == PULL_SUSPEND}
        await asyncio.gather(*held.values())


@virtual_time()
async def test_pulls_of_a_disconnected_client_are_forgotten(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (broker, client):
        await client.send()
        async with client_of(network, broker.address, "10.0.0.8") as other:
            held = asyncio.create_task(other.pull(1, hold_ms=15_000))
            await asyncio.sleep(0.1)
            assert len(broker.path.arrivals) == 1
            network.cut("10.0.0.8")
            assert isinstance(await asyncio.gather(held, return_exceptions=True), list)
            await asyncio.sleep(0.1)
            assert len(broker.path.arrivals) == 0


@virtual_time()
async def test_a_closing_broker_answers_held_pulls(tmp_path: Path) -> None:
    network = MemoryNetwork()
    async with running_broker(tmp_path, network) as (broker, client):
        await client.send()
        held = asyncio.create_task(client.pull(1, hold_ms=15_000))
        await asyncio.sleep(0.1)
        started_s = virtual_loop().time()
        await broker.close()
        assert (await held).code == ResponseCode.PULL_NOT_FOUND
        assert virtual_loop().time() - started_s < 2


@virtual_time()
async def test_the_committed_offset_travels_with_the_pull(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send()
        flags = PULL_SUBSCRIPTION | PULL_COMMIT_OFFSET
        await client.pull(1, sys_flag=flags, commit_offset=1)
        assert broker.state.offsets.find("g", "T", 0) == 1


@virtual_time()
async def test_an_impossible_offset_is_recorded_for_operators(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send()
        await client.pull(99)
        [event] = await client.messages("OFFSET_MOVED_EVENT")
        assert event.tags == "g"
        assert b'"offsetNew":1' in event.body
        assert b'"offsetRequest":99' in event.body


@virtual_time()
async def test_limits_of_queues_and_search_by_time(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        for _ in range(3):
            await client.send()
            await asyncio.sleep(10)
        times = [message.store_timestamp_ms for message in await client.messages()]
        queue = QueueOfTopic(topic="T", queue_id=0)
        assert await client.offset(RequestCode.GET_MAX_OFFSET, queue) == 3
        assert await client.offset(RequestCode.GET_MIN_OFFSET, queue) == 0
        unknown = QueueOfTopic(topic="Unknown", queue_id=7)
        assert await client.offset(RequestCode.GET_MAX_OFFSET, unknown) == 0
        for place, time_ms in enumerate(times):
            header = SearchOffset(topic="T", queue_id=0, timestamp=time_ms)
            code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
            assert await client.offset(code, header) == place
        late = SearchOffset(topic="T", queue_id=0, timestamp=times[-1] + 10**9)
        assert await client.offset(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, late) == 2
        earliest = await client.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, queue)
        assert earliest.ext_fields == {"timestamp": str(times[0])}
        empty = await client.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, unknown)
        assert empty.ext_fields == {"timestamp": "-1"}


@virtual_time()
async def test_a_held_pull_reads_only_what_is_still_permitted(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send()
        topic = broker.state.topics.find("T")
        assert topic is not None
        forbidding: list[Callable[[], Awaitable[None]]] = [
            lambda: broker.state.topics.update(replace(topic, perm=2)),
            lambda: broker.state.groups.update(GroupConfig(group_name="g", consume_enable=False)),
        ]
        for forbid in forbidding:
            held = asyncio.create_task(client.pull(broker.queue_end("T", 0), hold_ms=15_000))
            await asyncio.sleep(0.1)
            await forbid()
            await client.send(b"secret")
            answer = await held
            assert answer.code == ResponseCode.NO_PERMISSION
            assert whole_body(answer) == b""
            await broker.state.topics.update(topic)


@virtual_time()
async def test_a_held_pull_that_cannot_be_served_gets_the_same_error_as_any_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send()

        async def errors(prepare: Callable[[], None]) -> tuple[Command, Command]:
            end = broker.queue_end("T", 0)
            held = asyncio.create_task(client.pull(end, hold_ms=15_000))
            await asyncio.sleep(0.1)
            prepare()
            await client.send(bytes(5000))
            return await held, await client.pull(end)

        [connection] = broker.connections
        limits = dataclasses.replace(connection._limits, frame_bytes_max=4000)
        for answer in await errors(lambda: monkeypatch.setattr(connection, "_limits", limits)):
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert "a frame must be at most 4000 bytes, got" in (answer.remark or "")

        def fail(*_: object) -> ReadOutcome:
            raise OSError("the disk is gone")

        for answer in await errors(
            lambda: monkeypatch.setattr(broker.store, "read_from_memory", fail)
        ):
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert answer.remark == "OSError: the disk is gone"


@virtual_time()
async def test_pulls_of_a_deleted_topic_are_answered_soon(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        await client.send()
        held = asyncio.create_task(client.pull(1, hold_ms=600_000))
        await asyncio.sleep(0.1)
        started_s = virtual_loop().time()
        await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, TopicName(topic="T"))
        assert (await held).code == ResponseCode.TOPIC_NOT_EXIST
        assert virtual_loop().time() - started_s < 6


@virtual_time()
async def test_a_pull_commits_no_impossible_offset(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send()
        flags = PULL_SUBSCRIPTION | PULL_COMMIT_OFFSET
        for impossible in (-7, 2, 10**15):
            await client.pull(1, sys_flag=flags, commit_offset=impossible)
            assert broker.state.offsets.find("g", "T", 0) is None
        await client.pull(1, sys_flag=flags, commit_offset=1)
        assert broker.state.offsets.find("g", "T", 0) == 1


@virtual_time()
async def test_a_query_by_key_returns_what_fits_into_a_frame(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        for _ in range(12):
            await client.send(b"x" * 1_000_000, named={"KEYS": "k"})
        header = QueryMessage(
            topic="T", key="k", max_num=64, begin_timestamp=0, end_timestamp=2**62
        )
        answer = await client.ask(RequestCode.QUERY_MESSAGE, header)
        assert answer.code == ResponseCode.SUCCESS
        assert len(views(answer)) == 8
