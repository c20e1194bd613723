from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from netkit import ECHO, NEVER, slow, world
from turbopump.errors import ConnectionLost
from turbopump.net.connection import Connection
from turbopump.net.limits import ConnectionLimits
from turbopump.net.router import Router
from turbopump.testing import virtual_loop, virtual_time, wait_until
from turbopump.wire.command import Command


def by_close(client: Connection, server: Connection) -> None:
    client.close()


def by_abort(client: Connection, server: Connection) -> None:
    client.abort("test")


def by_server(client: Connection, server: Connection) -> None:
    server.close()


def by_reset(client: Connection, server: Connection) -> None:
    server.abort("test")


@pytest.mark.parametrize("end", [by_close, by_abort, by_server, by_reset])
@virtual_time()
async def test_requests_in_flight_and_waiting_fail_when_the_connection_ends(
    end: Callable[[Connection, Connection], None],
) -> None:
    async with world() as here:
        connection = await here.connect(limits=ConnectionLimits(requests_in_flight_max=2))
        calls = [asyncio.create_task(connection.request(Command(NEVER), 60_000)) for _ in range(4)]
        await asyncio.sleep(0.1)
        end(connection, here.accepted)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, ConnectionLost) for result in results)
        await connection.wait_closed()
        await wait_until(lambda: not here.server.connections)
        assert virtual_loop().time() < 1
        assert len(here.deadlines) == 0


@virtual_time()
async def test_a_closed_connection_refuses_requests() -> None:
    async with world() as here:
        connection = await here.connect()
        connection.close("had enough")
        with pytest.raises(ConnectionLost, match="had enough"):
            await connection.request(Command(ECHO), 1000)
        with pytest.raises(ConnectionLost):
            connection.oneway(Command(ECHO))
        with pytest.raises(ConnectionLost):
            await connection.oneway_in_time(Command(ECHO), 1000)
        await connection.wait_closed()


@virtual_time()
async def test_handlers_are_cancelled_when_their_peer_goes() -> None:
    ended: list[str] = []

    async def endless(request: Command, peer: Connection) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("cancelled")

    async with world(Router({1: endless})) as here:
        connection = await here.connect()
        connection.oneway(Command(1))
        await wait_until(lambda: here.accepted.handlers_running)
        accepted = here.accepted
        connection.close()
        await accepted.wait_closed()
        assert ended == ["cancelled"]
        assert accepted.handlers_running == 0


@virtual_time()
async def test_draining_waits_for_those_who_wait_for_a_place() -> None:
    async with world() as here:
        connection = await here.connect(limits=ConnectionLimits(requests_in_flight_max=1))
        calls = [asyncio.create_task(connection.request(slow(100), 5000)) for _ in range(5)]
        await asyncio.sleep(0)
        await connection.drain(3000)
        answers = await asyncio.gather(*calls)
        assert [answer.code for answer in answers] == [0] * 5
