from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from brokers import Client, running_broker, send_header
from turbopump.net.connection import Connection
from turbopump.net.pool import ConnectionPool
from turbopump.net.router import Router
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time
from turbopump.wire import properties
from turbopump.wire.bodies import Heartbeat, ProducerData
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.headers import PushReply, SendMessageAnswer

REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"
NAMED = {"CORRELATION_ID": "c-1", "REPLY_TO_CLIENT": "asker", "TTL": "3000", "MSG_TYPE": "reply"}


async def reply(client: Client, named: Mapping[str, str] = NAMED) -> Command:
    header = send_header(topic=REPLY_TOPIC, named=named)
    return await client.ask(RequestCode.SEND_REPLY_MESSAGE_V2, header, b"pong", timeout_ms=20_000)


@virtual_time()
async def test_a_reply_reaches_the_requesting_client_and_is_stored(tmp_path: Path) -> None:
    network = MemoryNetwork()
    pushed: list[Command] = []

    def take(request: Command, _peer: Connection) -> Command:
        pushed.append(request)
        return request.answer(ResponseCode.SUCCESS)

    router = Router({RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: take})
    clock = virtual_loop().clock
    async with (
        running_broker(tmp_path, network) as (broker, client),
        ConnectionPool(network.host("10.0.0.7"), router=router, clock=clock) as pool,
    ):
        asker = Client(pool, broker.address)
        beat = Heartbeat(client_id="asker", producer_data_set=[ProducerData(group_name="pg")])
        await asker.ask(RequestCode.HEART_BEAT, body=beat.encode())
        answer = await reply(client)
        assert answer.code == ResponseCode.SUCCESS
        assert SendMessageAnswer.from_ext_fields(answer.ext_fields).queue_offset == 0
        [push] = pushed
        header = PushReply.from_ext_fields(push.ext_fields)
        named = properties.decode(header.properties or "")
        assert push.body == b"pong"
        assert (named["CORRELATION_ID"], named["TTL"]) == ("c-1", "3000")
        assert named["PUSH_REPLY_TIME"].isdecimal()
        [kept] = await client.messages(REPLY_TOPIC)
        assert (kept.body, kept.properties) == (b"pong", NAMED)


@virtual_time()
async def test_undeliverable_replies_are_stored_and_reported(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        unknown = await reply(client)
        assert unknown.code == ResponseCode.SYSTEM_ERROR
        assert "channel of <asker> not found" in (unknown.remark or "")
        nobody = await reply(client, {"CORRELATION_ID": "c-1"})
        assert "REPLY_TO_CLIENT" in (nobody.remark or "")
        assert len(await client.messages(REPLY_TOPIC)) == 2


@virtual_time()
async def test_a_requesting_client_that_does_not_answer(tmp_path: Path) -> None:
    network = MemoryNetwork()

    async def hang(_request: Command, _peer: Connection) -> Command:
        await asyncio.sleep(60)
        raise AssertionError("nobody waits that long")

    router = Router({RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: hang})
    clock = virtual_loop().clock
    async with (
        running_broker(tmp_path, network) as (broker, client),
        ConnectionPool(network.host("10.0.0.7"), router=router, clock=clock) as pool,
    ):
        beat = Heartbeat(client_id="asker", producer_data_set=[ProducerData(group_name="pg")])
        await Client(pool, broker.address).ask(RequestCode.HEART_BEAT, body=beat.encode())
        answer = await reply(client)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "within 10000 ms" in (answer.remark or "")
