from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from unittest.mock import Mock

import pytest

from netkit import ECHO, NEVER, echo, slow, world
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
async def test_a_closed_connection_rejects_requests() -> None:
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
async def test_handlers_are_cancelled_when_their_peer_disconnects() -> None:
    ended: list[str] = []

    async def endless(request: Command, peer: Connection) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("cancelled")

    async with world(Router({1: endless})) as here:
        connection = await here.connect()
        connection.oneway(Command(1))
        await wait_until(lambda: here.handlers_running)
        accepted = here.accepted
        connection.close()
        await accepted.wait_closed()
        assert ended == ["cancelled"]
        assert accepted._serving.running == 0


@virtual_time()
async def test_draining_waits_for_requests_waiting_for_a_slot() -> None:
    async with world() as here:
        connection = await here.connect(limits=ConnectionLimits(requests_in_flight_max=1))
        calls = [asyncio.create_task(connection.request(slow(100), 5000)) for _ in range(5)]
        await asyncio.sleep(0)
        await connection.drain(3000)
        answers = await asyncio.gather(*calls)
        assert [answer.code for answer in answers] == [0] * 5


# --- reading that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RecursionError("too deep"), KeyError("x" * 5000)])
@virtual_time()
async def test_a_bug_in_reading_closes_only_its_connection_with_the_reason(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = Mock(held_bytes=0)
    decoder.feed.side_effect = error
    async with world() as here:
        other, peer = await here.connect(), await here.connect_raw("fuzzer")
        [trap] = [each for each in here.server.connections if "fuzzer" in each.peer_address]
        trap._inbox.decoder = decoder
        peer.transport.write(b"trap")
        await wait_until(lambda: peer.is_lost)
        assert (await other.request(Command(ECHO), 1000)).code == 0
        assert len(here.server.connections) == 1
    (reason,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    text = reason.getMessage()
    assert "fuzzer:" in text
    assert f"closed, reading failed: {type(error).__name__}" in text
    assert len(text) < 400
    assert reason.exc_info is None


@virtual_time()
async def test_an_error_after_a_burst_of_requests_closes_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def settle() -> None:
        raise ZeroDivisionError

    router = Router({ECHO: echo})
    router.settle = settle
    async with world(router) as here:
        connection = await here.connect()
        assert (await connection.request(Command(ECHO), 1000)).code == 0
        await connection.wait_closed()
    assert "closed, reading failed: ZeroDivisionError()" in caplog.text


# --- draining -------------------------------------------------------------------------------------


@virtual_time()
async def test_draining_ends_in_time_even_if_a_handler_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    released = asyncio.Event()

    async def stubborn(request: Command, peer: Connection) -> None:
        while not released.is_set():
            with suppress(asyncio.CancelledError):
                await released.wait()

    async with world(Router({1: stubborn})) as here:
        (await here.connect()).oneway(Command(1))
        await wait_until(lambda: here.handlers_running)
        start = virtual_loop().time()
        await here.server.drain(2000)
        assert 2 <= virtual_loop().time() - start < 2.5
        released.set()
        await asyncio.sleep(0)
    (left,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "keeps running after its connection was closed" in left.getMessage()
    assert "stubborn" in left.getMessage()


@virtual_time()
async def test_a_draining_connection_accepts_no_new_requests() -> None:
    async with world() as here:
        connection = await here.connect()
        running = asyncio.create_task(connection.request(slow(500, b"finished"), 5000))
        await wait_until(lambda: here.handlers_running)
        draining = asyncio.create_task(connection.drain(3000))
        await asyncio.sleep(0)
        assert not connection.is_open
        with pytest.raises(ConnectionLost, match=r"server:.*: is being closed by this side"):
            await connection.request(Command(ECHO), 1000)
        with pytest.raises(ConnectionLost, match="is being closed"):
            connection.oneway(Command(ECHO))
        with pytest.raises(ConnectionLost, match="is being closed"):
            await connection.oneway_in_time(Command(ECHO), 1000)
        await draining
        assert (await running).body == b"finished"
        assert virtual_loop().time() < 0.7
