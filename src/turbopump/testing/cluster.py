"""A whole cluster in one process and in virtual time: name servers, brokers, clients, faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any, Self, TypeVar

from turbopump.broker.broker import Broker
from turbopump.broker.config import BrokerConfig
from turbopump.broker.config_keys import parse
from turbopump.client.calls import require_success
from turbopump.client.config import ClientConfig
from turbopump.client.producer import Producer
from turbopump.client.send_hooks import SendReceipt
from turbopump.client.session import Session
from turbopump.errors import InvalidArgument, NotRunning
from turbopump.machine import Machine
from turbopump.message import Message
from turbopump.nameserver import NameServer, NameServerConfig
from turbopump.net.request_protocol import RequestHook
from turbopump.testing import cluster_state
from turbopump.testing.clock import VirtualClock
from turbopump.testing.cluster_registry import register_cluster
from turbopump.testing.disk import Disk
from turbopump.testing.idle_skipping import BusyTimeClock, IdleSkipping
from turbopump.testing.loop import Deadlock, VirtualTimeLoop, virtual_loop
from turbopump.testing.memory_net import LinkQuality, MemoryHost, MemoryNetwork
from turbopump.testing.waiting import TimeLimit, quiet, total_seconds, until
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import request
from turbopump.wire.headers import CreateTopic
from turbopump.wire.names import TEMPLATE_TOPIC

T = TypeVar("T")

BROKER = "broker-a"
TIMEOUT_S = 60.0
CONSUMED_TIMEOUT_S = 6 * 3600.0
"""Longer than all retries of a message take with the default delays."""

RUN_LIMIT_S = 6 * 3600.0
REAL_LIMIT_S = 120.0
"""Much more than any test needs, since the machine may be busy with others."""
_DEAF_LIMIT_S = 5.0
BROKER_PORT = 10911
_REQUEST_TIMEOUT_MS = 3000

CALM = LinkQuality(jitter=0, cut_chance=0)
"""Little is left to chance, which saves time; set ``network.quality`` for worse links."""

SMALL_FILES = {
    "mappedFileSizeCommitLog": str(8 * 1024 * 1024),
    "mappedFileSizeConsumeQueue": str(20 * 1000),
    "maxHashSlotNum": "1000",
    "maxIndexNum": "10000",
}
"""Settings that keep a broker's files small for tests."""


def broker_config(settings: Mapping[str, str] | None = None) -> BrokerConfig:
    """Return a broker's configuration for tests; settings by their keys in files."""
    return parse({**SMALL_FILES, **(settings or {})})


@dataclass(slots=True)
class _Place:
    """Where a broker runs, across restarts."""

    number: int
    host: MemoryHost
    disk: Disk


