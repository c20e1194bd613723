from __future__ import annotations

import asyncio
import logging

import pytest

from netkit import ECHO, NEVER, SLOW, handlers, slow, world
from turbopump.errors import ConnectFailed, ConnectionLost, ListenFailed
from turbopump.net.server import Server, ServerConfig
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_time, wait_until
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command


@virtual_time()
async def test_connects_and_disconnects_are_reported() -> None:
    async with world() as here:
        connection = await here.connect()
        assert [peer.peer_address for peer in here.connected] == [connection.local_address]
        connection.close()
        await wait_until(lambda: here.disconnected == here.connected)
        assert here.server.connections == ()


@virtual_time()
async def test_connections_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async with world(connections_max=2) as here:
        first, second = await here.connect(), await here.connect()
        third = await here.connect()
        await third.wait_closed()
        assert len(here.connected) == len(here.server.connections) == 2
        assert "refused, 2 are open already" in caplog.text
        first.close()
        await wait_until(lambda: len(here.server.connections) == 1)
        fourth = await here.connect()
        assert (await fourth.request(Command(ECHO), 1000)).code == 0
        assert (await second.request(Command(ECHO), 1000)).code == 0


@virtual_time()
async def test_draining_finishes_running_requests_and_rejects_new_ones() -> None:
    async with world() as here:
        connection = await here.connect()
        running = asyncio.create_task(connection.request(slow(500, b"finished"), 5000))
        await wait_until(lambda: here.handlers_running)
        draining = asyncio.create_task(here.server.drain(2000))
        await asyncio.sleep(0.1)
        with pytest.raises(ConnectFailed, match="refused"):
            await here.connect()
        refused = await connection.request(Command(ECHO), 1000)
        assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert (await running).body == b"finished"
        await draining
        assert virtual_loop().time() < 0.6
        await connection.wait_closed()


@virtual_time()
async def test_draining_writes_large_answers_to_the_end() -> None:
    async with world() as here:
        connection = await here.connect()
        body = bytes(5_000_000)
        call = asyncio.create_task(connection.request(slow(10, body), 5000))
        await wait_until(lambda: here.server.connections and here.handlers_running)
        await here.server.drain(5000)
        assert (await call).body == body


@virtual_time()
async def test_draining_ends_in_time_whatever_runs(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as here:
        connection = await here.connect()
        call = asyncio.create_task(connection.request(slow(60_000), 90_000))
        await wait_until(lambda: here.handlers_running)
        start = virtual_loop().time()
        await here.server.drain(2000)
        assert 2 <= virtual_loop().time() - start < 2.1
        with pytest.raises(ConnectionLost):
            await call
        assert "not drained within 2000 ms" in caplog.text


@virtual_time()
async def test_deferred_requests_do_not_delay_the_drain() -> None:
    async with world() as here:
        connection = await here.connect()
        call = asyncio.create_task(connection.request(Command(NEVER), 90_000))
        await asyncio.sleep(0.1)
        await here.server.drain(2000)
        with pytest.raises(ConnectionLost, match="closed by the peer"):
            await call
        assert virtual_loop().time() < 1


@virtual_time()
async def test_closing_twice_and_without_start_is_harmless() -> None:
    network = MemoryNetwork()
    server = Server(network.host("server"), handlers(), ServerConfig("server"))
    await server.close()
    await server.start()
    await server.close()
    await server.close()


@virtual_time()
async def test_an_address_in_use_is_a_clear_error() -> None:
    network = MemoryNetwork()
    config = ServerConfig("server", 10911)
    async with Server(network.host("server"), handlers(), config) as server:
        assert server.address == "server:10911"
        with pytest.raises(ListenFailed, match="server:10911: address already in use"):
            await Server(network.host("server"), handlers(), config).start()


@pytest.mark.slow
@virtual_time()
async def test_hundreds_of_peers_for_half_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with world(connections_max=300) as here:
        clients = [await here.connect(host=f"client-{number}") for number in range(300)]
        for _ in range(20):
            await asyncio.sleep(100)
            calls = (client.request(Command(SLOW), 1000) for client in clients)
            assert all(answer.code == 0 for answer in await asyncio.gather(*calls))
        assert len(here.server.connections) == 300
    assert caplog.text == ""
