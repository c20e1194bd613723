"""The broker: builds its parts, joins them, and runs them. The only place that knows them all."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

from turbopump.broker.arrivals import Arrivals
from turbopump.broker.clients import Consumers, Producers
from turbopump.broker.config import BrokerConfig
from turbopump.broker.config_file import ConfigFile
from turbopump.broker.delays import Delays
from turbopump.broker.durability import Durability
from turbopump.broker.groups import Groups
from turbopump.broker.names import SCHEDULE_TOPIC
from turbopump.broker.offsets import Offsets
from turbopump.broker.overload import LoopLag
from turbopump.broker.periodic import Periodic
from turbopump.broker.pull import Pulls
from turbopump.broker.put import Put
from turbopump.broker.queries import Queries
from turbopump.broker.retries import Retries
from turbopump.broker.send import Sends
from turbopump.broker.stats import SAMPLE_INTERVAL_MS, Stats
from turbopump.broker.topics import Topics
from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.errors import InvalidArgument
from turbopump.net.connection import Connection
from turbopump.net.deadlines import Deadlines
from turbopump.net.network import Network
from turbopump.net.router import Router, not_supported
from turbopump.net.server import Server, ServerConfig
from turbopump.net.sockets import SocketNetwork
from turbopump.store.outcomes import Arrival
from turbopump.store.store import Store
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.hosts import Host, host

_log = logging.getLogger(__name__)

_STORE_TICK_MS = 100
_RETENTION_INTERVAL_MS = 10_000
_RETENTION_FIRST_MS = 60_000
_FLUSH_TIMEOUT_MS = 5000
_EXPIRY_INTERVAL_MS = 10_000
_DRAIN_MS = 1000
"""Half of the two seconds in which a broker has to be down."""


class Broker:
    """One broker.

    ::

        async with Broker(BrokerConfig(directory=Path("store"))) as broker:
            print(broker.address)
    """

    def __init__(
        self,
        config: BrokerConfig,
        network: Network | None = None,
        clock: Clock = SYSTEM_CLOCK,
        *,
        seed: int | None = None,
    ) -> None:
        self.config = config
        self._network = network or SocketNetwork()
        self._clock = clock
        self._chance = Random(seed)  # noqa: S311 - spreads messages over queues
        self._ready = False
        self._advertised: Host | None = None
        self._warned_of: set[str] = set()
        self._router = Router(unknown=self._unknown)
        identity = config.identity
        self._server = Server(
            self._network,
            self._router,
            ServerConfig(
                host=identity.bind_host,
                port=identity.port,
                connections_max=config.overload.connections_max,
            ),
            clock=clock,
            on_connect=self._connected,
            on_disconnect=self._disconnected,
        )
        self._periodic = Periodic()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """Where clients find the broker, as ``host:port``."""
        assert self._advertised is not None, "the broker is not started"
        return str(self._advertised)

    async def start(self) -> None:
        """Recover the store, listen, and serve."""
        self.store = Store.open(self.config.directory, self.config.store, clock=self._clock)
        try:
            await self._server.start()
            # No await from here on: nobody is served by half a broker.
            self._advertised = _resolved(self.config.identity.reachable_host, self._server.port)
            self._build(self._advertised)
            self._load()
        except BaseException:
            await self._server.drain(0)
            self.store.close()
            raise
        self._run()
        self._ready = True
        _log.info("broker %s serves at %s", self.config.identity.broker_name, self.address)

    def _build(self, store_host: Host) -> None:
        config, clock, store = self.config, self._clock, self.store
        self.topics = Topics(
            config.topics,
            config.identity,
            self._file("topics.json"),
            clock,
            delay_levels=len(config.store.delay_levels),
        )
        self.groups = Groups(config.groups, self._file("subscriptionGroup.json"), clock)
        self.offsets = Offsets(self._file("consumerOffset.json"))
        self.stats = Stats(config.identity.cluster, clock)
        self.producers = Producers()
        self.consumers = Consumers()
        self.arrivals = Arrivals(clock, config.long_polling.held_max)
        self._lag = LoopLag(clock)
        self._deadlines = Deadlines(clock)
        self._durability = Durability(
            self._deadlines, store.dispatch, _FLUSH_TIMEOUT_MS, config.overload.sends_waiting_max
        )
        put = Put(store, self._durability, len(config.store.delay_levels))
        self.delays = Delays(
            store, put, self._file("delayOffset.json"), config.store.delay_levels, clock
        )
        self.sends = Sends(
            config=config,
            store_host=store_host,
            put=put,
            durability=self._durability,
            lag=self._lag,
            topics=self.topics,
            groups=self.groups,
            stats=self.stats,
            clock=clock,
            chance=self._chance,
        )
        self.pulls = Pulls(
            config=config,
            store_host=store_host,
            store=store,
            put=put,
            arrivals=self.arrivals,
            topics=self.topics,
            groups=self.groups,
            consumers=self.consumers,
            offsets=self.offsets,
            stats=self.stats,
            clock=clock,
        )
        self.retries = Retries(
            config=config,
            store=store,
            put=put,
            topics=self.topics,
            groups=self.groups,
            stats=self.stats,
            chance=self._chance,
        )
        self.queries = Queries(config, store)
        for part in (self.sends, self.pulls, self.retries, self.queries):
            for code, handler in part.handlers().items():
                self._router.add(code, handler)

    def _file(self, name: str) -> ConfigFile:
        return ConfigFile(Path(self.config.directory) / "config" / name)

    def _load(self) -> None:
        self.topics.load()
        self.groups.load()
        self.offsets.load()
        self.delays.load()

    def _run(self) -> None:
        config, every = self.config, self._periodic.every
        self.store.listen(self._arrived)
        self._lag.start()
        self.delays.start()
        every(_STORE_TICK_MS, self.store.tick)
        every(_RETENTION_INTERVAL_MS, self._retain, first_ms=_RETENTION_FIRST_MS)
        every(config.long_polling.sweep_interval_ms, self._sweep)
        every(config.intervals.offsets_ms, self.offsets.persist)
        every(config.intervals.delays_ms, self.delays.save)
        every(SAMPLE_INTERVAL_MS, self.stats.sample)
        every(_EXPIRY_INTERVAL_MS, self._expire)

    async def close(self) -> None:
        """Answer who waits, let go of the clients, and write everything down."""
        if not self._ready:
            return
        self._ready = False
        await self._periodic.stop()
        self.delays.stop()
        self.arrivals.release_all()
        await self._server.drain(_DRAIN_MS)
        self._lag.stop()
        self._deadlines.close()
        try:
            self.delays.save()
            self.offsets.persist_now()
        finally:
            self.store.close()

    # --- what happens -----------------------------------------------------------------------------

    def _arrived(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.arrivals.notify(arrival)
            if arrival.topic == SCHEDULE_TOPIC:
                self.delays.notify(arrival)

    def queue_end(self, topic: str, queue_id: int) -> int:
        """Return the offset that the next message of a queue will get."""
        return self.store.queue_range(topic, queue_id)[1]

    def _sweep(self) -> None:
        self.arrivals.sweep(self.queue_end)

    def _retain(self) -> None:
        self.store.retain()

    def _expire(self) -> None:
        now_ms, expiry_ms = self._clock.monotonic_ms(), self.config.groups.client_expiry_ms
        for registry in (self.consumers, self.producers):
            for connection in registry.expired(now_ms, expiry_ms):
                connection.close(f"no heartbeat for {expiry_ms} ms")

    def _connected(self, connection: Connection) -> None:
        """Warn when a client came by an address that others are not told of."""
        place = connection.local_address.rpartition(":")[0]
        told = self.config.identity.reachable_host
        if self._ready and place not in {told, *self._warned_of}:
            self._warned_of.add(place)
            _log.warning(
                "a client reached this broker at %s, but routes tell clients to use %s:"
                " set brokerIP1 to the address that clients can reach",
                place,
                told,
            )

    def _disconnected(self, connection: Connection) -> None:
        if self._ready:
            self.arrivals.forget(connection)
            self.consumers.connection_closed(connection)
            self.producers.connection_closed(connection)

    def _unknown(self, request: Command, peer: Connection) -> Command:
        if not self._ready:
            remark = "the broker is starting: try again"
            return request.answer(ResponseCode.SERVICE_NOT_AVAILABLE, remark=remark)
        return not_supported(request, peer)


def _resolved(name: str, port: int) -> Host:
    """Return the address that goes into messages and ids, which is always an IP address."""
    try:
        return host(name, port)
    except InvalidArgument:
        pass
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidArgument(f"brokerIP1 {name!r} cannot be resolved: {error}") from error
    return host(str(found[0][4][0]), port)
