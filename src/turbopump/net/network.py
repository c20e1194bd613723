"""What connections run over: sockets in production, memory in tests (`turbopump.testing`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from turbopump.net.tls import ClientTls, ServerTls

P = TypeVar("P", bound=asyncio.Protocol)


class Listener(Protocol):
    """A place where peers connect to."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int:
        """The port in use, also when any was asked for."""
        ...

    async def close(self) -> None:
        """Take no more connections; those that exist live on."""
        ...


class Network(Protocol):
    """Makes and takes connections; the one boundary where foreign errors become ours."""

    async def connect(
        self,
        host: str,
        port: int,
        protocol_factory: Callable[[], P],
        *,
        tls: ClientTls | None = None,
    ) -> P:
        """Connect, and return the protocol with its transport; raises ConnectFailed."""
        ...

    async def listen(
        self,
        host: str,
        port: int,
        protocol_factory: Callable[[], asyncio.Protocol],
        *,
        tls: ServerTls | None = None,
    ) -> Listener:
        """Take connections from now on, port 0 at any that is free; raises ListenFailed."""
        ...


def address_text(name: object) -> str:
    """Write a socket's name as ``host:port``, an IPv6 host in brackets."""
    if not isinstance(name, tuple) or len(name) < 2:
        return "unknown"
    host, port = str(name[0]), name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
