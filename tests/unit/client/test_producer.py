"""Sending: what arrives, where, how often it is retried, and what is rejected."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from clusters import BROKERS, Cluster, Recorder, cluster
from turbopump.client.calls import SendStatus
from turbopump.client.outgoing import MessageRules, Outgoing
from turbopump.client.producer import Producer
from turbopump.client.producer_config import ProducerConfig
from turbopump.client.selectors import by_chance, by_hash
from turbopump.client.send_hooks import SendReceipt
from turbopump.client.session import Session
from turbopump.errors import (
    ConnectFailed,
    InvalidArgument,
    NetworkError,
    NoRoute,
    NotRunning,
    RemoteError,
    RequestTimeout,
)
from turbopump.message import Message, MessageQueue, QueueOffset
from turbopump.store.outcomes import Found
from turbopump.testing import virtual_loop, virtual_time
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, as_command
from turbopump.wire.record import MessageView, decode_records

SEND = RequestCode.SEND_MESSAGE_V2


async def stored(world: Cluster, topic: str = "T") -> list[MessageView]:
    """Return all messages of a topic, queue by queue."""
    found: list[MessageView] = []
    for broker in world.brokers.values():
        for queue_id in range(4):
            read = broker.store.read(topic, queue_id, QueueOffset(0), 1000)
            if isinstance(read, Found):
                found += decode_records(b"".join(read.messages))
    return found


@virtual_time()
async def test_a_message_arrives_with_all_its_fields(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, Producer("pg", session=world.session()) as producer:
        message = Message(
            "T", b"hello", tags="created", keys=["42", "43"], properties={"who": "me"}, flag=7
        )
        receipt = await producer.send(message)
        assert receipt.status is SendStatus.OK
        assert receipt.queue.topic == "T"
        assert receipt.queue.broker == "a"
        assert receipt.queue_offset == 0
        (view,) = await stored(world)
        assert view.body == b"hello"
        assert (view.tags, view.keys, view.flag) == ("created", ["42", "43"], 7)
        assert view.properties["who"] == "me"
        assert view.message_id == receipt.message_id
        assert view.offset_id == receipt.offset_id


@virtual_time()
async def test_queues_take_turns_over_all_brokers(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, BROKERS) as world,
        Producer("pg", session=world.session()) as producer,
    ):
        await producer.send(Message("T", b"makes the topic"))
        receipts = [await producer.send(Message("T", b"x")) for _ in range(16)]
        assert len({receipt.queue for receipt in receipts}) == 8


@virtual_time()
async def test_a_chosen_queue_and_selectors(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, Producer("pg", session=world.session()) as producer:
        queue = MessageQueue("T", "a", 2)
        await producer.send(Message("T", b"makes the topic"))
        assert (await producer.send(Message("T", b"x"), to=queue)).queue == queue
        by_key = {(await producer.send(Message("T", b"x"), to=by_hash("k"))).queue for _ in "abc"}
        assert len(by_key) == 1
        last = await producer.send(Message("T", b"x"), to=lambda queues: queues[-1])
        assert last.queue == (await producer.queues("T"))[-1]
        chance = by_chance(Random(3))
        anywhere = {(await producer.send(Message("T", b"x"), to=chance)).queue for _ in range(40)}
        assert len(anywhere) == 4


def test_hashes_choose_as_java_does() -> None:
    queues = [MessageQueue("T", "a", number) for number in range(7)]
    assert by_hash("hello")(queues).queue_id == 99162322 % 7
    assert by_hash(-5)(queues).queue_id == 5
    assert by_hash(2**40)(queues).queue_id == 256 % 7
    assert by_hash(-(2**31))(queues).queue_id == 2**31 % 7


@virtual_time()
async def test_a_batch_is_stored_in_one_queue_in_order(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, Producer("pg", session=world.session()) as producer:
        messages = [Message("T", b"%d" % n, keys=[str(n)]) for n in range(5)]
        receipt = await producer.send_batch(messages)
        views = await stored(world)
        assert [view.body for view in views] == [b"0", b"1", b"2", b"3", b"4"]
        assert {view.queue_id for view in views} == {receipt.queue.queue_id}
        assert receipt.message_id.split(",") == [view.message_id for view in views]
        assert receipt.offset_id.split(",") == [view.offset_id for view in views]


@virtual_time()
async def test_large_bodies_are_compressed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, Producer("pg", session=world.session()) as producer:
        await producer.send(Message("T", b"x" * 4095))
        await producer.send(Message("T", b"y" * 4096))
        plain, compressed = sorted(await stored(world), key=lambda view: view.body)
        assert (plain.sys_flag, plain.body) == (0, b"x" * 4095)
        assert (compressed.sys_flag, compressed.body) == (0x301, b"y" * 4096)
        assert len(compressed.stored_body) < 100


@virtual_time()
async def test_oneway_arrives_without_an_answer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, Producer("pg", session=world.session()) as producer:
        await producer.send_oneway(Message("T", b"hello"))
        await asyncio.sleep(1)
        assert [view.body for view in await stored(world)] == [b"hello"]


@virtual_time()
async def test_submitted_messages_run_concurrently_and_each_callback_runs_once(
    tmp_path: Path,
) -> None:
    heard: list[SendReceipt | Exception | None] = []
    config = ProducerConfig(in_flight_max=10)
    async with (
        cluster(tmp_path) as world,
        Producer("pg", session=world.session(), config=config) as producer,
    ):
        start_ms = world.clock.monotonic_ms()
        promises = [
            await producer.submit(
                Message("T", b"%d" % n), on_sent=lambda receipt, error: heard.append(error)
            )
            for n in range(100)
        ]
        receipts = await asyncio.gather(*promises)
        assert world.clock.monotonic_ms() - start_ms < 100
        assert len({receipt.message_id for receipt in receipts}) == 100
        assert heard == [None] * 100
        assert len(await stored(world)) == 100


@virtual_time()
async def test_submitted_messages_of_a_queue_are_stored_in_their_order(tmp_path: Path) -> None:
    """Including those submitted just when the route of their topic is found."""
    promises: list[asyncio.Future[SendReceipt]] = []
    later: list[asyncio.Task[None]] = []

    async def submit(count: int) -> None:
        for _ in range(count):
            message = Message("T", b"%d" % len(promises))
            promises.append(await producer.submit(message, to=by_hash("customer")))
            # One in each loop iteration.
            await asyncio.sleep(0)

    class AtRoutes(Recorder):
        def after_response(self, address: str, request: Command, response: Command) -> None:
            if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
                later.append(asyncio.create_task(submit(20)))

    async with cluster(tmp_path) as world:
        session = world.session(hooks=[AtRoutes()])
        async with Producer("pg", session=session) as producer:
            await submit(20)
            await asyncio.gather(*promises)
            await asyncio.gather(*later)
            receipts = await asyncio.gather(*promises)
    assert len(receipts) > 40
    assert [receipt.queue_offset for receipt in receipts] == list(range(len(receipts)))


@virtual_time()
async def test_a_rejected_submitted_message_calls_its_callback(tmp_path: Path) -> None:
    heard: list[Exception | None] = []
    async with cluster(tmp_path) as world, Producer("pg", session=world.session()) as producer:
        promise = await producer.submit(
            Message("T", b""), on_sent=lambda receipt, error: heard.append(error)
        )
        with pytest.raises(InvalidArgument, match="body must be 1–"):
            await promise
    assert [type(error) for error in heard] == [InvalidArgument]


@virtual_time()
async def test_closing_waits_for_submitted_messages(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        async with Producer("pg", session=world.session()) as producer:
            promises = [await producer.submit(Message("T", b"x")) for _ in range(20)]
        assert all(promise.done() for promise in promises)
        assert len(await stored(world)) == 20
        with pytest.raises(NotRunning, match="not running"):
            await producer.send(Message("T", b"x"))


@virtual_time()
async def test_a_dead_broker_is_skipped(tmp_path: Path) -> None:
    recorder = Recorder()
    async with (
        cluster(tmp_path, BROKERS) as world,
        Producer("pg", session=world.session(hooks=[recorder])) as producer,
    ):
        await producer.send(Message("T", b"makes the topic"))
        await producer.send(Message("T", b"makes the topic"))
        world.network.refuse("10.0.0.1")
        world.network.cut("10.0.0.1", "10.0.1.1")
        receipts = [await producer.send(Message("T", b"x")) for _ in range(10)]
        assert {receipt.queue.broker for receipt in receipts} == {"b"}


def refusing(code: int, times: int = 1 << 30) -> Any:
    """Return a hook function that fails sends with a response code."""
    left = [times]

    def refuse(address: str, command: Command) -> None:
        if command.code == SEND and left[0]:
            left[0] -= 1
            raise RemoteError(code, "refused")

    return refuse


@pytest.mark.parametrize(
    ("code", "tries"),
    [
        (ResponseCode.SYSTEM_ERROR, 3),
        (ResponseCode.NO_PERMISSION, 3),
        (ResponseCode.TOPIC_NOT_EXIST, 3),
        (204, 3),
        (205, 3),
        (ResponseCode.MESSAGE_ILLEGAL, 1),
    ],
)
@virtual_time()
async def test_which_responses_are_retried(tmp_path: Path, code: int, tries: int) -> None:
    recorder = Recorder(refuse=refusing(code))
    async with (
        cluster(tmp_path, BROKERS) as world,
        Producer("pg", session=world.session(hooks=[recorder])) as producer,
    ):
        with pytest.raises(RemoteError) as caught:
            await producer.send(Message("T", b"x"))
        assert caught.value.code == code
        addresses = recorder.addresses_of(SEND)
        assert len(addresses) == tries
        assert all(one != other for one, other in itertools.pairwise(addresses))


@virtual_time()
async def test_a_chosen_queue_is_tried_once(tmp_path: Path) -> None:
    recorder = Recorder(refuse=refusing(ResponseCode.SYSTEM_ERROR))
    async with (
        cluster(tmp_path) as world,
        Producer("pg", session=world.session(hooks=[recorder])) as producer,
    ):
        with pytest.raises(RemoteError):
            await producer.send(Message("T", b"x"), to=by_hash("k"))
        assert len(recorder.of(SEND)) == 1


REFUSALS = [ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, 215]


@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("to", [None, MessageQueue("T", "a", 1), by_hash("k")])
@virtual_time()
async def test_a_busy_broker_is_retried_with_backoff(tmp_path: Path, code: int, to: Any) -> None:
    recorder = Recorder(refuse=refusing(code, times=5))
    config = ProducerConfig(retries_max=0)
    async with (
        cluster(tmp_path) as world,
        Producer("pg", session=world.session(hooks=[recorder]), config=config) as producer,
    ):
        start_ms = world.clock.monotonic_ms()
        await producer.send(Message("T", b"x"), to=to)
        elapsed_ms = world.clock.monotonic_ms() - start_ms
        assert (20 + 40 + 80 + 160 + 320) / 2 <= elapsed_ms <= 700
        assert len(recorder.of(SEND)) == 6
        assert len(await stored(world)) == 1


@pytest.mark.parametrize("code", REFUSALS)
@virtual_time()
async def test_a_broker_that_stays_busy_is_reported_at_the_deadline(
    tmp_path: Path, code: int
) -> None:
    recorder = Recorder(refuse=refusing(code))
    async with (
        cluster(tmp_path) as world,
        Producer("pg", session=world.session(hooks=[recorder])) as producer,
    ):
        start_ms = world.clock.monotonic_ms()
        with pytest.raises(RemoteError) as caught:
            await producer.send(Message("T", b"x"))
        assert caught.value.code == code
        assert 2400 < world.clock.monotonic_ms() - start_ms <= 3000
        assert 7 <= len(recorder.of(SEND)) <= 20


@virtual_time()
async def test_another_broker_is_tried_without_a_pause_when_one_is_busy(tmp_path: Path) -> None:
    def refuse(address: str, command: Command) -> None:
        if command.code == SEND and address.startswith(("10.0.0.1:", "10.0.0.3:")):
            raise RemoteError(ResponseCode.SYSTEM_BUSY, "[TIMEOUT_CLEAN_QUEUE]broker busy")

    async with (
        cluster(tmp_path, ("a", "b", "c")) as world,
        Producer("pg", session=world.session(hooks=[Recorder(refuse=refuse)])) as producer,
    ):
        start_ms = world.clock.monotonic_ms()
        receipts = [await producer.send(Message("T", b"x")) for _ in range(10)]
        assert {receipt.queue.broker for receipt in receipts} == {"b"}
        assert world.clock.monotonic_ms() - start_ms < 20


@virtual_time()
async def test_brokers_that_are_slow_and_busy_are_retried_after_a_pause(tmp_path: Path) -> None:
    recorder = Recorder(refuse=refusing(ResponseCode.SYSTEM_BUSY))
    config = ProducerConfig(avoid_slow_brokers=True)
    async with (
        cluster(tmp_path, BROKERS) as world,
        Producer("pg", session=world.session(hooks=[recorder]), config=config) as producer,
    ):
        with pytest.raises(RemoteError, match="code 2"):
            await producer.send(Message("T", b"x"))
        assert len(recorder.of(SEND)) <= 40


@virtual_time()
async def test_a_send_that_does_not_wait_for_brokers_reports_busy_immediately(
    tmp_path: Path,
) -> None:
    recorder = Recorder(refuse=refusing(ResponseCode.SYSTEM_BUSY))
    config = ProducerConfig(wait_for_brokers=False)
    async with (
        cluster(tmp_path) as world,
        Producer("pg", session=world.session(hooks=[recorder]), config=config) as producer,
    ):
        with pytest.raises(RemoteError, match="code 2"):
            await producer.send(Message("T", b"x"))
        assert len(recorder.of(SEND)) == 1


@pytest.mark.parametrize("is_killed", [False, True])
@virtual_time()
async def test_sends_wait_for_their_only_broker_while_it_restarts(
    tmp_path: Path, is_killed: bool
) -> None:
    async with cluster(tmp_path) as world, Producer("pg", session=world.session()) as producer:
        queue = (await producer.send(Message("T", b"0"))).queue
        await (world.crash() if is_killed else world.stop_broker())
        # Long enough that the name server no longer knows the topic or the broker.
        await asyncio.sleep(150)
        sends: list[asyncio.Future[Any]] = [
            asyncio.create_task(producer.send(Message("T", b"1"))),
            asyncio.create_task(producer.send(Message("T", b"2"), to=queue)),
            asyncio.create_task(producer.send(Message("T", b"3"), to=by_hash("k"))),
            asyncio.create_task(producer.send_batch([Message("T", b"4"), Message("T", b"5")])),
            asyncio.create_task(producer.send_oneway(Message("T", b"6"))),
            await producer.submit(Message("T", b"7")),
        ]
        await asyncio.sleep(2.4)
        assert not any(each.done() for each in sends)
        await world.start_broker()
        await asyncio.gather(*sends)
        await asyncio.sleep(0.1)
        bodies = sorted(message.body for message in await stored(world))
        assert bodies == [b"%d" % number for number in range(8)]


@virtual_time()
async def test_a_broker_that_does_not_return_is_reported_at_the_deadline(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, Producer("pg", session=world.session()) as producer:
        queue = (await producer.send(Message("T", b"0"))).queue
        await world.stop_broker()
        start_ms = world.clock.monotonic_ms()
        for to in (None, queue):
            with pytest.raises(ConnectFailed, match=r"connection refused( \(\d+ ms ago\))?$"):
                await producer.send(Message("T", b"x"), to=to, timeout=2)
        assert 3000 < world.clock.monotonic_ms() - start_ms <= 4000
        with pytest.raises(ConnectFailed):
            await producer.send_oneway(Message("T", b"x"), timeout=2)
        assert 4500 < world.clock.monotonic_ms() - start_ms <= 6000


@virtual_time()
async def test_a_broker_that_has_moved_is_found_while_a_send_waits(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        session = world.session()
        async with Producer("pg", session=session) as producer:
            await producer.send(Message("T", b"0"))
            session._routes.brokers = {"a": {0: "10.0.0.9:10911"}}
            assert (await producer.send(Message("T", b"1"))).status is SendStatus.OK


@virtual_time()
async def test_the_first_send_waits_for_a_name_server_that_starts(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, Producer("pg", session=world.session()) as producer:
        world.network.refuse("ns0")
        waiting = asyncio.create_task(producer.send(Message("T", b"x")))
        await asyncio.sleep(1)
        world.network.accept("ns0")
        assert (await waiting).status is SendStatus.OK


@virtual_time()
async def test_all_attempts_together_stay_within_the_timeout(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, BROKERS) as world,
        Producer("pg", session=world.session()) as producer,
    ):
        await producer.send(Message("T", b"makes the topic"))
        for host in ("10.0.0.1", "10.0.0.2"):
            world.network.stop_reading(host)
        start_ms = world.clock.monotonic_ms()
        with pytest.raises(NetworkError):
            await producer.send(Message("T", b"x"), timeout=0.5)
        assert 500 <= world.clock.monotonic_ms() - start_ms < 700
        for host in ("10.0.0.1", "10.0.0.2"):
            world.network.resume_reading(host)


@virtual_time()
async def test_slow_brokers_are_avoided_for_a_while(tmp_path: Path) -> None:
    config = ProducerConfig(avoid_slow_brokers=True)
    async with (
        cluster(tmp_path, BROKERS) as world,
        Producer("pg", session=world.session(), config=config) as producer,
    ):
        for _ in range(4):
            await producer.send(Message("T", b"makes the topic"))
        world.network.refuse("10.0.0.1")
        world.network.cut("10.0.0.1", "10.0.1.1")
        for _ in range(4):
            await producer.send(Message("T", b"x"))
        world.network.accept("10.0.0.1")
        await asyncio.sleep(599)
        again = {(await producer.send(Message("T", b"x"))).queue.broker for _ in range(16)}
        assert again == {"b"}
        await asyncio.sleep(2)
        again = {(await producer.send(Message("T", b"x"))).queue.broker for _ in range(16)}
        assert again == {"a", "b"}


@virtual_time()
async def test_an_unreachable_name_server_and_an_unknown_topic(tmp_path: Path) -> None:
    async with cluster(tmp_path, ()) as world, Producer("pg", session=world.session()) as producer:
        start_ms = world.clock.monotonic_ms()
        with pytest.raises(NoRoute, match="'T' has no queue"):
            await producer.send(Message("T", b"x"))
        assert world.clock.monotonic_ms() - start_ms < 100, "waiting does not help"
        world.network.refuse("ns0")
        world.network.cut("ns0")
        with pytest.raises(ConnectFailed):
            await producer.send(Message("T", b"x"))


@virtual_time()
async def test_a_namespace_is_added_to_names_and_removed_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        session = world.session(namespace="ns")
        async with Producer("pg", session=session) as producer:
            receipt = await producer.send(Message("T", b"x"), to=lambda queues: queues[1])
            assert receipt.queue == MessageQueue("T", "a", 1)
            assert (await producer.queues("T"))[0] == MessageQueue("T", "a", 0)
            (view,) = await stored(world, "ns%T")
            assert view.properties["INSTANCE_ID"] == "ns"
            assert producer.group == "ns%pg"


@virtual_time()
async def test_delayed_messages_are_delivered_later(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world, Producer("pg", session=world.session()) as producer:
        await producer.send(Message("T", b"x", delay_level=2))
        await asyncio.sleep(4)
        assert await stored(world) == []
        await asyncio.sleep(2)
        assert [view.body for view in await stored(world)] == [b"x"]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message("", b"x"), "topic must .* got ''"),
        (Message("a b", b"x"), "topic must .* got 'a b'"),
        (Message("x" * 128, b"x"), "topic must be 1–127 of"),
        (Message("SCHEDULE_TOPIC_XXXX", b"x"), "only brokers send"),
        (Message("T", b""), "body must be 1–"),
        (Message("T", b"x" * 101), "body must be 1–100 bytes"),
        (Message("T", b"x", tags=" "), "tags must not be blank, got ' '"),
        (Message("T", b"x", tags="a\x01"), "0x01"),
        (Message("T", b"x", keys=["a b"]), "a key must not be empty or have blanks, got 'a b'"),
        (Message("T", b"x", properties={"KEYS": "x"}), "reserved"),
        (Message("T", b"x", properties={"k": "v" * 40_000}), "at most 32767"),
        (Message("T", b"x", delay_level=-1), "delay_level must be 0–18, got -1"),
    ],
)
@virtual_time()
async def test_messages_that_no_broker_would_accept_are_rejected(
    tmp_path: Path, message: Message, text: str
) -> None:
    config = ProducerConfig(messages=MessageRules(body_bytes_max=100))
    async with (
        cluster(tmp_path, ()) as world,
        Producer("pg", session=world.session(), config=config) as producer,
    ):
        with pytest.raises(InvalidArgument, match=text):
            await producer.send(message)


class Noting:
    """A hook that records what it sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    def before_send(self, group: str, sent: Outgoing, queue: MessageQueue) -> None:
        self.seen.append(("before", sent.body))

    def after_send(
        self, group: str, sent: Outgoing, queue: MessageQueue, outcome: SendReceipt | Exception
    ) -> None:
        self.seen.append(("after", type(outcome)))


