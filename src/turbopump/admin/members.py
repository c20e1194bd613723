"""The members of a group, as brokers and the clients report them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire.bodies import ClientConnection, ConsumerConnections, RunningInfo
from turbopump.wire.codes import release

_FIRST_4 = release(4, 0, 0)
_FIRST_5 = release(5, 0, 0)


@dataclass(frozen=True, slots=True)
class Connection:
    """A client as its broker sees it."""

    client_id: str
    address: str
    language: str
    version: str


@dataclass(frozen=True, slots=True)
class Member:
    """A consumer of a group, and the queues that it owns; None if it did not report them."""

    connection: Connection
    queues: tuple[MessageQueue, ...] | None


@dataclass(frozen=True, slots=True)
class Difference:
    """A subscription that only some members have; None: they do not subscribe to the topic."""

    topic: str
    kind: str | None
    expression: str | None
    client_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a group and their subscriptions, as expressions by topic.

    Where members differ in a topic, ``differences`` has an entry for each thing that some want.
    """

    group: str
    members: tuple[Member, ...]
    consume_type: str | None
    message_model: str | None
    consume_from: str | None
    subscriptions: Mapping[str, str]
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldQueue:
    """What a member holds of one queue."""

    queue: MessageQueue
    committed: QueueOffset
    held: int
    held_mib: int
    is_locked: bool
    last_pulled_ms: int | None
    last_consumed_ms: int | None


@dataclass(frozen=True, slots=True)
class Inside:
    """What a member reports about itself; rates are by topic."""

    client_id: str
    queues: tuple[HeldQueue, ...]
    consumed_per_s: Mapping[str, float]
    failed_per_s: Mapping[str, float]
    settings: Mapping[str, str]
    stacks: str | None


def inside(client_id: str, info: RunningInfo) -> Inside:
    """Read a member's running info."""
    return Inside(
        client_id,
        tuple(
            HeldQueue(
                queue,
                QueueOffset(held.commit_offset),
                held.cached_msg_count,
                held.cached_msg_size_in_mib,
                held.locked,
                held.last_pull_timestamp or None,
                held.last_consume_timestamp or None,
            )
            for queue, held in sorted(info.mq_table.items())
        ),
        {topic: rates.consume_ok_tps for topic, rates in sorted(info.status_table.items())},
        {topic: rates.consume_failed_tps for topic, rates in sorted(info.status_table.items())},
        dict(info.properties),
        info.jstack,
    )


def version_name(number: int) -> str:
    """Return the release that a client announces by a number."""
    major, first = (5, _FIRST_5) if number + 1 >= _FIRST_5 else (4, _FIRST_4)
    if number < _FIRST_4:
        return str(number)
    minor, patch = divmod(number - first + 1, 20)
    # Each release has an entry for its snapshot just before it.
    return f"V{major}_{minor}_{patch // 2}" + ("" if (number - first) % 2 == 0 else "_SNAPSHOT")


def by_client(connections: Iterable[ClientConnection]) -> dict[str, ClientConnection]:
    """Return each client once: it is connected to every broker."""
    return {each.client_id: each for each in sorted(connections, key=lambda each: each.client_id)}


def differences(bodies: Iterable[ConsumerConnections]) -> tuple[Difference, ...]:
    """Return how the subscriptions of members differ, as seen by all brokers together."""
    found: dict[tuple[str, str | None, str | None], set[str]] = {}
    for body in bodies:
        for each in body.inconsistent_subscriptions or ():
            key = each.topic, each.expression_type, each.sub_string
            found.setdefault(key, set()).update(each.client_ids)
    return tuple(Difference(*key, tuple(sorted(ids))) for key, ids in found.items())


def connection_of(seen: ClientConnection) -> Connection:
    return Connection(
        seen.client_id, seen.client_addr, seen.language or "unknown", version_name(seen.version)
    )
