"""Which queues the option ``assign`` means among those that there are. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from turbopump.message import MessageQueue
from turbopump.spark.reading.options import Assigned
from turbopump.spark.reading.positions import Explicit, offsets_named


def assigned(chosen: Assigned, queues: Iterable[MessageQueue]) -> tuple[MessageQueue, ...]:
    """Return the queues meant; raises InvalidArgument if one is not there, or on two brokers."""
    return _named(chosen.queues, queues)


def assigned_among(
    chosen: Assigned, queues: Iterable[MessageQueue], known: Collection[MessageQueue] | None
) -> tuple[MessageQueue, ...]:
    """Return the queues meant that are there, for a stream that has begun with those ``known``.

    Where no broker is named, the one is meant that the stream has begun with, also if the topic
    has come to others since. Without anything known all that may be meant are returned; otherwise
    InvalidArgument is raised where a broker has to be named.
    """
    there = tuple(queues)
    found: set[MessageQueue] = set()
    for place in chosen.queues:
        fitting = [queue for queue in there if place in Assigned.places(queue)]
        if known is None or len(fitting) == 0:
            found.update(fitting)
            continue
        begun = [queue for queue in known if place in Assigned.places(queue)]
        if begun:
            found.update(queue for queue in fitting if queue in begun)
            continue
        homes = {queue.broker for queue in known if queue.topic == place[0]}
        near = [queue for queue in fitting if queue.broker in homes]
        found.update(_named([place], near or fitting))
    return tuple(sorted(found))


def _named(
    places: Iterable[tuple[str, str, int]], queues: Iterable[MessageQueue]
) -> tuple[MessageQueue, ...]:
    position = Explicit(tuple((topic, broker, number, 0) for topic, broker, number in places))
    return tuple(sorted(offsets_named("assign", position, queues)))
