"""Reading topics as streams, on real Spark and a real broker."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import StructType

import shells
from servers import Standalone, standalone
from source_topics import fill, fresh_topic, made_topic, wait_for
from turbopump.admin import Admin
from turbopump.spark import LagListener, SourceLag, lag
from turbopump.spark.query_lag import Spread, lag_of
from turbopump.spark.source import DefaultSource, StreamReader

PATIENCE_S = 120.0
DATA = Path(__file__).parents[1] / "data" / "spark"


class Collected:
    """What a query has returned, batch by batch; a repeated batch replaces its first attempt."""

    def __init__(self) -> None:
        self.batches: dict[int, list[int]] = {}

    def __call__(self, rows: DataFrame, batch: int) -> None:
        self.batches[batch] = [int(bytes(row.body)) for row in rows.select("body").collect()]

    @property
    def numbers(self) -> list[int]:
        return sorted(number for batch in self.batches.values() for number in batch)


def stream(spark: SparkSession, nameserver: str, **options: str) -> DataStreamReader:
    plain = {
        "nameserver": nameserver,
        "startingOffsets": "earliest",
        "discoveryInterval": "1s",
        "requestTimeout": "8s",
        "idleWait": "200ms",
    }
    return spark.readStream.format("rocketmq").options(**(plain | options))


def started(rows: DataFrame, into: Collected, checkpoint: Path) -> StreamingQuery:
    writer = rows.writeStream.foreachBatch(into).option("checkpointLocation", str(checkpoint))
    return writer.start()


def run_now(rows: DataFrame, into: Collected, checkpoint: Path) -> StreamingQuery:
    """Read what exists, and return the query when it has ended."""
    writer = rows.writeStream.foreachBatch(into).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(int(PATIENCE_S))
    return query


@pytest.fixture
def topic(broker: Standalone) -> str:
    return made_topic(broker.nameserver, fresh_topic(), queues=3)


def test_a_stream_resumes_from_its_checkpoint_within_its_limits(
    spark: SparkSession, broker: Standalone, topic: str, tmp_path: Path
) -> None:
    into = Collected()
    # One of the three queues stays empty.
    fill(broker.nameserver, topic, range(200), queues=2)
    options = {"topic": topic, "group": f"lag-of-{topic}", "maxOffsetsPerTrigger": "70"}
    rows = stream(spark, broker.nameserver, **options).load()
    reported: list[SourceLag] = []
    listener = LagListener(reported.append)
    spark.streams.addListener(listener)
    query = run_now(rows, into, tmp_path)
    assert into.numbers == list(range(200))
    assert [len(into.batches[batch]) for batch in sorted(into.batches)] == [0, 70, 70, 60]
    first = query.recentProgress[1]["sources"][0]
    assert ends(first["latestOffset"]) == [100, 100, 0], "the lag is reported"
    assert ends(first["endOffset"]) == [35, 35, 0]
    behind = [source for progress in query.recentProgress for source in lag_of(progress)]
    assert [each.offsets and each.offsets.max for each in behind] == [100, 65, 30, 0]
    assert [each.offsets_total for each in behind] == [200, 130, 60, 0]
    assert behind[0].seconds == Spread(0, 0, 0), "only the empty queue is known"
    assert behind[1].seconds is not None
    assert 0 == behind[1].seconds.min < behind[1].seconds.avg < behind[1].seconds.max < PATIENCE_S
    assert lag(query) == (behind[-1],)
    assert behind[-1].name == f"{topic} (group lag-of-{topic})"
    shells.wait_for(lambda: reported == behind, PATIENCE_S)
    spark.streams.removeListener(listener)
    run_now(rows, into, tmp_path)
    assert into.numbers == list(range(200)), "nothing is read twice"
    fill(broker.nameserver, topic, range(200, 300))
    run_now(rows, into, tmp_path)
    assert into.numbers == list(range(300))


def ends(offsets: Any) -> list[int]:
    """Return the offsets of the one topic and broker."""
    found = json.loads(offsets) if isinstance(offsets, str) else offsets
    # Marks of the last messages read are below the empty name.
    ((numbers,),) = (brokers.values() for topic, brokers in found.items() if topic)
    return [numbers[key] for key in sorted(numbers)]


@pytest.mark.parametrize("options", [{}, {"maxOffsetsPerTrigger": "10"}], ids=["all", "limited"])
def test_a_query_with_a_once_trigger_is_rejected(
    spark: SparkSession, broker: Standalone, topic: str, tmp_path: Path, options: dict[str, str]
) -> None:
    rows = stream(spark, broker.nameserver, topic=topic, **options).load()
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    with pytest.raises(StreamingQueryException, match=r"use trigger\(availableNow=True\)"):
        writer.trigger(once=True).start().awaitTermination()


@pytest.mark.parametrize(
    "options",
    [
        {"maxBytesPerTrigger": "5k", "tags": "a || b"},
        {"minOffsetsPerTrigger": "50", "maxTriggerDelay": "1s", "minPartitions": "4"},
    ],
)
def test_limits_of_other_kinds(
    spark: SparkSession, broker: Standalone, topic: str, tmp_path: Path, options: dict[str, str]
) -> None:
    into = Collected()
    fill(broker.nameserver, topic, range(120))
    run_now(stream(spark, broker.nameserver, topic=topic, **options).load(), into, tmp_path)
    wanted = [number for number in range(120) if "tags" not in options or number % 3 != 2]
    assert into.numbers == wanted
    if "maxBytesPerTrigger" in options:
        assert len([batch for batch in into.batches.values() if batch]) > 3


def test_a_running_stream_waits_until_there_is_enough(
    spark: SparkSession, broker: Standalone, topic: str, tmp_path: Path
) -> None:
    into = Collected()
    options = {"topic": topic, "minOffsetsPerTrigger": "50", "maxTriggerDelay": "1h"}
    query = started(stream(spark, broker.nameserver, **options).load(), into, tmp_path)
    try:
        wait_for(query, lambda: 0 in into.batches)
        for start in range(0, 60, 10):
            fill(broker.nameserver, topic, range(start, start + 10))
        wait_for(query, lambda: len(into.numbers) >= 50)
    finally:
        query.stop()
    assert len(into.batches[0]) == 0
    assert len(into.batches[1]) >= 50


def test_a_stream_continues_when_topics_are_deleted_and_queues_closed(
    spark: SparkSession, broker: Standalone, topic: str, tmp_path: Path
) -> None:
    into, gone = Collected(), made_topic(broker.nameserver, fresh_topic(), queues=1)
    fill(broker.nameserver, gone, range(10), queues=1)
    fill(broker.nameserver, topic, range(10, 20), queues=1)
    options = {"topics": f"{gone},{topic}", "failOnDataLoss": "false"}
    rows = stream(spark, broker.nameserver, **options).load()
    query = started(rows, into, tmp_path)
    try:
        wait_for(query, lambda: into.numbers == list(range(20)))
        with Admin(broker.nameserver) as admin:
            admin.topics.delete(gone)
            admin.topics.update(topic, queues=1, read_queues=1)
        wait_for(query, lambda: gone not in ends_now(query))
        fill(broker.nameserver, topic, range(20, 30), queues=1)
        wait_for(query, lambda: into.numbers == list(range(30)))
    finally:
        query.stop()
    fill(broker.nameserver, topic, range(30, 40), queues=1)
    run_now(stream(spark, broker.nameserver, topic=topic).load(), into, tmp_path)
    assert into.numbers == list(range(40))


def ends_now(query: StreamingQuery) -> str:
    progress = query.lastProgress
    assert progress is not None
    return str(progress["sources"][0]["endOffset"])


def test_new_messages_and_new_queues_are_followed(
    spark: SparkSession, broker: Standalone, topic: str, tmp_path: Path
) -> None:
    into = Collected()
    rows = stream(spark, broker.nameserver, topic=topic, startingOffsets="latest").load()
    fill(broker.nameserver, topic, range(1000, 1050))
    query = started(rows, into, tmp_path)
    try:
        wait_for(query, lambda: 0 in into.batches)
        fill(broker.nameserver, topic, range(50))
        wait_for(query, lambda: into.numbers == list(range(50)))
        with Admin(broker.nameserver) as admin:
            admin.topics.update(topic, queues=5)
        fill_new_queues(broker.nameserver, topic)
        wait_for(query, lambda: into.numbers == list(range(100)))
    finally:
        query.stop()


def fill_new_queues(nameserver: str, topic: str) -> None:
    """Send to the fourth and fifth queue, which exist once the broker has created them."""
    from turbopump.client.blocking import Producer
    from turbopump.message import Message

    with Producer("tests", nameserver=nameserver) as producer:
        for number in range(50, 100):
            producer.send(
                Message(topic, b"%d" % number), to=lambda queues: queues[3 + len(queues) % 2]
            )


def test_an_empty_topic_gives_an_empty_stream(
    spark: SparkSession, broker: Standalone, topic: str, tmp_path: Path
) -> None:
    into = Collected()
    rows = stream(spark, broker.nameserver, topic=topic, columns="body,queueOffset").load()
    run_now(rows, into, tmp_path)
    assert into.numbers == []
    with pytest.raises(StreamingQueryException, match="is not known to the name servers"):
        run_now(stream(spark, broker.nameserver, topic="nowhere").load(), into, tmp_path / "x")


# --- failures -------------------------------------------------------------------------------------


def test_topics_created_after_a_stream_started_without_any_are_read_completely(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    into, prefix = Collected(), fresh_topic()
    options = {"topicPattern": f"{prefix}.*", "startingOffsets": "latest"}
    run_now(stream(spark, broker.nameserver, **options).load(), into, tmp_path)
    name = made_topic(broker.nameserver, f"{prefix}-late", queues=2)
    fill(broker.nameserver, name, range(30))
    run_now(stream(spark, broker.nameserver, **options).load(), into, tmp_path)
    assert into.numbers == list(range(30))


def test_a_recreated_topic_is_read_completely(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    into, name = Collected(), made_topic(broker.nameserver, fresh_topic(), queues=1)
    options = {"topic": name, "failOnDataLoss": "false"}
    fill(broker.nameserver, name, range(50), queues=1)
    run_now(stream(spark, broker.nameserver, **options).load(), into, tmp_path)
    with Admin(broker.nameserver) as admin:
        admin.topics.delete(name)
    made_topic(broker.nameserver, name, queues=1)
    fill(broker.nameserver, name, range(50, 58), queues=1)
    run_now(stream(spark, broker.nameserver, **options).load(), into, tmp_path)
    assert into.numbers == list(range(58))


@pytest.mark.parametrize(("count", "is_repeated"), [(20, True), (8, True), (8, False)])
def test_messages_of_a_recreated_topic_are_never_mistaken_for_old_ones(
    spark: SparkSession, broker: Standalone, tmp_path: Path, count: int, *, is_repeated: bool
) -> None:
    """A failed batch is repeated without planning its end again; others are planned."""
    into, name = Collected(), made_topic(broker.nameserver, fresh_topic(), queues=1)
    rows = stream(spark, broker.nameserver, topic=name).load()
    fill(broker.nameserver, name, range(4), queues=1)
    run_now(rows, into, tmp_path)
    fill(broker.nameserver, name, range(4, 8), queues=1)

    def fail(_rows: DataFrame, _batch: int) -> None:
        raise RuntimeError("the sink is full")

    if is_repeated:
        writer = rows.writeStream.foreachBatch(fail).option("checkpointLocation", str(tmp_path))
        with pytest.raises(StreamingQueryException, match="the sink is full"):
            writer.trigger(availableNow=True).start().awaitTermination(int(PATIENCE_S))
    else:
        run_now(rows, into, tmp_path)
    before = into.numbers
    with Admin(broker.nameserver) as admin:
        admin.topics.delete(name)
    made_topic(broker.nameserver, name, queues=1)
    fill(broker.nameserver, name, range(100, 100 + count), queues=1)
    with pytest.raises(StreamingQueryException, match=r"was re-created: .*failOnDataLoss=false"):
        run_now(rows, into, tmp_path)
    assert into.numbers == before
    loose = stream(spark, broker.nameserver, topic=name, failOnDataLoss="false").load()
    run_now(loose, into, tmp_path)
    assert into.numbers == [*before, *range(100, 100 + count)]


def test_a_checkpoint_of_version_0_1_is_resumed(spark: SparkSession, tmp_path: Path) -> None:
    """It was killed before its third batch, messages 60 to 79, was committed."""
    into, name, checkpoint = Collected(), "checkpoint-0-1", tmp_path / "checkpoint"
    copytree(DATA / "checkpoint-0.1", checkpoint)
    with standalone(tmp_path / "broker", {"brokerName": "broker-a"}) as own:
        made_topic(own.nameserver, name, queues=2)
        for numbers in (range(60), range(60, 80), range(80, 90)):
            fill(own.nameserver, name, numbers, queues=2)
        rows = stream(spark, own.nameserver, topic=name).load()
        run_now(rows, into, checkpoint)
    assert into.batches[2] == list(range(60, 80))
    assert into.numbers == list(range(60, 90))
    noted = (checkpoint / "offsets" / "3").read_text().splitlines()[-1]
    assert ends(noted) == [80, 10]
    marks = json.loads(noted)[""][name]["broker-a"]
    assert marks.keys() == {"0", "1"}, "including the queue that had no new messages"


def test_a_worker_that_dies_in_the_middle_is_replaced(
    spark: SparkSession, broker: Standalone, topic: str, tmp_path: Path
) -> None:
    marker = str(tmp_path / "died")

    class DyingReader(StreamReader):
        def read(self, partition: Any) -> Iterator[Any]:
            for batch in super().read(partition):
                yield batch
                if not os.path.exists(marker):  # noqa: PTH110 - sent to the worker as it is
                    with open(marker, "w"):  # noqa: PTH123 - as above
                        pass
                    os.kill(os.getpid(), signal.SIGKILL)

    class Dying(DefaultSource):
        @classmethod
        def name(cls) -> str:
            return "rocketmq-dying"

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
            made = super().streamReader(schema)
            return DyingReader(made._options)  # type: ignore[attr-defined]

    spark.dataSource.register(Dying)
    into = Collected()
    fill(broker.nameserver, topic, range(300))
    rows = (
        spark.readStream.format("rocketmq-dying")
        .options(nameserver=broker.nameserver, topic=topic, startingOffsets="earliest")
        .load()
    )
    run_now(rows, into, tmp_path / "checkpoint")
    assert Path(marker).exists()
    assert Counter(into.numbers) == Counter(range(300))


def test_a_stream_survives_the_restart_of_its_broker(spark: SparkSession, tmp_path: Path) -> None:
    into = Collected()
    name = fresh_topic()
    with standalone(tmp_path / "broker") as first:
        fill(first.nameserver, made_topic(first.nameserver, name), range(100))
        query = started(
            stream(spark, first.nameserver, topic=name, group="survivor").load(),
            into,
            tmp_path / "checkpoint",
        )
        wait_for(query, lambda: into.numbers == list(range(100)))
        first.kill()
    try:
        with standalone(tmp_path / "broker", ports=first.ports) as second:
            fill(second.nameserver, name, range(100, 200))
            wait_for(query, lambda: into.numbers == list(range(200)))
    finally:
        query.stop()


SMALL_FILES = {"mappedFileSizeCommitLog": str(300 * 1024), "maxMessageSize": str(64 * 1024)}


def test_expired_messages_end_the_stream_or_are_skipped(
    spark: SparkSession, tmp_path: Path
) -> None:
    name, folder = fresh_topic(), tmp_path / "broker"
    with standalone(folder, SMALL_FILES) as first:
        fill(first.nameserver, made_topic(first.nameserver, name, queues=1), range(100))
        strict, lenient = Collected(), Collected()
        options = {"topic": name}
        run_now(stream(spark, first.nameserver, **options).load(), strict, tmp_path / "strict")
        loose = options | {"failOnDataLoss": "false"}
        run_now(stream(spark, first.nameserver, **loose).load(), lenient, tmp_path / "loose")
        fill(first.nameserver, name, range(100, 4000))
    # As a broker does with an expired file.
    min(folder.rglob("commitlog/*")).unlink()
    with standalone(folder, SMALL_FILES, ports=first.ports) as second:
        with pytest.raises(StreamingQueryException, match=r"expired before|are lost"):
            run_now(stream(spark, second.nameserver, **options).load(), strict, tmp_path / "strict")
        run_now(stream(spark, second.nameserver, **loose).load(), lenient, tmp_path / "loose")
    later = [number for number in lenient.numbers if number >= 100]
    assert later == list(range(later[0], 4000))
    assert later[0] > 200
