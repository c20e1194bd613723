"""Reading topics as tables, on real Spark and a real broker."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from servers import Standalone
from source_topics import fill, fresh_topic, made_topic
from stored_messages import stored
from turbopump.client.blocking import Producer, PullConsumer
from turbopump.message import Message
from turbopump.spark.records.schema import COLUMNS, spark_schema

COUNT = 1200


@pytest.fixture(scope="module")
def topic(broker: Standalone) -> str:
    """A topic with two queues, sent in two halves with a pause between them."""
    name = made_topic(broker.nameserver, fresh_topic(), queues=2)
    fill(broker.nameserver, name, range(COUNT // 2))
    first = stored(broker.nameserver, name)
    newest_ms = max(message.store_timestamp_ms for message in first)
    while time.time() * 1000 < newest_ms + 5:
        time.sleep(0.001)
    fill(broker.nameserver, name, range(COUNT // 2, COUNT))
    return name


@pytest.fixture(scope="module")
def broker_name(broker: Standalone, topic: str) -> str:
    with PullConsumer("tests", nameserver=broker.nameserver) as consumer:
        return consumer.queues(topic)[0].broker


def read(spark: SparkSession, broker: Standalone, **options: str) -> DataFrame:
    return (
        spark.read.format("rocketmq")
        .option("nameserver", broker.nameserver)
        .options(**options)
        .load()
    )


def numbers(rows: DataFrame) -> list[int]:
    """Return which messages were read, in order of their numbers."""
    found = rows.select(f.col("body").cast("string").cast("int").alias("n"))
    return sorted(row.n for row in found.collect())


def test_the_broker_filters_by_sql(spark: SparkSession, broker: Standalone) -> None:
    name = made_topic(broker.nameserver, fresh_topic(), queues=2)
    with Producer("tests", nameserver=broker.nameserver) as producer:
        for number in range(50):
            producer.send(Message(name, b"%d" % number, properties={"n": str(number)}))
    rows = read(spark, broker, topic=name, sql="n BETWEEN 10 AND 12 OR n = 40")
    assert numbers(rows) == [10, 11, 12, 40]


def test_every_column_equals_what_the_client_sees(
    spark: SparkSession, broker: Standalone, topic: str, broker_name: str
) -> None:
    rows = read(spark, broker, topic=topic)
    assert rows.schema == spark_schema()
    by_place = {(row.queueId, row.queueOffset): row for row in rows.collect()}
    messages = stored(broker.nameserver, topic)
    assert len(by_place) == len(messages) == COUNT
    for message in messages:
        row = by_place[message.queue_id, message.queue_offset]
        assert (row.topic, row.broker) == (topic, broker_name)
        assert bytes(row.body) == message.body
        assert (row.tags, row["keys"]) == (message.tags, message.properties["KEYS"])
        assert row.properties == message.properties
        assert row.msgId == message.message_id
        assert row.storeTimestamp.replace(tzinfo=UTC) == datetime.fromtimestamp(
            message.store_timestamp_ms / 1000, UTC
        )
        assert (row.size, row.sysFlag, row.reconsumeTimes) == (message.size, message.sys_flag, 0)


def test_columns_are_chosen_by_option_or_schema(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    chosen = read(spark, broker, topic=topic, columns="queueOffset,body")
    assert chosen.columns == ["queueOffset", "body"]
    assert numbers(chosen) == list(range(COUNT))
    without = read(spark, broker, topic=topic, includeProperties="false")
    assert without.columns == [name for name in COLUMNS if name != "properties"]
    schema = spark_schema(["tags", "queueId"])
    given = (
        spark.read.format("rocketmq")
        .schema(schema)
        .options(nameserver=broker.nameserver, topic=topic)
    )
    assert {row.tags for row in given.load().distinct().collect()} == {"a", "b", "c"}
    wrong = (
        spark.read.format("rocketmq")
        .schema("body string")
        .options(nameserver=broker.nameserver, topic=topic)
    )
    with pytest.raises(PySparkException, match="wrong type: body as string, expected body binary"):
        wrong.load().collect()


def test_a_read_starts_and_ends_at_the_given_positions(
    spark: SparkSession, broker: Standalone, topic: str, broker_name: str
) -> None:
    half_ms = max(
        message.store_timestamp_ms
        for message in stored(broker.nameserver, topic)
        if int(message.body) < COUNT // 2
    )
    moment = datetime.fromtimestamp((half_ms + 1) / 1000, UTC).isoformat()
    later = list(range(COUNT // 2, COUNT))
    earlier = list(range(COUNT // 2))
    assert numbers(read(spark, broker, topic=topic, startingOffsets=moment)) == later
    assert numbers(read(spark, broker, topic=topic, endingOffsets=str(half_ms + 1))) == earlier
    assert numbers(read(spark, broker, topic=topic, startingOffsets="2999-01-01")) == []
    explicit = json.dumps({topic: {broker_name: {"0": 10, "1": -1}}})
    end = json.dumps({topic: {"0": 15}})
    rows = read(spark, broker, topic=topic, startingOffsets=explicit, endingOffsets=end)
    places = sorted((row.queueId, row.queueOffset) for row in rows.collect())
    assert places == [(0, offset) for offset in range(10, 15)]


def test_messages_that_arrive_after_planning_are_not_in_the_batch(
    spark: SparkSession, broker: Standalone
) -> None:
    name = made_topic(broker.nameserver, fresh_topic(), queues=1)
    assert numbers(read(spark, broker, topic=name)) == []
    fill(broker.nameserver, name, range(60))
    rows = read(spark, broker, topic=name)
    assert rows.count() == 60
    fill(broker.nameserver, name, range(60, 80))
    assert rows.count() == 60
    assert read(spark, broker, topic=name).count() == 80


def test_the_broker_filters(spark: SparkSession, broker: Standalone, topic: str) -> None:
    wanted = [number for number in range(COUNT) if number % 3 != 1]
    assert numbers(read(spark, broker, topic=topic, tags="a || c")) == wanted
    with pytest.raises(PySparkException, match="option sql is 'number >': expected"):
        read(spark, broker, topic=topic, sql="number >").collect()


def test_ranges_are_split_and_answers_are_small(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    split = read(spark, broker, topic=topic, minPartitions="6", pullBatchSize="7")
    assert split.rdd.getNumPartitions() == 6
    assert numbers(split) == list(range(COUNT))
    capped = read(spark, broker, topic=topic, maxRecordsPerPartition="150", pullsInFlight="1")
    assert capped.rdd.getNumPartitions() == COUNT // 150
    assert numbers(capped) == list(range(COUNT))
    apart = read(spark, broker, topic=topic, partitionPerQueue="true", requestTimeout="8s")
    assert apart.rdd.getNumPartitions() == 2
    assert numbers(apart) == list(range(COUNT))


def test_several_topics_are_read_together(spark: SparkSession, broker: Standalone) -> None:
    prefix = fresh_topic()
    names = [made_topic(broker.nameserver, f"{prefix}-{end}", queues=2) for end in "xyz"]
    for start, name in enumerate(names):
        fill(broker.nameserver, name, range(start * 100, start * 100 + 100))
    assert numbers(read(spark, broker, topics=",".join(names[:2]))) == list(range(200))
    assert numbers(read(spark, broker, topicPattern=f"{prefix}-[yz]")) == list(range(100, 300))
    assigned = json.dumps({names[0]: [1]})
    assert numbers(read(spark, broker, assign=assigned)) == list(range(50, 100))


def test_names_lie_within_a_namespace(spark: SparkSession, broker: Standalone) -> None:
    name = fresh_topic()
    with Producer("tests", nameserver=broker.nameserver, namespace="staging") as producer:
        producer.send(Message(name, b"7"))
    rows = read(spark, broker, topic=name, namespace="staging").collect()
    assert [(row.topic, bytes(row.body)) for row in rows] == [(name, b"7")]
    assert stored(broker.nameserver, f"staging%{name}")


def test_invalid_options_are_reported_before_anything_is_read(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    with pytest.raises(PySparkException, match=r"did you mean startingOffsets\?"):
        read(spark, broker, topic=topic, startingOffset="earliest")
    with pytest.raises(PySparkException, match="is not known to the name servers"):
        read(spark, broker, topic="nobody-knows-it").collect()
    with pytest.raises(PySparkException, match="maxOffsetsPerTrigger is for streams only"):
        read(spark, broker, topic=topic, maxOffsetsPerTrigger="3").collect()
    with pytest.raises(PySparkException, match="ends at offset 600, got 9000"):
        read(spark, broker, topic=topic, endingOffsets=json.dumps({topic: {"0": 9000}})).collect()


@pytest.mark.usefixtures("filters_allowed")
def test_one_dataframe_answers_every_query_of_it(
    spark: SparkSession, broker: Standalone, topic: str
) -> None:
    """Spark keeps pushed filters for a DataFrame's later queries, so the source accepts none."""
    rows = read(spark, broker, topic=topic, columns="queueId,queueOffset,tags")
    assert rows.where("queueId = 1 and queueOffset < 10").count() == 10
    assert rows.count() == COUNT
    both = rows.where("queueOffset = 3").union(rows.where("queueOffset = 4"))
    assert both.count() == 4
    with pytest.raises(PySparkException, match=r"'pushFilters' .use startingOffsets"):
        read(spark, broker, topic=topic, pushFilters="true").count()
