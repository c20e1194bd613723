"""An HTTP server that returns the addresses of name servers, on any network."""

from __future__ import annotations

import asyncio
from typing import Self, cast

from turbopump.net.network import Listener, Network
from turbopump.net.tls import ServerTls


def http(body: str, status: str = "200 OK", header: str = "") -> bytes:
    """Return an answer with a length, after which the connection stays open."""
    content = body.encode()
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", header, "")
    return "\r\n".join(line for line in lines if line).encode() + b"\r\n\r\n" + content


class AddressServer:
    """Answers each request, whatever it is, with ``answer``; with None not at all."""

    def __init__(
        self, network: Network, answer: bytes | None, host: str, port: int, tls: ServerTls | None
    ) -> None:
        self.answer = answer
        self.closes = False
        """Whether it closes the connection after each answer."""
        self.requests: list[str] = []
        self._network = network
        self._at = host, port, tls
        self._listener: Listener | None = None

    @property
    def address(self) -> str:
        assert self._listener is not None
        return f"{self._listener.host}:{self._listener.port}"

    async def __aenter__(self) -> Self:
        host, port, tls = self._at
        self._listener = await self._network.listen(host, port, lambda: _Peer(self), tls=tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listener is not None:
            await self._listener.close()


def address_server(
    network: Network,
    text: str = "",
    *,
    answer: bytes | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ServerTls | None = None,
) -> AddressServer:
    """Return a server, to be entered, that returns a text or a whole answer."""
    return AddressServer(network, answer or http(text), host, port, tls)


class _Peer(asyncio.Protocol):
    def __init__(self, server: AddressServer) -> None:
        self._server = server
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._received.endswith(b"\r\n\r\n"):
            return
        self._server.requests.append(self._received.decode())
        if self._server.answer is not None:
            self._transport.write(self._server.answer)
            if self._server.closes:
                self._transport.close()
