"""What a batch query reads, decided when it is planned."""

from __future__ import annotations

from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue
from turbopump.spark.clocks import CLOCK_MARGIN_MS
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.filter_pushdown import ScanBounds, cut, ranges_at_offsets
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import Partition, QueueRange, plan, ranges_between
from turbopump.spark.reading.positions import OfGroup


async def plan_batch(cluster: Cluster, options: SourceOptions, by: ScanBounds) -> list[Partition]:
    """Find out where to read from and to, once: what comes later is not of this batch."""
    queues = [queue for queue in await cluster.queues() if by.has_queue(queue)]
    start = await cluster.resolve("startingOffsets", options.start, queues)
    end = await cluster.resolve("endingOffsets", options.end, queues)
    if not isinstance(options.start, OfGroup) and not isinstance(options.end, OfGroup):
        # Where a group has come to is no statement of the user's.
        _require_order(start, end)
    ranges = cut(ranges_between(start, end), by, await _offsets_of_times(cluster, by, queues))
    return plan(await _with_keys(cluster, ranges, by), options.plan)


def _require_order(start: dict[MessageQueue, int], end: dict[MessageQueue, int]) -> None:
    for queue, at in start.items():
        if end[queue] < at:
            raise InvalidArgument(
                f"startingOffsets must not be after endingOffsets: {queue} would be read from {at} "
                f"to {end[queue]}"
            )


async def _offsets_of_times(
    cluster: Cluster, by: ScanBounds, queues: list[MessageQueue]
) -> dict[MessageQueue, tuple[int, int]]:
    """Return offsets between which all lies that was stored in the wanted time.

    The search takes times to ascend, which they do not where a clock was set back: what it may
    have missed lies within the margin, and Spark leaves out the rest.
    """
    if by.stored_ms.low is None and by.stored_ms.high is None:
        return {}
    limits = await cluster.limits(queues)
    first = {queue: ends.low for queue, ends in limits.items()}
    last = {queue: ends.high for queue, ends in limits.items()}
    if by.stored_ms.low is not None:
        first = await cluster.since(by.stored_ms.low - CLOCK_MARGIN_MS, limits)
    if by.stored_ms.high is not None:
        last = await cluster.since(by.stored_ms.high + CLOCK_MARGIN_MS, limits)
    return {queue: (first[queue], last[queue]) for queue in limits}


async def _with_keys(
    cluster: Cluster, ranges: list[QueueRange], by: ScanBounds
) -> list[QueueRange]:
    """Return the parts of ranges that hold messages with wanted keys, or all if that is unknown."""
    keys = by.one_of.get("keys")
    if keys is None or not ranges:
        return ranges
    found: set[tuple[MessageQueue, int]] = set()
    for topic in sorted({each.topic for each in ranges}):
        for text in sorted(keys):
            places = await cluster.offsets_of_key(topic, text)
            if places is None:
                return ranges
            found |= places
    return ranges_at_offsets(ranges, found)
