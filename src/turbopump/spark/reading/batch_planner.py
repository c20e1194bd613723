"""What a batch query reads, decided when it is planned."""

from __future__ import annotations

from turbopump.errors import InvalidArgument
from turbopump.spark.reading.cluster import Cluster
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import Partition, plan, ranges_between
from turbopump.spark.reading.positions import OfGroup


async def plan_batch(cluster: Cluster, options: SourceOptions) -> list[Partition]:
    """Resolve start and end offsets once: later messages are not part of this batch."""
    queues = await cluster.queues()
    start = await cluster.resolve("startingOffsets", options.start, queues)
    end = await cluster.resolve("endingOffsets", options.end, queues)
    # A group's committed offset is not the user's choice.
    is_chosen = not (isinstance(options.start, OfGroup) or isinstance(options.end, OfGroup))
    for queue, at in start.items():
        if is_chosen and end[queue] < at:
            raise InvalidArgument(
                f"startingOffsets must not be after endingOffsets: {queue} would be read from {at} "
                f"to {end[queue]}"
            )
    read = {queue: at for queue, at in end.items() if at > start.get(queue, at)}
    # Tasks read later, or again if a DataFrame is used twice: the topic may be re-created before.
    marks = await cluster.all_marks(read)
    return plan(ranges_between(start, end, marks), options.plan, queues=len(start))
