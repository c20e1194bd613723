"""Offsets of many queues as stored in Spark's checkpoints, and how far a batch may go. Pure.

In a checkpoint they are ``{"topic": {"broker": {"0": 123}}}``: the next offset to read of each
queue. Spark compares them as text, so the same offsets must always be written in the same order.
Below the key ``""`` a checkpoint has, in the same form, what identifies the last message read.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

from msgspec import Struct

from turbopump.errors import DataLost, InvalidArgument
from turbopump.message import MessageQueue

Offsets = Mapping[MessageQueue, int]
"""The next offset to read, by queue."""

Mark = tuple[int, int]
"""Distinguishes a message from one at the same offset of a re-created topic: its store time in ms,
and its position in the log."""

Marks = Mapping[MessageQueue, Mark]
"""Marks of the messages before offsets, by queue."""

NOTHING_BELOW: Mark = (-1, -1)
"""The mark of an offset below which nothing is stored: all messages expired, or none was there. A
message that is found there later proves that the topic was re-created."""

Place = tuple[str, str]
"""A topic, by the application's name, and a broker."""

T = TypeVar("T")
Nested = dict[str, dict[str, Any]]
_MARKS = ""
_QUEUE_ID = attrgetter("queue_id")
_number_text = lru_cache(maxsize=1 << 16)(str)
"""The text of a queue's number; a known one, with its hash, is found in half the time."""
_TEXTS_MAX = 5

GROUP = "group"
"""The entry of the latest-offsets report below the key ``""``: the group, or null."""

NO_QUEUES: Nested = {"": {}}
"""The position of a stream that started before there were queues: later ones are read whole.

Before it has started, the position is empty.
"""


def nested(offsets: Offsets, marks: Marks | None = None) -> Nested:
    """Return offsets in checkpoint form; equal offsets always give equal text."""
    written = _nested(marks or {}, lambda each: [f"{ms}@{position}" for ms, position in each])
    return ({_MARKS: written} if written else {}) | _nested(offsets)


def reported(latest: Offsets, group: str | None) -> Nested:
    """Return the latest offsets for Spark's progress, with the group that reads them."""
    return {_MARKS: {GROUP: group}} | _nested(latest)


