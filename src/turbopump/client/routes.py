"""The queues of a topic, and the addresses of its brokers. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from turbopump.message import MessageQueue
from turbopump.wire.bodies import QUEUES_MAX, TopicRoute

_log = logging.getLogger(__name__)

MASTER_ID = 0
PERM_WRITE = 0b010
PERM_READ = 0b100

TOPIC_QUEUES_MAX = 4 * QUEUES_MAX
"""Maximum queues of a topic on all brokers; larger numbers in a route are ignored."""

_COUNT_DIGITS_MAX = 9
"""Digits of a number in text; longer numbers are too large even when truncated."""


@dataclass(frozen=True, slots=True)
class Route:
    """A topic's readable and writable queues, and their brokers.

    ``is_borrowed``: the topic does not exist yet, and these are its template's queues.
    """

    topic: str
    writable: tuple[MessageQueue, ...]
    readable: tuple[MessageQueue, ...]
    brokers: Mapping[str, Mapping[int, str]]
    is_borrowed: bool = False
    filter_servers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By broker address."""


def route_of(topic: str, found: TopicRoute) -> Route:
    """Build a route from a name server's answer; equal answers give equal routes."""
    brokers = {
        data.broker_name: dict(sorted(data.broker_addrs.items()))
        for data in sorted(found.broker_datas, key=lambda data: data.broker_name)
    }
    queue_datas = sorted(found.queue_datas, key=lambda data: data.broker_name)
    to_read = (
        (data.broker_name, data.read_queue_nums) for data in queue_datas if data.perm & PERM_READ
    )
    to_write = (
        (data.broker_name, data.write_queue_nums)
        for data in queue_datas
        if data.perm & PERM_WRITE and MASTER_ID in brokers.get(data.broker_name, {})
    )
    fixed = found.order_topic_conf
    return Route(
        topic=topic,
        writable=_queues(topic, _ordered(fixed) if fixed else to_write),
        readable=_queues(topic, to_read),
        brokers=brokers,
        filter_servers={
            address: tuple(servers) for address, servers in found.filter_server_table.items()
        },
    )


def borrowed_route(topic: str, template: TopicRoute, queues_wanted: int) -> Route:
    """Return the route that a topic will probably have after its first message."""
    queue_datas = []
    for data in template.queue_datas:
        count = min(queues_wanted, data.read_queue_nums)
        queue_datas.append(structs.replace(data, read_queue_nums=count, write_queue_nums=count))
    plain = TopicRoute(broker_datas=template.broker_datas, queue_datas=queue_datas)
    return replace(route_of(topic, plain), is_borrowed=True)


def _ordered(text: str) -> Iterator[tuple[str, int]]:
    """Parse ``broker:queues;broker:queues``, the fixed queues of an ordered topic."""
    for entry in text.split(";"):
        broker, _, count = entry.partition(":")
        if count.isdecimal():
            yield broker, int(count[:_COUNT_DIGITS_MAX])


def _queues(topic: str, counts: Iterable[tuple[str, int]]) -> tuple[MessageQueue, ...]:
    """Number the queues of all brokers.

    Skip a broker that claims an impossible number: any smaller number would be a guess.
    """
    queues: list[MessageQueue] = []
    for broker, count in counts:
        if 0 <= count <= min(QUEUES_MAX, TOPIC_QUEUES_MAX - len(queues)):
            queues += (MessageQueue(topic, broker, number) for number in range(count))
        else:
            text = "topic %s: ignored %d queues of broker %s, expected up to %d, %d of all brokers"
            _log.warning(text, topic, count, broker, QUEUES_MAX, TOPIC_QUEUES_MAX)
    return tuple(queues)
