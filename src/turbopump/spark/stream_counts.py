"""Counts of rows and of bad records, which Spark reports in the progress of a query.

Spark's Python sources have no metrics of their own, so what a source drops cannot be counted. Bad
records are rows for queries that count them before dropping them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its conventional name

from turbopump.spark.reading.options import FORMAT, columns_of, on_bad_record_of
from turbopump.spark.records.bad_records import OnBadRecord
from turbopump.spark.records.schema import DECODE_ERROR

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

METRICS = "turbopump"
"""The name in Spark's progress for the counts of a consumer or a counted stream."""
BAD = "bad"
"""The count of records that could not be decoded, however ``onBadRecord`` handles them."""
_REPLACED = ("columns", "includeproperties", "onbadrecord")


def counted_stream(
    spark: SparkSession, options: Mapping[str, str], *, metrics: str = METRICS
) -> DataFrame:
    """Return a stream with the options of the source, which counts rows and bad records.

    The same rows and columns as from ``spark.readStream``; in addition, the progress of each batch
    has ``observedMetrics["turbopump"]`` with ``rows`` and ``bad``. Each counted stream of one query
    needs its own ``metrics``, as Spark requires unique names.

    ::

        orders = turbopump.spark.counted_stream(spark, {"topic": "orders", "onBadRecord": "skip"})
    """
    is_shown = DECODE_ERROR in columns_of(options)
    counted, leaves_out_bad = counted_options(options)
    frame = spark.readStream.format(FORMAT).options(**counted).load()
    bad = F.count(DECODE_ERROR) if DECODE_ERROR in frame.columns else F.sum(F.lit(0))
    frame = frame.observe(metrics, F.count(F.lit(1)).alias("rows"), bad.alias(BAD))
    if leaves_out_bad and not (is_shown and on_bad_record_of(options) is OnBadRecord.DEAD_LETTER):
        frame = frame.where(F.col(DECODE_ERROR).isNull())
    return frame if is_shown else frame.drop(DECODE_ERROR)


def counted_options(options: Mapping[str, str]) -> tuple[dict[str, str], bool]:
    """Return options with which bad records are rows, and whether the query drops them."""
    mode = on_bad_record_of(options)
    if mode is OnBadRecord.FAIL:
        return dict(options), False
    columns = dict.fromkeys([*columns_of(options), DECODE_ERROR])
    kept = {name: text for name, text in options.items() if name.lower() not in _REPLACED}
    as_rows = OnBadRecord.NULL if mode is OnBadRecord.SKIP else mode
    is_dropped = mode is not OnBadRecord.NULL
    return {**kept, "columns": ",".join(columns), "onBadRecord": as_rows.value}, is_dropped


def observed(progress: StreamingQueryProgress) -> Mapping[str, Any] | None:
    """Return the counts of a batch by name, or None if its query has none."""
    row = progress.observedMetrics.get(METRICS)
    if row is None:
        return None
    found = row.asDict()
    if "values" in found:
        # As JSON produced elsewhere has it, with names separate from values.
        names = [field["name"] for field in found["schema"]["fields"]]
        found = dict(zip(names, found["values"], strict=True))
    return found
