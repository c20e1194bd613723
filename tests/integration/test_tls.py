"""TLS over real sockets, on both event loops; the tests create the certificates."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from msgspec.structs import replace

from netkit import ECHO, Run, handlers, receive_buffers, require_sent
from turbopump.client.background import LoopThread
from turbopump.errors import ConnectFailed, InvalidArgument, NetworkError
from turbopump.net import sockets
from turbopump.net.blocking_connection import readable
from turbopump.net.blocking_pool import BlockingPool
from turbopump.net.connection import Connection
from turbopump.net.pool import ConnectionPool
from turbopump.net.pool_config import PoolConfig
from turbopump.net.router import Router
from turbopump.net.server import Server, ServerConfig
from turbopump.net.sockets import SocketNetwork
from turbopump.net.tls import ClientTls, ServerTls, TlsMode
from turbopump.testing import wait_until
from turbopump.wire.command import FLAG_ONEWAY, Command, Serialize
from turbopump.wire.framing import FrameDecoder, encode


@dataclass(frozen=True)
class Files:
    """Certificates on disk."""

    trust: Path
    server: Path
    client: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    found = Files(folder / "ca.pem", folder / "server.pem", folder / "client.pem")
    authority.cert_pem.write_to_path(found.trust)
    server = authority.issue_cert("127.0.0.1", "broker.test")
    server.private_key_and_cert_chain_pem.write_to_path(found.server)
    client = authority.issue_cert("client@example.test")
    client.private_key_and_cert_chain_pem.write_to_path(found.client)
    return found


async def asked(server: ServerTls | None, client: ClientTls | None) -> int:
    """Start a server, send it a request with a large answer, and return the answer's code."""
    async with (
        Server(SocketNetwork(), handlers(), ServerConfig(tls=server)) as listening,
        ConnectionPool(SocketNetwork(), PoolConfig(tls=client)) as pool,
    ):
        body = bytes(300_000)
        calls = (pool.request(listening.address, Command(ECHO, body=body), 5000) for _ in range(5))
        answers = await asyncio.gather(*calls)
        assert all(answer.body == body for answer in answers)
        return answers[0].code


@pytest.mark.parametrize(
    ("mode", "with_tls", "works"),
    [
        (TlsMode.DISABLED, False, True),
        (TlsMode.DISABLED, True, False),
        (TlsMode.PERMISSIVE, False, True),
        (TlsMode.PERMISSIVE, True, True),
        (TlsMode.ENFORCING, False, False),
        (TlsMode.ENFORCING, True, True),
    ],
)
def test_modes_admit_the_right_clients(
    run_on_loop: Run, files: Files, mode: TlsMode, with_tls: bool, works: bool
) -> None:
    async def main() -> None:
        server = ServerTls(files.server, mode=mode)
        client = ClientTls(trust_path=files.trust) if with_tls else None
        if works:
            assert await asked(server, client) == 0
        else:
            with pytest.raises(NetworkError):
                await asked(server, client)

    run_on_loop(main())


def test_certificates_are_checked(run_on_loop: Run, files: Files) -> None:
    async def main() -> None:
        server = ServerTls(files.server, mode=TlsMode.ENFORCING)
        with pytest.raises(ConnectFailed, match="certificate verify failed"):
            await asked(server, ClientTls())
        with pytest.raises(ConnectFailed, match="certificate"):
            await asked(server, ClientTls(trust_path=files.trust, server_name="other.test"))
        assert await asked(server, ClientTls(files.trust, server_name="broker.test")) == 0
        assert await asked(server, ClientTls(verify=False)) == 0

    run_on_loop(main())


def test_clients_may_have_to_show_a_certificate(run_on_loop: Run, files: Files) -> None:
    async def main() -> None:
        server = ServerTls(files.server, mode=TlsMode.PERMISSIVE, client_trust_path=files.trust)
        with pytest.raises(NetworkError):
            await asked(server, ClientTls(files.trust))
        assert await asked(server, ClientTls(files.trust, certificate_path=files.client)) == 0

    run_on_loop(main())


