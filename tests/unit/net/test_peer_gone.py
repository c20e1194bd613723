"""Peers that close before they have their responses: their requests are executed."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from netkit import SMALL, RawPeer, World, world
from turbopump.net.connection import Connection
from turbopump.net.limits import ConnectionLimits
from turbopump.net.router import Router
from turbopump.net.server import ServerConfig
from turbopump.testing import virtual_loop, virtual_time, wait_until
from turbopump.wire.command import FLAG_ONEWAY, Command
from turbopump.wire.framing import encode

COMMIT = 15
COMMITS = 4000


class Commits:
    """Records requests; each has a response that soon fills the peer's window."""

    def __init__(self, answer_bytes: int = 200) -> None:
        self.numbers: list[int] = []
        self._answer_bytes = answer_bytes

    def serve(self, request: Command, peer: Connection) -> Command:
        self.numbers.append(request.opaque)
        return request.answer(0, body=bytes(self._answer_bytes))

    async def serve_later(self, request: Command, peer: Connection) -> Command:
        await asyncio.sleep(0.001)
        return self.serve(request, peer)


def commits(flag: int = 0, count: int = COMMITS) -> bytes:
    return b"".join(encode(Command(COMMIT, opaque=n, flag=flag)) for n in range(count))


async def send_and_close(here: World, data: bytes, *, is_reset: bool) -> RawPeer:
    peer = await here.connect_raw()
    peer.transport.pause_reading()
    peer.transport.write(data)
    await asyncio.sleep(1)
    if is_reset:
        peer.transport.abort()
    else:
        peer.transport.close()
    return peer


@pytest.mark.parametrize("flag", [0, FLAG_ONEWAY])
@pytest.mark.parametrize("is_coroutine", [False, True])
@virtual_time()
async def test_requests_before_the_close_are_executed(flag: int, is_coroutine: bool) -> None:
    served = Commits(answer_bytes=0)
    router = Router({COMMIT: served.serve_later if is_coroutine else served.serve})
    limits = ConnectionLimits(handlers_running_max=10)
    async with world(router, limits) as here:
        peer = await here.connect_raw()
        # Few enough for the answers to fit into the window of the peer, which does not read them.
        count = COMMITS // 2
        peer.transport.write(commits(flag, count))
        peer.transport.close()
        await wait_until(lambda: len(here.disconnected) == 1)
        await here.disconnected[0].wait_closed()
        assert sorted(served.numbers) == list(range(count))


@virtual_time()
async def test_requests_that_arrived_before_a_reset_are_executed() -> None:
    served = Commits()
    async with world(Router({COMMIT: served.serve}), SMALL) as here:
        # The peer does not read, so the server has stopped reading with pending requests.
        peer = await send_and_close(here, commits(), is_reset=True)
        before = len(served.numbers)
        await wait_until(lambda: here.disconnected)
        assert served.numbers == list(range(len(served.numbers)))
        assert before < len(served.numbers) < COMMITS
        assert peer.is_lost


@virtual_time()
async def test_a_peer_counts_as_gone_only_after_its_last_request_started() -> None:
    begun: list[int] = []

    async def serve(request: Command, peer: Connection) -> None:
        begun.append(request.opaque)
        await asyncio.sleep(1)

    async with world(Router({COMMIT: serve}), ConnectionLimits(handlers_running_max=1)) as here:
        peer = await here.connect_raw()
        peer.transport.write(b"".join(encode(Command(COMMIT, opaque=n)) for n in range(3)))
        await wait_until(lambda: begun)
        here.accepted._transport.abort()
        await wait_until(lambda: peer.is_lost)
        assert begun == [0]
        assert not here.disconnected
        await wait_until(lambda: here.disconnected)
        assert begun == [0, 1, 2]


