"""Which brokers serve which topic: the route table, without IO and without a clock.

Times are arguments, in milliseconds on any clock that never goes back. A broker *name* stands for a
master (id 0) and its slaves; each of them is known by the *address* it registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as replaced

from turbopump.wire.bodies import (
    BrokerData,
    ClusterInfo,
    DataVersion,
    QueueData,
    TopicConfig,
    TopicList,
    TopicRoute,
)
from turbopump.wire.headers import RegisterBrokerAnswer

MASTER_ID = 0
SILENCE_MAX_MS = 120_000
"""A broker that is silent for longer is gone."""

PERM_READ = 4
PERM_WRITE = 2

UNIT_FLAG = 1
UNIT_SUBSCRIPTION_FLAG = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    name: str
    address: str
    cluster: str
    broker_id: int
    ha_address: str
    version: DataVersion
    topics: Mapping[str, TopicConfig] = field(default_factory=dict)
    """All of the broker's topics, or only those that changed: others are never removed."""

    filter_servers: tuple[str, ...] | None = None
    """None leaves them as they are."""

    epoch: int = 0
    """Of a master's claim; 0 if it was never promoted."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The broker is known now."""

    answer: RegisterBrokerAnswer
    """For a slave: where its master is, if that is known."""

    displaced: str | None = None
    """The address that had the broker's name and id before, now removed."""


