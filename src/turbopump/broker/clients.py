"""Connected clients: members of consumer groups and of producer groups, by connection.

A heartbeat adds a connection to groups; leaving, closing or silence removes it. This module neither
waits nor sends: it reports changes to a listener.

After a restart the members of consumer groups are remembered: until they reconnect, an `AbsentPeer`
holds their place, so that the member list is complete from the first request on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from turbopump.wire.bodies import ConsumeFrom, ConsumerData, ConsumeType, MessageModel, Subscription


class Peer(Protocol):
    """A client's connection, of any protocol; also its identity here."""

    peer_address: str

    @property
    def is_open(self) -> bool: ...

    def close(self, reason: str = ...) -> None: ...


class AbsentPeer:
    """A member that has not reconnected since the broker started."""

    is_open = False

    def __init__(self) -> None:
        self.peer_address = "not reconnected"

    def close(self, reason: str = "") -> None:
        """Do nothing: there is no connection."""


class Member(Struct, frozen=True, eq=False):
    """One client in one group, as its last heartbeat described it."""

    connection: Peer
    client_id: str
    language: int | None
    version: int
    heartbeat_ms: int
    """When the heartbeat arrived, by the monotonic clock; of an absent member, since when it is
    awaited."""
    heartbeat_epoch_ms: int
    """The same as wall-clock time, for display."""

    @property
    def address(self) -> str:
        return self.connection.peer_address

    @property
    def is_absent(self) -> bool:
        """Whether it is remembered from before a restart and has not reconnected yet."""
        return isinstance(self.connection, AbsentPeer)


class ConsumerGroup(Struct, frozen=True, eq=False):
    """A group that has members, as the last heartbeat left it."""

    consume_type: ConsumeType | None
    message_model: MessageModel | None
    consume_from: ConsumeFrom | None
    subscriptions: Mapping[str, Subscription]
    members: dict[Peer, Member]
    """By connection, oldest first; only `Consumers` changes it, in place, since groups are
    large."""


OnGroupChange = Callable[[str, ConsumerGroup | None], None]
"""Called with a group whose members or topics changed; None when its last member left."""


class _Joined(ABC):
    """Which groups each connection is in, and how it leaves them."""

    def __init__(self) -> None:
        self._joined: dict[Peer, set[str]] = {}

    def joined(self, connection: Peer) -> AbstractSet[str]:
        """Return the groups that a connection is in."""
        return self._joined.get(connection, frozenset())

    def unregister(self, connection: Peer, group: str) -> None:
        """Remove a connection from a group."""
        joined = self._joined.get(connection, set())
        if group in joined:
            joined.discard(group)
            if not joined:
                del self._joined[connection]
            self._leave(connection, group)

    def connection_closed(self, connection: Peer) -> None:
        """Remove a connection from all its groups."""
        for group in sorted(self._joined.pop(connection, ())):
            self._leave(connection, group)

    def expired(self, now_ms: int, expiry_ms: int) -> list[Peer]:
        """Return the connections with a group that has not heard from them for too long.

        They stay members until they are closed: closing notifies the others.
        """
        late = (m.connection for m in self._members() if now_ms - m.heartbeat_ms > expiry_ms)
        return list(dict.fromkeys(late))

    def oldest_ms(self, now_ms: int) -> int:
        """Return the time of the oldest last heartbeat; now if there are no members."""
        return min((member.heartbeat_ms for member in self._members()), default=now_ms)

    @abstractmethod
    def _leave(self, connection: Peer, name: str) -> None: ...

    @abstractmethod
    def _members(self) -> Iterator[Member]:
        """Return the members that can time out."""