@virtual_time()
async def test_hooks_see_every_attempt(tmp_path: Path) -> None:
    recorder, noting = Recorder(refuse=refusing(ResponseCode.SYSTEM_ERROR, 1)), Noting()
    async with (
        cluster(tmp_path) as world,
        Producer("pg", session=world.session(hooks=[recorder]), hooks=[noting]) as producer,
    ):
        await producer.send(Message("T", b"x"))
    expected = [
        ("before", b"x"),
        ("after", RemoteError),
        ("before", b"x"),
        ("after", SendReceipt),
    ]
    assert noting.seen == expected


class Unflushed(Session):
    """A session whose brokers are all slow to flush."""

    async def request(self, address: str, command: Any, timeout_ms: int) -> Any:
        answer = as_command(await super().request(address, command, timeout_ms))
        if command.code != SEND:
            return answer
        return replace(answer, code=ResponseCode.FLUSH_DISK_TIMEOUT)


@virtual_time()
async def test_a_message_stored_but_not_flushed_may_be_retried(tmp_path: Path) -> None:
    recorder = Recorder()
    config = ProducerConfig(retry_unless_ok=True)
    async with cluster(tmp_path, BROKERS) as world:
        session = world.session(hooks=[recorder], kind=Unflushed)
        async with Producer("pg", session=session, config=config) as producer:
            receipt = await producer.send(Message("T", b"x"))
        assert receipt.status is SendStatus.FLUSH_DISK_TIMEOUT
        assert len(recorder.of(SEND)) == 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"send_timeout": 0}, "send_timeout must be .*, got 0"),
        ({"retries_max": -1}, "retries_max must be .*, got -1"),
        ({"in_flight_max": 0}, "in_flight_max must be .*, got 0"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        ProducerConfig(**changes)


def test_a_timeout_is_a_retryable_error() -> None:
    assert RequestTimeout("x").retriable
    assert RemoteError(ResponseCode.SYSTEM_BUSY, "").retriable
    assert not RemoteError(ResponseCode.MESSAGE_ILLEGAL, "").retriable


@virtual_time()
async def test_the_send_timeout_covers_the_route_lookup(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as world,
        Producer("pg", session=world.session()) as producer,
    ):
        await producer.send(Message("Known", b"x"))
        world.network.stop_reading("ns0")
        started_s = virtual_loop().time()
        with pytest.raises(
            RequestTimeout, match="no name server answered in time where topic New is"
        ):
            await producer.send(Message("New", b"x"), timeout=0.5)
        assert virtual_loop().time() - started_s < 0.6
        world.network.resume_reading("ns0")
