"""The network of the machine: TCP, with or without TLS."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from turbopump.errors import ConnectFailed, ListenFailed
from turbopump.net.network import Listener
from turbopump.net.tls import HANDSHAKE_FIRST_BYTE, ClientTls, ServerTls, TlsMode
from turbopump.supervisor import Supervisor
from turbopump.timeouts import timeout
from turbopump.wire.hosts import split_address

_log = logging.getLogger(__name__)

P = TypeVar("P", bound=asyncio.Protocol)

At = tuple[str, int] | tuple[str, int, int, int]
Place = tuple[int, At]
"""The family of an address, and the address."""

CONNECT_TIMEOUT_MS = 3000
BACKLOG = 1024
HANDSHAKE_TIMEOUT_S = 10.0
UNDECIDED_MAX = 4096
"""Connections without a first byte, or in their handshake; one more drops the oldest of them."""
FIRST_BYTE_TIMEOUT_S = 10.0
_PAUSE_AFTER_FAILURE_S = 1.0
_RECEIVE_BUFFER_BYTES = 4 * 1024 * 1024
"""For responses that arrive while a thread processes earlier ones. Left to autotuning, Linux
sometimes keeps the buffer so small that broker and reader wait for each other in turn."""
_FAILED_CALL = re.compile(r"\[Errno (\d+)\] Connect call failed")
"""How asyncio, unlike uvloop, words what the system says, for one or several addresses."""
_PORT_TRIES = 20
"""Attempts to find a port that is free at all addresses of a host."""


class SocketNetwork:
    """Connects and listens with TCP sockets.

    Both asyncio and uvloop enable TCP_NODELAY and leave SO_KEEPALIVE off, as the protocol
    requires.
    """

    def __init__(self, connect_timeout_ms: int = CONNECT_TIMEOUT_MS) -> None:
        self._connect_timeout_ms = connect_timeout_ms
        # Cached: reading trusted certificates takes milliseconds.
        self._contexts: dict[ClientTls, ssl.SSLContext] = {}

    async def connect(
        self,
        host: str,
        port: int,
        protocol_factory: Callable[[], P],
        *,
        tls: ClientTls | None = None,
    ) -> P:
        context = None if tls is None else self._context(tls)
        server_name = None if tls is None else tls.server_name or host
        try:
            async with timeout(self._connect_timeout_ms / 1000):
                _, protocol = await asyncio.get_running_loop().create_connection(
                    protocol_factory, host, port, ssl=context, server_hostname=server_name
                )
        except TimeoutError as error:
            text = f"{host}:{port}: no answer within {self._connect_timeout_ms} ms"
            raise ConnectFailed(text) from error
        except (OSError, UnicodeError) as error:
            # A host name that cannot be looked up is a UnicodeError.
            raise ConnectFailed(f"{host}:{port}: {_reason(error)}") from error
        return protocol

    def connect_blocking(
        self, address: str, *, tls: ClientTls | None = None, timeout_ms: int = CONNECT_TIMEOUT_MS
    ) -> socket.socket:
        """Connect a socket for a thread, TLS handshake included; raises ConnectFailed."""
        host, port = split_address(address)
        timeout_ms = min(timeout_ms, self._connect_timeout_ms)
        try:
            connected = socket.create_connection((host, port), timeout_ms / 1000)
            try:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if _allows_receive_buffer():
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
                if tls is None:
                    return connected
                name = tls.server_name or host
                return self._context(tls).wrap_socket(connected, server_hostname=name)
            except BaseException:
                connected.close()
                raise
        except TimeoutError as error:
            raise ConnectFailed(f"{address}: no answer within {timeout_ms} ms") from error
        except (OSError, UnicodeError) as error:
            # A host name that cannot be looked up is a UnicodeError.
            raise ConnectFailed(f"{address}: {_reason(error)}") from error

    async def listen(
        self,
        host: str,
        port: int,
        protocol_factory: Callable[[], asyncio.Protocol],
        *,
        tls: ServerTls | None = None,
    ) -> Listener:
        """Accept connections; port 0 takes any free port; raises ListenFailed.

        If the host has several addresses, listens on all of them, at the same port.
        """
        mode = TlsMode.DISABLED if tls is None else tls.mode
        context = None if tls is None or mode is TlsMode.DISABLED else tls.context()
        try:
            bound = _bind_all(await _places(host, port))
            if context is not None and mode is TlsMode.PERMISSIVE:
                return SniffingListener(bound, protocol_factory, context, HANDSHAKE_TIMEOUT_S)
            return await _serve(bound, protocol_factory, context)
        except OSError as error:
            raise ListenFailed(f"{host}:{port}: {_reason(error).lower()}") from error
        except UnicodeError as error:
            raise ListenFailed(f"{host}:{port}: {error}") from error

    def _context(self, tls: ClientTls) -> ssl.SSLContext:
        context = self._contexts.get(tls)
        if context is None:
            context = self._contexts[tls] = tls.context()
        return context


@functools.lru_cache(maxsize=1)
def _allows_receive_buffer() -> bool:
    """Return whether the system grants a receive buffer of that size.

    If not, none is requested: a smaller one would not grow automatically.
    """
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        return tried.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= _RECEIVE_BUFFER_BYTES


class SocketListener(Listener):
    """A listening socket, or one for each address of the host."""

    def __init__(self, servers: Sequence[asyncio.Server]) -> None:
        super().__init__(servers[0].sockets[0].getsockname())
        self._servers = tuple(servers)

    async def close(self) -> None:
        for server in self._servers:
            server.close()


class SniffingListener(Listener):
    """Accepts connections with and without TLS at one port: the first byte of each tells which.

    The byte is peeked at and stays in the socket, so that both TLS and plain protocols find the
    whole stream. Starts immediately, on one or more sockets of the same port.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        protocol_factory: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        handshake_timeout_s: float,
    ) -> None:
        super().__init__(listening[0].getsockname())
        self._listening = tuple(listening)
        self._protocol_factory = protocol_factory
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        # A dict as an ordered set: the oldest is dropped first.
        self._undecided: dict[asyncio.Task[None], None] = {}
        self._work = Supervisor()
        for at in self._listening:
            self._work.keep(f"accepting at port {self.port}", functools.partial(self._accept, at))

    async def close(self) -> None:
        """Stop accepting; connections that have sent a byte stay open."""
        await self._work.stop()
        for listening in self._listening:
            listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                # Most likely out of file descriptors: closing connections frees some.
                _log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
                continue
            self._make_room()
            task = self._work.start(self._decide(accepted))
            self._undecided[task] = None
            task.add_done_callback(functools.partial(self._decided, accepted))
            # Accepting may never block: yield to the connections already accepted.
            await asyncio.sleep(0)

    def _make_room(self) -> None:
        """Drop the oldest, or silent peers would shut out all others."""
        if len(self._undecided) >= UNDECIDED_MAX:
            oldest = next(iter(self._undecided))
            del self._undecided[oldest]
            oldest.cancel()

    def _decided(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._undecided.pop(task, None)
        if task.cancelled() or task.exception() is not None:
            accepted.close()

    async def _decide(self, accepted: socket.socket) -> None:
        """Hand the connection over as soon as its first byte has arrived."""
        try:
            async with timeout(FIRST_BYTE_TIMEOUT_S):
                await _readable(accepted)
            first = accepted.recv(1, socket.MSG_PEEK)
            if not first:
                accepted.close()
                return
            is_tls = first[0] == HANDSHAKE_FIRST_BYTE
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol_factory,
                accepted,
                ssl=self._context if is_tls else None,
                ssl_handshake_timeout=self._handshake_timeout_s if is_tls else None,
            )
        except OSError as error:
            _log.info("connection closed before its first frame: %r", error)
            accepted.close()


