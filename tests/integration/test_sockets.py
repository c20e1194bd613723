"""Connections over real sockets, on both event loops."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections import Counter
from typing import cast

import pytest
from msgspec.structs import replace

from netkit import (
    ECHO,
    NEVER,
    SMALL,
    Run,
    echo,
    handlers,
    receive_buffers,
    require_sent,
    slow,
)
from turbopump.errors import ConnectFailed, ConnectionLost, ListenFailed, RequestTimeout
from turbopump.net.connection import Connection
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.router import Router
from turbopump.net.server import Server, ServerConfig
from turbopump.net.sockets import SocketNetwork
from turbopump.testing import wait_until
from turbopump.wire.command import FLAG_ONEWAY, Buffer, Command, Serialize
from turbopump.wire.framing import encode


def test_run_uses_the_fastest_loop() -> None:
    async def main() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run(main()) == "uvloop"


def test_requests_both_ways(run_on_loop: Run) -> None:
    async def main() -> None:
        peers: list[Connection] = []
        async with (
            Server(SocketNetwork(), handlers(), on_connect=peers.append) as server,
            ConnectionPool(SocketNetwork(), router=Router({7: echo})) as pool,
        ):
            calls = (pool.request(server.address, slow(5, bytes([i])), 5000) for i in range(50))
            answers = await asyncio.gather(*calls)
            assert [answer.body for answer in answers] == [bytes([i]) for i in range(50)]
            assert (await peers[0].request(Command(7, body=b"push"), 5000)).body == b"push"
            connection = await pool.connection(server.address)
            assert connection.peer_address == server.address
            assert peers[0].peer_address == connection.local_address

    run_on_loop(main())


def test_a_peer_that_never_pauses_does_not_starve_others(run_on_loop: Run) -> None:
    requests, turn = 100, 0
    served: Counter[int] = Counter()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        is_over = asyncio.Event()

        def next_turn() -> None:
            nonlocal turn
            turn += 1
            if not is_over.is_set():
                loop.call_soon(next_turn)

        def serve(request: Command, peer: Connection) -> None:
            served[turn] += 1
            # As long as sending the next one takes, so that there is always something to read.
            time.sleep(0.001)
            if served.total() == requests:
                is_over.set()

        async with Server(SocketNetwork(), Router({7: serve})) as server:
            next_turn()
            frame = encode(Command(7, flag=FLAG_ONEWAY, body=bytes(250_000)))
            with socket.create_connection((server.host, server.port)) as peer:
                await asyncio.gather(
                    asyncio.to_thread(peer.sendall, frame * requests), is_over.wait()
                )

    run_on_loop(main())
    assert max(served.values()) <= 6


def test_large_bodies_in_pieces(run_on_loop: Run) -> None:
    async def main() -> None:
        async with (
            Server(SocketNetwork(), handlers()) as server,
            ConnectionPool(SocketNetwork()) as pool,
        ):
            data = bytes(range(256)) * 40_000
            view = memoryview(data)
            pieces: list[Buffer] = [view[:100], view[100:5_000_000], view[5_000_000:]]
            for _ in range(3):
                answer = await pool.request(server.address, Command(ECHO, body=pieces), 10_000)
                assert answer.body == data

    run_on_loop(main())


def test_sockets_send_small_frames_immediately(run_on_loop: Run) -> None:
    async def main() -> None:
        peers: list[Connection] = []
        async with (
            Server(SocketNetwork(), handlers(), on_connect=peers.append) as server,
            ConnectionPool(SocketNetwork()) as pool,
        ):
            ours = await pool.connection(server.address)
            await wait_until(lambda: peers)
            for connection in (ours, peers[0]):
                end: socket.socket = connection._transport.get_extra_info("socket")
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert not end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    run_on_loop(main())


def test_requests_fail_while_a_server_is_down_and_succeed_when_it_returns(run_on_loop: Run) -> None:
    async def main() -> None:
        async with ConnectionPool(SocketNetwork()) as pool:
            async with Server(SocketNetwork(), handlers()) as server:
                address, port = server.address, server.port
                call = asyncio.create_task(pool.request(address, Command(NEVER), 10_000))
                await wait_until(lambda: server.connections)
                assert (await pool.request(address, Command(ECHO), 5000)).code == 0
            with pytest.raises(ConnectionLost):
                await call
            with pytest.raises(ConnectFailed, match=f"^{address}: Connection refused$"):
                await pool.request(address, Command(ECHO), 5000)
            with pytest.raises(ConnectFailed, match=f"^localhost:{port}: Connection refused$"):
                await pool.request(f"localhost:{port}", Command(ECHO), 5000)
            async with Server(SocketNetwork(), handlers(), ServerConfig(port=port)):
                await wait_until(
                    lambda: pool._peers[address].backoff.next_try_ms <= pool._clock.monotonic_ms()
                )
                assert (await pool.request(address, Command(ECHO), 5000)).code == 0

    run_on_loop(main())


def test_timeouts_in_real_time(run_on_loop: Run) -> None:
    async def main() -> None:
        async with (
            Server(SocketNetwork(), handlers()) as server,
            ConnectionPool(SocketNetwork()) as pool,
        ):
            loop = asyncio.get_running_loop()
            start = loop.time()
            with pytest.raises(RequestTimeout):
                await pool.request(server.address, Command(NEVER), 30)
            assert loop.time() - start >= 0.03

    run_on_loop(main())


def test_a_slow_reader_gets_back_pressure(run_on_loop: Run) -> None:
    async def main() -> None:
        served: list[int] = []

        def large(request: Command, peer: Connection) -> Command:
            served.append(request.opaque)
            return request.answer(0, body=bytes(60_000))

        config = ServerConfig(limits=SMALL)
        async with Server(SocketNetwork(), Router({1: large}), config) as server:
            peer = await SocketNetwork().connect("127.0.0.1", server.port, IdleProtocol)
            peer.transport.pause_reading()
            wanted = 2000
            peer.transport.write(b"".join(encode(Command(1, opaque=i)) for i in range(wanted)))
            await wait_until(lambda: served)
            await wait_until(lambda: not server.connections[0]._inbox.is_reading)
            assert server.connections[0].unwritten_bytes < 200_000
            assert len(served) < wanted
            peer.transport.abort()
            await wait_until(lambda: not server.connections)

    run_on_loop(main())


def test_malformed_bytes_end_only_their_own_connection(
    run_on_loop: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with (
            Server(SocketNetwork(), handlers()) as server,
            ConnectionPool(SocketNetwork()) as pool,
        ):
            for bad in (
                b"GET / HTTP/1.1\r\n\r\n",
                struct.pack(">ii", 3, 0),
                b"\x00\x00\x00\x08" * 4,
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(bad)
                assert await reader.read() == b""
                writer.close()
                assert (await pool.request(server.address, Command(ECHO), 5000)).code == 0

    run_on_loop(main())
    reasons = [r for r in caplog.records if "malformed frame" in r.getMessage()]
    assert len(reasons) == 3
    assert all(r.levelno == logging.WARNING for r in reasons)
    assert "bytes, got 1195725856" in reasons[0].getMessage()


def test_an_address_in_use_and_one_that_is_not_ours(run_on_loop: Run) -> None:
    async def main() -> None:
        async with Server(SocketNetwork(), handlers()) as server:
            with pytest.raises(ListenFailed, match=f"127.0.0.1:{server.port}"):
                await Server(SocketNetwork(), handlers(), ServerConfig(port=server.port)).start()

    run_on_loop(main())


def test_connecting_to_a_port_without_a_listener(run_on_loop: Run) -> None:
    async def main() -> None:
        with socket.socket() as placeholder:
            # Bound but not listening: no other process can take the port meanwhile.
            placeholder.bind(("127.0.0.1", 0))
            port = placeholder.getsockname()[1]
            with pytest.raises(ConnectFailed, match=f"127.0.0.1:{port}: "):
                await SocketNetwork().connect("127.0.0.1", port, asyncio.Protocol)

    run_on_loop(main())


def test_a_host_that_does_not_answer(run_on_loop: Run) -> None:
    async def main() -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            port = full.getsockname()[1]
            network = SocketNetwork(connect_timeout_ms=50)
            # The backlog accepts one or two; further connections get no answer.
            calls = [network.connect("127.0.0.1", port, IdleProtocol) for _ in range(5)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            made = [result for result in results if isinstance(result, IdleProtocol)]
            failed = [str(result) for result in results if isinstance(result, ConnectFailed)]
            assert len(made) + len(failed) == 5
            assert f"127.0.0.1:{port}: no answer within 50 ms" in failed
            for kept in made:
                kept.transport.abort()

    run_on_loop(main())


class IdleProtocol(asyncio.Protocol):
    """An idle connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("flag", [0, FLAG_ONEWAY])
def test_requests_before_the_close_are_executed(
    run_on_loop: Run, flag: int, is_reset: bool
) -> None:
    count = 4000
    numbers: list[int] = []
    closed: list[Connection] = []

    def serve(request: Command, peer: Connection) -> Command:
        numbers.append(request.opaque)
        return request.answer(0, body=bytes(500))

    async def main() -> None:
        router = Router({7: serve})
        async with Server(SocketNetwork(), router, on_disconnect=closed.append) as server:
            receive_buffers(server, 1_000_000)
            with socket.create_connection((server.host, server.port)) as peer:
                command = Command(7, flag, body=bytes(70), serialize=Serialize.ROCKETMQ)
                # All of it is in the kernel before the server reads the first byte.
                peer.sendall(b"".join(encode(replace(command, opaque=n)) for n in range(count)))
                require_sent(peer)
                if is_reset:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await wait_until(lambda: closed)
            assert numbers == list(range(count))

    run_on_loop(main())
