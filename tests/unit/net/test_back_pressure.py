"""A peer that does not read must not make this side buffer without bound."""

from __future__ import annotations

import asyncio

import pytest

from netkit import ECHO, SMALL, World, echo, in_flight, world
from turbopump.errors import Overloaded
from turbopump.net.connection import Connection
from turbopump.net.router import Router
from turbopump.testing import virtual_loop, virtual_time, wait_until
from turbopump.testing.memory_transport import WINDOW_BYTES
from turbopump.wire.command import FLAG_ONEWAY, Command
from turbopump.wire.framing import encode

ANSWER_BYTES = 32 * 1024


def large_answers() -> tuple[Router, list[int]]:
    served: list[int] = []

    def large(request: Command, peer: Connection) -> Command:
        served.append(request.opaque)
        return request.answer(0, body=bytes(ANSWER_BYTES))

    return Router({1: large, ECHO: echo}), served


class Flood(asyncio.Protocol):
    """Sends requests continuously, and reads nothing until released."""

    def __init__(self) -> None:
        self.received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)


async def flood(here: World, requests: int) -> Flood:
    peer = await here.network.host("client").connect("server", here.server.port, Flood)
    peer.transport.write(b"".join(encode(Command(1, opaque=i)) for i in range(requests)))
    return peer


@virtual_time()
async def test_a_server_stops_reading_from_a_peer_that_does_not_read() -> None:
    router, served = large_answers()
    async with world(router, SMALL) as here:
        peer = await flood(here, 1000)
        await asyncio.sleep(10)
        accepted = here.accepted
        assert accepted.unwritten_bytes <= SMALL.write_pause_bytes + 2 * ANSWER_BYTES
        assert len(served) <= (WINDOW_BYTES + accepted.unwritten_bytes) // ANSWER_BYTES + 1
        peer.transport.resume_reading()
        await wait_until(lambda: peer.received_bytes > 1000 * ANSWER_BYTES)
        assert served == list(range(1000))
        assert accepted.unwritten_bytes == 0
        peer.transport.close()


@virtual_time()
async def test_other_peers_are_served_in_the_meantime() -> None:
    router, _ = large_answers()
    async with world(router, SMALL) as here:
        peer = await flood(here, 1000)
        other = await here.connect()
        for _ in range(10):
            assert (await other.request(Command(ECHO), 100)).code == 0
        peer.transport.abort()


@virtual_time()
async def test_a_peer_that_never_reads_is_closed_as_idle() -> None:
    router, _ = large_answers()
    async with world(router, SMALL) as here:
        await flood(here, 100)
        await wait_until(lambda: here.disconnected, 200)
        assert 119 < virtual_loop().time() < 125


@virtual_time()
async def test_a_peer_that_reads_slowly_is_not_idle() -> None:
    router, served = large_answers()
    async with world(router, SMALL) as here:
        peer = await flood(here, 20)
        for _ in range(10):
            await asyncio.sleep(100)
            peer.transport.resume_reading()
            await asyncio.sleep(0.0001)
            peer.transport.pause_reading()
        assert not here.disconnected
        peer.transport.resume_reading()
        await wait_until(lambda: peer.received_bytes > 20 * ANSWER_BYTES)
        assert len(served) == 20


@virtual_time()
async def test_late_answers_to_a_peer_that_does_not_read_end_at_the_hard_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept: list[tuple[Command, Connection]] = []
    router = Router({1: lambda request, peer: kept.append((request, peer))})
    async with world(router, SMALL) as here:
        await flood(here, 100)
        await wait_until(lambda: len(kept) == 100)
        most = 0
        for request, peer in kept:
            peer.answer(request, request.answer(0, body=bytes(ANSWER_BYTES)))
            most = max(most, peer.unwritten_bytes)
        assert most <= SMALL.unwritten_bytes_max + ANSWER_BYTES + 1000
        assert not kept[0][1].is_open
        await wait_until(lambda: here.disconnected)
    assert "bytes unwritten, at most 1048576" in caplog.text


@virtual_time()
async def test_requests_wait_while_the_peer_does_not_read() -> None:
    async with world(limits=SMALL) as here:
        connection = await here.connect(limits=SMALL)
        here.network.stop_reading("server")
        body = bytes(16 * 1024)
        calls = [
            asyncio.create_task(connection.request(Command(ECHO, body=body), 60_000))
            for _ in range(200)
        ]
        await asyncio.sleep(5)
        assert connection.unwritten_bytes <= SMALL.write_pause_bytes + 2 * len(body)
        assert len(in_flight(connection)) < 10
        here.network.resume_reading("server")
        answers = await asyncio.gather(*calls)
        assert all(answer.body == body for answer in answers)


@virtual_time()
async def test_a_caller_that_waits_too_long_for_the_peer_to_read_gets_an_error() -> None:
    async with world(limits=SMALL) as here:
        connection = await here.connect(limits=SMALL)
        here.network.stop_reading("server")
        while connection._admission.writable:
            connection.oneway(Command(ECHO, body=bytes(30_000)))
        with pytest.raises(Overloaded, match="the peer read nothing for 500 ms"):
            await connection.request(Command(ECHO), 500)
        with pytest.raises(Overloaded, match="the peer read nothing for 500 ms"):
            await connection.oneway_in_time(Command(ECHO), 500)
        with pytest.raises(Overloaded, match="does not read"):
            connection.oneway(Command(ECHO))
        connection.abort("done")


@virtual_time()
async def test_two_sides_that_flood_each_other_do_not_deadlock() -> None:
    """Both have full buffers: the side that connected continues reading, so both make progress."""
    async with world(limits=SMALL) as here:
        connection = await here.connect(Router({ECHO: echo}), SMALL)
        body = bytes(16 * 1024)
        forth = (connection.request(Command(ECHO, body=body), 60_000) for _ in range(100))
        back = (here.accepted.request(Command(ECHO, body=body), 60_000) for _ in range(100))
        answers = await asyncio.gather(*forth, *back)
        assert len(answers) == 200


@virtual_time()
async def test_frames_of_one_turn_go_out_in_few_writes() -> None:
    async with world() as here:
        here.network.quality = type(here.network.quality)(cut_chance=0)
        connection = await here.connect()
        here.network.trace = []
        await asyncio.gather(*(connection.request(Command(ECHO), 1000) for _ in range(200)))
        assert len(here.network.trace) < 40


@virtual_time()
async def test_a_heavy_sender_yields_to_others() -> None:
    served: list[int] = []

    def serve(request: Command, _: Connection) -> None:
        served.append(request.opaque)

    async with world(Router({1: serve, ECHO: echo})) as here:
        await (await here.connect()).request(Command(ECHO), 1000)
        peer = here.accepted
        for number in range(6):
            # Like a transport that has received more than was requested.
            peer.data_received(
                encode(Command(1, opaque=number, flag=FLAG_ONEWAY, body=bytes(70_000)))
            )
        assert served == [0, 1, 2, 3]
        await wait_until(lambda: len(served) == 6)
        assert served == list(range(6))
        for number in range(6, 16):
            peer.data_received(encode(Command(1, opaque=number, flag=FLAG_ONEWAY)))
        assert served == list(range(16)), "small ones do not matter"
