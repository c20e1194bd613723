"""A name server: serves the routes that brokers register to clients."""

from __future__ import annotations

import logging
import math
from contextlib import AsyncExitStack
from typing import Self

from turbopump.machine import Machine
from turbopump.nameserver.config import NameServerConfig
from turbopump.nameserver.handlers import config_handlers, kv_handlers, route_handlers
from turbopump.nameserver.kv import KvConfig
from turbopump.nameserver.live_config import LiveConfig
from turbopump.nameserver.registration import BrokerConnections, broker_handlers
from turbopump.nameserver.routes import SILENCE_MAX_MS, RouteTable
from turbopump.net.connection import Connection
from turbopump.net.network import Network
from turbopump.net.router import Router
from turbopump.net.server import Server, ServerConfig
from turbopump.supervisor import Supervisor
from turbopump.tables import TableFile, TableWriter
from turbopump.wire.body_limits import BODY_BYTES_MAX

_log = logging.getLogger(__name__)

FIRST_SCAN_MS = 5000
SCAN_INTERVAL_MS = 10_000
DRAIN_TIMEOUT_MS = 1000


class NameServer:
    """Serves routes for as long as its context lasts.

    ::

        async with NameServer(NameServerConfig(port=0), SocketNetwork()) as server:
            print(server.address)

    Name servers do not know each other: brokers register with all of them. Registrations are kept
    in memory only; after a restart brokers register again.
    """

    def __init__(
        self, config: NameServerConfig, network: Network, machine: Machine | None = None
    ) -> None:
        machine = machine or Machine()
        self._clock = clock = machine.clock
        self._writer = TableWriter(machine.background, clock)
        self._config = LiveConfig(config, self._writer, machine.files)
        self._kv = KvConfig(TableFile(config.kv_config_path, machine.files, self._writer))
        self._routes = RouteTable(config.brokers_max, config.topics_max)
        self._connections: BrokerConnections = {}
        self._server = Server(
            network,
            self._router(),
            ServerConfig(
                host=config.host,
                port=config.port,
                connections_max=config.connections_max,
                receive_bytes_max=config.receive_bytes_max,
                drain_timeout_ms=DRAIN_TIMEOUT_MS,
            ),
            clock=clock,
            on_disconnect=self._on_disconnect,
        )
        self._work = Supervisor()
        self._running = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._kv.load()
        async with AsyncExitStack() as starting:
            starting.callback(self._writer.close)
            await starting.enter_async_context(self._server)
            starting.push_async_callback(self._work.stop)
            self._work.every("silent brokers", self._pause_ms, self._scan, first_ms=FIRST_SCAN_MS)
            self._running = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    @property
    def address(self) -> str:
        """Where it listens, as ``host:port``."""
        return self._server.address

    def _router(self) -> Router:
        # Unlike Apache RocketMQ, which stays silent, unknown codes are answered: a client
        # that tries a feature learns immediately that it is missing, instead of timing out.
        return Router(
            {
                **broker_handlers(self._routes, self._connections, self._kv, self._clock),
                **route_handlers(self._routes, self._kv, self._config),
                **kv_handlers(self._kv),
                **config_handlers(self._config),
            },
            body_bytes_max=BODY_BYTES_MAX,
        )

    def _scan(self) -> None:
        """Remove silent brokers."""
        for address in self._routes.expire(self._clock.monotonic_ms()):
            _log.warning("broker at %s removed: silent for %d ms", address, SILENCE_MAX_MS)
            connection = self._connections.pop(address, None)
            if connection is not None:
                connection.close("the broker was silent for too long")

    def _pause_ms(self) -> int:
        """Return the time to the next scan: no broker can time out before it."""
        now_ms = self._clock.monotonic_ms()
        wait_ms = self._routes.expiry_min_ms(now_ms) - now_ms
        return max(1, math.ceil(wait_ms / SCAN_INTERVAL_MS)) * SCAN_INTERVAL_MS

    def _on_disconnect(self, connection: Connection) -> None:
        for address in [a for a, each in self._connections.items() if each is connection]:
            del self._connections[address]
            if self._routes.remove(address):
                _log.warning("broker at %s removed: its connection closed", address)
