"""Which member of a group owns which queue: each member computes it, and all must agree.

A strategy is any function of the sorted queues of a topic, the sorted client ids of the members and
the member's own id. All members of a group must use the same one.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue

Strategy = Callable[[Sequence[MessageQueue], Sequence[str], str], Sequence[MessageQueue]]
"""Returns the queues of one member: ``strategy(queues, members, me)``."""

T = TypeVar("T")

VIRTUAL_NODES = 10
_ROOM_MARK = "@"


def allocated(
    strategy: Strategy, queues: Iterable[MessageQueue], members: Iterable[str], me: str
) -> list[MessageQueue]:
    """Return this client's share; empty while it is not among the members.

    Members are sorted as every client does; an id with two connections occurs twice.
    """
    return list(strategy(_in_order(tuple(queues)), sorted(members, key=_text_order), me))


@lru_cache(maxsize=256)
def _in_order(queues: tuple[MessageQueue, ...]) -> tuple[MessageQueue, ...]:
    """Sort queues as every client does: by topic, broker and id, strings by UTF-16 code units.

    Cached, since routes rarely change between rounds.
    """
    return tuple(
        sorted(queues, key=lambda q: (_text_order(q.topic), _text_order(q.broker), q.queue_id))
    )


def average(queues: Sequence[MessageQueue], members: Sequence[str], me: str) -> list[MessageQueue]:
    """Give each member adjacent queues; the first members get one more if they do not divide.

    ::

        PushConsumer("billing", handle, subscriptions=topics, strategy=average)
    """
    if not _takes_part(queues, members, me):
        return []
    place, rest = members.index(me), len(queues) % len(members)
    has_more = place < rest
    size = len(queues) // len(members) + has_more
    start = place * size + (0 if has_more else rest)
    return list(queues[start : start + size])


def average_by_circle(
    queues: Sequence[MessageQueue], members: Sequence[str], me: str
) -> list[MessageQueue]:
    """Assign the queues round-robin.

    ::

        PushConsumer("billing", handle, subscriptions=topics, strategy=average_by_circle)
    """
    if not _takes_part(queues, members, me):
        return []
    return list(queues[members.index(me) :: len(members)])


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """Assigns each queue to the next member on a hash ring; membership changes move few queues.

    ::

        PushConsumer("billing", handle, subscriptions=topics, strategy=ConsistentHash())
    """

    virtual_nodes: int = VIRTUAL_NODES

    def __post_init__(self) -> None:
        if self.virtual_nodes < 0:
            raise InvalidArgument(f"virtual_nodes must be 0 or more, got {self.virtual_nodes}")

    def __call__(
        self, queues: Sequence[MessageQueue], members: Sequence[str], me: str
    ) -> list[MessageQueue]:
        if not _takes_part(queues, members, me):
            return []
        ring = {
            ring_hash(f"{member}-{node}"): member
            for member in members
            for node in range(self.virtual_nodes)
        }
        places = sorted(ring)
        if not places:
            return []
        return [queue for queue in queues if ring[_next(places, _place_of(queue))] == me]


@dataclass(frozen=True, slots=True)
class FixedQueues:
    """Assigns the configured queues, whatever the group's members.

    ::

        FixedQueues((MessageQueue("orders", "broker-a", 0), MessageQueue("orders", "broker-a", 1)))
    """

    queues: tuple[MessageQueue, ...]

    def __call__(
        self,
        queues: Sequence[MessageQueue],  # noqa: ARG002 - the signature of all strategies
        members: Sequence[str],  # noqa: ARG002
        me: str,  # noqa: ARG002
    ) -> list[MessageQueue]:
        return list(self.queues)


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """Assigns only queues of brokers in given rooms; such brokers are named ``room@name``.

    ::

        MachineRoom(frozenset({"berlin", "paris"}))
    """

    rooms: frozenset[str]

    def __call__(
        self, queues: Sequence[MessageQueue], members: Sequence[str], me: str
    ) -> list[MessageQueue]:
        if not _takes_part(queues, members, me):
            return []
        inside = [queue for queue in queues if self._has(queue)]
        place, (share, rest) = members.index(me), divmod(len(inside), len(members))
        mine = inside[place * share : (place + 1) * share]
        if place < rest:
            mine.append(inside[len(members) * share + place])
        return mine

    def _has(self, queue: MessageQueue) -> bool:
        room, *names = queue.broker.split(_ROOM_MARK)
        return len(names) == 1 and room in self.rooms


@dataclass(frozen=True, slots=True)
class NearbyRoom:
    """Assigns queues to members of their room; all members share those of rooms without members.

    ::

        NearbyRoom(average, lambda queue: queue.broker[:2], lambda member: member[:2])
    """

    inner: Strategy
    room_of_queue: Callable[[MessageQueue], str]
    room_of_member: Callable[[str], str]

    def __call__(
        self, queues: Sequence[MessageQueue], members: Sequence[str], me: str
    ) -> list[MessageQueue]:
        if not _takes_part(queues, members, me):
            return []
        queues_by_room = _by_room(queues, self.room_of_queue, "queue")
        members_by_room = _by_room(members, self.room_of_member, "member")
        room = self.room_of_member(me)
        mine: list[MessageQueue] = []
        if room in queues_by_room:
            mine += self.inner(queues_by_room[room], members_by_room[room], me)
        for other in sorted(queues_by_room.keys() - members_by_room.keys(), key=_text_order):
            mine += self.inner(queues_by_room[other], members, me)
        return mine


def ring_hash(text: str) -> int:
    """Return a position on the ring: the first four bytes of the text's MD5."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


def _takes_part(queues: Collection[MessageQueue], members: Collection[str], me: str) -> bool:
    if not me:
        raise InvalidArgument("me must be the id of this member, got an empty string")
    if not queues:
        raise InvalidArgument("queues must have at least one queue")
    if not members:
        raise InvalidArgument("members must have at least one member")
    return me in members


def _by_room(things: Iterable[T], room_of: Callable[[T], str], kind: str) -> dict[str, list[T]]:
    rooms: dict[str, list[T]] = {}
    for thing in things:
        room = room_of(thing)
        if not room:
            raise InvalidArgument(f"every {kind} must have a machine room, {thing} has none")
        rooms.setdefault(room, []).append(thing)
    return rooms


def _text_order(text: str) -> bytes:
    return text.encode("utf-16-be", "surrogatepass")


def _place_of(queue: MessageQueue) -> int:
    return ring_hash(
        f"MessageQueue [topic={queue.topic}, brokerName={queue.broker}, queueId={queue.queue_id}]"
    )


def _next(places: Sequence[int], place: int) -> int:
    at = bisect_left(places, place)
    return places[at] if at < len(places) else places[0]
