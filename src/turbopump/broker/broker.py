"""The broker: builds, connects and runs its parts. The only module that knows all of them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Self

from turbopump.broker.administration import Administration
from turbopump.broker.config import BrokerConfig
from turbopump.broker.delays import WATCH_MS
from turbopump.broker.filter_servers import FilterServerProcesses
from turbopump.broker.handlers.filter_servers import SWEEP_MS, FilterServers
from turbopump.broker.handlers.offsets import refusals
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.lost_tables import note_missing, queue_counts, recover_topics
from turbopump.broker.membership import SWEEP_INTERVAL_MS
from turbopump.broker.membership_file import ABSENCE_SAVE_MS
from turbopump.broker.message_path import MessagePath
from turbopump.broker.registration import Registration
from turbopump.broker.replication.mastership import Mastership
from turbopump.broker.replication.replica import Replica
from turbopump.broker.replication.replication import Replication
from turbopump.broker.state import State
from turbopump.broker.stats import SAMPLE_INTERVAL_MS
from turbopump.broker.store_ticker import StoreTicker
from turbopump.broker.topics import is_readable
from turbopump.core import PullFrame
from turbopump.errors import InvalidArgument, ListenFailed, ServerFailed
from turbopump.machine import Machine
from turbopump.net.connection import Connection
from turbopump.net.name_server_list import NameServerList
from turbopump.net.network import Network
from turbopump.net.pool import ConnectionPool
from turbopump.net.router import Router, not_supported
from turbopump.net.server import Server, ServerConfig
from turbopump.net.sockets import SocketNetwork
from turbopump.store.outcomes import Arrival
from turbopump.store.scrubber import SLICE_BYTES
from turbopump.store.store import Store
from turbopump.supervisor import Supervisor
from turbopump.tables import Table, TableFile, TableWriter
from turbopump.timeouts import timeout
from turbopump.wire.bodies import DataVersion, TopicConfig
from turbopump.wire.body_limits import BODY_BYTES_MAX
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.hosts import Host, host
from turbopump.wire.names import SCHEDULE_TOPIC

_log = logging.getLogger(__name__)

_RETENTION_INTERVAL_MS = 10_000
_RETENTION_FIRST_MS = 60_000
_RETENTION_FULL_MS = 1000
"""When retention runs first: normally, and on a disk that is already full."""
_FIND_NAME_SERVERS_MS = 1000
_REGISTER_MS = 500
_SETTLE_MS = 500
_LEAVE_MS = 300
_DRAIN_MS = 500
"""All short: a broker starts within a second and is down two seconds after the signal."""


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
        machine: Machine | None = None,
        *,
        config_path: Path | None = None,
        on_role_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._network = network = network or SocketNetwork()
        self._machine = machine = machine or Machine()
        self._clock = clock = machine.clock
        self._writer = TableWriter(machine.background, clock)
        self._config_path = config_path
        self._live = self._live_config(config)
        self._on_role_change = on_role_change
        self._ready = False
        self._advertised: Host | None = None
        self._warned_of: set[str] = set()
        self._router, self._vip_router = (
            Router(unknown=self._unknown, body_bytes_max=BODY_BYTES_MAX) for _ in range(2)
        )
        self._pool = ConnectionPool(network, clock=clock, random=machine.random)
        self._server = Server(
            network,
            self._router,
            ServerConfig(
                host=config.identity.bind_host,
                port=config.identity.port,
                connections_max=config.overload.connections_max,
                receive_bytes_max=config.overload.receive_bytes_max,
                poll_us=config.network.poll_us,
            ),
            clock=clock,
            on_connect=self._connected,
            on_disconnect=self._disconnected,
        )
        self._work = Supervisor(self._fatal)
        self._names = NameServerList(config.registration.sources, network, clock, self._work)
        role_path = config.directory / "config" / "brokerRole.json"
        role_file = TableFile(role_path, machine.files, self._writer)
        self._mastership = Mastership(
            config,
            role_file,
            self._pool.request,
            machine.random,
            clock,
            # More than half of a part may be less than half of all.
            lambda: self._names.current if self._names.is_complete else (),
        )
        self.failure: ServerFailed | None = None
        """Why it can no longer keep its guarantees; leaving its context raises this error."""
        self._entered: tuple[asyncio.Task[object], int] | None = None
        self._swept: tuple[int, DataVersion] | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a broker is started by a task"
        await self.start()
        self._entered = task, task.cancelling()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        entered, self._entered = self._entered, None
        await self.close()
        if self.failure is not None and entered is not None:
            task, cancelled = entered
            if task.uncancel() <= cancelled and kind is asyncio.CancelledError:
                raise self.failure from self.failure.__cause__

    def take_over(self, before: Broker) -> None:
        """Take over from the broker that ran before this one: its context, and its name servers."""
        self._entered = before._entered
        self._names.continue_from(before._names)

    @property
    def address(self) -> str:
        """Where clients find the broker, as ``host:port``."""
        assert self._advertised is not None, "the broker is not started"
        return str(self._advertised)

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The open connections of clients, oldest first."""
        return self._server.connections

    @property
    def config(self) -> BrokerConfig:
        """The settings as they are now: operators may change them while the broker runs."""
        return self._live.current

    async def start(self) -> None:
        """Recover the store, listen, serve, and register with the name servers."""
        config = self.config
        self.store = Store.open(config.directory, config.store, self._machine)
        async with AsyncExitStack() as undo:
            undo.callback(self.store.close)
            undo.callback(self._writer.close)
            undo.push_async_callback(self._pool.close)
            undo.push_async_callback(self._server.drain, 0)
            undo.push_async_callback(self._work.stop)
            await self._server.start()
            await self._listen_for_vip(config.identity.vip_port)
            reachable = config.identity.reachable_host
            self._advertised = _resolved(reachable, self._server.port)
            if not self._names.is_complete:
                await self._names.refresh(_FIND_NAME_SERVERS_MS)
            config, suspension = await self._mastership.assume(self.address)
            self._live = self._live_config(config)
            self.replication = Replication(
                self.store, self._live, self._network, self._clock, self._work, self._note_stored
            )
            undo.push_async_callback(self.replication.close)
            ha_port = await self.replication.listen()
            ha_host = config.replication.advertised_host or reachable
            self.replication.ha_address = str(_resolved(ha_host, ha_port, "brokerIP2"))
            # No await until everything is built: half a broker must serve no request.
            self._build(self._advertised)
            undo.pop_all()
        if suspension is not None:
            _log.warning("%s", suspension)
            self.path.writer.suspension = suspension
        self._run()
        self._ready = True
        try:
            if suspension is None:
                await self._register()
        except BaseException:
            await self.close()
            raise
        _log.info("broker %s listens on %s", config.identity.broker_name, self.address)

    async def _name_servers_changed(self, removed: Collection[str]) -> None:
        self._registration.use_name_servers(self._names.current)
        for address in removed:
            await self._pool.drop(address)

    async def _listen_for_vip(self, port: int | None) -> None:
        """Serve the VIP port too, unless it is None or taken: newer clients do not need it."""
        if port is None:
            return
        try:
            await self._server.listen_also(port, self._vip_router)
        except ListenFailed as error:
            _log.warning(
                "the VIP port is not served, which Java clients before 4.5 and Apache slaves need:"
                " %s; free the port or choose another listenPort (vipChannelEnable=false ends"
                " this warning)",
                error,
            )

    def _live_config(self, config: BrokerConfig) -> LiveConfig:
        files = self._machine.files
        return LiveConfig(config, self._clock, self._config_path, files, self._writer)

    async def _register(self) -> None:
        """Wait briefly for name servers to answer; the others are retried in the background."""
        self._registration.start(self._work)
        try:
            async with timeout(_REGISTER_MS / 1000):
                await self._registration.wait_tried()
        except TimeoutError:
            _log.warning("not all name servers answered: starting without waiting for them")

    def _build(self, store_host: Host) -> None:
        self.state = State(self._live, self._clock, self._machine.files, self._writer)
        missing = self.state.load(self._mastership.record.epoch)
        self.path = MessagePath(
            self.state,
            self.store,
            store_host,
            self._clock,
            self._machine.random,
            self._work,
            self.replication.slaves,
        )
        if not self.path.delays.load():
            missing.append(self.path.delays.saving)
        counts = queue_counts(self.store.queue_ids())
        note_missing(missing, counts)
        is_lost = self.state.topics.saving in missing
        recover_topics(self.state.topics, counts, is_table_lost=is_lost)
        self.state.offsets.clamp_to_ends(self.queue_end)
        self.path.transactions.load()
        watch = self._work.watch("store maintenance", is_essential=True)
        self._store_ticker = StoreTicker(self.store, self._clock, watch)
        self._registration = Registration(
            config=self.config,
            topics=self.state.topics,
            pool=self._pool,
            address=self.address,
            ha_address=self.replication.ha_address,
            name_servers=self._names.current,
            epoch=self._mastership.record.epoch,
        )
        self._names.on_change = self._name_servers_changed
        self.administration = Administration(
            self.state,
            self.path,
            self.store,
            self._registration,
            self._mastership,
            self.address,
            self._clock,
            self._work,
        )
        config = self.config
        self._filter_servers = FilterServers(
            config.filters,
            config.identity,
            self._clock,
            self._registration.announce_filter_servers,
        )
        self.replica = Replica(
            config=config,
            state=self.state,
            path=self.path,
            store=self.store,
            registration=self._registration,
            mastership=self._mastership,
            replication=self.replication,
            pool=self._pool,
            address=self.address,
            clock=self._clock,
            work=self._work,
            on_role_change=self._on_role_change,
        )
        self.administration.runtime_info.replication = self.replica.described
        self.state.topics.listen(self._registration.topic_changed)
        self.state.topics.listen(self._release_unreadable)
        self.state.consumers.listen_to_expressions(self.path.arrivals.release_subscribers)
        self._live.listen(self._config_changed)
        self._router.settle = self._vip_router.settle = self.path.settle
        refused = refusals() if config.identity.is_slave else {}
        for part in (self.path, self.administration, self._filter_servers, self.replica):
            for code, handler in part.handlers().items():
                self._router.add(code, refused.get(code, handler))
                if code != RequestCode.PULL_MESSAGE:
                    # As in Apache RocketMQ: clients never pull from the VIP port.
                    self._vip_router.add(code, refused.get(code, handler))
        for kind, frame_handler in self.path.frame_handlers().items():
            self._router.add_frames(kind, frame_handler)
            if kind is not PullFrame:
                self._vip_router.add_frames(kind, frame_handler)

    def _run(self) -> None:
        every = self._work.every
        self.store.listen(self._arrived, self.path.arrivals)
        self._names.start()
        self.replica.run()
        if not self.config.identity.is_slave:
            self._run_master()
        self._store_ticker.note_message()
        first_ms = _RETENTION_FIRST_MS if self.store.refusal is None else _RETENTION_FULL_MS
        every("retention", _RETENTION_INTERVAL_MS, self._retain, first_ms=first_ms)
        every("held pulls", lambda: self.config.long_polling.sweep_interval_ms, self._sweep)
        every("offsets", lambda: self.config.intervals.offsets_ms, self._save_offsets)
        every("statistics", SAMPLE_INTERVAL_MS, self.state.stats.sample)
        every("silent clients", SWEEP_INTERVAL_MS, self.administration.membership.sweep)
        scrub_bytes_per_s = self.config.store.scrub_bytes_per_s
        if scrub_bytes_per_s:
            every("scrubber", max(1, SLICE_BYTES * 1000 // scrub_bytes_per_s), self.store.scrub)
        if self.config.filters.servers:
            every("silent filter servers", SWEEP_MS, self._filter_servers.sweep)
            # They use this address, even where routes name another one.
            self._warned_of.add("127.0.0.1")
            processes = FilterServerProcesses(
                self.config.filters, self.config.identity, self._server.port
            )
            processes.start(self._work)
        self._await_reconnects()

    def _run_master(self) -> None:
        """Start the parts that write messages; a slave gets the results from its master."""
        every = self._work.every
        self.path.delays.start()
        every("delay progress", lambda: self.config.intervals.delays_ms, self._save_delays)
        every("transaction checks", self._check_interval_ms, self.path.checks.run)
        every("clock watch", WATCH_MS, self.path.delays.watch_clock)

    def _check_interval_ms(self) -> int:
        return self.config.transactions.check_interval_ms

    def _await_reconnects(self) -> None:
        """Give remembered members, and owners of locks, time to reconnect, if there are any."""
        awaited = self.administration.membership.members.awaited
        if not awaited:
            return
        wait_ms = self.config.groups.member_reconnect_ms
        count = len({client_id for _, client_id in awaited})
        groups = len({group for group, _ in awaited})
        _log.info("%d clients of %d groups have up to %d ms to reconnect", count, groups, wait_ms)

        async def forget_absent() -> None:
            membership = self.administration.membership
            left_ms = membership.forget_absent()
            while left_ms:
                await asyncio.sleep(min(left_ms, ABSENCE_SAVE_MS) / 1000)
                left_ms = membership.forget_absent()

        self._work.keep("absent members", forget_absent)

    async def close(self) -> None:
        """Unregister, answer waiting requests, disconnect clients, and save all state."""
        if not self._ready:
            return
        self._ready = False
        self._store_ticker.stop()
        self.path.delays.stop()
        self.path.sends.close()
        self.path.arrivals.release_all()
        self.administration.copied_tables.close()
        async with AsyncExitStack() as rest:
            # From the last to the first, each even if others fail or the caller is cancelled.
            rest.callback(self.store.close)
            rest.callback(self._close_tables)
            rest.push_async_callback(self._save_tables)
            # Delayed messages count as delivered once their copies are on disk.
            rest.callback(self.store.flush)
            rest.callback(self.path.transactions.stop)
            rest.callback(self.path.deadlines.close)
            rest.callback(self.path.queueing_delay.stop)
            rest.push_async_callback(self.replication.close)
            rest.push_async_callback(self._server.drain, _DRAIN_MS)
            rest.push_async_callback(self._pool.close)
            rest.push_async_callback(self._unregister)
            rest.push_async_callback(self.path.durability.settle, _SETTLE_MS)
            rest.push_async_callback(self._work.stop)

    @property
    def _tables(self) -> tuple[Table, ...]:
        return (*self.state.tables, self.path.delays.saving, self._mastership.saving)

    async def _save_tables(self) -> None:
        self.path.transactions.settle_progress()
        await asyncio.gather(*(table.try_save() for table in self._tables))

    def _close_tables(self) -> None:
        """Save the tables that are not saved yet."""
        self._writer.close()
        with ExitStack() as rest:
            for table in self._tables:
                rest.callback(table.save_now)

    async def _unregister(self) -> None:
        """Unregister from the name servers, without waiting for those that do not answer."""
        try:
            async with timeout(_LEAVE_MS / 1000):
                await self._registration.unregister()
        except TimeoutError:
            _log.warning(
                "name servers do not answer: they will remove the broker when it times out"
            )

    def _fatal(self, name: str, error: BaseException) -> None:
        """Stop the broker, because a part that it needs keeps failing."""
        failure = ServerFailed(
            f"broker {self.config.identity.broker_name} stops: {name} keeps failing with"
            f" {error!r}; nothing acknowledged is lost, start it again"
        )
        failure.__cause__ = error
        self.fail(failure)

    def fail(self, failure: ServerFailed) -> None:
        """Cancel the task inside its context, which gets the failure."""
        if self.failure is None:
            self.failure = failure
            _log.critical("%s", self.failure)
            if self._entered is not None:
                self._entered[0].cancel()

    # --- events -----------------------------------------------------------------------------------

    def _arrived(self, arrivals: list[Arrival]) -> None:
        self._note_stored()
        for arrival in arrivals:
            self.path.arrivals.notify(arrival)
            if arrival.topic == SCHEDULE_TOPIC:
                self.path.delays.notify(arrival)

    def _note_stored(self) -> None:
        """Schedule a flush of what was stored, and its transfer to slaves."""
        self._store_ticker.note_message()
        self.replication.slaves.note_written()

    def queue_end(self, topic: str, queue_id: int) -> int:
        """Return the offset that the next message of a queue will get."""
        return self.store.queue_range(topic, queue_id)[1]

    def _sweep(self) -> None:
        arrivals = self.path.arrivals
        arrivals.wake_stale()
        # Pulls held since have read up to the same end: without new messages, none was missed.
        seen = (self.store.readable_end, self.state.topics.data_version)
        if seen == self._swept:
            return
        arrivals.sweep(self.queue_end)
        for topic in arrivals.topics - self.state.topics.table.keys():
            arrivals.release_topic(topic)
        # Not earlier: a failed one must be repeated.
        self._swept = seen

    def _release_unreadable(self, topic: TopicConfig) -> None:
        if not is_readable(topic):
            self.path.arrivals.release_topic(topic.topic_name)

    def _save_offsets(self) -> Awaitable[None] | None:
        self.path.transactions.settle_progress()
        return _saved(self.state.offsets.saving)

    def _save_delays(self) -> Awaitable[None] | None:
        return _saved(self.path.delays.saving)

    def _retain(self) -> None:
        self.store.retain()

    def _config_changed(self, old: BrokerConfig, new: BrokerConfig) -> None:
        self.state.topics.config = new.topics
        self.state.groups.config = new.groups
        self.administration.membership.config = new.groups
        self.path.arrivals.config = new.long_polling
        self.administration.runtime_info.config = new
        self._registration.config = new
        self.store.set_retention(new.store.retention)
        if old.access != new.access:
            self._registration.announce_all()

    def _connected(self, connection: Connection) -> None:
        """Warn if a client used an address that differs from the advertised one."""
        place = connection.local_address.rpartition(":")[0].strip("[]")
        advertised = self._advertised.address if self._advertised is not None else place
        if self._ready and place not in {advertised, *self._warned_of}:
            self._warned_of.add(place)
            _log.warning(
                "a client reached this broker at %s, but routes tell clients to use %s:"
                " set brokerIP1 to the address that clients can reach",
                place,
                advertised,
            )

    def _disconnected(self, connection: Connection) -> None:
        if self._ready:
            self.path.arrivals.forget(connection)
            self.administration.clients.connection_closed(connection)
            self._filter_servers.connection_closed(connection)

    def _unknown(self, request: Command, peer: Connection) -> Command:
        if not self._ready:
            remark = "the broker is starting: try again"
            return request.answer(ResponseCode.SERVICE_NOT_AVAILABLE, remark=remark)
        return not_supported(request, peer)


def _saved(table: Table) -> Awaitable[None] | None:
    return table.try_save() if table.is_dirty else None


def _resolved(name: str, port: int, key: str = "brokerIP1") -> Host:
    """Return the address that goes into messages and ids: always an IP address."""
    try:
        return host(name, port)
    except InvalidArgument:
        pass
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidArgument(f"{key} {name!r} cannot be resolved: {error}") from error
    return host(str(found[0][4][0]), port)
