"""Declare an archive of topics as tables; Spark decides what to run, and in which order."""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

spark = SparkSession.active()


@dp.table(partition_cols=["topic", "date"])
def archived_messages() -> DataFrame:
    """Every message of the topics, once: the table and its checkpoint belong together."""
    return (
        spark.readStream.format("rocketmq")
        .option("nameserver", spark.conf.get("turbopump.nameserver"))
        .option("topics", spark.conf.get("turbopump.topics"))
        .option("startingOffsets", "earliest")
        .load()
        .withColumn("date", F.to_date("storeTimestamp"))
    )


@dp.materialized_view
def messages_by_tag() -> DataFrame:
    """The number of messages per tag and day, recomputed by every run."""
    return (
        spark.read.table("archived_messages")
        .groupBy("topic", "date", "tags")
        .agg(
            F.count(F.lit(1)).alias("messages"),
            F.sum(F.length("body")).alias("body_bytes"),
            F.max("storeTimestamp").alias("last_stored"),
        )
    )
