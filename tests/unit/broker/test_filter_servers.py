"""Filter servers at their broker: registered, forgotten, and reported to name servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from brokers import running_broker
from clusters import cluster
from consumers import make_topic
from plain_filters import filter_server, plain_filters
from turbopump.broker.config import FiltersConfig
from turbopump.broker.handlers import filter_servers
from turbopump.client.session import Session
from turbopump.testing import virtual_time
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.headers import FilterServerAnswer, RegisterFilterServer

ONE = FiltersConfig(servers=1)


@pytest.fixture(autouse=True)
def in_process() -> Iterator[None]:
    with plain_filters():
        yield


def registration(address: str) -> RegisterFilterServer:
    return RegisterFilterServer(filter_server_addr=address)


@virtual_time()
async def test_a_registration_is_answered_with_the_broker(tmp_path: Path) -> None:
    async with running_broker(tmp_path, filters=ONE) as (_, client):
        code = RequestCode.REGISTER_FILTER_SERVER
        answer = await client.ask(code, registration("10.0.0.7:4000"))
        assert answer.code == ResponseCode.SUCCESS
        found = FilterServerAnswer.from_ext_fields(answer.ext_fields)
        assert found == FilterServerAnswer(broker_name="broker-a", broker_id=0)


@virtual_time()
async def test_a_broker_without_filter_servers_rejects_registrations(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (_, client):
        answer = await client.ask(RequestCode.REGISTER_FILTER_SERVER, registration("10.0.0.7:4000"))
        assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


@virtual_time()
async def test_invalid_addresses_are_rejected(tmp_path: Path) -> None:
    async with running_broker(tmp_path, filters=ONE) as (_, client):
        wrong_hosts = ("h" * 300, "a\nb", " 10.0.0.7", "a,b", "\u00e4")
        others = ("", "10.0.0.7", "10.0.0.7:0", ":4000", "a:99999")
        for wrong in (*others, *(f"{host}:4000" for host in wrong_hosts)):
            answer = await client.ask(RequestCode.REGISTER_FILTER_SERVER, registration(wrong))
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert "filterServerAddr" in str(answer.remark), wrong
        answer = await client.ask(RequestCode.REGISTER_FILTER_SERVER)
        assert "filterServerAddr" in str(answer.remark)


@virtual_time()
async def test_the_number_of_filter_servers_is_bounded(tmp_path: Path) -> None:
    async with running_broker(tmp_path, filters=ONE) as (_, client):
        code = RequestCode.REGISTER_FILTER_SERVER
        for port in range(1, filter_servers._SERVERS_MAX + 1):
            assert (await client.ask(code, registration(f"10.0.0.7:{port}"))).code == 0
        answer = await client.ask(code, registration("10.0.0.7:4000"))
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "256 filter servers are registered already" in str(answer.remark)


@virtual_time()
async def test_routes_list_filter_servers_until_they_disconnect(tmp_path: Path) -> None:
    async with cluster(tmp_path, filters=ONE) as world, world.session() as session:
        await make_topic(world)
        broker = world.brokers["a"].address
        async with filter_server(world.network, broker) as server:
            await until_route_has(session, broker, (server.address,))
        # Its connection has closed.
        await until_route_has(session, broker, ())


@virtual_time()
async def test_a_silent_filter_server_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, filters=ONE) as world, world.session() as session:
        await make_topic(world)
        broker = world.brokers["a"].address
        async with filter_server(world.network, broker) as server:
            await until_route_has(session, broker, (server.address,))
            await server._work.stop()
            await asyncio.sleep(25)
            await until_route_has(session, broker, (server.address,))
            await asyncio.sleep(20)
            await until_route_has(session, broker, ())


async def until_route_has(session: Session, broker: str, servers: tuple[str, ...]) -> None:
    async def has() -> bool:
        await session.refresh_route("T")
        route = session.cached_route("T")
        return route is not None and route.filter_servers.get(broker, ()) == servers

    for _ in range(100):
        if await has():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the route does not have {servers}")
