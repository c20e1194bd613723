"""Listening on all addresses of a host, in every TLS mode, on both event loops."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest
import trustme

from netkit import ECHO, Run, handlers
from turbopump.errors import ListenFailed
from turbopump.net import sockets
from turbopump.net.pool import ConnectionPool
from turbopump.net.pool_config import PoolConfig
from turbopump.net.server import Server, ServerConfig
from turbopump.net.sockets import SocketNetwork
from turbopump.net.tls import ClientTls, ServerTls, TlsMode
from turbopump.wire.command import Command


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(path)
    return path


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


async def two_loopbacks(host: str, port: int) -> list[sockets.Place]:
    """Resolve any name to both loopback addresses, as localhost does on most machines."""
    return [
        (socket.AF_INET, ("127.0.0.1", port)),
        (socket.AF_INET6, ("::1", port, 0, 0)),
    ]


@needs_ipv6
@pytest.mark.parametrize("mode", [None, *TlsMode])
@pytest.mark.parametrize("host", ["", "both.test"])
def test_every_address_of_a_host_is_listened_at_with_one_port(
    run_on_loop: Run,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: TlsMode | None,
    host: str,
) -> None:
    if host:
        monkeypatch.setattr(sockets, "_places", two_loopbacks)

    async def main() -> None:
        tls = None if mode is None else ServerTls(certificate, mode=mode)
        client = ClientTls(verify=False) if mode is TlsMode.ENFORCING else None
        async with (
            Server(SocketNetwork(), handlers(), ServerConfig(host, tls=tls)) as server,
            ConnectionPool(SocketNetwork(), PoolConfig(tls=client)) as pool,
        ):
            for address in (f"127.0.0.1:{server.port}", f"[::1]:{server.port}"):
                assert (await pool.request(address, Command(ECHO), 5000)).code == 0

    run_on_loop(main())


@needs_ipv6
def test_a_port_in_use_on_one_address_is_not_chosen(
    run_on_loop: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_places", two_loopbacks)
    tried: list[int] = []
    bind = sockets._bind

    def bind_or_not(family: int, at: sockets.At) -> socket.socket:
        if at[1]:
            tried.append(at[1])
            if len(tried) == 1:
                raise OSError(errno.EADDRINUSE, "Address already in use")
        return bind(family, at)

    monkeypatch.setattr(sockets, "_bind", bind_or_not)

    async def main() -> None:
        async with Server(SocketNetwork(), handlers(), ServerConfig("both.test")) as server:
            assert len(tried) == 2
            assert server.port == tried[1]

    run_on_loop(main())


def test_an_address_this_machine_lacks_does_not_disable_the_others(
    run_on_loop: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def places(host: str, port: int) -> list[sockets.Place]:
        return [(socket.AF_INET, ("192.0.2.1", port)), (socket.AF_INET, ("127.0.0.1", port))]

    monkeypatch.setattr(sockets, "_places", places)

    async def main() -> None:
        async with Server(SocketNetwork(), handlers(), ServerConfig("half.test")) as server:
            assert server.host == "127.0.0.1"

    run_on_loop(main())


@pytest.mark.parametrize(
    ("host", "reason"), [("192.0.2.1", "cannot assign"), ("a" * 70, ""), ("nobody.invalid", "")]
)
def test_a_host_that_is_not_ours_is_named(run_on_loop: Run, host: str, reason: str) -> None:
    async def main() -> None:
        with pytest.raises(ListenFailed, match=f"^{host}:0: {reason}"):
            await Server(SocketNetwork(), handlers(), ServerConfig(host)).start()

    run_on_loop(main())