def report_of(written: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what `reported` wrote besides offsets; None for the offsets of other sources."""
    report = written.get(_MARKS)
    return report if isinstance(report, dict) and GROUP in report else None


def has_marks(written: Mapping[str, Any]) -> bool:
    """Whether offsets have marks, and so are those of this source."""
    return bool(written.get(_MARKS))


def by_place(queues: Iterable[MessageQueue]) -> dict[Place, list[MessageQueue]]:
    """Group queues by topic and broker, which are queried together."""
    places: dict[Place, list[MessageQueue]] = {}
    topic = broker = None
    together: list[MessageQueue] = []
    for queue in queues:
        # Thousands of neighbours belong together: a look-up for each takes twice as long.
        if queue.topic != topic or queue.broker != broker:
            topic, broker = queue.topic, queue.broker
            together = places.setdefault((topic, broker), [])
        together.append(queue)
    return places


def values_by_place(values: Mapping[MessageQueue, T]) -> dict[Place, Mapping[MessageQueue, T]]:
    """Group values of queues by topic and broker."""
    places = by_place(values).items()
    return {place: {queue: values[queue] for queue in queues} for place, queues in places}


def _nested(
    values: Mapping[MessageQueue, T], written_as: Callable[[Iterable[T]], Iterable[object]] = iter
) -> Nested:
    written: Nested = {}
    for (topic, broker), queues in sorted(by_place(values).items()):
        # Numbers sort faster than queues, of which there may be thousands.
        in_order = sorted(queues, key=_QUEUE_ID)
        each = written_as(map(values.__getitem__, in_order))
        texts = map(_number_text, map(_QUEUE_ID, in_order))
        written.setdefault(topic, {})[broker] = dict(zip(texts, each, strict=True))
    return written


def flat(written: object) -> dict[MessageQueue, int]:
    """Parse the offsets that `nested` wrote; raises InvalidArgument for anything else."""
    try:
        topics: dict[str, Any] = {**written}  # type: ignore[dict-item]
        topics.pop(_MARKS, None)
        return {queue: int(at) for queue, at in _flat(topics)}
    except (TypeError, ValueError, AttributeError):
        raise InvalidArgument(
            'checkpoint offsets must be {"topic": {"broker": {"queue": offset}}}, got '
            f"{written!r}: the checkpoint belongs to another source"
        ) from None


def flat_marks(written: Mapping[str, Any]) -> dict[MessageQueue, Mark]:
    """Parse the marks that `nested` wrote; checkpoints of version 0.1 have none."""
    marks = ((queue, text.split("@")) for queue, text in _flat(written.get(_MARKS, {})))
    return {queue: (int(time_ms), int(position)) for queue, (time_ms, position) in marks}


def _flat(topics: Mapping[str, Any]) -> Iterator[tuple[MessageQueue, Any]]:
    for topic, brokers in topics.items():
        for broker, numbers in brokers.items():
            for number, value in numbers.items():
                yield MessageQueue(topic, broker, int(number)), value


class Limits(Struct, frozen=True, gc=False):
    """The limits of a queue: its oldest message, and the offset of its next one."""

    low: int
    high: int
    is_certain: bool = True
    """False if reported by a slave: its master may have older and newer messages."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Messages from ``start`` to ``end`` of a queue that should be read but are gone.

    ``end`` below ``start`` means that the queue ends before what was already read.
    """

    queue: MessageQueue
    start: int
    end: int
    is_recreated: bool = False

    def __str__(self) -> str:
        if self.is_recreated:
            return (
                f"{self.queue} was re-created: the message at offset {self.start - 1} is not the "
                "one that was there"
            )
        if self.end < self.start:
            return (
                f"{self.queue} ends at offset {self.end} but was read to {self.start}: the topic "
                "was re-created, or its broker lost messages"
            )
        return (
            f"{self.queue} starts at offset {self.end}: {self.end - self.start} messages from "
            f"offset {self.start} expired before they were read"
        )


def first_texts(texts: Iterable[object]) -> str:
    """Return a shortened description for queues, of which thousands may have the same problem."""
    each = [str(text) for text in texts]
    more = f"; and {len(each) - _TEXTS_MAX} more queues" if len(each) > _TEXTS_MAX else ""
    return "; ".join(each[:_TEXTS_MAX]) + more


def losses(
    start: Offsets, limits: Mapping[MessageQueue, Limits], recreated: Collection[MessageQueue] = ()
) -> list[Loss]:
    """Return what is gone from queues that were read up to ``start``."""
    found = []
    for queue, ends in limits.items():
        at = start.get(queue)
        if at is None:
            continue
        if queue in recreated:
            found.append(Loss(queue, at, ends.low, is_recreated=True))
        elif ends.is_certain and not ends.low <= at <= ends.high:
            found.append(Loss(queue, at, ends.high if at > ends.high else ends.low))
    return sorted(found, key=lambda loss: loss.queue)


def inside_for_group(
    group: str, offsets: Offsets, limits: Mapping[MessageQueue, Limits], *, fail_on_data_loss: bool
) -> dict[MessageQueue, int]:
    """Return a group's offsets, moved past losses; raises DataLost if losses are errors."""
    lost = losses(offsets, limits)
    if lost and fail_on_data_loss:
        raise DataLost(
            f"group {group!r} cannot resume from its committed offsets: {first_texts(lost)}; "
            "failOnDataLoss=false continues without them, `turbopump offset reset` moves the group"
        )
    return moved_past(offsets, limits)


def inside(
    name: str, offsets: Offsets, limits: Mapping[MessageQueue, Limits], *, fail_on_data_loss: bool
) -> dict[MessageQueue, int]:
    """Return the offsets of an option, none outside its queue.

    One before the beginning raises DataLost, one beyond the end InvalidArgument, unless losses are
    ignored. While the master is unavailable, no offset is known to be outside.
    """
    found = dict(offsets)
    for queue, at in offsets.items():
        ends = limits[queue]
        if not ends.is_certain:
            continue
        if fail_on_data_loss and at > ends.high:
            raise InvalidArgument(f"option {name}: {queue} ends at offset {ends.high}, got {at}")
        if fail_on_data_loss and at < ends.low:
            loss = Loss(queue, at, ends.low)
            raise DataLost(f"option {name}: {loss}; failOnDataLoss=false continues without them")
        found[queue] = min(max(at, ends.low), ends.high)
    return found


def moved_past(
    start: Offsets, limits: Mapping[MessageQueue, Limits], recreated: Collection[MessageQueue] = ()
) -> dict[MessageQueue, int]:
    """Return where to continue if losses are ignored.

    A re-created queue is read from its beginning: that may repeat messages if it was not re-created
    but lost its newest ones.
    """
    gone = {loss.queue for loss in losses(start, limits, recreated)}
    return {queue: limits[queue].low if queue in gone else at for queue, at in start.items()}


def backlog(start: Offsets, target: Offsets) -> dict[MessageQueue, int]:
    """Return how many messages of each queue are to be read, without queues that have none.

    A queue that was never read has none: its start is decided first.
    """
    return {queue: end - at for queue, end in target.items() if (at := start.get(queue, end)) < end}


def shares(backlogs: Mapping[MessageQueue, int], rows_max: int) -> dict[MessageQueue, int]:
    """Divide rows among queues in proportion to their backlogs, at least one for each.

    So a busy queue never starves a quiet one, and the sum is exactly ``rows_max`` unless there are
    fewer rows, or more queues.
    """
    total = sum(backlogs.values())
    if total <= rows_max:
        return dict(backlogs)
    given = {queue: max(1, rows_max * rows // total) for queue, rows in backlogs.items()}
    spare = rows_max - sum(given.values())
    # The remainder of rounding goes to the largest.
    for queue in sorted(backlogs, key=lambda queue: (-backlogs[queue], queue)) if spare > 0 else ():
        more = min(spare, backlogs[queue] - given[queue])
        given[queue] += more
        spare -= more
    # What "at least one" overdrew is taken from the largest shares, so that a longer queue never
    # gets less than a shorter one.
    largest = [(-given[queue], backlogs[queue], queue) for queue in backlogs] if spare < 0 else []
    heapq.heapify(largest)
    while spare < 0 and largest[0][0] < -1:
        share, rows, queue = largest[0]
        given[queue] -= 1
        heapq.heapreplace(largest, (share + 1, rows, queue))
        spare += 1
    return given


def forward(start: Offsets, steps: Mapping[MessageQueue, int]) -> Offsets:
    """Return the offsets advanced by counts of messages."""
    return {**start, **{queue: start[queue] + step for queue, step in steps.items()}}