def test_silent_or_malformed_connections_do_no_harm(run_on_loop: Run, files: Files) -> None:
    async def main() -> None:
        config = ServerConfig(tls=ServerTls(files.server))
        async with Server(SocketNetwork(), handlers(), config) as server:
            _, gone = await asyncio.open_connection("127.0.0.1", server.port)
            gone.close()
            await gone.wait_closed()
            _, silent = await asyncio.open_connection("127.0.0.1", server.port)
            reader, liar = await asyncio.open_connection("127.0.0.1", server.port)
            liar.write(b"\x16\x03\x01\x00\x05hello")
            await reader.read()
            async with ConnectionPool(SocketNetwork()) as pool:
                assert (await pool.request(server.address, Command(ECHO), 5000)).code == 0
                await wait_until(lambda: len(server.connections) == 1)
            for writer in (silent, liar):
                writer.close()

    run_on_loop(main())


def test_silent_peers_do_not_shut_others_out(
    run_on_loop: Run, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "UNDECIDED_MAX", 5)

    async def main() -> None:
        config = ServerConfig(tls=ServerTls(files.server))
        async with Server(SocketNetwork(), handlers(), config) as server:
            silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(8)]
            half = ClientTls(trust_path=files.trust)
            for tls in (None, half):
                async with ConnectionPool(SocketNetwork(), PoolConfig(tls=tls)) as pool:
                    assert (await pool.request(server.address, Command(ECHO), 5000)).code == 0
            # The oldest were closed to make room; five silent ones are left.
            ends = [asyncio.create_task(reader.read()) for reader, _ in silent]
            await wait_until(lambda: sum(end.done() for end in ends) >= 3)
            assert all(end.done() for end in ends[:3])
            assert not any(end.done() for end in ends[5:])
            for _, writer in silent:
                writer.close()
            await asyncio.gather(*ends, return_exceptions=True)

    run_on_loop(main())


def test_a_silent_peer_is_dropped_after_the_handshake_timeout(
    run_on_loop: Run, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "FIRST_BYTE_TIMEOUT_S", 0.05)

    async def main() -> None:
        config = ServerConfig(tls=ServerTls(files.server))
        async with Server(SocketNetwork(), handlers(), config) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            assert await reader.read() == b""
            writer.close()

    run_on_loop(main())


def test_permissive_sockets_send_small_frames_immediately(run_on_loop: Run, files: Files) -> None:
    async def main() -> None:
        config = ServerConfig(tls=ServerTls(files.server))
        async with (
            Server(SocketNetwork(), handlers(), config) as server,
            ConnectionPool(SocketNetwork()) as pool,
        ):
            await pool.request(server.address, Command(ECHO), 5000)
            end = server.connections[0]._transport.get_extra_info("socket")
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run_on_loop(main())


@pytest.mark.parametrize("name", ["missing.pem", "ca.pem"])
def test_files_that_cannot_be_used_are_named(files: Files, name: str) -> None:
    path = files.trust.with_name(name)
    with pytest.raises(InvalidArgument, match=name):
        ServerTls(path).context()
    with pytest.raises(InvalidArgument, match=name):
        ClientTls(certificate_path=path).context()


def test_only_the_given_certificates_are_trusted(files: Files) -> None:
    assert ClientTls(files.trust).context().cert_store_stats()["x509_ca"] == 1
    server = ServerTls(files.server, client_trust_path=files.trust)
    assert server.context().cert_store_stats()["x509_ca"] == 1


def test_trust_that_cannot_be_used_is_named(tmp_path: Path, files: Files) -> None:
    with pytest.raises(InvalidArgument, match=r"trusted TLS certificates .*nobody\.pem"):
        ClientTls(tmp_path / "nobody.pem").context()
    with pytest.raises(InvalidArgument, match=r"nobody\.pem"):
        ServerTls(files.server, client_trust_path=tmp_path / "nobody.pem").context()


