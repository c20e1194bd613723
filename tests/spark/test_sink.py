"""Writing rows to topics, on real Spark and a real broker."""

from __future__ import annotations

import gc
import json
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from servers import Standalone, standalone
from stored_messages import stored
from turbopump.admin import Admin
from turbopump.client.selectors import by_hash
from turbopump.message import MessageQueue
from turbopump.spark.writing.deduplication import without_duplicates
from turbopump.spark.writing.row_encoder import STAMP_PROPERTY
from turbopump.wire.record import MessageView

STAMP_PARTS = 4


@pytest.fixture
def topic() -> str:
    return f"sink-{uuid.uuid4().hex}"


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[int]:
    """How many rows the sink gets at a time."""
    setting = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = str(spark.conf.get(setting))
    spark.conf.set(setting, "100")
    yield 100
    spark.conf.set(setting, before)


def writer(rows: DataFrame, nameserver: str, topic: str | None = None) -> DataFrameWriter:
    given = rows.write.format("rocketmq").mode("append").option("nameserver", nameserver)
    return given if topic is None else given.option("topic", topic)


def bodies(messages: list[MessageView]) -> Counter[bytes]:
    return Counter(message.body for message in messages)


def stamps(messages: list[MessageView]) -> Counter[str]:
    return Counter(message.properties[STAMP_PROPERTY] for message in messages)


# --- the parts of a message -----------------------------------------------------------------------


def test_all_columns_arrive(spark: SparkSession, broker: Standalone, topic: str) -> None:
    rows = spark.sql(
        f"""select '{topic}' topic, cast(concat('body ', id) as binary) body,
        if(id = 0, null, 'created') tags, if(id = 0, null, concat('k', id, ' other')) keys,
        if(id = 0, null, map('shop', 'berlin', 'n', cast(id as string))) properties,
        cast(if(id = 0, null, 0) as int) delayLevel, cast(if(id = 0, null, id % 4) as int) queueId
        from range(40)"""
    )
    writer(rows, broker.nameserver).save()
    found = stored(broker.nameserver, topic)
    assert bodies(found) == Counter(f"body {n}".encode() for n in range(40))
    by_body = {message.body.decode(): message for message in found}
    first = by_body["body 0"]
    assert first.tags is None
    assert first.keys == [first.properties[STAMP_PROPERTY]]
    assert "shop" not in first.properties
    for number in range(1, 40):
        message = by_body[f"body {number}"]
        assert message.tags == "created"
        assert message.keys == [f"k{number}", "other", message.properties[STAMP_PROPERTY]]
        assert message.properties["shop"] == "berlin"
        assert message.properties["n"] == str(number)
        assert message.queue_id == number % 4
    assert set(stamps(found).values()) == {1}
    assert {len(stamp.split("/")) for stamp in stamps(found)} == {STAMP_PARTS}


