"""Idempotent writes on real Spark: repeated tasks and batches send no row twice."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from servers import Standalone
from source_topics import made_topic
from stored_messages import stored

ROWS = 1000
STOPPED_AT = 350
"""The row at which the first attempt ends; most earlier rows are stored by then."""
PADDING = "x" * 1000
"""So that a hundred rows exceed what Spark's buffers hold."""
EXPECTED = Counter(f"{n}{PADDING}".encode() for n in range(ROWS))
PATIENCE_S = 240.0
SMALL = {"batchSize": "100", "maxInFlight": "1", "idempotent": "true"}


@pytest.fixture
def options(broker: Standalone) -> dict[str, str]:
    topic = made_topic(broker.nameserver, f"idempotent-{uuid.uuid4().hex}", queues=4)
    return {"nameserver": broker.nameserver, "topic": topic, **SMALL}


@pytest.fixture(autouse=True)
def _small_batches(spark: SparkSession) -> Iterator[None]:
    setting = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = str(spark.conf.get(setting))
    spark.conf.set(setting, "100")
    yield
    spark.conf.set(setting, before)


def bodies(options: dict[str, str]) -> Counter[bytes]:
    found = stored(options["nameserver"], options["topic"])
    return Counter(message.body for message in found)


def test_task_that_fails_midway_and_a_repeated_write_send_nothing_twice(
    spark: SparkSession, options: dict[str, str]
) -> None:
    last = f"{STOPPED_AT}{PADDING}"

    def spoiled_on_first_attempt(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            texts = batch.column("body").to_pylist()
            if context.attemptNumber() == 0 and last in texts:
                texts[texts.index(last)] = None
            yield pa.record_batch([pa.array(texts, pa.string())], names=["body"])

    rows = spark.sql(f"select concat(id, '{PADDING}') body from range({ROWS})").coalesce(1)
    spoiled = rows.mapInArrow(spoiled_on_first_attempt, "body string")
    monday = spoiled.write.format("rocketmq").options(**options, writeId="monday").mode("append")
    monday.save()
    assert bodies(options) == EXPECTED
    monday.save()
    # Complete writes are not sent again, whatever their partitions.
    rows.repartition(2).write.format("rocketmq").options(**options, writeId="monday").mode(
        "append"
    ).save()
    assert bodies(options) == EXPECTED
    one = spark.sql("select '0' body")
    one.write.format("rocketmq").options(**options, writeId="tuesday").mode("append").save()
    assert bodies(options) == EXPECTED + Counter([b"0"])


def test_batch_of_a_killed_query_is_repeated_without_duplicates(
    spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    lines, checkpoint, gate = (tmp_path / name for name in ("in", "checkpoint", "closed"))
    lines.mkdir()
    gate.touch()
    (lines / "0.txt").write_text("".join(f"{n}{PADDING}\n" for n in range(ROWS)))
    closed, last = str(gate), f"{STOPPED_AT}{PADDING}"

    def held_at_the_gate(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            while last in batch.column("body").to_pylist() and Path(closed).exists():
                time.sleep(0.05)

    def started() -> StreamingQuery:
        return (
            spark.readStream.text(str(lines))
            .selectExpr("value body")
            .mapInArrow(held_at_the_gate, "body string")
            .writeStream.format("rocketmq")
            .options(**options, checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )

    query = started()
    end_s = time.monotonic() + PATIENCE_S
    while not bodies(options):
        assert query.isActive, query.exception()
        assert time.monotonic() < end_s
    query.stop()
    gate.unlink()
    started().awaitTermination()
    assert bodies(options) == EXPECTED
    # As if the driver had died between the sink's commit and Spark's record of it.
    for note in (checkpoint / "commits").glob("*0*"):
        note.unlink()
    (lines / "1.txt").write_text("more\n")
    started().awaitTermination()
    assert bodies(options) == EXPECTED + Counter([b"more"])
