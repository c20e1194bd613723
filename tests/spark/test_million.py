"""A million rows to a topic and back by a stream, each of them accounted for."""

from __future__ import annotations

import uuid
from pathlib import Path

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as f

from servers import Standalone

COUNT = 1_000_000
PER_MICRO_BATCH = 400_000


def test_a_million_rows_are_written_and_streamed_exactly_once(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    topic = f"million-{uuid.uuid4().hex}"
    rows = spark.range(0, COUNT, 1, 2).selectExpr("cast(id as string) body", "id % 4 queueId")
    cluster = {"nameserver": broker.nameserver, "topic": topic}
    # None is sent twice because its response is late: then the numbers would not be exact.
    sink = {**cluster, "sendTimeoutMs": "120000"}
    rows.write.format("rocketmq").options(**sink).mode("append").save()

    query = (
        spark.readStream.format("rocketmq")
        .options(
            **cluster,
            startingOffsets="earliest",
            columns="queueId,queueOffset,body",
            maxOffsetsPerTrigger=str(PER_MICRO_BATCH),
        )
        .load()
        .selectExpr("queueId", "queueOffset", "cast(cast(body as string) as long) number")
        .writeStream.format("parquet")
        .options(path=str(tmp_path / "rows"), checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert sum(each.numInputRows for each in query.recentProgress) == COUNT
    assert len([each for each in query.recentProgress if each.numInputRows]) > 1

    each = COUNT // 4
    found = account(spark, tmp_path / "rows")
    # Every queue has its share of the numbers, 0, 4, 8 and so on, one at each offset.
    assert [tuple(row) for row in found] == [
        (queue, each, each, each, 0, each - 1, queue * each + 4 * (each * (each - 1) // 2))
        for queue in range(4)
    ]


def account(spark: SparkSession, path: Path) -> list[Row]:
    """Count by queue: rows, distinct numbers and offsets, first and last offset, the total."""
    return (
        spark.read.parquet(str(path))
        .groupBy("queueId")
        .agg(
            f.count("*"),
            f.countDistinct("number"),
            f.countDistinct("queueOffset"),
            f.min("queueOffset"),
            f.max("queueOffset"),
            f.sum("number"),
        )
        .orderBy("queueId")
        .collect()
    )
