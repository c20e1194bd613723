"""Shared by the connection tests: a server and its clients on an in-memory network."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from turbopump.net.connection import Connection
from turbopump.net.deadlines import Deadlines
from turbopump.net.limits import DEFAULT_LIMITS, ConnectionLimits
from turbopump.net.request_protocol import RequestHook
from turbopump.net.router import Router
from turbopump.net.server import Server, ServerConfig
from turbopump.net.sockets import SocketListener
from turbopump.testing import LinkQuality, MemoryNetwork, VirtualClock, virtual_loop
from turbopump.wire.command import Command, Payload, body_parts

ECHO = 310
SLOW = 11
NEVER = 12
FAIL = 13

SMALL = ConnectionLimits(
    frame_bytes_max=64 * 1024, write_pause_bytes=4 * 1024, unwritten_bytes_max=1024 * 1024
)


Run = Callable[[Coroutine[Any, Any, None]], None]
"""Runs a coroutine to completion on one of the event loops; from the fixture ``run_on_loop``."""


def in_flight(connection: Connection) -> Collection[int]:
    """Return the requests that wait for a response."""
    return connection._protocol.in_flight


def echo(request: Command, peer: Connection) -> Command:
    return request.answer(0, body=request.body)


async def slow_echo(request: Command, peer: Connection) -> Command:
    """Echo after as many milliseconds as the field says."""
    await asyncio.sleep(int((request.ext_fields or {}).get("ms", "100")) / 1000)
    return request.answer(0, body=request.body)


def never(request: Command, peer: Connection) -> None:
    """Never answer the request."""


def fail(request: Command, peer: Connection) -> Command:
    raise RuntimeError("the handler broke")


def handlers() -> Router:
    return Router({ECHO: echo, SLOW: slow_echo, NEVER: never, FAIL: fail})


def slow(ms: int, body: Payload = b"") -> Command:
    return Command(SLOW, ext_fields={"ms": str(ms)}, body=body)


def body_bytes(command: Command) -> bytes:
    return b"".join(body_parts(command.body))


class RawPeer(asyncio.Protocol):
    """A peer that sends arbitrary bytes, valid frames or not."""

    def __init__(self) -> None:
        self.received = b""
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


@dataclass
class World:
    """A server on the host "server"; clients are on "client"."""

    network: MemoryNetwork
    server: Server
    clock: VirtualClock
    deadlines: Deadlines
    connected: list[Connection] = field(default_factory=list)
    disconnected: list[Connection] = field(default_factory=list)

    @property
    def accepted(self) -> Connection:
        """The server's end of the only connection."""
        (connection,) = self.server.connections
        return connection

    @property
    def handlers_running(self) -> int:
        """How many requests of the only connection are being handled."""
        return self.accepted._serving.running

    async def connect(
        self,
        router: Router | None = None,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        *,
        hooks: Sequence[RequestHook] = (),
        host: str = "client",
    ) -> Connection:
        client_router = router or Router()
        return await self.network.host(host).connect(
            self.server.host,
            self.server.port,
            lambda: Connection(client_router, self.deadlines, limits, hooks=hooks),
        )

    async def connect_raw(self, host: str = "client") -> RawPeer:
        return await self.network.host(host).connect(self.server.host, self.server.port, RawPeer)


@asynccontextmanager
async def world(
    router: Router | None = None,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    *,
    quality: LinkQuality | None = None,
    connections_max: int = 100,
    config: ServerConfig | None = None,
) -> AsyncIterator[World]:
    """Start a server in virtual time."""
    network, clock = MemoryNetwork(quality), virtual_loop().clock
    connected: list[Connection] = []
    disconnected: list[Connection] = []
    config = config or ServerConfig("server", connections_max=connections_max, limits=limits)
    async with Server(
        network.host("server"),
        router or handlers(),
        config,
        clock=clock,
        on_connect=connected.append,
        on_disconnect=disconnected.append,
    ) as server:
        yield World(network, server, clock, Deadlines(clock), connected, disconnected)


# --- real sockets ---------------------------------------------------------------------------------


def receive_buffers(server: Server, size: int) -> None:
    """Let the kernel buffer ``size`` bytes of each peer before anything is read."""
    listener = cast(SocketListener, server._listener)
    for listening in listener._servers[0].sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def require_sent(peer: socket.socket) -> None:
    """Wait until the other side's kernel has everything; skip if its buffers are too small."""
    for _ in range(100):
        unsent = fcntl.ioctl(peer.fileno(), termios.TIOCOUTQ, bytes(4))
        if not int.from_bytes(unsent, sys.byteorder):
            return
        time.sleep(0.01)
    pytest.skip("the machine does not allow large receive buffers (net.core.rmem_max)")
