"""Messages with replies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clusters import BROKERS, Cluster, Recorder, cluster
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.producer import Producer
from turbopump.errors import InvalidArgument, RemoteError, RequestTimeout
from turbopump.message import Message, MessageQueue
from turbopump.testing import virtual_time
from turbopump.wire import framing
from turbopump.wire.codes import RequestCode
from turbopump.wire.record import MessageView
from vectors import frame


async def answer_all(world: Cluster, replier: Producer, delay_s: float = 0.0) -> None:
    """Reply to every request with its own body in upper case."""
    session = world.session("10.0.1.2", instance="replier")
    async with LitePullConsumer("repliers", session=session, start_from="first") as consumer:
        await consumer.assign(
            [MessageQueue("Q", name, number) for name in world.brokers for number in range(4)]
        )
        async for message in consumer:
            await asyncio.sleep(delay_s)
            await replier.reply(message, message.body.upper() * 1000)


@virtual_time()
async def test_requests_are_replied_to_whichever_broker_has_them(tmp_path: Path) -> None:
    recorder = Recorder()
    async with (
        cluster(tmp_path, BROKERS) as world,
        Producer("asking", session=world.session(hooks=[recorder])) as asking,
        Producer("replying", session=world.session("10.0.1.3", hooks=[recorder])) as replying,
    ):
        for name in BROKERS:
            await world.make_topic("Q", name)
        answering = asyncio.create_task(answer_all(world, replying))
        replies = await asyncio.gather(
            *(asking.request(Message("Q", b"r%d" % number)) for number in range(20))
        )
        assert [reply.body[:3].strip(b"R") for reply in replies[:3]] == [b"0", b"1", b"2"]
        assert all(len(reply.body) >= 2000 for reply in replies), "compressed in transit"
        assert len({reply.message_id for reply in replies}) == 20
        answering.cancel()
    for name in ("SEND_MESSAGE_V2", "SEND_REPLY_MESSAGE_V2"):
        recorded = framing.decode(frame(f"request_reply.{name}.request"))
        ours = recorder.of(RequestCode[name])[-1]
        assert set(ours.ext_fields or {}) == set(recorded.ext_fields or {})


@virtual_time()
async def test_a_reply_that_does_not_arrive_in_time(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as world,
        Producer("asking", session=world.session()) as asking,
    ):
        start_ms = world.clock.monotonic_ms()
        with pytest.raises(RequestTimeout, match="no reply came within 700 ms"):
            await asking.request(Message("Q", b"x"), timeout=0.7)
        assert 700 <= world.clock.monotonic_ms() - start_ms < 800


@virtual_time()
async def test_replying_to_a_disconnected_client_is_an_error(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        async with Producer("asking", session=world.session()) as asking:
            with pytest.raises(RequestTimeout):
                await asking.request(Message("Q", b"x"), timeout=0.1)
            await asking.send(Message("Q", b"not a request"), to=lambda queues: queues[0])
        session = world.session("10.0.1.2")
        async with (
            Producer("replying", session=session) as replying,
            LitePullConsumer("g", session=session, start_from="first") as consumer,
        ):
            await consumer.assign(await consumer.queues("Q"))
            messages: list[MessageView] = []
            while len(messages) < 2:
                messages += await consumer.poll()
            plain, request = sorted(messages, key=lambda message: message.body)
            with pytest.raises(RemoteError, match="not found"):
                await replying.reply(request, b"too late")
            with pytest.raises(InvalidArgument, match="not a request"):
                await replying.reply(plain, b"why")