@pytest.mark.parametrize("flag", [0, FLAG_ONEWAY])
def test_requests_before_the_close_are_executed(run_on_loop: Run, files: Files, flag: int) -> None:
    count = 4000
    numbers: list[int] = []
    closed: list[Connection] = []
    context = ssl.create_default_context(cafile=files.trust)

    def serve(request: Command, peer: Connection) -> Command:
        numbers.append(request.opaque)
        return request.answer(0, body=bytes(500))

    def connected(address: tuple[str, int]) -> ssl.SSLSocket:
        plain = socket.create_connection(address)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    async def main() -> None:
        config = ServerConfig(tls=ServerTls(files.server, mode=TlsMode.ENFORCING))
        router = Router({7: serve})
        async with Server(SocketNetwork(), router, config, on_disconnect=closed.append) as server:
            receive_buffers(server, 1_000_000)
            peer = await asyncio.to_thread(connected, (server.host, server.port))
            with peer:
                command = Command(7, flag, body=bytes(70), serialize=Serialize.ROCKETMQ)
                # All of it is in the kernel before the server reads the first byte.
                peer.sendall(b"".join(encode(replace(command, opaque=n)) for n in range(count)))
                require_sent(peer)
            await wait_until(lambda: closed)
            assert numbers == list(range(count))

    run_on_loop(main())


# --- blocking connections -------------------------------------------------------------------------


@contextmanager
def echoing(tls: ServerTls) -> Iterator[str]:
    """Serve in a thread; yield the address."""
    server, thread = Server(SocketNetwork(), handlers(), ServerConfig(tls=tls)), LoopThread()
    try:
        thread.run(server.start())
        yield server.address
    finally:
        thread.run(server.close())
        thread.stop()


def test_threads_speak_tls_too(files: Files) -> None:
    client = ClientTls(files.trust, certificate_path=files.client)
    with echoing(ServerTls(files.server, client_trust_path=files.trust)) as address:
        pool = BlockingPool(SocketNetwork(), PoolConfig(tls=client))
        body = bytes(range(256)) * 8192
        for _ in range(3):
            assert pool.request(address, Command(ECHO, body=body), 5000).body == body
            pool.oneway(address, Command(ECHO, body=body), 5000)
        assert len(pool) == 1, "the connection is reused, whatever TLS itself has sent"
        pool.close()


def test_threads_read_encrypted_responses_into_their_own_memory(files: Files) -> None:
    with echoing(ServerTls(files.server)) as address:
        pool = BlockingPool(SocketNetwork(), PoolConfig(tls=ClientTls(files.trust)))
        connection = pool.take(address)
        for _ in range(10):
            opaque = connection.unused_opaque()
            connection.put(encode(Command(ECHO, opaque=opaque, body=b"x" * 100_000)))
        connection.flush()
        decoder, found, room = FrameDecoder(), list[int](), memoryview(bytearray(1 << 16))
        while len(found) < 10:
            count = connection.receive_into(room, 5000)
            found += [each.opaque for each in decoder.feed(bytes(room[:count]))]
        assert found == list(range(10))
        sent = [connection.send(Command(ECHO, body=b"x" * 40_000), 5000) for _ in range(10)]
        received: list[int] = []
        while len(received) < 10:
            assert readable([connection], 5000) == [connection]
            received += [each.opaque for each in connection.responses()]
        assert received == sent
        pool.give_back(connection)
        assert len(pool) == 1
        pool.close()


def test_threads_do_not_connect_with_an_untrusted_certificate(files: Files) -> None:
    with echoing(ServerTls(files.server)) as address:
        for tls in (ClientTls(), ClientTls(files.trust, server_name="other.test")):
            pool = BlockingPool(SocketNetwork(), PoolConfig(tls=tls))
            with pytest.raises(ConnectFailed, match="certificate verify failed"):
                pool.request(address, Command(ECHO), 5000)