def test_option_outranks_column_and_texts_are_bodies(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    rows = spark.sql(
        "select 'elsewhere' topic, concat('grün ', id) body, array('a', cast(id as string)) keys "
        "from range(3)"
    )
    writer(rows, broker.nameserver, topic).option("stamp", "false").save()
    found = stored(broker.nameserver, topic)
    assert {message.body.decode(): message.keys for message in found} == {
        f"grün {n}": ["a", str(n)] for n in range(3)
    }
    assert all(STAMP_PROPERTY not in message.properties for message in found)


def test_delayed_compressed_and_plain_messages_of_many_topics(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    """None of them is blocked by the others; the delayed ones arrive when they are due."""
    rows = spark.sql(
        f"""select concat('{topic}-', id % 3) topic,
        if(id % 10 = 0, repeat('x', 10000), cast(id as string)) body, id % 2 delayLevel
        from range(60)"""
    )
    writer(rows, broker.nameserver).option("stamp", "property").save()
    found: list[MessageView] = []
    while len(found) < 60:
        found = [m for n in range(3) for m in stored(broker.nameserver, f"{topic}-{n}")]
    large = [message for message in found if len(message.body) == 10000]
    assert len(large) == 6
    assert all(message.body_length < 1000 for message in large)
    assert set(stamps(found).values()) == {1}
    assert all(not message.keys for message in found)


# --- order ----------------------------------------------------------------------------------------


def test_rows_of_a_sharding_key_keep_their_order(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    rows = spark.sql(
        "select cast(id as string) body, concat('customer-', id % 17) shardingKey from range(5000)"
    ).coalesce(1)
    writer(rows, broker.nameserver, topic).option("batchSize", "50").save()
    found = stored(broker.nameserver, topic)
    assert len(found) == 5000
    queues = [MessageQueue(topic, "", number) for number in range(4)]
    order: dict[str, list[int]] = defaultdict(list)
    for message in found:
        key = f"customer-{int(message.body) % 17}"
        assert message.queue_id == by_hash(key)(queues).queue_id
        order[key].append(int(message.body))
    assert all(numbers == sorted(numbers) for numbers in order.values())


def test_rows_of_a_queue_keep_their_order(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    rows = spark.sql("select cast(id as string) body, id % 4 queueId from range(3000)").coalesce(1)
    writer(rows, broker.nameserver, topic).option("batchSize", "64").save()
    found = stored(broker.nameserver, topic)
    for queue_id in range(4):
        numbers = [int(message.body) for message in found if message.queue_id == queue_id]
        assert numbers == list(range(queue_id, 3000, 4))


# --- rejected writes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("select", "options", "words"),
    [
        (
            "'x' b, 1 tags",
            {},
            ["body is missing", "topic is missing", "'b' is unknown", "tags is int"],
        ),
        ("'x' body, 1 queueId, 'a' shardingKey", {"topic": "t"}, ["both choose the queue"]),
        ("'x' body", {"topic": "t", "shard": "1"}, ["no option 'shard'", "maxInFlight"]),
        (
            "'x' body",
            {"topic": "t", "batchsize": "none"},
            ["batchSize must be a whole number, got 'none'"],
        ),
        ("'x' body", {"topic": "a topic"}, ["got 'a topic'"]),
    ],
)
def test_the_driver_rejects_invalid_writes(
    spark: SparkSession, select: str, options: dict[str, str], words: list[str]
) -> None:
    rows = spark.sql(f"select {select}")
    with pytest.raises(Exception, match="InvalidArgument") as raised:
        writer(rows, "127.0.0.1:1").options(**options).save()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("select", "column", "words"),
    [
        ("if(id = 7, null, 'x') body", "body", "null"),
        ("if(id = 7, '', 'x') body", "body", "bytes, got 0"),
        ("if(id = 7, repeat('x', 5000), 'x') body", "body", "bytes, got 5000"),
        ("'x' body, if(id = 7, 'a\\u0001', 'x') tags", "tags", "0x01"),
        ("'x' body, map(if(id = 7, 'KEYS', 'x'), 'y') properties", "properties", "reserved"),
        ("'x' body, map('SPARK_ROW', 'y') properties", "properties", "SPARK_ROW"),
        ("'x' body, if(id = 7, 99, 0) queueId", "queueId", "queue 99"),
    ],
)
def test_task_names_row_and_column(
    spark: SparkSession, broker: Standalone, topic: str, select: str, column: str, words: str
) -> None:
    rows = spark.sql(f"select {select} from range(10)").coalesce(1)
    row = 0 if "'SPARK_ROW'" in select else 7
    with pytest.raises(Exception, match=f"row {row} of partition 0, column {column}: .*{words}"):
        writer(rows, broker.nameserver, topic).option("bodyBytesMax", "4096").save()


def test_reserved_properties_can_be_dropped(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    rows = spark.sql(
        "select 'x' body, map('KEYS', 'old', 'SPARK_ROW', 'old', 'shop', 'berlin') properties"
    )
    writer(rows, broker.nameserver, topic).option("reservedProperties", "drop").save()
    (message,) = stored(broker.nameserver, topic)
    assert message.properties["shop"] == "berlin"
    assert message.keys == [message.properties[STAMP_PROPERTY]]
    assert message.properties[STAMP_PROPERTY] != "old"


def test_a_failed_send_fails_the_job_with_the_brokers_message(
    spark: SparkSession, topic: str, tmp_path: Path
) -> None:
    rows = spark.sql("select repeat('x', 3000) body from range(10)").coalesce(1)
    with standalone(tmp_path, {"maxMessageSize": "2000"}) as small:
        with pytest.raises(Exception, match=r"of partition 0 could not be sent.*code 13: \w+"):
            writer(rows, small.nameserver, topic).save()
        small.kill()
        with pytest.raises(Exception, match=r"of partition 0 could not be sent to .*refused"):
            writer(rows, small.nameserver, topic).option("retries", "1").save()


def test_topic_without_permission_fails_the_job(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    with Admin(broker.nameserver) as admin:
        admin.topics.create(topic, queues=4, permission="r")
    rows = spark.sql("select 'x' body")
    with pytest.raises(Exception, match=f"row 0 of partition 0 could not be sent to {topic}: .*"):
        writer(rows, broker.nameserver, topic).option("retries", "1").save()
    assert not stored(broker.nameserver, topic)


# --- retried tasks and queries --------------------------------------------------------------------


def test_duplicates_of_a_retried_task_are_recognised(
    spark: SparkSession, broker: Standalone, topic: str, small_batches: int
) -> None:
    def spoiled_on_first_try(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Let row 350 have no body in the first attempt of a task."""
        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            texts = batch.column("body").to_pylist()
            if context.attemptNumber() == 0 and "350" in texts:
                texts[texts.index("350")] = None
            yield pa.record_batch([pa.array(texts, pa.string())], names=["body"])

    rows = spark.sql("select cast(id as string) body from range(1000)").coalesce(1)
    spoiled = rows.mapInArrow(spoiled_on_first_try, "body string")
    # With one send at a time, two are certainly stored before the fourth batch is examined.
    options = {"batchSize": str(small_batches), "maxInFlight": "1"}
    writer(spoiled, broker.nameserver, topic).options(**options).save()
    found = stored(broker.nameserver, topic)
    assert 1200 <= len(found) <= 1400
    assert set(bodies(found)) == {str(n).encode() for n in range(1000)}
    assert len(stamps(found)) == 1000
    by_stamp = defaultdict(set)
    for message in found:
        by_stamp[message.properties[STAMP_PROPERTY]].add(message.body)
    assert all(len(texts) == 1 for texts in by_stamp.values())
    once = without_duplicates(as_rows(spark, found))
    assert sorted(int(row.body) for row in once.collect()) == list(range(1000))


def test_write_id_makes_repeated_writes_recognisable(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    rows = spark.sql("select cast(id as string) body from range(10)").coalesce(1)
    for write_id in ("monday", "monday", "tuesday"):
        writer(rows, broker.nameserver, topic).option("writeId", write_id).save()
    found = stored(broker.nameserver, topic)
    assert sorted(stamps(found).values()) == [1] * 10 + [2] * 10
    assert f"monday/0/0/{9}" in stamps(found)


def lines_to_topic(
    spark: SparkSession, folder: Path, checkpoint: Path, nameserver: str, topic: str
) -> StreamingQuery:
    return (
        spark.readStream.text(str(folder))
        .selectExpr("value as body")
        .writeStream.format("rocketmq")
        .option("nameserver", nameserver)
        .option("topic", topic)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def test_a_stream_resumes_and_repeats_the_uncommitted_batch(
    spark: SparkSession, broker: Standalone, topic: str, tmp_path: Path
) -> None:
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    folder.mkdir()
    for run in range(2):
        (folder / f"{run}.txt").write_text("".join(f"{run}-{n}\n" for n in range(200)))
        lines_to_topic(spark, folder, checkpoint, broker.nameserver, topic).awaitTermination()
    expected = Counter(f"{run}-{n}".encode() for run in range(2) for n in range(200))
    assert bodies(stored(broker.nameserver, topic)) == expected
    # As if the driver had died between the last send and Spark's own record of it.
    for note in (checkpoint / "commits").glob("*1*"):
        note.unlink()
    lines_to_topic(spark, folder, checkpoint, broker.nameserver, topic).awaitTermination()
    found = stored(broker.nameserver, topic)
    assert len(found) == 600
    assert len(stamps(found)) == 400
    query_id = json.loads((checkpoint / "metadata").read_text())["id"]
    assert {stamp.rsplit("/", 2)[0] for stamp in stamps(found)} == {
        f"{query_id}/0",
        f"{query_id}/1",
    }


def test_a_failed_send_ends_the_stream_with_the_brokers_message(
    spark: SparkSession, topic: str, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "0.txt").write_text("x" * 3000)
    with standalone(tmp_path / "broker", {"maxMessageSize": "2000"}) as small:
        query = lines_to_topic(spark, folder, tmp_path / "c", small.nameserver, topic)
        with pytest.raises(Exception, match=r"could not be sent.*code 13"):
            query.awaitTermination()


# --- reading without duplicates -------------------------------------------------------------------

READ = (
    "topic string, broker string, queueId int, queueOffset long, properties map<string,string>, "
    "body string, storeTimestamp timestamp"
)


def as_rows(spark: SparkSession, messages: list[MessageView]) -> DataFrame:
    rows = [
        (
            message.topic,
            "broker",
            message.queue_id,
            int(message.queue_offset),
            message.properties,
            message.body.decode(),
            datetime.fromtimestamp(message.store_timestamp_ms / 1000, UTC),
        )
        for message in messages
    ]
    return spark.createDataFrame(rows, READ)


def test_workers_exclude_permanent_objects_from_garbage_collection(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    def set_aside(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"objects": [gc.get_freeze_count()] * batch.num_rows})

    # Three tasks for two workers: one of them runs its second.
    for _ in range(3):
        writer(spark.sql("select 'x' body"), broker.nameserver, topic).save()
    counts = spark.range(0, 2, 1, 2).mapInArrow(set_aside, "objects long").toArrow()
    assert counts.column("objects").to_numpy().max() > 10_000