@dataclass(frozen=True, slots=True)
class TableFull:
    """The table is full: nothing was registered."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Live:
    """A registered broker, by its address."""

    name: str
    broker_id: int
    ha_address: str
    version: DataVersion
    seen_ms: int
    filter_servers: tuple[str, ...]


@dataclass(slots=True)
class _Replicas:
    """The addresses of one broker name by id; there is always at least one."""

    cluster: str
    addresses: dict[int, str]


class RouteTable:
    """Brokers, their clusters and their topics, as far as they have registered.

    ``topics_max`` counts a topic once for every broker name that has it.
    """

    def __init__(self, brokers_max: int = 10_000, topics_max: int = 500_000) -> None:
        self._brokers_max = brokers_max
        self._topics_max = topics_max
        self._live: dict[str, _Live] = {}
        self._brokers: dict[str, _Replicas] = {}
        self._queues: dict[str, dict[str, QueueData]] = {}
        """By topic, then by broker name."""
        self._queues_count = 0
        self.changes = 0
        """Grows whenever an answer may change."""

    def __contains__(self, address: str) -> bool:
        return address in self._live

    # --- registrations ----------------------------------------------------------------------------

    def register(self, registration: Registration, now_ms: int) -> Registered | TableFull:
        """Register a broker and, if it is a master and they may have changed, its topics."""
        full = self._capacity_error(registration)
        if full is not None:
            return full
        before = self._live.get(registration.address)
        servers = registration.filter_servers
        if servers is None:
            servers = before.filter_servers if before else ()
        live = _Live(
            registration.name,
            registration.broker_id,
            registration.ha_address,
            registration.version,
            now_ms,
            servers,
        )
        if before is not None and self._is_same(registration, before, live):
            self._live[registration.address] = live
            return Registered(self._answer(registration))
        self.changes += 1
        holder = self._place(registration, before)
        is_changed = before is None or before.version != registration.version
        if registration.broker_id == MASTER_ID and (holder is None or is_changed):
            self._put_queues(registration)
        self._live[registration.address] = live
        displaced = None if holder == registration.address else holder
        return Registered(self._answer(registration), displaced)

    def _is_same(self, registration: Registration, before: _Live, live: _Live) -> bool:
        """Whether a registration changes nothing, and only shows that the broker is alive."""
        replicas = self._brokers[before.name]
        return replace(before, seen_ms=live.seen_ms) == live and (
            replicas.cluster == registration.cluster
        )

    def unregister(self, name: str, broker_id: int, address: str) -> bool:
        """Remove a broker that unregisters; return whether it was registered.

        Only under this name and id: a late request of a predecessor must not remove the broker that
        has replaced it.
        """
        live = self._live.get(address)
        if live is None or (live.name, live.broker_id) != (name, broker_id):
            return False
        return self.remove(address)

    def remove(self, address: str) -> bool:
        """Remove the broker at an address; return whether it was registered.

        A broker name without addresses is removed from its cluster and its topics, and a topic
        without brokers is removed.
        """
        live = self._live.pop(address, None)
        if live is None:
            return False
        self.changes += 1
        replicas = self._brokers[live.name]
        del replicas.addresses[live.broker_id]
        if not replicas.addresses:
            del self._brokers[live.name]
            self._drop_queues(self._queues.keys(), {live.name})
        return True

    def expire(self, now_ms: int) -> list[str]:
        """Remove the brokers that have been silent for too long; return their addresses."""
        silent = [
            address
            for address, live in self._live.items()
            if now_ms - live.seen_ms > SILENCE_MAX_MS
        ]
        for address in silent:
            self.remove(address)
        return silent

    def expiry_min_ms(self, now_ms: int) -> int:
        """Return a timestamp before which no broker can expire."""
        heard_ms = min((live.seen_ms for live in self._live.values()), default=now_ms)
        return heard_ms + SILENCE_MAX_MS

    def known_version(self, address: str, version: DataVersion, now_ms: int) -> DataVersion | None:
        """Return a broker's registered version, if any; a query with the same one renews it."""
        live = self._live.get(address)
        if live is not None and live.version == version:
            self._live[address] = replace(live, seen_ms=now_ms)
        return None if live is None else live.version

    def _place(self, registration: Registration, before: _Live | None) -> str | None:
        """Assign a broker's name and id to its address; return the address that had them before."""
        name, broker_id = registration.name, registration.broker_id
        if before is not None and before.name != name:
            self.remove(registration.address)
        elif before is not None and before.broker_id != broker_id:
            # Such as a promoted slave. Its name stays, even while it has no address.
            del self._brokers[name].addresses[before.broker_id]
        replicas = self._brokers.setdefault(name, _Replicas(registration.cluster, {}))
        replicas.cluster = registration.cluster
        holder = replicas.addresses.get(broker_id)
        if holder is not None and holder != registration.address:
            del self._live[holder]
        replicas.addresses[broker_id] = registration.address
        return holder

    def _capacity_error(self, registration: Registration) -> TableFull | None:
        is_new = registration.address not in self._live
        if is_new and len(self._live) >= self._brokers_max:
            return TableFull(
                f"{self._brokers_max} brokers are already registered, which is the limit"
            )
        if registration.broker_id != MASTER_ID:
            return None
        fresh = self._queues_count + sum(
            registration.name not in self._queues.get(topic.topic_name, {})
            for topic in registration.topics.values()
        )
        if fresh > self._topics_max:
            return TableFull(f"at most {self._topics_max} topics can be registered, got {fresh}")
        return None

    def _put_queues(self, registration: Registration) -> None:
        name = registration.name
        for topic in registration.topics.values():
            queues = self._queues.setdefault(topic.topic_name, {})
            self._queues_count += name not in queues
            queues[name] = QueueData(
                broker_name=name,
                perm=topic.perm,
                read_queue_nums=topic.read_queue_nums,
                write_queue_nums=topic.write_queue_nums,
                topic_sys_flag=topic.topic_sys_flag,
            )

    def _answer(self, registration: Registration) -> RegisterBrokerAnswer:
        address = self._brokers[registration.name].addresses.get(MASTER_ID)
        if registration.broker_id == MASTER_ID or address is None:
            return RegisterBrokerAnswer()
        ha_address = self._live[address].ha_address
        return RegisterBrokerAnswer(ha_server_addr=ha_address, master_addr=address)

    # --- changes by operators ---------------------------------------------------------------------

    def wipe_write_permission(self, name: str) -> int:
        """Remove write permission until the broker registers a change; return its topic count."""
        return self._change_permission(name, lambda perm: perm & ~PERM_WRITE)

    def add_write_permission(self, name: str) -> int:
        """Restore write and read permission of a broker; return its topic count."""
        return self._change_permission(name, lambda _: PERM_READ | PERM_WRITE)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove a topic, or only its queues in one cluster."""
        self.changes += 1
        names = self._brokers.keys() if cluster is None else self._names_in(cluster)
        self._drop_queues([topic], names)

    def _change_permission(self, name: str, change: Callable[[int], int]) -> int:
        self.changes += 1
        count = 0
        for queues in self._queues.values():
            queue = queues.get(name)
            if queue is not None:
                queues[name] = replaced(queue, perm=change(queue.perm))
                count += 1
        return count

    def _drop_queues(self, topics: Iterable[str], names: Set[str]) -> None:
        for topic in tuple(topics):
            queues = self._queues.get(topic, {})
            for name in names & queues.keys():
                del queues[name]
                self._queues_count -= 1
            if not queues:
                self._queues.pop(topic, None)

    # --- queries ----------------------------------------------------------------------------------

    def route(self, topic: str) -> TopicRoute | None:
        """Return a topic's route; None if no broker has it."""
        queues = self._queues.get(topic)
        if queues is None:
            return None
        brokers = [self._broker_data(name) for name in queues]
        addresses = [address for broker in brokers for address in broker.broker_addrs.values()]
        return TopicRoute(
            broker_datas=brokers,
            queue_datas=list(queues.values()),
            filter_server_table={
                address: list(self._live[address].filter_servers)
                for address in addresses
                if self._live[address].filter_servers
            },
        )

    def cluster_info(self) -> ClusterInfo:
        clusters: dict[str, list[str]] = {}
        for name, replicas in self._brokers.items():
            clusters.setdefault(replicas.cluster, []).append(name)
        return ClusterInfo(
            broker_addr_table={name: self._broker_data(name) for name in self._brokers},
            cluster_addr_table=clusters,
        )

    def topics(self) -> list[str]:
        return list(self._queues)

    def topics_in(self, cluster: str) -> list[str]:
        """Return the topics that a broker of a cluster has."""
        names = self._names_in(cluster)
        return [topic for topic, queues in self._queues.items() if names & queues.keys()]

    def topics_flagged(self, flags: int, mask: int) -> list[str]:
        """Return the topics whose system flag, masked, equals ``flags``."""
        return [
            topic
            for topic, queues in self._queues.items()
            if any(queue.topic_sys_flag & mask == flags for queue in queues.values())
        ]

    def system_topics(self) -> TopicList:
        """Return the names of clusters and brokers, which are topics too, and a broker to ask."""
        clusters = dict.fromkeys(replicas.cluster for replicas in self._brokers.values())
        return TopicList(
            broker_addr=next(iter(self._live), None),
            topic_list=[*clusters, *(name for name in self._brokers if name not in clusters)],
        )

    def _names_in(self, cluster: str) -> set[str]:
        return {name for name, replicas in self._brokers.items() if replicas.cluster == cluster}

    def _broker_data(self, name: str) -> BrokerData:
        replicas = self._brokers[name]
        return BrokerData(
            broker_addrs=dict(sorted(replicas.addresses.items())),
            broker_name=name,
            cluster=replicas.cluster,
        )