@virtual_time()
async def test_handlers_of_a_gone_peer_finish() -> None:
    finished: list[int] = []

    async def serve(request: Command, peer: Connection) -> None:
        await asyncio.sleep(request.opaque)
        finished.append(request.opaque)

    async with world(Router({COMMIT: serve})) as here:
        peer = await here.connect_raw()
        for seconds in (0, 1, 20, 60):
            peer.transport.write(encode(Command(COMMIT, opaque=seconds)))
        peer.transport.close()
        await wait_until(lambda: here.disconnected)
        await here.disconnected[0].wait_closed()
        assert finished == [0, 1, 20]
        assert 30 <= virtual_loop().time() < 31


@virtual_time()
async def test_closing_a_server_waits_for_handlers_of_gone_peers() -> None:
    finished: list[int] = []

    async def serve(request: Command, peer: Connection) -> None:
        await asyncio.sleep(1)
        finished.append(1)

    async with world(Router({COMMIT: serve})) as here:
        peer = await here.connect_raw()
        peer.transport.write(encode(Command(COMMIT)))
        peer.transport.close()
        await wait_until(lambda: here.disconnected)
        assert not here.server.connections
        assert not finished
    assert finished == [1]


@virtual_time()
async def test_requests_before_a_malformed_frame_are_executed() -> None:
    served = Commits()
    async with world(Router({COMMIT: served.serve_later})) as here:
        peer = await here.connect_raw()
        peer.transport.write(encode(Command(COMMIT, opaque=7)) + b"\xff" * 8)
        await wait_until(lambda: here.disconnected)
        await here.disconnected[0].wait_closed()
        assert served.numbers == [7]


# --- buffered data --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reset", [False, True])
@virtual_time()
async def test_closed_connections_free_their_half_frames(is_reset: bool) -> None:
    half = encode(Command(COMMIT, body=bytes(2**20)))[:-1]
    async with world() as here:
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(20):
                peer = await here.connect_raw()
                peer.transport.write(half)
                await wait_until(lambda: here.accepted._inbox.held_bytes == len(half))
                if is_reset:
                    peer.transport.abort()
                else:
                    peer.transport.close()
                await wait_until(lambda: not here.server.connections)
            assert here.server._budget.held_bytes == 0
            assert tracemalloc.get_traced_memory()[0] < 4 * len(half)
        finally:
            tracemalloc.stop()
            gc.enable()


@virtual_time()
async def test_unfinished_frames_of_all_connections_are_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    size = SMALL.frame_bytes_max // 2
    most = 10 * size
    half = encode(Command(COMMIT, body=bytes(2 * size - 1000)))[:size]
    config = ServerConfig("server", receive_bytes_max=most, limits=SMALL)
    served = Commits()
    async with world(Router({COMMIT: served.serve}), config=config) as here:
        honest = await here.connect_raw("honest")
        hoarders = [await here.connect_raw("hoarder") for _ in range(30)]
        for hoarder in hoarders:
            hoarder.transport.write(half)
            honest.transport.write(encode(Command(COMMIT, body=bytes(5000))))
            await asyncio.sleep(0.1)
            assert here.server._budget.held_bytes <= most
        # The oldest were closed, each for the next one.
        assert [hoarder.is_lost for hoarder in hoarders] == [True] * 20 + [False] * 10
        assert not honest.is_lost
        assert len(served.numbers) == 30
        assert f"received and not served on all connections, at most {most}" in caplog.text


@virtual_time()
async def test_streams_of_large_frames_are_not_held_against_a_peer() -> None:
    # Each chunk ends inside a frame, so the peer always has an unfinished one.
    size = SMALL.frame_bytes_max // 2
    config = ServerConfig("server", receive_bytes_max=3 * 64 * 1024, limits=SMALL)
    served = Commits(1)
    async with world(Router({COMMIT: served.serve}), config=config) as here:
        stream, half = await here.connect_raw("stream"), encode(Command(COMMIT, body=bytes(size)))
        stream.transport.write(half[: size // 2])
        await asyncio.sleep(0.1)
        hoarders = [await here.connect_raw("hoarder") for _ in range(20)]
        for hoarder in hoarders:
            hoarder.transport.write(half[:-1])
            stream.transport.write(half[size // 2 :] + half[: size // 2])
            await asyncio.sleep(0.1)
        assert not stream.is_lost
        assert len(served.numbers) == 20
