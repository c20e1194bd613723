"""A name server: tells clients where topics are, as brokers have told it."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.nameserver.config import NameServerConfig
from turbopump.nameserver.handlers import config_handlers, kv_handlers, route_handlers
from turbopump.nameserver.kv import KvConfig
from turbopump.nameserver.live_config import LiveConfig
from turbopump.nameserver.registration import BrokerConnections, broker_handlers
from turbopump.nameserver.routes import SILENCE_MAX_MS, RouteLimits, RouteTable
from turbopump.nameserver.writer import Writer
from turbopump.net.connection import Connection
from turbopump.net.network import Network
from turbopump.net.router import Router
from turbopump.net.server import Server, ServerConfig
from turbopump.wire.body_limits import BODY_BYTES_MAX

_log = logging.getLogger(__name__)

FIRST_SCAN_S = 5.0
SCAN_INTERVAL_S = 10.0
DRAIN_TIMEOUT_MS = 1000


class NameServer:
    """Serves routes for as long as its context lasts.

    ::

        async with NameServer(NameServerConfig(port=0), SocketNetwork()) as server:
            print(server.address)

    Several name servers know nothing of each other; brokers register with all of them. What brokers
    tell is kept in memory only: after a restart they tell it again.
    """

    def __init__(
        self, config: NameServerConfig, network: Network, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._clock = clock
        self._writer = Writer()
        self._config = LiveConfig(config, self._writer)
        self._kv = KvConfig(config.kv_config_path, self._writer)
        self._routes = RouteTable(RouteLimits(config.brokers_max, config.topics_max))
        self._connections = BrokerConnections()
        self._server = Server(
            network,
            self._router(),
            ServerConfig(
                host=config.host,
                port=config.port,
                connections_max=config.connections_max,
                drain_timeout_ms=DRAIN_TIMEOUT_MS,
            ),
            clock=clock,
            on_disconnect=self._on_disconnect,
        )
        self._running = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._kv.load()
        async with AsyncExitStack() as starting:
            starting.callback(self._writer.close)
            await starting.enter_async_context(self._server)
            tasks = await starting.enter_async_context(asyncio.TaskGroup())
            scan = tasks.create_task(self._scan())
            starting.callback(scan.cancel)
            self._running = starting.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            # The task group must see it: it may be its own, because a task failed.
            await self._running.__aexit__(kind, error, traceback)
        else:
            # It must not see anything else: it would wrap the user's error in a group.
            await self._running.aclose()

    @property
    def address(self) -> str:
        """Where it listens, as ``host:port``."""
        return self._server.address

    def _router(self) -> Router:
        # Unlike the original, which stays silent, codes that nobody serves are answered: a client
        # that tries a feature out learns at once that it is missing, instead of timing out.
        return Router(
            {
                **broker_handlers(self._routes, self._connections, self._kv, self._clock),
                **route_handlers(self._routes, self._kv, self._config),
                **kv_handlers(self._kv),
                **config_handlers(self._config),
            },
            body_bytes_max=BODY_BYTES_MAX,
        )

    async def _scan(self) -> None:
        """Remove silent brokers for ever."""
        await asyncio.sleep(FIRST_SCAN_S)
        while True:
            for address in self._routes.expire(self._clock.monotonic_ms()):
                _log.warning("broker at %s removed: silent for %d ms", address, SILENCE_MAX_MS)
                connection = self._connections.pop(address)
                if connection is not None:
                    connection.close("the broker was silent for too long")
            # Not before anybody can be: brokers that show that they live only make it later.
            silent_ms = self._routes.silent_from_ms(self._clock.monotonic_ms())
            wait_s = (silent_ms - self._clock.monotonic_ms()) / 1000
            scans = max(1, math.ceil(wait_s / SCAN_INTERVAL_S))
            await asyncio.sleep(scans * SCAN_INTERVAL_S)

    def _on_disconnect(self, connection: Connection) -> None:
        for address in self._connections.pop_all(connection):
            if self._routes.remove(address):
                _log.warning("broker at %s removed: its connection closed", address)
