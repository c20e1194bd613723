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
            found.update(_named([place], near or fitting))
    return tuple(sorted(found))


def _by_place(queues: Iterable[MessageQueue]) -> dict[tuple[str, str, int], list[MessageQueue]]:
    found: dict[tuple[str, str, int], list[MessageQueue]] = {}
    for queue in queues:
        for place in Assigned.places(queue):
            found.setdefault(place, []).append(queue)
    return found


def _named(
    places: Iterable[tuple[str, str, int]], queues: Iterable[MessageQueue]
) -> tuple[MessageQueue, ...]:
    position = Explicit(tuple((topic, broker, number, 0) for topic, broker, number in places))
    return tuple(sorted(offsets_named("assign", position, queues)))
