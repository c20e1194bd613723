"""The connections, routes and heartbeats that the clients of one process share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection, Coroutine, Mapping, Sequence
from threading import get_ident
from typing import Any, overload

from turbopump.client import calls
from turbopump.client.broker_requests import BrokerRequests
from turbopump.client.code_filters import CodeFilters
from turbopump.client.config import ClientConfig, client_id
from turbopump.client.continuity import Source
from turbopump.client.life_cycle import LifeCycle, not_running
from turbopump.client.members import ConsumerMember, Members, ProducerMember
from turbopump.client.replicas import Replica, replica_to_read
from turbopump.client.replies import Replies
from turbopump.client.route_cache import NameServers, RouteCache
from turbopump.client.routes import MASTER_ID, Route
from turbopump.errors import ForkedClient, NetworkError, NoRoute, NotRunning, TurbopumpError
from turbopump.machine import Machine
from turbopump.machine.log_limit import LogLimit
from turbopump.machine.process import process_id
from turbopump.machine.timers import Repeated
from turbopump.message import MessageQueue
from turbopump.net.blocking_pool import BlockingPool
from turbopump.net.limits import ConnectionLimits
from turbopump.net.name_server_list import NameServerList
from turbopump.net.network import Network
from turbopump.net.pool import ConnectionPool
from turbopump.net.pool_config import PoolConfig
from turbopump.net.request_protocol import Prepared, Request, RequestHook
from turbopump.net.sockets import SocketNetwork
from turbopump.net.thread_request import ThreadRequest
from turbopump.supervisor import Supervisor
from turbopump.wire.bodies import Heartbeat, TopicRoute
from turbopump.wire.command import Command, Response
from turbopump.wire.headers import UnregisterClient

_log = logging.getLogger(__name__)

_FIRST_HEARTBEAT_MS = 1000
_UNREGISTER_TIMEOUT_MS = 3000
_UNREACHABLE_MS = 10_000
"""How long an unreachable replica is skipped if there is another one."""
_KEEP_TO_MASTER_MS = 60_000
"""Long enough for a slave to notice that its master lost messages, and to truncate them."""
_BACKOFF_MAX_MS = 500
"""Far shorter than a send, which waits for a restarting broker."""


class Session(LifeCycle):
    """One client of a cluster, with any number of producers and consumers.

    ::

        async with Session(ClientConfig("127.0.0.1:9876")) as session:
            async with Producer("orders-producer", session=session) as producer:
                await producer.send(Message("orders", b"hello"))

    Each user of a session calls `start`, then `close`; the last `close` ends it. It belongs to the
    event loop that it was started in, and to its process: a child created by fork must create its
    own.
    """

    def __init__(
        self,
        config: ClientConfig,
        network: Network | None = None,
        machine: Machine | None = None,
        *,
        hooks: Sequence[RequestHook] = (),
    ) -> None:
        self.config = config
        self.machine = machine = machine or Machine()
        self.clock = machine.clock
        self.random = machine.random
        self.log_limit = LogLimit(self.clock)
        self.client_id = client_id(config, self.random)
        self.members = Members()
        self.replies = Replies(self.random)
        self.code_filters = CodeFilters(self)
        self._network = network or SocketNetwork()
        self._hooks = (*config.request_hooks, *hooks)
        self._keeps_to_master: dict[str, int] = {}
        """By broker, the deadline until which its slaves are not read from."""
        self.work = Supervisor()
        """Owns background tasks, including those of the session's users; ends with the session."""
        self.name_servers = NameServerList(
            config.nameserver_addresses,
            self._network,
            self.clock,
            self.work,
            self._name_servers_changed,
        )
        self._routes = RouteCache(
            NameServers(self.name_servers, self.random),
            self._ask_route,
            self.work,
            self._route_changed,
        )
        # Those of the cache, which says what they raise.
        self.cached_route = self._routes.cached
        self.route = self._routes.existing
        self.route_to_send = self._routes.to_send
        self.refresh_route = self._routes.refresh
        self._users = 0
        self.pid = process_id()
        self._pool: ConnectionPool | None = None
        self._blocking_pool: BlockingPool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        """The loop's thread."""
        self._heartbeat_wanted = asyncio.Event()
        self._announced_to: frozenset[str] = frozenset()
        self._own_brokers = set[str]()
        """Addresses of brokers that are Turbopump's."""
        self._beat_sent: tuple[Heartbeat, bytes] | None = None
        """The last heartbeat, as a value and encoded."""

    def __repr__(self) -> str:
        return f"<Session {self.client_id} of {self.config.nameserver or 'the environment'}>"

    # --- life cycle -------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self._pool is not None

    async def start(self) -> None:
        """Start, or join the current users; opens no connections yet."""
        self.require_own_process()
        self._users += 1
        if self._pool is None:
            self._pool = self._new_pool()
            self._blocking_pool = self._new_blocking_pool()
            self._loop = asyncio.get_running_loop()
            self._thread = get_ident()
            self._heartbeat_wanted = asyncio.Event()
            self.name_servers.start()
            interval_ms = self.config.route_interval_ms
            self.work.every("route refresh", interval_ms, self.refresh_routes)
            self.work.keep("heartbeat", self._beat)

    async def close(self) -> None:
        """Leave; the last user waits for responses in flight and closes the connections."""
        self.require_own_process()
        if self._users == 0:
            return
        self._users -= 1
        if self._users == 0 and self._pool is not None:
            pool, self._pool = self._pool, None
            if self._blocking_pool is not None:
                self._blocking_pool.close()
            await self.work.stop()
            await pool.close()

    def require_own_process(self) -> None:
        """Raise ForkedClient in a child of the process that created the session."""
        if process_id() != self.pid:
            raise ForkedClient(
                f"client {self.client_id} was created in process {self.pid} and is used in "
                f"{process_id()}; create producers and consumers after the fork"
            )

    # --- members ----------------------------------------------------------------------------------

    async def join(self, member: ProducerMember | ConsumerMember) -> None:
        """Add a member and notify all known brokers; raises InvalidArgument if it already exists.

        A consumer must look up the routes of its topics first, or no broker would be notified.
        """
        self.require_own_process()
        self.members.add(member)
        await self.heartbeat()

    async def leave(self, member: ProducerMember | ConsumerMember) -> None:
        """Remove a member and notify all known brokers."""
        if not self.members.remove(member):
            return
        is_producer = isinstance(member, ProducerMember)
        header = UnregisterClient(
            client_id=self.client_id,
            producer_group=member.group if is_producer else None,
            consumer_group=None if is_producer else member.group,
        )
        async with asyncio.TaskGroup() as group:
            for address in self._heartbeat_addresses():
                call = calls.unregister(self, address, header, _UNREGISTER_TIMEOUT_MS)
                what = "could not notify %s that %s left"
                group.create_task(self._logged(call, address, what, address, member.group))

    async def heartbeat(self) -> None:
        """Send a heartbeat to all known brokers; failures are logged."""
        self._announced_to = frozenset(self._heartbeat_addresses())
        beats = [
            self._logged(self.heartbeat_to(address), address, "no heartbeat to %s", address)
            for address in sorted(self._announced_to)
        ]
        if len(beats) == 1:
            await beats[0]
            return
        async with asyncio.TaskGroup() as group:
            for beat in beats:
                group.create_task(beat)

    async def heartbeat_to(self, address: str) -> None:
        """Send a heartbeat to one broker; raises TurbopumpError."""
        timeout_ms = self.config.request_timeout_ms
        is_own = await calls.heartbeat(self, address, self._heartbeat_body(), timeout_ms)
        (self._own_brokers.add if is_own else self._own_brokers.discard)(address)

    def is_own_broker(self, address: str) -> bool:
        """Whether a broker is Turbopump's, by its response to the last heartbeat."""
        return address in self._own_brokers

    def _heartbeat_body(self) -> bytes:
        beat = self.members.heartbeat(self.client_id)
        if self._beat_sent is None or self._beat_sent[0] != beat:
            self._beat_sent = beat, beat.encode()
        return self._beat_sent[1]

    def warn(
        self, log: logging.Logger, broker: str, error: TurbopumpError, what: str, *args: object
    ) -> None:
        """Log a failure of a broker, given by name or address, at most once a minute.

        While it cannot be reached, everything that fails for this reason is logged as one.
        """
        text, key = f"{what}: %s", (what, *args)
        if isinstance(error, NetworkError):
            text += "; logged once a minute for each broker"
            brokers = self._routes.brokers.items()
            names = (name for name, addresses in brokers if broker in addresses.values())
            key = ("unreachable", next(names, broker))
        self.log_limit.log(key, log, logging.WARNING, text, *args, error)

    async def _logged(
        self, call: Awaitable[None], address: str, failure: str, *args: object
    ) -> None:
        try:
            await call
        except TurbopumpError as error:
            self.warn(_log, address, error, failure, *args)

    # --- routes -----------------------------------------------------------------------------------

    async def refresh_routes(self) -> None:
        """Look up again all cached topics and those that consumers need."""
        await self._routes.refresh_all(self.members.topics())

    def has_broker(self, broker: str) -> bool:
        """Whether any address of a broker is known."""
        return bool(self._routes.brokers.get(broker))

    def has_master(self, broker: str) -> bool:
        """Whether the master of a broker is known: slaves may lack the newest messages."""
        return MASTER_ID in self._routes.brokers.get(broker, {})

    def address_to_write(self, broker: str) -> str:
        """Return the address of a broker's master; raises NoRoute."""
        addresses = self._routes.brokers.get(broker)
        address = None if addresses is None else addresses.get(MASTER_ID)
        if address is None:
            raise NoRoute(f"broker {broker!r} has no master that a name server knows")
        return address

    def replicas(self, broker: str) -> Mapping[int, str]:
        """Return the known addresses of a broker, by id."""
        return self._routes.brokers.get(broker, {})

    def replica_to_read(self, broker: str, broker_id: int = MASTER_ID) -> Replica:
        """Return the wanted replica, or else a reachable one; raises NoRoute."""
        if broker in self._keeps_to_master:
            if self._keeps_to_master[broker] > self.clock.monotonic_ms():
                broker_id = MASTER_ID
            else:
                del self._keeps_to_master[broker]
        return _required(broker, replica_to_read(self._reachable(self.replicas(broker)), broker_id))

    async def replica_to_commit(self, queue: MessageQueue) -> Replica:
        """Return where offsets of a queue are committed: its master, or any replica without one.

        A master that is known but unreachable is worth waiting for: slaves keep no offsets of
        their own.
        """
        await self._require_broker(queue)
        return _required(queue.broker, replica_to_read(self.replicas(queue.broker), MASTER_ID))

    def keep_to_master(self, broker: str) -> None:
        """Read from the master for a while, as long as it is reachable."""
        self._keeps_to_master[broker] = self.clock.monotonic_ms() + _KEEP_TO_MASTER_MS

    def source(self, address: str) -> Source:
        """Return the connection to an address, as the source of a pull."""
        return Source(address, 0 if self._pool is None else self._pool.connection_number(address))

    async def replica_of(self, queue: MessageQueue) -> Replica:
        """Return where to ask about a queue: its master, else any; looks up an unknown broker."""
        await self._require_broker(queue)
        return self.replica_to_read(queue.broker)

    async def address_of(self, queue: MessageQueue) -> str:
        """Return the address of `replica_of`."""
        return (await self.replica_of(queue)).address

    async def _require_broker(self, queue: MessageQueue) -> None:
        if not self.has_broker(queue.broker):
            await self._routes.refresh(queue.topic)

    def _reachable(self, addresses: Mapping[int, str]) -> Mapping[int, str]:
        """Return the replicas that were reachable recently, or all if none was."""
        pool = self._pool
        if pool is None or len(addresses) < 2:
            return addresses
        reachable = {
            broker_id: address
            for broker_id, address in addresses.items()
            if not pool.has_failed_within(address, _UNREACHABLE_MS)
        }
        return reachable or addresses

    def any_address(self, route: Route) -> str:
        """Return the master's address, or else any, of a random broker of a route."""
        candidates = [addresses for addresses in route.brokers.values() if addresses]
        if not candidates:
            raise NoRoute(f"topic {route.topic!r} has no broker now")
        addresses = self._reachable(self.random.choice(candidates))
        return addresses.get(MASTER_ID) or self.random.choice(list(addresses.values()))

    # --- requests ---------------------------------------------------------------------------------

    @overload
    def request(
        self, address: str, command: Command, timeout_ms: int
    ) -> Coroutine[Any, Any, Command]: ...
    @overload
    def request(
        self, address: str, command: Prepared, timeout_ms: int
    ) -> Coroutine[Any, Any, Response]: ...
    def request(
        self, address: str, command: Request, timeout_ms: int
    ) -> Coroutine[Any, Any, Response]:
        """Send a request and return its response, whatever its code."""
        return self._running_pool().request(address, command, timeout_ms)

    def start_request(self, address: str, waiting: ThreadRequest) -> None:
        """Send a request that a thread waits for; its outcome is None if it cannot be sent now."""
        try:
            if not self._running_pool().start_request(address, waiting):
                waiting.finish(None)
        except Exception as error:  # noqa: BLE001 - raised by the thread, which would wait forever
            waiting.finish(error)

    def oneway(self, address: str, command: Request, timeout_ms: int) -> Coroutine[Any, Any, None]:
        """Send a request without a response; the timeout covers connecting and writing."""
        return self._running_pool().oneway(address, command, timeout_ms)

    @property
    def has_blocking_pool(self) -> bool:
        """Whether threads can send directly: over sockets, but not in a simulated network."""
        return self._blocking_pool is not None

    def blocking_pool(self) -> BlockingPool:
        """Return the connection pool for threads; any thread may use it."""
        if process_id() != self.pid:
            self.require_own_process()
        if self._pool is None or self._blocking_pool is None:
            raise NotRunning(f"client {self.client_id} is not started, or closed already")
        return self._blocking_pool

    def _running_pool(self) -> ConnectionPool:
        if process_id() != self.pid:
            self.require_own_process()
        if self._pool is None:
            raise not_running(f"client {self.client_id}")
        # Cheaper than looking up the running loop, which is a system call before Python 3.12.
        if get_ident() != self._thread or self._loop is None or not self._loop.is_running():
            raise NotRunning(
                f"client {self.client_id} was started in another event loop, and works only there"
            )
        return self._pool

    def _pool_config(self) -> PoolConfig:
        limits = ConnectionLimits(requests_in_flight_max=self.config.requests_in_flight_max)
        return PoolConfig(backoff_max_ms=_BACKOFF_MAX_MS, limits=limits, tls=self.config.tls)

    def _new_blocking_pool(self) -> BlockingPool | None:
        if not isinstance(self._network, SocketNetwork):
            return None
        config, hooks = self._pool_config(), self._hooks
        return BlockingPool(
            self._network, config, hooks=hooks, clock=self.clock, random=self.random
        )

    def _new_pool(self) -> ConnectionPool:
        return ConnectionPool(
            self._network,
            self._pool_config(),
            router=BrokerRequests(self.members, self.replies.arrived, self.work).router(),
            hooks=self._hooks,
            greeting=self._greeting,
            clock=self.clock,
            random=self.random,
        )

    def _greeting(self, address: str) -> Command | None:
        """Return the heartbeat that goes first on a new connection to a broker.

        A broker that restarted, or dropped the connection, does not know this client: asked for
        the members of a group, it would name only the others, which would share all queues.
        """
        if not (self.members.producers or self.members.consumers):
            return None
        if address not in self._heartbeat_addresses():
            return None
        return calls.heartbeat_command(self._heartbeat_body())

    async def _name_servers_changed(self, removed: Collection[str]) -> None:
        for address in removed:
            if self._pool is not None:
                await self._pool.drop(address)

    async def _ask_route(self, nameserver: str, topic: str) -> TopicRoute:
        return await calls.route(self, nameserver, topic, self.config.request_timeout_ms)

    def _route_changed(self, route: Route) -> None:
        if not self._announced_to.issuperset(self._heartbeat_addresses()):
            self._heartbeat_wanted.set()
        for consumer in tuple(self.members.consumers.values()):
            if route.topic in consumer.topics():
                consumer.route_changed(route.topic)

    async def _beat(self) -> None:
        """Send heartbeats at the interval, and soon after a route adds brokers."""
        wait_ms = _FIRST_HEARTBEAT_MS
        while True:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(wait_ms / 1000, Repeated(self._heartbeat_wanted.set))
            try:
                await self._heartbeat_wanted.wait()
            finally:
                timer.cancel()
            self._heartbeat_wanted.clear()
            await self.heartbeat()
            if self._blocking_pool is not None:
                self._blocking_pool.close_idle()
            wait_ms = self.config.heartbeat_interval_ms

    def _heartbeat_addresses(self) -> Collection[str]:
        """Return the masters, and with consumers also the slaves: they may read from those."""
        with_slaves = bool(self.members.consumers)
        return {
            address: None
            for addresses in self._routes.brokers.values()
            for broker_id, address in addresses.items()
            if with_slaves or broker_id == MASTER_ID
        }


def _required(broker: str, replica: Replica | None) -> Replica:
    if replica is None:
        raise NoRoute(f"broker {broker!r} is not known to the name servers")
    return replica
