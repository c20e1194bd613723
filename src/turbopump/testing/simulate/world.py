"""The cluster of a run: every process can be killed and restarted, and has a name."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from turbopump.admin.administration import Admin
from turbopump.broker.broker import Broker
from turbopump.broker.config import BrokerConfig, Role
from turbopump.broker.replicated import ReplicatedBroker
from turbopump.client.session import Session
from turbopump.errors import StoreDamaged, TurbopumpError
from turbopump.machine import Machine
from turbopump.nameserver import NameServer
from turbopump.store.directory import StoreDirectory
from turbopump.store.store import Store
from turbopump.testing.cluster import Cluster, _Place, broker_config
from turbopump.testing.disk import CHANGING, Disk
from turbopump.testing.idle_skipping import BusyTimeClock
from turbopump.testing.memory_net import LinkQuality, MemoryHost
from turbopump.testing.simulate.bodies import DamagedBodies
from turbopump.testing.simulate.events import (
    BrokerDown,
    Down,
    FaultBegan,
    FaultEnded,
    Reopened,
    Unexpected,
)
from turbopump.testing.simulate.fault_plan import FaultKind
from turbopump.testing.simulate.history import History
from turbopump.testing.simulate.plan import Plan
from turbopump.testing.simulate.replica_plan import Slave
from turbopump.testing.simulate.roles import Roles, is_ready
from turbopump.testing.simulate.store_contents import Contents, contents_of, differences
from turbopump.wire.mastership import CLAIMS_NAMESPACE, MasterClaim, parse_claim

OnDeath = Callable[[], object]

_DIRECTORY = Path("/")
"""On the in-memory disks, one for each broker."""
_START_AGAIN_S = 1.0
_FULL = 0.97
_NAMESERVER = "ns"
_DOWN_NAMESERVER = FaultKind.KILL_NAMESERVER.value
_PROMOTION_MS = 20_000


class World(Cluster):
    """Name servers, brokers, and the hosts of all clients, by name."""

    def __init__(self, plan: Plan, history: History) -> None:
        flush = {"flushDiskType": plan.mode}
        super().__init__(
            _DIRECTORY,
            plan.machines,
            nameservers=plan.nameservers,
            config=_config({**plan.settings, **flush}, plan.replicas.recent_bytes),
            quality=LinkQuality(
                latency=plan.latency_ms / 1000, jitter=plan.jitter_ms / 1000, cut_chance=0.02
            ),
            skips_idle_time=False,
        )
        self.plan = plan
        self.promotes = plan.replicas.promotes
        """Whether machines may change their roles."""
        self.history = history
        self._slaves = {slave.name: slave for slave in plan.replicas.slaves}
        self.has_slaves = bool(self._slaves)
        """Whether any machine is planned to follow another."""
        self.hosts: dict[str, list[str]] = {}
        """Of producers and groups, by name: those of the members that run."""
        self.made: list[weakref.ref[Broker | Session]] = []
        """All brokers and clients of the run."""
        self.down_nameservers: set[int] = set()
        self.doomed: dict[str, Down] = {}
        """Brokers that died during an operation, and still have to be cleaned up."""
        self.stopped: list[Broker] = []
        """Brokers that stopped, and were not inspected since: they accepted commits until then."""
        self.starting: dict[str, Broker] = {}
        """Brokers whose start is not over: they already serve while name servers do not answer."""
        self.abandoned: dict[str, Contents] = {}
        """What brokers held that recovered, and crashed before they served."""
        self.damaged: DamagedBodies = {}
        self._reads_fail = any(fault.kind is FaultKind.FAIL_READS for fault in plan.faults)
        self.roles = Roles(plan, self.brokers)
        self._lives: dict[str, ReplicatedBroker] = {}
        """Where slaves are promoted: what changes the roles of each running machine."""
        self._nameserver_disks: dict[int, Disk] = {}
        self._clocks: dict[int, BusyTimeClock] = {}
        """By the number of a broker's machine; across all its starts."""

    async def start(self) -> None:
        """Start all servers."""
        await super().start()
        for name in self._names:
            self._set_up_disk(name)

    def _nameserver_disk(self, number: int) -> Disk:
        return self._nameserver_disks.setdefault(number, super()._nameserver_disk(number))

    def _set_up_disk(self, name: str) -> None:
        if self.plan.keeps_some:
            # What a loss of power leaves of unsynced data is left to chance.
            seed = f"{self.plan.seed} {name}"
            self.disk(name).random = Random(seed)  # noqa: S311 - the same in every run
        self.calm_disk(name)

    def _config_of(self, name: str, place: _Place) -> BrokerConfig:
        config, slave = super()._config_of(name, place), self._slaves.get(name)
        if slave is None:
            return config
        identity = replace(
            config.identity,
            broker_name=slave.master,
            broker_id=slave.broker_id,
            role=Role.SLAVE,
        )
        return replace(config, identity=identity)

    @property
    def masters(self) -> dict[str, Broker]:
        """The masters that run, by broker name."""
        if not self._slaves:
            return self.brokers
        if self.promotes:
            return self.roles.serving()
        return {name: made for name, made in self.brokers.items() if name not in self._slaves}

    @property
    def masters_seen(self) -> Mapping[str, Broker]:
        """The same, as found by the last call of `follow_roles`."""
        return self.roles.serving_then if self.promotes else self.masters

    @property
    def slaves_seen(self) -> Sequence[Slave]:
        """The slaves, as found by the last call of `follow_roles`."""
        return self.roles.slaves_then if self.promotes else self.slaves

    @property
    def slaves(self) -> Sequence[Slave]:
        """The slaves: as planned, or as they are after promotions."""
        plan = self.plan.replicas
        return self.roles.slaves() if plan.promotes else plan.slaves

    async def start_broker(self, name: str | None = None) -> Broker:
        """Start a broker, and remember it for as long as it is in memory."""
        broker = await super().start_broker(name)
        self.made.append(weakref.ref(broker))
        return broker

    async def _started(self, name: str, config: BrokerConfig, machine: Machine) -> Broker:
        host = self._places[name].host
        lives = ReplicatedBroker(config, host, machine) if self.promotes else None
        broker = Broker(config, host, machine) if lives is None else lives.current
        self.starting[name] = broker
        try:
            await (broker if lives is None else lives).start()
        finally:
            del self.starting[name]
        if lives is None:
            return broker
        self._lives[name] = lives
        return lives.current

    async def _close(self, name: str, broker: Broker) -> None:
        lives = self._lives.pop(name, None)
        await (broker if lives is None else lives).close()

    def follow_roles(self) -> None:
        """Record brokers that have restarted in another role."""
        for name, lives in self._lives.items():
            current = lives.current
            if self.brokers.get(name) not in (None, current) and is_ready(current):
                self.brokers[name] = current
                self.made.append(weakref.ref(current))
        self.roles.update(self.now_us)

    def failed_machines(self) -> list[str]:
        """Return the machines whose processes have ended because they could not change roles."""
        return [
            name
            for name, lives in self._lives.items()
            if name in self.brokers and name not in self.doomed
            if lives.current.failure is not None
        ]

    async def promote(self, broker: str) -> bool:
        """Promote the slave of a broker name that has most of the log; False if that fails."""
        return await self._promote(broker, None)

    async def promote_all(self, broker: str) -> bool:
        """Promote each slave of a broker name at once; False if none is promoted."""
        ids = [slave.broker_id for slave in self.slaves if slave.master == broker]
        return any(await asyncio.gather(*(self._promote(broker, each) for each in ids)))

    async def _promote(self, broker: str, broker_id: int | None) -> bool:
        role = "SYNC_MASTER" if self.plan.replicas.is_sync_master else "ASYNC_MASTER"
        async with Admin(session=self.session(request_timeout=_PROMOTION_MS / 1000)) as admin:
            try:
                node = await admin.clusters.promotable(broker, broker_id)
                await admin.clusters.promote(node, role)
            except TurbopumpError:
                return False
        return True

    def claims(self, broker: str) -> list[MasterClaim | None]:
        """Return the claim to a broker name that each name server has, running or not."""
        tables = (server._kv for server in self.nameservers)  # noqa: SLF001 - also while a network is cut
        return [parse_claim(table.value(CLAIMS_NAMESPACE, broker)) for table in tables]

    @property
    def now_us(self) -> int:
        """Virtual time since the run began."""
        return round(self._loop.time() * 1e6)

    # --- clients ----------------------------------------------------------------------------------

    def client(self, name: str, **changes: Any) -> Session:
        """Return a session on its own host, which belongs to a producer or group."""
        session = self.session(instance=f"client-{len(self.clients)}", **changes)
        self.hosts.setdefault(name, []).append(session.config.host)
        self.made.append(weakref.ref(session))
        return session

    def kill_client(self, session: Session) -> None:
        """Isolate a client permanently: nothing it does from now on reaches another process."""
        host = session._network  # noqa: SLF001 - which is the host that this cluster has given it
        assert isinstance(host, MemoryHost)
        self.network.kill(host)
        self.forget_client(session)

    def forget_client(self, session: Session) -> None:
        """Exclude this client from further faults."""
        for hosts in self.hosts.values():
            if session.config.host in hosts:
                hosts.remove(session.config.host)

    def host_names(self, name: str) -> list[str]:
        """Return the hosts with a name now: of a broker, name server, producer or group."""
        if name in self._places:
            return [self._places[name].host.name]
        return [name] if name.startswith("ns") else self.hosts.get(name, [])

    def all_hosts(self) -> list[str]:
        """Return the hosts of all running processes."""
        brokers = [place.host.name for place in self._places.values()]
        names = [_host(server) for server in self.nameservers]
        return [*brokers, *names, *(host for hosts in self.hosts.values() for host in hosts)]

    def machine_at(self, address: str) -> str:
        """Return the machine of an address."""
        return next(name for name, at in self._places.items() if at.host.name == address)

    def broker_at(self, address: str) -> str:
        """Return the broker name of an address."""
        return self.roles.name_of(self.machine_at(address))

    def machine_clock(self, name: str) -> BusyTimeClock:
        """Return the clock of a broker's machine."""
        return self._clocks[self._places[name].number]

    def _broker_machine(self, place: _Place) -> Machine:
        clock = self._clocks.setdefault(place.number, BusyTimeClock(self._loop.clock))
        return replace(super()._broker_machine(place), clock=clock)

    # --- brokers ----------------------------------------------------------------------------------

    def calm_disk(self, name: str) -> None:
        """Restore the normal behaviour of a disk."""
        disk = self.disk_of(name)
        disk.heal()
        if name in self._places:
            disk.sync_time = self.plan.sync_ms / 1000

    def disk_of(self, machine: str) -> Disk:
        """Return the disk of a broker or a name server."""
        if machine in self._places:
            return self.disk(machine)
        return self._nameserver_disk(int(machine.removeprefix(_NAMESERVER)))

    def store_directory(self, name: str) -> StoreDirectory:
        """Return where a broker stores its files."""
        return StoreDirectory(self._config_of(name, self._places[name]).directory, self.disk(name))

    def fill_disk(self, machine: str) -> None:
        """Fill a disk: brokers stop writing before there is no space left, name servers do not."""
        disk = self.disk_of(machine)
        if machine in self._places:
            # The log's own disk has room, or brokers would delete files, whatever is in them.
            disk.roomy.add(self.store_directory(machine).commit_log)
            disk.fullness = _FULL
        else:
            disk.capacity_bytes = disk.used_bytes

    def crowd_disk(self, machine: str, fullness: float) -> None:
        """Leave no room for a slave's log either, so that retention would delete files."""
        disk = self.disk_of(machine)
        disk.roomy.clear()
        disk.fullness = fullness

    def reads_succeeding(self) -> ExitStack:
        """Let no read of a broker's disk fail in a block, for inspection from outside."""
        stack = ExitStack()
        for place in self._places.values() if self._reads_fail else ():
            stack.enter_context(place.disk.reads_succeeding())
        return stack

    def crash_at_disk_change(self, name: str, how: Down, changes: int, on_death: OnDeath) -> None:
        """Crash a broker just before the nth change on its disk."""

        def dying_host() -> MemoryHost:
            self.doomed[name] = how
            self.history.add(BrokerDown(self.now_us, name, how))
            # Not before: it may have restarted in the meantime.
            return self._places[name].host

        self._crash_at_change(self.disk(name), changes, dying_host, on_death)

    def _crash_at_change(
        self, disk: Disk, changes: int, dying_host: Callable[[], MemoryHost], on_death: OnDeath
    ) -> None:
        """Let a disk reject everything from its nth change on, and its host die."""
        left = changes

        def look(operation: str, _: Path) -> None:
            nonlocal left
            if disk._is_dead:  # noqa: SLF001 - of another crash: nothing dies twice
                return
            left -= operation in CHANGING
            if left <= 0:
                disk.on_operation = None
                disk.die()
                host = dying_host()
                # The disk may be at work on a thread, while the loop stands still.
                self.network.silence(host.name)
                self._loop.call_soon(self._die, host, on_death)

        disk.on_operation = look

    def _die(self, host: MemoryHost, on_death: OnDeath) -> None:
        self.network.kill(host)
        on_death()

    def cancel_crash(self, machine: str) -> None:
        """Cancel the planned death of a broker or name server."""
        self.disk_of(machine).on_operation = None

    def replace_disk(self, name: str) -> None:
        """Give a slave that is down a new disk: it has to copy everything again."""
        self.history.add(FaultBegan(self.now_us, FaultKind.NEW_DISK.value, name))
        self.cancel_crash(name)
        self._places[name].disk = Disk(self._loop)
        self._set_up_disk(name)
        self.abandoned.pop(name, None)

    def is_copied(self, slave: Slave) -> bool:
        """Whether a slave has everything its master has, and the master knows it."""
        master, copy = self.masters.get(slave.master), self.brokers.get(slave.name)
        if master is None or copy is None:
            return False
        end = master.store.readable_end
        known = [each.acknowledged for each in master.replication.slaves.following]
        slaves = self.plan.replicas.of(slave.master)
        return copy.store.readable_end == end and known.count(end) >= len(slaves)

    async def end_broker(self, name: str, how: Down) -> None:
        """Stop or crash a broker, or clean up one that has died."""
        if name in self.doomed:
            how = self.doomed[name]
        else:
            self.history.add(BrokerDown(self.now_us, name, how))
        if how is Down.STOPPED:
            await self._stop(name)
        else:
            await self.crash(name, lose_unflushed=how is Down.POWER_LOST)
        self.doomed.pop(name, None)

    async def _stop(self, name: str) -> None:
        broker = self.broker(name)
        try:
            await self.stop_broker(name)
        except (OSError, TurbopumpError):
            # Its disk has started to fail since: what it could not save is lost, as in a crash.
            self.history.add(BrokerDown(self.now_us, name, Down.KILLED))
            self.disk(name).close_all()
        self.stopped.append(broker)

    async def begin_broker(self, name: str) -> None:
        """Restart a broker; a disk that fails or is full may prevent that for a while."""
        if self.plan.opens_twice:
            self._open_and_abandon(name)
        while name not in self.brokers:
            try:
                await self.start_broker(name)
            except Exception as error:
                if name in self.doomed:
                    # Whatever it has seen of the disk after its death.
                    self._clear_away(name)
                    await asyncio.sleep(_START_AGAIN_S)
                    continue
                if not isinstance(error, OSError | TurbopumpError):
                    raise
                note = f"not started: {type(error).__name__}"
                self.history.add(FaultBegan(self.now_us, "start of", name, note))
                if isinstance(error, StoreDamaged):
                    # No fault of a run damages what was synced.
                    self.history.add(Unexpected(self.now_us, f"{name} does not start: {error}"))
                self.disk(name).close_all()
                await asyncio.sleep(_START_AGAIN_S)
            else:
                if name in self.doomed:
                    await self.end_broker(name, self.doomed[name])

    def _clear_away(self, name: str) -> None:
        """Forget a broker that died during its start."""
        disk = self.disk(name)
        if self.doomed.pop(name) is Down.POWER_LOST:
            disk.lose_unsynced()
        disk.close_all()

    def open_twice(self, name: str) -> None:
        """Open the store of a broker that is down twice, and compare."""
        first, second = self._opened(name), self._opened(name)
        self.history.add(Reopened(self.now_us, name, tuple(differences(first, second))))

    def _open_and_abandon(self, name: str) -> None:
        """Recover a store, then crash: the next recovery must find the same."""
        try:
            self.abandoned[name] = self._opened(name)
        except (OSError, TurbopumpError):
            # A disk that fails; the start itself reports it.
            self.disk(name).close_all()

    def _opened(self, name: str) -> Contents:
        """Open a store as a broker does, and abandon it."""
        disk, place = self.disk(name), self._places[name]
        config, machine = self._config_of(name, place), self._broker_machine(place)
        store = Store.open(config.directory, config.store, machine)
        try:
            return contents_of(store, self.roles.name_of(name), self.damaged)
        finally:
            disk.die()
            store.close()
            disk.close_all()

    # --- name servers -----------------------------------------------------------------------------

    def crash_nameserver_at_change(self, number: int, changes: int, on_death: OnDeath) -> None:
        """Crash a name server just before the nth change on its disk."""

        def dying_host() -> MemoryHost:
            return self.network.host(_host(self.nameservers[number]))

        self._crash_at_change(self._nameserver_disk(number), changes, dying_host, on_death)

    async def kill_nameserver(self, number: int, how: Down = Down.KILLED) -> None:
        """Kill a name server; it restarts without routes."""
        server, disk = self.nameservers[number], self._nameserver_disk(number)
        self.down_nameservers.add(number)
        self.history.add(FaultBegan(self.now_us, _DOWN_NAMESERVER, f"ns{number}", how.value))
        disk.on_operation = None
        disk.die()
        self.network.kill(self.network.host(_host(server)))
        await server.__aexit__(None, None, None)
        if how is Down.POWER_LOST:
            disk.lose_unsynced()
        disk.close_all()

    def open_nameserver_files(self) -> list[Path]:
        """Return the files that name servers have open; to be called when all have stopped."""
        return [path for disk in self._nameserver_disks.values() for path in disk.close_all()]

    async def restart_nameserver(self, number: int) -> None:
        """Restart a name server at its address."""
        # Key-values survive, and with them the master's role; routes do not.
        self.nameservers[number] = await self._nameserver(number, _host(self.nameservers[number]))
        self.down_nameservers.discard(number)
        self.history.add(FaultEnded(self.now_us, _DOWN_NAMESERVER, f"ns{number}"))


def _host(server: NameServer) -> str:
    return server.address.rpartition(":")[0]


def _config(settings: Mapping[str, str], recent_bytes: int | None) -> BrokerConfig:
    config = broker_config(settings)
    if recent_bytes is None:
        return config
    # In files it is a share of the machine's memory.
    limits = replace(config.store.limits, recent_bytes=recent_bytes)
    return replace(config, store=replace(config.store, limits=limits))