class Consumers(_Joined):
    """Consumer groups with members, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: list[OnGroupChange] = []
        self._expression_listeners: list[Callable[[str, str], None]] = []
        self._groups: dict[str, ConsumerGroup] = {}
        self._absent: dict[str, AbsentPeer] = {}
        """By client id."""
        self._pullers: dict[str, dict[Peer, None]] = {}
        """Connections that pull for a group with absent members without being members of it."""
        self.changes = 0
        """How often anything changed that is saved for a restart."""

    @property
    def groups(self) -> Mapping[str, ConsumerGroup]:
        """All groups that have members."""
        return MappingProxyType(self._groups)

    def listen(self, listener: OnGroupChange) -> None:
        """Call a function after each change of a group's members or topics."""
        self._listeners.append(listener)

    def listen_to_expressions(self, listener: Callable[[str, str], None]) -> None:
        """Call a function with each group and topic whose subscription has changed."""
        self._expression_listeners.append(listener)

    def find(self, group: str) -> ConsumerGroup | None:
        """Return a group that has members."""
        return self._groups.get(group)

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """Return a group's subscription to a topic; None if it has none or is offline."""
        found = self._groups.get(group)
        return None if found is None else found.subscriptions.get(topic)

    def members(self, group: str) -> tuple[Member, ...]:
        """Return the members of a group, oldest first."""
        found = self._groups.get(group)
        return () if found is None else tuple(found.members.values())

    def member(self, group: str, client_id: str) -> Member | None:
        """Return the member of a group with a client id; the latest if there are several."""
        found = [member for member in self.members(group) if member.client_id == client_id]
        return found[-1] if found else None

    def groups_of_topic(self, topic: str) -> set[str]:
        """Return the online groups that subscribe to a topic."""
        return {name for name, group in self._groups.items() if topic in group.subscriptions}

    def heartbeat(self, member: Member, data: ConsumerData) -> None:
        """Add a connection to a group, and make its subscriptions the group's.

        A remembered client takes its own place: the list of members stays the same.
        """
        name = data.group_name
        known = self._groups.get(name)
        members = {} if known is None else known.members
        is_new = member.connection not in members and not self._vacate(member.client_id, name)
        members[member.connection] = member
        self._joined.setdefault(member.connection, set()).add(name)
        self._pullers.get(name, {}).pop(member.connection, None)
        old = {} if known is None else known.subscriptions
        group = self._groups[name] = ConsumerGroup(
            data.consume_type,
            data.message_model,
            data.consume_from_where,
            merged(old, data.subscription_data_set),
            members,
        )
        if is_new or known is None or not _is_same(known, group):
            self.changes += 1
        # A changed subscription moves no queue, so members are not notified.
        if is_new or group.subscriptions.keys() != old.keys():
            self._notify(name, group)
        for topic, subscription in group.subscriptions.items():
            if topic in old and _differs(old[topic], subscription):
                for listener in self._expression_listeners:
                    listener(name, topic)

    # --- members that have not reconnected --------------------------------------------------------

    def remember(self, name: str, group: ConsumerGroup, members: Iterable[Member]) -> None:
        """Restore a group from before a restart; its members are absent until they reconnect."""
        self._groups[name] = group
        for member in members:
            absent = self._absent.setdefault(member.client_id, AbsentPeer())
            group.members[absent] = replace(member, connection=absent)
            self._joined.setdefault(absent, set()).add(name)

    @property
    def has_absent(self) -> bool:
        """Whether any member has not reconnected yet."""
        return bool(self._absent)

    def note_puller(self, name: str, connection: Peer) -> None:
        """Note that a connection pulls for a group: it may belong to an absent member.

        Which one is unknown until its heartbeat, but it can be notified of changes.
        """
        group = self._groups.get(name)
        if group is not None and connection not in group.members:
            self._pullers.setdefault(name, {})[connection] = None

    def pullers(self, group: str) -> tuple[Peer, ...]:
        """Return the connections that pull for a group and may belong to absent members."""
        return tuple(self._pullers.get(group, ()))

    def forget_pullers(self, group: str) -> None:
        """Forget the connections that pull for a group without being members."""
        self._pullers.pop(group, None)

    @property
    def absent(self) -> dict[tuple[str, str], int]:
        """Group and client id of remembered members, and since when each is awaited."""
        return {
            (name, client_id): self._groups[name].members[absent].heartbeat_ms
            for client_id, absent in self._absent.items()
            for name in sorted(self.joined(absent))
        }

    def unregister_absent(self, client_id: str, group: str) -> bool:
        """Remove a remembered client from a group; return whether it was one."""
        if not self._vacate(client_id, group):
            return False
        self._left(group)
        return True

    def forget_absent(self, since_ms: int) -> list[tuple[str, str]]:
        """Drop members that were absent at a time and since; return group and id of each."""
        gone = [each for each, awaited_ms in self.absent.items() if awaited_ms <= since_ms]
        for name, client_id in gone:
            self._vacate(client_id, name)
        names = dict.fromkeys(name for name, _ in gone)
        # The others are notified of nothing.
        for name in () if self._absent else self._pullers.keys() - names:
            del self._pullers[name]
        for name in names:
            self._left(name)
        return gone

    def connection_closed(self, connection: Peer) -> None:
        super().connection_closed(connection)
        for pullers in self._pullers.values():
            pullers.pop(connection, None)

    def _vacate(self, client_id: str, name: str) -> bool:
        """Remove the absent member of a client from a group, without notifying others."""
        absent = self._absent.get(client_id)
        if absent is None or name not in self.joined(absent):
            return False
        del self._groups[name].members[absent]
        self._joined[absent].discard(name)
        if not self._joined[absent]:
            del self._joined[absent], self._absent[client_id]
        return True

    def _members(self) -> Iterator[Member]:
        members = (member for group in self._groups.values() for member in group.members.values())
        # Absent ones have their own deadline.
        return (member for member in members if not member.is_absent)

    def _leave(self, connection: Peer, name: str) -> None:
        del self._groups[name].members[connection]
        self._left(name)

    def _left(self, name: str) -> None:
        self.changes += 1
        group = self._groups[name]
        if group.members:
            self._notify(name, group)
        else:
            del self._groups[name]
            self.forget_pullers(name)
            self._notify(name, None)

    def _notify(self, name: str, group: ConsumerGroup | None) -> None:
        for listener in self._listeners:
            listener(name, group)


