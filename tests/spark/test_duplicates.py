"""Reading each row of a sink once: no row is lost unless it is a duplicate."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from turbopump.errors import InvalidArgument
from turbopump.spark.writing.deduplication import without_duplicates
from turbopump.spark.writing.row_encoder import STAMP_PROPERTY

READ = (
    "topic string, broker string, queueId int, queueOffset long, properties map<string,string>, "
    "body string, storeTimestamp timestamp"
)


def line(place: tuple[int, int], body: str, stamp: str | None, hour: int) -> str:
    """Return a message as a line of JSON; its position is its queue and offset."""
    message = {
        "topic": "orders",
        "broker": "a",
        "queueId": place[0],
        "queueOffset": place[1],
        "properties": {"TAGS": "x"} if stamp is None else {STAMP_PROPERTY: stamp},
        "body": body,
        "storeTimestamp": f"2026-01-01T{hour:02}:00:00Z",
    }
    return json.dumps(message) + "\n"


def streamed(spark: SparkSession, folder: Path, *micro_batches: str) -> DataFrame:
    """Return a stream that reads each of the texts as a micro-batch."""
    folder.mkdir()
    for number, text in enumerate(micro_batches):
        (folder / f"{number}.json").write_text(text)
    return spark.readStream.schema(READ).option("maxFilesPerTrigger", "1").json(str(folder))


def deduplicated(spark: SparkSession, once: DataFrame, checkpoint: Path) -> list[str]:
    name = f"once_{uuid.uuid4().hex}"
    writer = once.writeStream.format("memory").queryName(name).trigger(availableNow=True)
    writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()
    return sorted(row.body for row in spark.table(name).collect())


def test_stream_retains_messages_hours_older_than_the_newest_seen(
    spark: SparkSession, tmp_path: Path
) -> None:
    messages = streamed(
        spark,
        tmp_path / "in",
        line((0, 0), "first", "q/0/0/0", 10),
        line((0, 1), "second", "q/0/0/1", 10),
        line((1, 0), "old, stamped", "q/0/1/0", 8)
        + line((1, 1), "old, unstamped", None, 2)
        + line((1, 2), "old, unstamped", None, 2)
        + line((0, 2), "first", "q/0/0/0", 10),
        line((1, 3), "old, stamped", "q/0/1/0", 23) + line((0, 3), "last", "q/0/0/2", 1),
    )
    once = without_duplicates(messages, within="10 minutes")
    assert once.columns == messages.columns
    expected = ["first", "last", "old, stamped", "old, unstamped", "old, unstamped", "second"]
    assert deduplicated(spark, once, tmp_path / "checkpoint") == expected


def test_two_rows_with_the_same_stamp_are_both_returned(
    spark: SparkSession, tmp_path: Path
) -> None:
    text = (
        line((0, 0), "a", "q/0/0/0", 1)
        + line((0, 1), "b", "q/0/0/0", 1)
        + line((0, 2), "a", "q/0/0/0", 1)
    )
    messages = streamed(spark, tmp_path / "in", text)
    assert deduplicated(spark, without_duplicates(messages), tmp_path / "checkpoint") == ["a", "b"]
    batch = without_duplicates(spark.read.schema(READ).json(str(tmp_path / "in")))
    assert sorted(row.body for row in batch.collect()) == ["a", "b"]


def test_a_watermark_before_it_is_rejected(spark: SparkSession, tmp_path: Path) -> None:
    late = streamed(spark, tmp_path / "in").withWatermark("storeTimestamp", "1 minute")
    with pytest.raises(InvalidArgument, match="the watermark on storeTimestamp drops late"):
        without_duplicates(late)


def test_the_error_names_the_columns_it_needs(spark: SparkSession) -> None:
    with pytest.raises(InvalidArgument, match=r"add .*broker, queueId, queueOffset, properties to"):
        without_duplicates(spark.sql("select 'orders' topic, 'x' body"))
