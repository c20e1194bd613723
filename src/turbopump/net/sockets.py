"""The network of the machine: TCP, with or without TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

from turbopump.errors import ConnectFailed, ListenFailed
from turbopump.net.network import Listener
from turbopump.net.sniffing import SniffingListener
from turbopump.net.tls import ClientTls, ServerTls, TlsMode

P = TypeVar("P", bound=asyncio.Protocol)

CONNECT_TIMEOUT_MS = 3000
BACKLOG = 1024
HANDSHAKE_TIMEOUT_S = 10.0


class SocketNetwork:
    """Connects and listens with TCP sockets.

    Both asyncio and uvloop switch TCP_NODELAY on and leave SO_KEEPALIVE off by themselves, which is
    what the protocol asks for.
    """

    def __init__(self, connect_timeout_ms: int = CONNECT_TIMEOUT_MS) -> None:
        self._connect_timeout_ms = connect_timeout_ms
        # Reading trusted certificates takes milliseconds: once for each setting is enough.
        self._contexts: dict[ClientTls, ssl.SSLContext] = {}

    async def connect(
        self,
        host: str,
        port: int,
        protocol_factory: Callable[[], P],
        *,
        tls: ClientTls | None = None,
    ) -> P:
        """Connect, and return the protocol with its transport; raises ConnectFailed."""
        context = None if tls is None else self._context(tls)
        server_name = None if tls is None else tls.server_name or host
        try:
            async with asyncio.timeout(self._connect_timeout_ms / 1000):
                _, protocol = await asyncio.get_running_loop().create_connection(
                    protocol_factory, host, port, ssl=context, server_hostname=server_name
                )
        except TimeoutError as error:
            text = f"{host}:{port}: no answer within {self._connect_timeout_ms} ms"
            raise ConnectFailed(text) from error
        except (OSError, UnicodeError) as error:
            # A host name that cannot even be asked for is a UnicodeError.
            raise ConnectFailed(f"{host}:{port}: {error}") from error
        return protocol

    async def listen(
        self,
        host: str,
        port: int,
        protocol_factory: Callable[[], asyncio.Protocol],
        *,
        tls: ServerTls | None = None,
    ) -> Listener:
        """Take connections from now on, port 0 at any that is free; raises ListenFailed."""
        mode = TlsMode.DISABLED if tls is None else tls.mode
        context = None if tls is None or mode is TlsMode.DISABLED else tls.context()
        try:
            if context is not None and mode is TlsMode.PERMISSIVE:
                return await _listen_sniffing(host, port, protocol_factory, context)
            server = await asyncio.get_running_loop().create_server(
                protocol_factory,
                host or None,
                port,
                backlog=BACKLOG,
                ssl=context,
                ssl_handshake_timeout=None if context is None else HANDSHAKE_TIMEOUT_S,
            )
        except OSError as error:
            raise ListenFailed(f"{host}:{port}: {error}") from error
        return SocketListener(server)

    def _context(self, tls: ClientTls) -> ssl.SSLContext:
        context = self._contexts.get(tls)
        if context is None:
            context = self._contexts[tls] = tls.context()
        return context


class SocketListener:
    """A listening socket, or one for each address of the host."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self._at = server.sockets[0].getsockname()

    @property
    def host(self) -> str:
        return str(self._at[0])

    @property
    def port(self) -> int:
        return int(self._at[1])

    async def close(self) -> None:
        """Take no more connections; those that exist live on."""
        self._server.close()


async def _listen_sniffing(
    host: str,
    port: int,
    protocol_factory: Callable[[], asyncio.Protocol],
    context: ssl.SSLContext,
) -> SniffingListener:
    infos = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, number, _, at = infos[0]
    listening = socket.socket(family, kind, number)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setblocking(False)
        listening.bind(at)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    listener = SniffingListener(listening, protocol_factory, context, HANDSHAKE_TIMEOUT_S)
    listener.start()
    return listener
