"""Dividing offset ranges into tasks: split and packed into partitions. Pure.

The plan depends only on its arguments, so a batch that is repeated after a failure is read by the
same tasks in the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from turbopump.message import MessageQueue
from turbopump.spark.reading.offsets import Mark, Offsets

NO_MARKS: Mapping[MessageQueue, Mark | None] = {}

PACKED_ROWS_MAX = 10_000
"""Ranges are packed into one task up to this many rows, about one Arrow batch: reading a row costs
the same, and Spark starts fewer tasks."""

SKEW_FACTOR = 5
"""A range is split by default if it has this many times the average of the other queues, ..."""
SKEW_ROWS_MIN = 50_000
"""... and pieces of at least this many rows remain: about a quarter of a second's work."""


class LastMessage(NamedTuple):
    """The last message of a queue in a batch, as it was when the batch was planned."""

    offset: int
    store_timestamp_ms: int
    position: int


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """Messages of one queue from ``start`` to before ``end``."""

    topic: str
    broker: str
    queue_id: int
    start: int
    end: int
    last: LastMessage | None = field(default=None, compare=False)
    """None if unknown. In another range if the queue is split into several."""

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def queue(self) -> MessageQueue:
        return MessageQueue(self.topic, self.broker, self.queue_id)

    def __str__(self) -> str:
        return f"{self.queue}[{self.start}, {self.end})"


Partition = tuple[QueueRange, ...]
"""What one task reads, in this order."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The user's limits for dividing ranges."""

    partitions_min: int | None = None
    """Large ranges are split until there are about this many tasks."""

    rows_per_partition_max: int | None = None
    is_per_queue: bool = False
    """One task per queue, whatever its range: its messages stay in order."""


_AS_IT_IS = PlanLimits()


def ranges_between(
    start: Offsets, end: Offsets, marks: Mapping[MessageQueue, Mark | None] = NO_MARKS
) -> list[QueueRange]:
    """Return the ranges between two offsets; queues missing from ``start`` have none.

    ``marks`` are those of the messages before ``end``.
    """
    return [
        QueueRange(
            queue.topic,
            queue.broker,
            queue.queue_id,
            at,
            end[queue],
            None if (mark := marks.get(queue)) is None else LastMessage(end[queue] - 1, *mark),
        )
        for queue, at in sorted(start.items())
        if end.get(queue, at) > at
    ]


def plan(
    ranges: Iterable[QueueRange], limits: PlanLimits = _AS_IT_IS, *, queues: int = 0
) -> list[Partition]:
    """Divide ranges into partitions: large ranges split, small ones of a batch packed.

    ``queues`` also counts the queues with nothing to read.
    """
    whole = sorted(ranges)
    if limits.is_per_queue:
        return [(each,) for each in whole]
    queues, total = max(queues, len(whole)), sum(each.rows for each in whole)
    pieces = [
        piece
        for each in whole
        for piece in _split(
            each, max(_pieces(each, len(whole), total, limits), _skew_pieces(each, queues, total))
        )
    ]
    partitions_min = limits.partitions_min or 0
    if len(pieces) <= partitions_min:
        return [(piece,) for piece in pieces]
    rows_max = min(PACKED_ROWS_MAX, limits.rows_per_partition_max or PACKED_ROWS_MAX)
    if partitions_min:
        rows_max = max(1, min(rows_max, total // partitions_min))
    return _packed(pieces, rows_max)


def _pieces(of: QueueRange, ranges: int, total: int, limits: PlanLimits) -> int:
    pieces = 1
    if limits.rows_per_partition_max:
        pieces = -(-of.rows // limits.rows_per_partition_max)
    if limits.partitions_min and ranges < limits.partitions_min:
        pieces = max(pieces, -(-limits.partitions_min * of.rows // total))
    return max(1, min(pieces, of.rows))


def _skew_pieces(of: QueueRange, queues: int, total: int) -> int:
    """Return the number of pieces of a range that dwarfs those of the other queues.

    Pieces have the size that all ranges would have if messages were spread evenly.
    """
    if of.rows * (queues - 1) <= SKEW_FACTOR * (total - of.rows):
        return 1
    return max(1, round(of.rows / max(SKEW_ROWS_MIN, total / queues)))


def _split(of: QueueRange, pieces: int) -> list[QueueRange]:
    cuts = [of.start + of.rows * number // pieces for number in range(pieces + 1)]
    return [replace(of, start=start, end=end) for start, end in pairwise(cuts)]


def _packed(pieces: list[QueueRange], rows_max: int) -> list[Partition]:
    packed: list[list[QueueRange]] = []
    room = 0
    for piece in pieces:
        if not packed or piece.rows > room:
            packed.append([])
            room = rows_max
        packed[-1].append(piece)
        room -= piece.rows
    return [tuple(each) for each in packed]
