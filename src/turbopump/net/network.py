"""The network interface: sockets in production, memory in tests (`turbopump.testing`)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from turbopump.net.tls import ClientTls, ServerTls

P = TypeVar("P", bound=asyncio.Protocol)


class Listener(ABC):
    """An address where peers connect, as the name of a socket."""

    def __init__(self, at: Sequence[Any]) -> None:
        self.host = str(at[0])
        self.port = int(at[1])
        """The port in use, also if port 0 was requested."""

    @abstractmethod
    async def close(self) -> None:
        """Stop accepting; existing connections stay open."""


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

    async def listen(
        self,
        host: str,
        port: int,
        protocol_factory: Callable[[], asyncio.Protocol],
        *,
        tls: ServerTls | None = None,
    ) -> Listener:
        """Accept connections; port 0 takes any free port; raises ListenFailed."""


def address_text(name: object) -> str:
    """Format a socket's name as ``host:port``, an IPv6 host in brackets."""
    if not isinstance(name, tuple) or len(name) < 2:
        return "unknown"
    host, port = str(name[0]), name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_text(address: str) -> str:
    """Return the host of an address, as `address_text` formats it."""
    return address.rpartition(":")[0]