async def _readable(waiting: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(waiting, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(waiting)


async def _serve(
    bound: Sequence[socket.socket],
    protocol_factory: Callable[[], asyncio.Protocol],
    context: ssl.SSLContext | None,
) -> SocketListener:
    loop = asyncio.get_running_loop()
    timeout_s = None if context is None else HANDSHAKE_TIMEOUT_S
    return SocketListener(
        [
            await loop.create_server(
                protocol_factory,
                sock=listening,
                backlog=BACKLOG,
                ssl=context,
                ssl_handshake_timeout=timeout_s,
            )
            for listening in bound
        ]
    )


def _reason(error: OSError | UnicodeError) -> str:
    """Return the system's text for an error, without its number."""
    if failed := _FAILED_CALL.search(str(error)):
        return os.strerror(int(failed[1]))
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


async def _places(host: str, port: int) -> list[Place]:
    """Look up all addresses of a host; the empty host has those of the machine."""
    infos = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return list(dict.fromkeys((int(family), cast(At, at)) for family, _, _, _, at in infos))


def _bind_all(places: Sequence[Place]) -> list[socket.socket]:
    """Listen at all places; port 0 becomes the same free port at each; raises OSError."""
    for tries_left in range(_PORT_TRIES, -1, -1):
        try:
            return _bind_each(places)
        except OSError as error:
            # A port that is free at the first address may be taken at another one.
            chosen = places[0][1][1] == 0 and len(places) > 1
            if error.errno != errno.EADDRINUSE or not chosen or not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def _bind_each(places: Sequence[Place]) -> list[socket.socket]:
    bound: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, at in places:
            port = bound[0].getsockname()[1] if bound else at[1]
            try:
                bound.append(_bind(family, (at[0], port, *at[2:])))
            except OSError as error:
                # localhost may resolve to an IPv6 address on a machine without IPv6.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
        if missing is not None and not bound:
            raise missing
    except OSError:
        for listening in bound:
            listening.close()
        raise
    return bound


def _bind(family: int, at: At) -> socket.socket:
    # asyncio sets TCP_NODELAY only if the protocol is given.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # IPv4 has a socket of its own.
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.setblocking(False)
        listening.bind(at)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
