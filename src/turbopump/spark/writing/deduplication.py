"""Reading without the duplicates that retried Spark tasks leave behind."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from turbopump.errors import InvalidArgument
from turbopump.spark.writing.row_encoder import STAMP_PROPERTY
from turbopump.wire.properties import KEYS, TAGS

_KEY = "__turbopump_row"
_SEEN = "__turbopump_seen"
_PLACE = ("topic", "broker", "queueId", "queueOffset")
"""What distinguishes messages without a stamp."""

_NEEDED = (*_PLACE, "properties", "body")
_WATERMARK = "spark.watermarkDelayMs"
"""How Spark marks the column of a watermark."""


def without_duplicates(
    messages: DataFrame, *, within: str = "1 hour", stamp: str = STAMP_PROPERTY
) -> DataFrame:
    """Return messages read from topics, with each row that a sink wrote only once.

    A batch compares all rows with one another. A stream remembers rows for ``within`` after reading
    them, by the clock and not by message times, so that no message is too late however old it is:
    choose more than it takes to restart a failed query. ``stamp`` is the property that identifies
    rows; duplicates also have the same body, tags and keys. Messages without a stamp are all kept.
    Add a stream's own watermarks after this, not before.

    ::

        orders = spark.readStream.format("rocketmq").option("topic", "orders").load()
        once = turbopump.spark.without_duplicates(orders, within="10 minutes")
    """
    missing = [name for name in _NEEDED if name not in messages.columns]
    if missing:
        raise InvalidArgument(
            f"without_duplicates needs the columns {', '.join(_NEEDED)}: add {', '.join(missing)} "
            "to the option columns"
        )
    marked = messages.withColumn(_KEY, _row(stamp))
    if not messages.isStreaming:
        return marked.dropDuplicates([_KEY]).drop(_KEY)
    _require_no_watermark(messages)
    # Spark drops rows older than the watermark, duplicate or not. The micro-batch's time never is,
    # and is the same when the batch is repeated.
    timed = marked.withColumn(_SEEN, f.current_timestamp()).withWatermark(_SEEN, within)
    return timed.dropDuplicatesWithinWatermark([_KEY]).drop(_KEY, _SEEN)


def _require_no_watermark(messages: DataFrame) -> None:
    for field in messages.schema.fields:
        if _WATERMARK in (field.metadata or {}):
            raise InvalidArgument(
                f"the watermark on {field.name} drops late messages before they are compared: call "
                "withWatermark on the result of without_duplicates"
            )


def _row(stamp: str) -> Column:
    """Return what two messages share only if they are the same row.

    The topic is part of it: a message waiting in a retry topic for redelivery has the stamp of the
    first, and is not its duplicate. So is the content: a query that wrote its rows again in another
    order has given one stamp to two rows.
    """
    properties = f.col("properties")
    content = f.xxhash64("body", properties[TAGS], properties[KEYS]).cast("string")
    stamped = f.concat_ws("\t", f.lit("stamp"), f.col("topic"), properties[stamp], content)
    place = f.concat_ws("\t", f.lit("place"), *map(f.col, _PLACE))
    return f.when(properties[stamp].isNotNull(), stamped).otherwise(place)
