"""Clients that find name servers by HTTP."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest

from address_servers import AddressServer, address_server, http
from clusters import Cluster, Recorder, cluster
from turbopump.admin.administration import Admin
from turbopump.client.config import ClientConfig
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.producer import Producer
from turbopump.client.push_consumer import PushConsumer
from turbopump.errors import InvalidArgument, NoNameServer
from turbopump.message import Message
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.writing.options import SinkOptions
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.codes import RequestCode
from turbopump.wire.record import MessageView

URL = "http://web:8080/ns"


def served(world: Cluster, *numbers: int) -> AddressServer:
    """Return an HTTP server that names some of the cluster's name servers."""
    text = ";".join(world.nameservers[number].address for number in numbers)
    return address_server(world.network.host("web"), text, host="web", port=8080)


async def succeed(_: Sequence[MessageView], __: ConsumeContext) -> ConsumeResult:
    return ConsumeResult.SUCCESS


@virtual_time()
async def test_clients_send_consume_and_administer(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        bodies.extend(bytes(message.body) for message in messages)
        return await succeed(messages, context)

    async with (
        cluster(tmp_path) as world,
        served(world, 0),
        world.session(nameserver=URL) as session,
        Producer("shop", session=session) as producer,
        PushConsumer(
            "billing", listen, session=session, subscriptions={"T": "*"}, start_from="first"
        ),
        Admin(session=session) as admin,
    ):
        await producer.send(Message("T", b"1"))
        await wait_until(lambda: bodies == [b"1"], 60)
        assert "T" in await admin.topics.names()
        (settings,) = (await admin.configuration.name_servers()).items()
        assert settings[0] == world.nameserver


@virtual_time()
async def test_a_new_list_replaces_the_name_servers_of_a_running_client(tmp_path: Path) -> None:
    recorder = Recorder()
    async with cluster(tmp_path, nameservers=2) as world, served(world, 0) as web:
        old, new = (server.address for server in world.nameservers)
        async with (
            world.session(nameserver=URL, hooks=[recorder]) as session,
            Producer("shop", session=session) as producer,
        ):
            await producer.send(Message("T", b"1"))
            assert set(recorder.addresses_of(RequestCode.GET_ROUTEINFO_BY_TOPIC)) == {old}
            web.answer = http(new)
            await wait_until(lambda: session.name_servers.current == (new,), 121)
            await wait_until(lambda: session.source(old).connection == 0, 10)
            recorder.requests.clear()
            await session.refresh_routes()
            assert set(recorder.addresses_of(RequestCode.GET_ROUTEINFO_BY_TOPIC)) == {new}
            await producer.send(Message("T", b"2"))


@virtual_time()
async def test_a_server_that_is_down_at_first_is_named(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        session = world.session(nameserver=URL)
        consumer = PushConsumer("g", succeed, session=session, subscriptions={"T": "*"})
        refused = "no name servers found: http://web:8080/ns: web:8080: connection refused"
        with pytest.raises(NoNameServer, match=refused):
            await consumer.start()
        async with Admin(session=world.session(nameserver=URL)) as admin:
            with pytest.raises(NoNameServer, match=refused):
                await admin.topics.names()
        async with served(world, 0), Producer("p", session=session) as producer:
            await producer.send(Message("T", b"1"))


@virtual_time()
async def test_running_clients_do_not_need_the_server(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as world,
        world.session(nameserver=URL) as session,
        Producer("shop", session=session) as producer,
    ):
        async with served(world, 0):
            await producer.send(Message("T", b"1"))
        await asyncio.sleep(300)
        await producer.send(Message("T", b"2"))
        await producer.send(Message("U", b"1"))


@pytest.mark.parametrize("nameserver", [URL, [URL, "10.0.0.1:9876"]])
def test_a_configuration_may_have_urls(nameserver: str | list[str]) -> None:
    sources = (URL,) if isinstance(nameserver, str) else tuple(nameserver)
    assert ClientConfig(nameserver).nameserver_addresses == sources


def test_a_url_that_cannot_be_fetched_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="scheme 'ftp' is not supported; expected http"):
        ClientConfig("ftp://web/ns")


def test_spark_passes_the_url_to_its_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    monkeypatch.setenv("ROCKETMQ_NAMESRV_DOMAIN", "web")
    source = SourceOptions.for_stream({"topic": "T"})
    sink = SinkOptions.parse({"topic": "T"})
    monkeypatch.delenv("ROCKETMQ_NAMESRV_DOMAIN")
    sent = pickle.loads(pickle.dumps(source)).client, pickle.loads(pickle.dumps(sink)).client()
    for client in sent:
        assert client.nameserver_addresses == ("http://web:8080/rocketmq/nsaddr",)
