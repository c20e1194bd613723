"""Consumer groups: settings, lag and members."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from msgspec import structs

from turbopump.admin.members import (
    Connection,
    Inside,
    Member,
    Members,
    by_client,
    connection_of,
    differences,
    inside,
)
from turbopump.admin.progress import PositionReader, Progress
from turbopump.admin.servers import BrokerNode, Servers, gathered, none_on, not_found
from turbopump.admin.topics import Topics
from turbopump.client.names import check_group
from turbopump.errors import (
    AdministrationError,
    AlreadyThere,
    InvalidArgument,
    NotThere,
    StillInUse,
    TurbopumpError,
)
from turbopump.message import MessageQueue
from turbopump.wire import headers
from turbopump.wire.bodies import (
    ClientConnection,
    ConsumerConnections,
    ConsumerOffsets,
    GroupConfig,
    GroupConfigTable,
    ProducerConnections,
    RunningInfo,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.names import dead_letter_topic, retry_topic

_INT_MAX = 2**31 - 1
_RETRY_QUEUES_MAX = 1024
_FIELDS = {
    "group": "group_name",
    "retries_max": "retry_max_times",
    "retry_queues": "retry_queue_nums",
    "can_consume": "consume_enable",
    "can_broadcast": "consume_broadcast_enable",
    "broker_id": "broker_id",
    "slow_broker_id": "which_broker_when_consume_slowly",
}
"""The names of a group's settings here and in the protocol."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What brokers know of a group."""

    group: str
    retries_max: int = 16
    """How often a message is tried again before it becomes a dead letter."""

    retry_queues: int = 1
    """Queues of the retry topic on each broker; 0 drops what fails."""

    can_consume: bool = True
    can_broadcast: bool = True
    broker_id: int = 0
    """Replica to read from, where `slaveReadEnable` is set: 0 is the master."""

    slow_broker_id: int = 1
    """Replica to read from while messages are far behind, where `slaveReadEnable` is set."""


