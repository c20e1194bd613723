"""Reading without the duplicates that tasks leave behind when Spark tries them again."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from turbopump.errors import InvalidArgument
from turbopump.spark.writing.rows import STAMP_PROPERTY

_KEY = "__turbopump_row"
_PLACE = ("topic", "broker", "queueId", "queueOffset")
"""What tells messages apart that nobody has stamped."""


def without_duplicates(
    messages: DataFrame,
    *,
    within: str = "1 hour",
    time: str = "storeTimestamp",
    stamp: str = STAMP_PROPERTY,
) -> DataFrame:
    """Return messages that were read from topics, each row that a sink wrote only once.

    A batch compares all rows with one another. A stream remembers stamps for ``within``, counted
    in the times of the messages: choose more than it takes Spark to try a failed task or query
    again. Messages without a stamp are all kept. ``stamp`` is the property that tells rows apart.

    ::

        orders = spark.readStream.format("rocketmq").option("topic", "orders").load()
        once = turbopump.spark.without_duplicates(orders, within="10 minutes")
    """
    needed = [*_PLACE, "properties", *([time] if messages.isStreaming else [])]
    missing = [name for name in needed if name not in messages.columns]
    if missing:
        raise InvalidArgument(
            f"messages without duplicates need the columns {', '.join(needed)}: "
            f"{', '.join(missing)} is missing, add it to the option columns"
        )
    marked = messages.withColumn(_KEY, _row(stamp))
    if messages.isStreaming:
        kept = marked.withWatermark(time, within).dropDuplicatesWithinWatermark([_KEY])
    else:
        kept = marked.dropDuplicates([_KEY])
    return kept.drop(_KEY)


def _row(stamp: str) -> Column:
    """Return what two messages have in common only if they are the same row.

    The topic belongs to it: a message that waits in a retry topic for its next delivery has the
    stamp of the first, and is no duplicate of it.
    """
    stamped = f.concat_ws("\t", f.lit("stamp"), f.col("topic"), f.col("properties")[stamp])
    place = f.concat_ws("\t", f.lit("place"), *map(f.col, _PLACE))
    return f.when(f.col("properties")[stamp].isNotNull(), stamped).otherwise(place)
