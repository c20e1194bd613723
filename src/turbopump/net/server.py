"""Accepts connections and serves their requests."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Self

from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.errors import InvalidArgument
from turbopump.net.connection import Connection, OnChange, no_notice
from turbopump.net.deadlines import Deadlines
from turbopump.net.inbox import ReceiveBudget
from turbopump.net.limits import (
    DEFAULT_LIMITS,
    RECEIVE_BYTES_MAX,
    ConnectionLimits,
    require_at_least,
)
from turbopump.net.network import Listener, Network, address_text
from turbopump.net.polling import busy_poller
from turbopump.net.router import Router
from turbopump.net.tls import ServerTls

_log = logging.getLogger(__name__)

_PORT_MAX = 0xFFFF


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen, and the limits of a server."""

    host: str = "127.0.0.1"
    """Name or IP address; empty listens on all addresses of the machine."""

    port: int = 0
    """0 takes any free port."""

    connections_max: int = 10_000
    """Open connections; further ones are closed immediately."""

    drain_timeout_ms: int = 5000
    """How long `Server.close` waits for running handlers and unwritten answers."""

    receive_bytes_max: int = RECEIVE_BYTES_MAX
    """Bytes received on all connections and not served yet, such as unfinished frames; above it,
    the connection is closed whose unfinished frame began first."""

    poll_us: int = 0
    """How long to poll for the next request before sleeping, while requests come in quick order
    (`turbopump.net.polling`); 0 turns it off."""

    limits: ConnectionLimits = DEFAULT_LIMITS
    tls: ServerTls | None = None
    """None serves without TLS only."""

    def __post_init__(self) -> None:
        require_at_least("port", self.port, 0)
        require_at_least("connections_max", self.connections_max, 1)
        require_at_least("drain_timeout_ms", self.drain_timeout_ms, 0)
        require_at_least("poll_us", self.poll_us, 0)
        require_at_least("receive_bytes_max", self.receive_bytes_max, self.limits.frame_bytes_max)
        if self.port > _PORT_MAX:
            raise InvalidArgument(f"port must be 0–{_PORT_MAX}, got {self.port}")


class Server:
    """Accepts connections and serves their requests with a router.

    ::

        async with Server(SocketNetwork(), Router({code: handler})) as server:
            print(server.address)
    """

    def __init__(
        self,
        network: Network,
        router: Router,
        config: ServerConfig | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_connect: OnChange = no_notice,
        on_disconnect: OnChange = no_notice,
    ) -> None:
        self._network = network
        self._router = router
        self._config = config or ServerConfig()
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._deadlines = Deadlines(clock)
        poller = busy_poller(self._config.poll_us, clock)
        self._on_served = None if poller is None else poller.served
        # A dict as an ordered set: connections are drained in the order they were opened.
        self._connections: dict[Connection, None] = {}
        # Closed by their peers, with handlers that are still running.
        self._ending: dict[Connection, None] = {}
        self._budget = ReceiveBudget(self._config.receive_bytes_max)
        self._listener: Listener | None = None
        self._other_listeners: list[Listener] = []
        self._draining = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def host(self) -> str:
        return self._require_listener().host

    @property
    def port(self) -> int:
        return self._require_listener().port

    @property
    def address(self) -> str:
        """Where the server listens, as ``host:port``."""
        return address_text((self.host, self.port))

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The open connections, oldest first."""
        return tuple(self._connections)

    async def start(self) -> None:
        """Listen; raises ListenFailed."""
        self._draining = False
        self._listener = await self._listen(self._config.port, self._router)
        _log.info("listening at %s", self.address)

    async def listen_also(self, port: int, router: Router) -> None:
        """Accept connections at another port too, with its own router; raises ListenFailed."""
        self._other_listeners.append(await self._listen(port, router))

    async def _listen(self, port: int, router: Router) -> Listener:
        made = partial(self._new_connection, router)
        return await self._network.listen(self._config.host, port, made, tls=self._config.tls)

    async def close(self) -> None:
        """Drain for up to ``drain_timeout_ms``."""
        await self.drain(self._config.drain_timeout_ms)

    async def drain(self, timeout_ms: int) -> None:
        """Stop accepting connections and requests, finish running ones, then close.

        Requests that are answered later are not awaited: their owner answers them before. Whatever
        is not finished in time is aborted.
        """
        self._draining = True
        others, self._other_listeners = self._other_listeners, []
        for listener in (self._listener, *others):
            if listener is not None:
                await listener.close()
        async with asyncio.TaskGroup() as group:
            for connection in (*self.connections, *self._ending):
                group.create_task(connection.drain(timeout_ms))
        self._deadlines.close()

    def _require_listener(self) -> Listener:
        assert self._listener is not None, "the server is not started"
        return self._listener

    def _new_connection(self, router: Router) -> Connection:
        return Connection(
            router,
            self._deadlines,
            self._config.limits,
            accepted=True,
            on_open=self._opened,
            on_closed=self._closed,
            on_ended=self._ended,
            on_served=self._on_served,
            budget=self._budget,
        )

    def _opened(self, connection: Connection) -> None:
        if self._draining:
            connection.abort("the server is closing")
        elif len(self._connections) + len(self._ending) >= self._config.connections_max:
            count = len(self._connections) + len(self._ending)
            _log.warning("%s: refused, %d are open already", connection, count)
            connection.abort("too many connections")
        else:
            self._connections[connection] = None
            self._on_connect(connection)

    def _closed(self, connection: Connection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._ending[connection] = None
            self._on_disconnect(connection)

    def _ended(self, connection: Connection) -> None:
        self._ending.pop(connection, None)