@dataclass(frozen=True, slots=True)
class GroupChange:
    """The settings of a group on one broker, before and after."""

    broker: str
    before: GroupSettings
    after: GroupSettings


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group, where it is known, how many members it has, and whether they want the same."""

    settings: GroupSettings
    brokers: tuple[str, ...]
    members: int
    is_consistent: bool = True


class Groups:
    """What can be done with consumer groups.

    ::

        progress = await admin.groups.progress("billing")
        print(progress.lag, [each.queue for each in progress.queues if each.lag])
    """

    def __init__(self, servers: Servers, topics: Topics) -> None:
        self._servers = servers
        self._topics = topics

    # --- settings ---------------------------------------------------------------------------------

    async def list(self, cluster: str | None = None) -> tuple[GroupInfo, ...]:
        """Return all groups; where brokers differ about one, the first by name is right."""
        nodes = await self._servers.readable(cluster)
        tables = await gathered(self._table(node) for node in nodes)
        having: dict[str, list[BrokerNode]] = {}
        configs: dict[str, GroupConfig] = {}
        for node, table in zip(nodes, tables, strict=True):
            for name, config in table.items():
                having.setdefault(name, []).append(node)
                configs.setdefault(name, config)
        names = sorted(having)
        online = await gathered(self._online(name, having[name]) for name in names)
        return tuple(
            GroupInfo(
                _settings(configs[name]),
                tuple(node.broker for node in having[name]),
                len(by_client(each for body in found for each in body.connection_set)),
                is_consistent=not differences(found),
            )
            for name, found in zip(names, online, strict=True)
        )

    async def settings(self, group: str) -> dict[str, GroupSettings]:
        """Return a group's settings by broker, without the brokers that do not have it."""
        nodes = await self._servers.readable()
        tables = await gathered(self._table(node) for node in nodes)
        found = zip(nodes, tables, strict=True)
        return {node.broker: _settings(table[group]) for node, table in found if group in table}

    async def create(self, settings: GroupSettings, cluster: str | None = None) -> tuple[str, ...]:
        """Create a group on all brokers; raises AlreadyThere. Return the brokers' names."""
        check_group(settings.group)
        _check_numbers(settings)
        masters = await self._servers.masters(cluster)
        for node in masters:
            if settings.group in await self._table(node):
                raise AlreadyThere(f"group {settings.group!r} already exists on {node.broker}")
        base = GroupConfig(group_name=settings.group)
        await gathered(self._put(node, base, settings) for node in masters)
        return tuple(node.broker for node in masters)

    async def update(
        self,
        group: str,
        *,
        retries_max: int | None = None,
        retry_queues: int | None = None,
        can_consume: bool | None = None,
        can_broadcast: bool | None = None,
        broker_id: int | None = None,
        slow_broker_id: int | None = None,
        cluster: str | None = None,
    ) -> tuple[GroupChange, ...]:
        """Change a group on the brokers that have it, on each only in what is given."""
        named = {
            "retries_max": retries_max,
            "retry_queues": retry_queues,
            "can_consume": can_consume,
            "can_broadcast": can_broadcast,
            "broker_id": broker_id,
            "slow_broker_id": slow_broker_id,
        }
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        if not given:
            raise InvalidArgument(f"nothing to change; specify {', '.join(named)}")
        masters = await self._servers.masters(cluster)
        tables = await gathered(self._table(node) for node in masters)
        known = [(n, t[group]) for n, t in zip(masters, tables, strict=True) if group in t]
        if not known:
            raise not_found("group", group, {name for table in tables for name in table})
        changes = []
        for node, config in known:
            before = _settings(config)
            changes.append(GroupChange(node.broker, before, replace(before, **given)))
        for change in changes:
            _check_numbers(change.after)
        await gathered(
            self._put(node, config, change.after)
            for (node, config), change in zip(known, changes, strict=True)
        )
        return tuple(changes)

    async def delete(
        self,
        group: str,
        *,
        cluster: str | None = None,
        with_dead_letters: bool = False,
        force: bool = False,
    ) -> tuple[str, ...]:
        """Delete a group, its progress and its retry topic; return the topics deleted.

        Raises StillInUse when it has members, unless ``force`` is set: they would bring it back.
        Its dead letters stay unless asked for: nothing else holds them.
        """
        await self.require(group)
        if not force:
            await self.require_stopped(group)
        header = headers.DeleteGroup(group_name=group, remove_offset=True)
        await gathered(
            self._servers.ask(node, RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
            for node in await self._servers.masters(cluster)
        )
        topics = [retry_topic(group)] + [dead_letter_topic(group)] * with_dead_letters
        names = await self._topics.names()
        gone = [topic for topic in topics if topic in names]
        for topic in gone:
            await self._topics.delete(topic, cluster)
        return tuple(gone)

    async def require(self, group: str) -> None:
        """Raise NotThere, with similar names, unless some broker knows the group.

        One that has never had a member may have offsets without settings.
        """
        nodes = await self._servers.readable()
        tables = await gathered(self._table(node) for node in nodes)
        if any(group in table for table in tables):
            return
        offsets = await gathered(self.offsets_on(node) for node in nodes)
        if not any(name.endswith(f"@{group}") for table in offsets for name in table):
            raise not_found("group", group, {name for table in tables for name in table})

    async def offsets_on(self, node: BrokerNode) -> dict[str, dict[int, int]]:
        """Return the offsets of all groups on a broker, by ``topic@group`` and queue."""
        asking = self._servers.read(ConsumerOffsets, node, RequestCode.GET_ALL_CONSUMER_OFFSET)
        # The one code for everything; 0.1 brokers use it until a group has consumed.
        found = await none_on(ResponseCode.SYSTEM_ERROR, asking)
        return {} if found is None else found.offset_table

    async def require_stopped(self, group: str) -> None:
        """Raise StillInUse when a group has members."""
        members = await self._connections(group, await self._servers.readable())
        if members:
            ids = ", ".join(sorted(members))
            raise StillInUse(f"group {group!r} has {len(members)} members: {ids}")

    # --- progress ---------------------------------------------------------------------------------

    async def progress(
        self, group: str, topic: str | None = None, *, with_owners: bool = False
    ) -> Progress:
        """Return how far a group is behind, in one topic or all; raises NotThere.

        Messages of queues without a committed offset count from where members would start.
        ``with_owners`` asks every member which queues it has, which takes longer.
        """
        await self.require(group)
        nodes = await self._servers.readable()
        online = await self._online(group, nodes)
        reader = PositionReader(self._servers, group, online)
        found = await gathered(reader.read(node, topic) for node in nodes)
        owners = await self._owners(group) if with_owners else {}
        queues = (
            replace(each, client_id=owners.get(each.queue)) for _, _, own in found for each in own
        )
        return Progress(
            group,
            tuple(sorted(queues, key=lambda each: each.queue)),
            sum(consumed for consumed, _, _ in found),
            sum(failed for _, failed, _ in found),
            is_running=bool(online),
        )

    async def _owners(self, group: str) -> dict[MessageQueue, str]:
        try:
            found = await self.members(group)
        except NotThere:
            return {}
        return {
            queue: member.connection.client_id
            for member in found.members
            for queue in member.queues or ()
        }

    # --- members ----------------------------------------------------------------------------------

    async def members(self, group: str) -> Members:
        """Return the members of a group and the queues of each; raises NotThere for no group."""
        await self.require(group)
        nodes = await self._servers.readable()
        found = await self._online(group, nodes)
        connections = by_client(each for body in found for each in body.connection_set)
        queues = await gathered(self._owned(nodes, group, client) for client in connections)
        first = found[0] if found else ConsumerConnections()
        subscriptions = {
            topic: each.sub_string
            for body in found
            for topic, each in body.subscription_table.items()
        }
        return Members(
            group,
            tuple(map(Member, map(connection_of, connections.values()), queues)),
            first.consume_type,
            first.message_model,
            first.consume_from_where,
            dict(sorted(subscriptions.items())),
            differences(found),
        )

    async def inspect(
        self, group: str, client_id: str | None = None, *, with_stacks: bool = False
    ) -> Inside:
        """Return a member's running info; ``client_id`` is needed if there are several."""
        await self.require(group)
        nodes = await self._servers.readable()
        members = sorted(await self._connections(group, nodes))
        if client_id is None and len(members) > 1:
            raise InvalidArgument(
                f"group {group!r} has several members; specify one of {', '.join(members)}"
            )
        if not members:
            raise AdministrationError(f"group {group!r} has no members")
        chosen = client_id or members[0]
        if chosen not in members:
            raise not_found(f"member of group {group!r}", chosen, members)
        info = await self._running_info(nodes, group, chosen, with_stacks=with_stacks)
        if info is None:
            raise AdministrationError(f"member {chosen} of group {group!r} does not answer")
        return inside(chosen, info)

    async def producers(self, group: str) -> tuple[Connection, ...]:
        """Return the members of a producer group; none if no broker knows it."""
        header = headers.ProducerGroup(producer_group=group)
        found: list[ClientConnection] = []
        for node in await self._servers.readable():
            code = RequestCode.GET_PRODUCER_CONNECTION_LIST
            asking = self._servers.read(ProducerConnections, node, code, header)
            # The one code for everything; brokers use it for a group without members.
            if (answer := await none_on(ResponseCode.SYSTEM_ERROR, asking)) is not None:
                found += answer.connection_set
        return tuple(map(connection_of, by_client(found).values()))

    async def consumers_on(self, node: BrokerNode, group: str) -> ConsumerConnections | None:
        """Return the members that are connected to a broker; None if there are none."""
        header = headers.ConsumerGroup(consumer_group=group)
        code = RequestCode.GET_CONSUMER_CONNECTION_LIST
        asking = self._servers.read(ConsumerConnections, node, code, header)
        return await none_on(ResponseCode.CONSUMER_NOT_ONLINE, asking)

    async def _online(
        self, group: str, nodes: Sequence[BrokerNode]
    ) -> Sequence[ConsumerConnections]:
        bodies = await gathered(self.consumers_on(node, group) for node in nodes)
        return [body for body in bodies if body is not None]

    async def _connections(
        self, group: str, nodes: Sequence[BrokerNode]
    ) -> dict[str, ClientConnection]:
        found = await self._online(group, nodes)
        return by_client(each for body in found for each in body.connection_set)

    async def _owned(
        self, nodes: Sequence[BrokerNode], group: str, client_id: str
    ) -> tuple[MessageQueue, ...] | None:
        info = await self._running_info(nodes, group, client_id, with_stacks=False)
        return None if info is None else tuple(sorted(info.mq_table))

    async def _running_info(
        self, nodes: Sequence[BrokerNode], group: str, client_id: str, *, with_stacks: bool
    ) -> RunningInfo | None:
        """Return a client's running info, through any broker that knows it."""
        header = headers.RunningInfoOf(
            consumer_group=group, client_id=client_id, jstack_enable=with_stacks
        )
        code = RequestCode.GET_CONSUMER_RUNNING_INFO
        for node in nodes:
            with suppress(TurbopumpError):
                return await self._servers.read(RunningInfo, node, code, header)
        return None

    async def _table(self, node: BrokerNode) -> dict[str, GroupConfig]:
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        return (await self._servers.read(GroupConfigTable, node, code)).subscription_group_table

    async def _put(self, node: BrokerNode, base: GroupConfig, settings: GroupSettings) -> None:
        config = structs.replace(base, **{_FIELDS[n]: v for n, v in asdict(settings).items()})
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        await self._servers.ask(node, code, body=config.encode())


def _check_numbers(settings: GroupSettings) -> None:
    """Refuse what brokers would refuse, some of them after others have agreed."""
    for name, number, least, most in (
        ("retries_max", settings.retries_max, -1, _INT_MAX),
        ("retry_queues", settings.retry_queues, 0, _RETRY_QUEUES_MAX),
        ("broker_id", settings.broker_id, 0, _INT_MAX),
        ("slow_broker_id", settings.slow_broker_id, 0, _INT_MAX),
    ):
        if not least <= number <= most:
            raise InvalidArgument(f"{name} must be {least} to {most}, got {number}")


def _settings(config: GroupConfig) -> GroupSettings:
    return GroupSettings(**{name: getattr(config, field) for name, field in _FIELDS.items()})
