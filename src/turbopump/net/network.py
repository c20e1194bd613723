"""The network interface: sockets in production, memory in tests (`turbopump.testing`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from turbopump.net.tls import ClientTls, ServerTls

P = TypeVar("P", bound=asyncio.Protocol)


class Listener(Protocol):
    """An address where peers connect."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int:
        """The port in use, also if port 0 was requested."""
        ...

    async def close(self) -> None:
        """Stop accepting; existing connections stay open."""
        ...


class Network(Protocol):
    """Opens and accepts connections; the only place where foreign errors become ours."""

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
        """Accept connections; port 0 takes any free port; raises ListenFailed."""
        ...


def address_text(name: object) -> str:
    """Format a socket's name as ``host:port``, an IPv6 host in brackets."""
    if not isinstance(name, tuple) or len(name) < 2:
        return "unknown"
    host, port = str(name[0]), name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
