"""Which topics and queues the options select: by name, by pattern, individually. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from turbopump.message import MessageQueue
from turbopump.spark.reading.positions import Explicit, offsets_named
from turbopump.wire.names import DEAD_LETTER_PREFIX, RETRY_PREFIX


@dataclass(frozen=True, slots=True)
class Topics:
    """Topics by name."""

    names: tuple[str, ...]

    def has(self, queue: MessageQueue) -> bool:
        return queue.topic in self.names


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """Topics whose whole name matches an expression.

    Retry and dead-letter topics match only if the expression starts with their prefix.
    """

    pattern: str

    def has(self, queue: MessageQueue) -> bool:
        return self.matches(queue.topic)

    def matches(self, topic: str) -> bool:
        if topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)) and self.pattern[0] != "%":
            return False
        return re.fullmatch(self.pattern, topic) is not None


@dataclass(frozen=True, slots=True)
class Assigned:
    """Single queues, as (topic, broker, number); the broker is empty if there is only one."""

    queues: tuple[tuple[str, str, int], ...]

    def has(self, queue: MessageQueue) -> bool:
        return not self.places(queue).isdisjoint(self.queues)

    @staticmethod
    def places(queue: MessageQueue) -> frozenset[tuple[str, str, int]]:
        """Return the forms in which a queue can be assigned."""
        return frozenset((queue.topic, broker, queue.queue_id) for broker in ("", queue.broker))


Chosen = Topics | TopicPattern | Assigned


def assigned(
    places: Iterable[tuple[str, str, int]], queues: Iterable[MessageQueue]
) -> tuple[MessageQueue, ...]:
    """Return the assigned queues; raises InvalidArgument if one is missing, or on two brokers."""
    position = Explicit(tuple((topic, broker, number, 0) for topic, broker, number in places))
    return tuple(sorted(offsets_named("assign", position, queues)))


def assigned_among(
    chosen: Assigned, queues: Iterable[MessageQueue], known: Collection[MessageQueue] | None
) -> tuple[MessageQueue, ...]:
    """Return the assigned queues that exist, for a stream that started with those ``known``.

    Without a named broker, the one that the stream started with is used, even if the topic now has
    others. If none is known, all candidates are returned; otherwise InvalidArgument is raised where
    a broker must be named.
    """
    there, before = _by_place(queues), _by_place(known or ())
    homes = {(queue.topic, queue.broker) for queue in known or ()}
    found: set[MessageQueue] = set()
    for place in chosen.queues:
        fitting = there.get(place, [])
        if known is None or not fitting:
            found.update(fitting)
        elif begun := before.get(place):
            found.update(queue for queue in fitting if queue in begun)
        else:
            near = [queue for queue in fitting if (queue.topic, queue.broker) in homes]
            found.update(assigned([place], near or fitting))
    return tuple(sorted(found))


def _by_place(queues: Iterable[MessageQueue]) -> dict[tuple[str, str, int], list[MessageQueue]]:
    found: dict[tuple[str, str, int], list[MessageQueue]] = {}
    for queue in queues:
        for place in Assigned.places(queue):
            found.setdefault(place, []).append(queue)
    return found