class Producers(_Joined):
    """Producer groups with members, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[str, dict[Peer, Member]] = {}
        self._by_client_id: dict[str, dict[tuple[str, Peer], Member]] = {}

    @property
    def groups(self) -> Mapping[str, Mapping[Peer, Member]]:
        """All groups that have members."""
        return MappingProxyType(self._groups)

    def members(self, group: str) -> tuple[Member, ...]:
        """Return the members of a group, oldest first."""
        return tuple(self._groups.get(group, {}).values())

    def by_client_id(self, client_id: str) -> Member | None:
        """Return the latest producer with a client id, in any group."""
        seats = self._by_client_id.get(client_id, {}).values()
        return max(seats, key=lambda member: member.heartbeat_ms, default=None)

    def heartbeat(self, member: Member, group: str) -> None:
        """Add a connection to a group."""
        members = self._groups.setdefault(group, {})
        old = members.get(member.connection)
        if old is not None and old.client_id != member.client_id:
            self._forget_id(old, group)
        members[member.connection] = member
        self._joined.setdefault(member.connection, set()).add(group)
        seats = self._by_client_id.setdefault(member.client_id, {})
        seats[group, member.connection] = member

    def _members(self) -> Iterator[Member]:
        return (member for group in self._groups.values() for member in group.values())

    def _leave(self, connection: Peer, name: str) -> None:
        members = self._groups[name]
        self._forget_id(members.pop(connection), name)
        if not members:
            del self._groups[name]

    def _forget_id(self, gone: Member, group: str) -> None:
        seats = self._by_client_id[gone.client_id]
        del seats[group, gone.connection]
        if not seats:
            del self._by_client_id[gone.client_id]


def _is_same(old: ConsumerGroup, new: ConsumerGroup) -> bool:
    """Whether a heartbeat left a group unchanged, apart from its members."""
    return (
        old.consume_type is new.consume_type
        and old.message_model is new.message_model
        and old.consume_from is new.consume_from
        and old.subscriptions == new.subscriptions
    )


def _differs(old: Subscription, new: Subscription) -> bool:
    """Whether a new version of a subscription has a different filter."""
    return old is not new and (
        old.sub_string != new.sub_string or old.expression_type != new.expression_type
    )


def merged(
    old: Mapping[str, Subscription], fresh: Iterable[Subscription]
) -> dict[str, Subscription]:
    """Return a group's subscriptions after a heartbeat: its topics, each in its newest version."""
    found = {}
    for subscription in fresh:
        known = old.get(subscription.topic, subscription)
        is_newer = subscription.sub_version > known.sub_version
        found[subscription.topic] = subscription if is_newer else known
    return found