class Cluster(cluster_state.ReadsState):
    """Name servers, brokers and clients over a network in memory, in virtual time.

    ::

        async with Cluster(tmp_path) as cluster:
            async with Producer("shop", nameserver=cluster.nameserver) as producer:
                await producer.send(Message("orders", b"hello"))
            assert len(cluster.messages("orders")) == 1

    Every `turbopump.aio` client started in the same event loop is part of it, each on its own host.
    ``config`` is a broker's configuration except directory, name and addresses; ``quality`` is that
    of all links between hosts. Without ``skips_idle_time``, periodic work also runs in hours in
    which nothing happens.
    """

    network: MemoryNetwork

    def __init__(
        self,
        directory: Path,
        brokers: Sequence[str] = (BROKER,),
        *,
        nameservers: int = 1,
        config: BrokerConfig | None = None,
        quality: LinkQuality = CALM,
        skips_idle_time: bool = True,
        runner: asyncio.Runner | None = None,
    ) -> None:
        if nameservers < 1:
            raise InvalidArgument(f"nameservers must be at least 1, got {nameservers}")
        self.directory = directory
        self.config = config or broker_config()
        self.nameservers: list[NameServer] = []
        self.brokers: dict[str, Broker] = {}
        """Running brokers by name."""
        self.clients: list[Session] = []
        """The sessions of all clients started, oldest first."""
        self._client_disks: dict[str, Disk] = {}
        """By host: broadcasting consumers keep their offsets there."""
        self._quality = quality
        self._skips_idle_time = skips_idle_time
        self._names = tuple(brokers)
        self._nameserver_count = nameservers
        self._places: dict[str, _Place] = {}
        self._runner = runner
        self._limit = TimeLimit(RUN_LIMIT_S)
        self._stack = AsyncExitStack()

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all servers; clients started in the loop now belong to the cluster."""
        self.network = MemoryNetwork(self._quality)
        self._loop = loop = virtual_loop()
        self._waking_clock = BusyTimeClock(loop.clock)
        idle = IdleSkipping(self._waking_clock, self._marks) if self._skips_idle_time else None
        self._stack.enter_context(loop.skipping(idle))
        entry = register_cluster(loop)
        for number in range(self._nameserver_count):
            self.nameservers.append(await self._nameserver(number, f"ns{number}{entry.suffix}"))
        self._stack.enter_context(entry.open(self.nameserver, self._client_session))
        for name in self._names:
            await self.start_broker(name)

    async def _nameserver(self, number: int, host: str) -> NameServer:
        path = self.directory / f"ns{number}" / "kvConfig.json"
        config = NameServerConfig(host=host, kv_config_path=path)
        machine = self._machine(self._nameserver_disk(number), number)
        server = NameServer(config, self.network.host(host), machine)
        return await self._stack.enter_async_context(server)

    async def close(self) -> None:
        """Stop all servers; clients that start after this get an error."""
        for name in tuple(self.brokers):
            await self.stop_broker(name)
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the cluster's time, from a plain test function.

        Time stands still between two runs. A run fails if it takes two minutes of real time, or six
        hours of virtual time that it did not request with `advance` or `until`.
        """
        if self._runner is None:
            work.close()
            raise NotRunning("this cluster runs in the loop that started it: await it there")
        loop = self._runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop), "made by `running_cluster`"
        # Work that ignores cancellation would use up all of the time for closing.
        loop.limit_real_time(_DEAF_LIMIT_S if self._limit.is_deaf else REAL_LIMIT_S)
        try:
            return self._runner.run(self._limit.run(work))
        except Deadlock:
            self._limit.abandon()
            raise

    def _require_own_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            raise NotRunning(
                "turbopump_cluster lives in an event loop of its own and was awaited in another "
                "event loop: await it in the test itself, which may be `async def`, or call "
                "turbopump_cluster.run(...) in a plain function"
            )

    # --- clients ----------------------------------------------------------------------------------

    @property
    def clock(self) -> VirtualClock:
        """The clock of the whole cluster."""
        return self._loop.clock

    @property
    def nameserver(self) -> str:
        """The name server address for clients."""
        return ";".join(server.address for server in self.nameservers)

    def session(
        self,
        host: str = "",
        hooks: Sequence[RequestHook] = (),
        kind: type[Session] = Session,
        **changes: Any,
    ) -> Session:
        """Return a session, not started, of a client on its own host or on a given one.

        ``changes`` are fields of its `ClientConfig`. Only needed for what a client started with
        ``nameserver=cluster.nameserver`` cannot do.
        """
        self._require_own_loop()
        number = len(self.clients) + 1
        host = host or f"10.1.{number // 250}.{number % 250 + 1}"
        settings = {"nameserver": self.nameserver, "host": host, "instance": "test", **changes}
        made = kind(
            ClientConfig(**settings),
            self.network.host(host),
            self._machine(self._client_disks.setdefault(host, Disk(self._loop)), number),
            hooks=hooks,
        )
        self.clients.append(made)
        return made

    def _client_session(self, config: ClientConfig) -> Session:
        """Return the session of a client that knows only the cluster's address."""
        own = {"instance": config.instance or f"client-{len(self.clients) + 1}", "tls": None}
        given = (field.name for field in fields(config) if field.init)
        changes = {name: getattr(config, name) for name in given} | own
        return self.session(changes.pop("host"), **changes)

    # --- messages ---------------------------------------------------------------------------------

    async def make_topic(self, topic: str, broker: str | None = None, queues: int = 4) -> None:
        """Create a topic on one broker or on all masters, as an operator does."""
        header = CreateTopic(
            topic=topic,
            default_topic=TEMPLATE_TOPIC,
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=6,
            topic_filter_type="SINGLE_TAG",
        )
        command = request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        async with self.session() as session:
            for name in self._masters() if broker is None else (broker,):
                address = self.broker(name).address
                require_success(await session.request(address, command, _REQUEST_TIMEOUT_MS))

    def _masters(self) -> list[str]:
        return [name for name, made in self.brokers.items() if not made.config.identity.is_slave]

    async def send(self, *messages: Message) -> list[SendReceipt]:
        """Send messages, one after the other, with a producer of the test's own."""
        async with Producer("test-producer", session=self.session()) as producer:
            return [await producer.send(message) for message in messages]

    def _read(self, question: Callable[[Collection[Broker]], T]) -> T:
        return question(self.brokers.values())

    # --- time -------------------------------------------------------------------------------------

    async def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> None:
        """Advance the clock; returns when everything due by then is done."""
        self._require_own_loop()
        total_s = total_seconds(days, hours, minutes, seconds)
        with self._limit.lifted(total_s):
            await asyncio.sleep(total_s)
        await quiet()

    async def until(
        self,
        fact: Callable[[], object],
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Wait until a condition holds, for a minute by default; see `messages`, `lag`, ...

        Raises AssertionError on timeout, with a description of the cluster.
        """
        self._require_own_loop()
        timeout_s = total_seconds(days, hours, minutes, seconds) or TIMEOUT_S
        with self._limit.lifted(timeout_s):
            await until(fact, timeout_s, self._state)

    async def until_consumed(
        self,
        group: str,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Wait until a group has no message left: each is consumed or dead-lettered.

        Waits six hours by default, which is longer than all retries of a message take. Not for
        broadcasting groups, whose offsets brokers do not know.
        """
        self._require_own_loop()
        timeout_s = total_seconds(days, hours, minutes, seconds) or CONSUMED_TIMEOUT_S
        is_consumed = cluster_state.Consumed(self.brokers.values(), group)
        # Consumers commit every few seconds, so checking more often would only cost time.
        what = f"group {group} has consumed everything"
        with self._limit.lifted(timeout_s):
            await until(is_consumed, timeout_s, self._state, what=what, pause_s=5)

    def _state(self) -> list[str]:
        down = [f"broker {name} is down" for name in self._places if name not in self.brokers]
        return [*down, *cluster_state.summary(self.brokers.values())]

    # --- brokers ----------------------------------------------------------------------------------

    def broker(self, name: str | None = None) -> Broker:
        """Return a running broker; the first one by default."""
        name = self._broker_name(name)
        if name not in self.brokers:
            raise NotRunning(f"broker {name} is down: start it with start_broker({name!r})")
        return self.brokers[name]

    def disk(self, broker: str | None = None) -> Disk:
        """Return the disk of a broker, with its switches."""
        return self._places[self._broker_name(broker)].disk

    async def start_broker(self, name: str | None = None) -> Broker:
        """Start a broker that was stopped or crashed, or an additional one."""
        self._require_own_loop()
        name = name or self._broker_name(None)
        if name in self.brokers:
            raise InvalidArgument(f"broker {name} is already running")
        known = self._places.get(name)
        number = known.number if known is not None else len(self._places) + 1
        host = self.network.host(f"10.0.0.{number}")
        disk = known.disk if known is not None else Disk(self._loop)
        place = self._places[name] = _Place(number, host, disk)
        broker = await self._started(
            name, self._config_of(name, place), self._broker_machine(place)
        )
        self.brokers[name] = broker
        return broker

    async def _started(self, name: str, config: BrokerConfig, machine: Machine) -> Broker:
        broker = Broker(config, self._places[name].host, machine)
        await broker.start()
        return broker

    async def _close(self, name: str, broker: Broker) -> None:  # noqa: ARG002 - by name in subclasses
        await broker.close()

    async def stop_broker(self, name: str | None = None) -> None:
        """Stop a broker gracefully: it unregisters and saves its state."""
        self._require_own_loop()
        name = self._broker_name(name)
        broker, disk = self.broker(name), self.disk(name)
        del self.brokers[name]
        # Closing waits for the disk on the loop's own thread: time could not pass meanwhile.
        disk.heal()
        await self._close(name, broker)
        left = disk.close_all()
        assert not left, f"broker {name} has stopped and left files open: {left}"

    async def crash(self, name: str | None = None, *, lose_unflushed: bool = False) -> None:
        """Crash a broker: clients are not notified, and nothing more is written.

        What the operating system had received is there after `start_broker`. With
        ``lose_unflushed`` the machine's power fails: unsynced data is lost too.
        """
        self._require_own_loop()
        name = self._broker_name(name)
        broker, place = self.broker(name), self._places[name]
        del self.brokers[name]
        place.disk.die()
        self.network.kill(place.host)
        # Only frees memory, threads and files: disk and network accept nothing any more.
        await self._close(name, broker)
        if lose_unflushed:
            place.disk.lose_unsynced()
        place.disk.close_all()

    def _nameserver_disk(self, number: int) -> Disk:  # noqa: ARG002 - by number in subclasses
        return Disk(self._loop)

    def _broker_machine(self, place: _Place) -> Machine:
        return self._machine(place.disk, place.number)

    def _machine(self, disk: Disk, seed: int) -> Machine:
        random = Random(seed)  # noqa: S311 - the same in every run
        return Machine(disk, disk.background, self._waking_clock, random)

    def _broker_name(self, name: str | None) -> str:
        known = (*self._places, *self._names)
        if name is None and known:
            return known[0]
        if name is None or name not in known:
            raise InvalidArgument(f"broker {name!r}: there are {', '.join(known) or 'none'}")
        return name

    def _config_of(self, name: str, place: _Place) -> BrokerConfig:
        identity = replace(
            self.config.identity,
            broker_name=name,
            bind_host=place.host.name,
            advertised_host="",
            port=BROKER_PORT,
        )
        addresses = tuple(server.address for server in self.nameservers)
        return replace(
            self.config,
            directory=self.directory / f"broker-{place.number}",
            identity=identity,
            registration=replace(self.config.registration, name_servers=addresses),
        )

    def _marks(self) -> object:
        is_whole = all(
            name in self.brokers and not place.disk.is_disturbed
            for name, place in self._places.items()
        )
        if not is_whole:
            return None
        return cluster_state.activity_marks(list(self.brokers.values()), self.clients, self.network)

    # --- network ----------------------------------------------------------------------------------

    def cut(self, *names: str) -> int:
        """Reset the connections of brokers and clients, or all; return how many there were.

        A broker goes by its name, a client by the name of one of its groups, or by its host.
        """
        return sum(self.network.cut(host) for host in self._hosts(names))

    def isolate(self, *names: str) -> None:
        """Block traffic between these brokers and clients and all others, until `heal`."""
        for host in self._hosts(names):
            self.network.isolate(host)

    def refuse(self, *names: str) -> None:
        """Make brokers, or all of them, refuse new connections, until `heal`."""
        for host in self._hosts(names or tuple(self._places)):
            self.network.refuse(host)

    def heal(self) -> None:
        """End all faults of the network and the disks; what was lost stays lost."""
        self.network.heal()
        self.network.stop_losing()
        for host in self._hosts(()):
            self.network.accept(host)
            self.network.resume_reading(host)
        for place in self._places.values():
            place.disk.heal()

    def _hosts(self, names: Sequence[str]) -> list[str]:
        """Return the hosts with these names, or all."""
        servers = {name: [place.host.name] for name, place in self._places.items()}
        groups = _hosts_by_group(self.clients)
        clients = [session.config.host for session in self.clients]
        nameservers = [server.address.rpartition(":")[0] for server in self.nameservers]
        by_name = {**groups, **servers, **{host: [host] for host in (*clients, *nameservers)}}
        unknown = [name for name in names if name not in by_name]
        if unknown:
            known = ", ".join((*servers, *groups))
            raise InvalidArgument(f"{unknown[0]!r}: no broker, group or host; there are {known}")
        return list(dict.fromkeys(host for each in names or by_name for host in by_name[each]))


def _hosts_by_group(clients: Sequence[Session]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for session in clients:
        for group in (*session.members.producers, *session.members.consumers):
            found.setdefault(group, []).append(session.config.host)
    return found


@contextmanager
def running_cluster(
    directory: Path,
    brokers: Sequence[str] = (BROKER,),
    *,
    nameservers: int = 1,
    settings: Mapping[str, str] | None = None,
    seed: int = 0,
    skips_idle_time: bool = True,
) -> Iterator[Cluster]:
    """Run a cluster for plain functions, which use `Cluster.run`.

    ``settings`` are the brokers', by their keys in configuration files; ``seed`` decides everything
    left to chance.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        cluster = Cluster(
            directory,
            brokers,
            nameservers=nameservers,
            config=broker_config(settings),
            skips_idle_time=skips_idle_time,
            runner=runner,
        )
        cluster.run(cluster.start())
        try:
            yield cluster
        finally:
            cluster.run(cluster.close())
