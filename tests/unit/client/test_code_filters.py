"""Code filter subscriptions of every kind of consumer, through a filter server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from clusters import Cluster, Recorder, cluster
from consumers import Seen, committed, consuming, make_topic, send
from plain_filters import filter_server, plain_filters
from turbopump.aio import (
    CodeFilter,
    Found,
    LitePullConsumer,
    PullConsumer,
    PushConsumer,
)
from turbopump.broker.config import FiltersConfig
from turbopump.client.calls import NothingNew
from turbopump.errors import NoRoute, RemoteError
from turbopump.filter_server.server import FilterServer
from turbopump.message import MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.bodies import Heartbeat
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import whole_body
from turbopump.wire.headers import PullMessage
from turbopump.wire.record import MessageView
from turbopump.wire.sysflag import PULL_CLASS_FILTER, PULL_COMMIT_OFFSET

ONE = FiltersConfig(servers=1)
PORT = 4000


def even(message: MessageView) -> bool:
    return message.body.isdigit() and int(message.body) % 2 == 0


EVEN = CodeFilter(even)
SIX = CodeFilter("def matches(message): return message.body == b'6'")
NUMBERS = [b"%d" % number for number in range(8)]
QUEUE = MessageQueue("T", "a", 0)


@pytest.fixture(autouse=True)
def in_process() -> Iterator[None]:
    with plain_filters():
        yield


async def beside(stack: AsyncExitStack, world: Cluster, host: str = "10.0.0.7") -> FilterServer:
    """Run a filter server beside the broker until the stack ends."""
    broker = world.brokers["a"].address
    return await stack.enter_async_context(filter_server(world.network, broker, host, PORT))


@virtual_time()
async def test_a_push_consumer(tmp_path: Path) -> None:
    async with cluster(tmp_path, filters=ONE) as world, AsyncExitStack() as stack:
        await make_topic(world)
        await beside(stack, world)
        recorder, seen = Recorder(), Seen()
        session = world.session(hooks=[recorder])
        async with consuming(world, seen, session=session, subscriptions={"T": EVEN}) as consumer:
            await send(world, NUMBERS)
            await wait_until(lambda: seen.count == 4)
            # Change the filter while it runs; pulls that wait with the first one are sent again.
            await consumer.subscribe("T", SIX)
            await send(world, NUMBERS)
            await wait_until(lambda: seen.count == 5)
            await asyncio.sleep(20)
        assert sorted(seen.bodies) == [b"0", b"2", b"4", b"6", b"6"]
    beats = [
        Heartbeat.decode(whole_body(command)) for command in recorder.of(RequestCode.HEART_BEAT)
    ]
    told = {
        (wanted.sub_string, wanted.class_filter_mode, wanted.expression_type)
        for beat in beats
        for data in beat.consumer_data_set
        for wanted in data.subscription_data_set
        if wanted.topic == "T"
    }
    assert told == {(EVEN.name, True, "TAG"), (SIX.name, True, "TAG")}
    for command in recorder.of(RequestCode.PULL_MESSAGE):
        header = PullMessage.from_ext_fields(command.ext_fields)
        if header.topic == "T":
            assert header.sys_flag & PULL_CLASS_FILTER
            assert not header.sys_flag & PULL_COMMIT_OFFSET


@virtual_time()
async def test_messages_that_did_not_match_are_committed(tmp_path: Path) -> None:
    async with cluster(tmp_path, filters=ONE) as world, AsyncExitStack() as stack:
        await make_topic(world)
        await beside(stack, world)
        await send(world, NUMBERS, to=QUEUE)
        seen = Seen()
        none = CodeFilter("def matches(message): return False")
        async with consuming(world, seen, session=world.session(), subscriptions={"T": none}):
            await asyncio.sleep(60)
        offset = await committed(world)
        assert offset is not None
        assert offset >= len(NUMBERS)
        assert seen.count == 0


@virtual_time()
async def test_a_lite_pull_consumer(tmp_path: Path) -> None:
    async with cluster(tmp_path, filters=ONE) as world, AsyncExitStack() as stack:
        await make_topic(world)
        await beside(stack, world)
        await send(world, NUMBERS)
        async with LitePullConsumer(
            "g", session=world.session(), subscriptions={"T": EVEN}, start_from="first"
        ) as consumer:
            bodies: list[bytes] = []
            while len(bodies) < 4:
                bodies += [message.body for message in await consumer.poll(timeout=5)]
        assert sorted(bodies) == [b"0", b"2", b"4", b"6"]


@virtual_time()
async def test_a_pull_consumer(tmp_path: Path) -> None:
    async with cluster(tmp_path, filters=ONE) as world, AsyncExitStack() as stack:
        await make_topic(world)
        await beside(stack, world)
        await send(world, NUMBERS, to=QUEUE)
        async with PullConsumer("g", session=world.session()) as consumer:
            await asyncio.sleep(1)
            await consumer.queues("T")
            outcome = await consumer.pull(QUEUE, 0, tags=EVEN)
            assert isinstance(outcome, Found)
            assert [message.body for message in outcome.messages] == [b"0", b"2", b"4", b"6"]
            end = outcome.next_offset
            assert isinstance(await consumer.pull(QUEUE, end, tags=EVEN), NothingNew)


@virtual_time()
async def test_a_restarted_filter_server_gets_the_filter_again(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, filters=ONE) as world:
        await make_topic(world)
        seen, recorder = Seen(), Recorder()
        session = world.session(hooks=[recorder])
        first = AsyncExitStack()
        await beside(first, world)
        async with consuming(world, seen, session=session, subscriptions={"T": EVEN}):
            await send(world, NUMBERS)
            await wait_until(lambda: seen.count == 4)
            await first.aclose()
            await send(world, NUMBERS)
            async with AsyncExitStack() as second:
                await beside(second, world)
                await wait_until(lambda: seen.count == 8)
        uploads = recorder.of(RequestCode.REGISTER_MESSAGE_FILTER_CLASS)
        # Once for each of the two, and for pulls that were answered by then.
        assert 2 <= len(uploads) <= 5


@virtual_time()
async def test_another_filter_server_takes_over(tmp_path: Path) -> None:
    async with cluster(tmp_path, filters=ONE) as world, AsyncExitStack() as stack:
        await make_topic(world)
        first = AsyncExitStack()
        await beside(first, world, "10.0.0.7")
        await beside(stack, world, "10.0.0.8")
        await asyncio.sleep(1)
        seen = Seen()
        async with consuming(world, seen, session=world.session(), subscriptions={"T": EVEN}):
            await send(world, NUMBERS)
            await wait_until(lambda: seen.count == 4)
            await first.aclose()
            await send(world, NUMBERS)
            await wait_until(lambda: seen.count == 8)


@virtual_time()
async def test_a_broker_that_restarts(tmp_path: Path) -> None:
    async with cluster(tmp_path, filters=ONE) as world, AsyncExitStack() as stack:
        await make_topic(world)
        await beside(stack, world)
        seen = Seen()
        async with consuming(world, seen, session=world.session(), subscriptions={"T": EVEN}):
            await send(world, NUMBERS)
            await wait_until(lambda: seen.count == 4)
            await world.stop_broker("a")
            await world.start_broker("a")
            await send(world, NUMBERS)
            await wait_until(lambda: seen.count == 8)


@virtual_time()
async def test_a_topic_that_does_not_exist_yet(tmp_path: Path) -> None:
    async with cluster(tmp_path, filters=ONE) as world, AsyncExitStack() as stack:
        await beside(stack, world)
        seen = Seen()
        async with consuming(world, seen, session=world.session(), subscriptions={"T": EVEN}):
            await send(world, NUMBERS)
            await wait_until(lambda: seen.count == 4)


@virtual_time()
async def test_no_filter_server_is_an_error_at_the_start(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        for consumer in (
            PushConsumer("p", Seen(), session=world.session(), subscriptions={"T": EVEN}),
            LitePullConsumer("l", session=world.session(), subscriptions={"T": EVEN}),
        ):
            with pytest.raises(NoRoute, match=r"no filter server.*set filterServerNums"):
                await consumer.start()
        async with PullConsumer("g", session=world.session()) as puller:
            await puller.queues("T")
            with pytest.raises(NoRoute, match="has no filter server"):
                await puller.pull(QUEUE, 0, tags=EVEN)


@virtual_time()
async def test_a_rejected_filter_is_an_error_on_subscribe(tmp_path: Path) -> None:
    async with cluster(tmp_path, filters=ONE) as world, AsyncExitStack() as stack:
        await make_topic(world)
        await beside(stack, world)
        wrong = CodeFilter("raise ValueError('at load')\ndef matches(message): return True")
        with pytest.raises(RemoteError, match="was refused: at load"):
            await PushConsumer(
                "p", Seen(), session=world.session(), subscriptions={"T": wrong}
            ).start()
        seen = Seen()
        async with consuming(
            world, seen, session=world.session(), subscriptions={"T": EVEN}
        ) as consumer:
            with pytest.raises(RemoteError, match="was refused: at load"):
                await consumer.subscribe("T", wrong)
            await send(world, NUMBERS)
            await wait_until(lambda: seen.count == 4)


@virtual_time()
async def test_a_stopped_filter_is_logged_and_other_subscribers_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with cluster(tmp_path, filters=ONE) as world, AsyncExitStack() as stack:
        await make_topic(world)
        await beside(stack, world)
        hostile = CodeFilter("def matches(message): raise MemoryError")
        bad, good = Seen(), Seen()
        async with (
            consuming(world, bad, "10.0.1.1", "bad", subscriptions={"T": hostile}),
            consuming(world, good, "10.0.1.2", "good", subscriptions={"T": EVEN}),
        ):
            await send(world, NUMBERS)
            await wait_until(lambda: good.count == 4)
            await asyncio.sleep(5)
        assert bad.count == 0
        assert any(
            "for bad" in record.getMessage()
            and "was stopped: it needs more memory" in record.getMessage()
            for record in caplog.records
        )
