"""Streams whose progress includes the number of records that could not be decoded."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its conventional name

from turbopump.spark.observed_metrics import BAD, METRICS
from turbopump.spark.reading.counted_bad_records import counted_options
from turbopump.spark.reading.options import FORMAT, columns_of, on_bad_record_of
from turbopump.spark.records.bad_records import OnBadRecord
from turbopump.spark.records.schema import DECODE_ERROR


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
