"""Records that cannot be decoded, on real Spark and a real broker: fail, null, skip, deadLetter."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
from pyspark.sql.streaming.query import StreamingQuery

from bad_records import (
    COUNT,
    DAMAGED,
    GOOD,
    NOT_INFLATING,
    fill_with_bad,
    send_not_inflating,
)
from servers import Standalone
from source_topics import fresh_topic
from stored_messages import stored
from turbopump.errors import InvalidArgument, SparkError
from turbopump.spark import SparkConsumer, counted_stream, lag
from turbopump.spark.pipelines import archive, read_archive, redrive, replay
from turbopump.spark.records.schema import COLUMNS
from turbopump.wire.names import dead_letter_topic
from turbopump.wire.record import decode_record

BAD = {NOT_INFLATING: "not valid ZLIB", DAMAGED: "does not match its checksum"}


@pytest.fixture(scope="module")
def topic(broker: Standalone) -> str:
    store = broker.log.parent / "store"
    return fill_with_bad(broker.nameserver, store, fresh_topic())


@pytest.fixture
def options(broker: Standalone, topic: str) -> dict[str, str]:
    return {"nameserver": broker.nameserver, "topic": topic}


def read(spark: SparkSession, options: dict[str, str], mode: str, **more: str) -> DataFrame:
    return spark.read.format("rocketmq").options(**options, onBadRecord=mode, **more).load()


def numbers(rows: list[Row]) -> list[int]:
    return [int(bytes(row.body)) for row in sorted(rows, key=lambda row: row.queueOffset)]


def letters(broker: Standalone, topic: str) -> list[tuple[str, str, bytes]]:
    """Return where each dead letter came from, why, and what it was."""
    found = []
    for letter in stored(broker.nameserver, topic):
        raw = decode_record(letter.body)
        found.append(
            (
                letter.properties["ORIGIN_QUEUE_OFFSET"],
                letter.properties["DECODE_ERROR"],
                raw.stored_body,
            )
        )
    return sorted(found)


def require_letters(broker: Standalone, topic: str) -> None:
    """Both records exist, once each, with their bytes as they are in the store."""
    found = letters(broker, topic)
    assert [int(offset) for offset, _, _ in found] == [NOT_INFLATING, DAMAGED]
    assert all(BAD[int(offset)] in reason for offset, reason, _ in found)
    assert [body for _, _, body in found] == [b"not compressed", bytes([ord("5") ^ 0x55])]


def test_a_batch(spark: SparkSession, broker: Standalone, options: dict[str, str]) -> None:
    topic = options["topic"]
    plain = spark.read.format("rocketmq").options(**options).load()
    assert plain.columns == list(COLUMNS)
    place = rf"topic {topic}, broker .*, queue 0, offset ({NOT_INFLATING}|{DAMAGED}): body"
    with pytest.raises(PySparkException, match=place + ".*set onBadRecord to null, skip or dead"):
        plain.collect()

    rows = read(spark, options, "null")
    assert rows.columns == [*COLUMNS, "decodeError"]
    by_offset = {row.queueOffset: row for row in rows.collect()}
    assert sorted(by_offset) == list(range(COUNT))
    for offset, row in by_offset.items():
        assert (row.body is None) == (offset in BAD)
        assert BAD.get(offset, "") in (row.decodeError or "")
        assert (row.decodeError is None) == (offset not in BAD)
    assert by_offset[DAMAGED]["keys"] == f"k{DAMAGED}", "the rest of it can be read"

    assert numbers(read(spark, options, "skip").collect()) == GOOD
    # Bodies that are not read are not inflated, but checksums are always compared.
    assert read(spark, options, "skip", columns="queueOffset").count() == COUNT - 1

    dead = f"{topic}-bad"
    sent = read(spark, options, "deadLetter", deadLetterTopic=dead)
    assert numbers(sent.collect()) == GOOD
    require_letters(broker, dead)
    # Repeated, as a failed task is: letters that already exist are not sent again.
    shown = read(
        spark, options, "deadLetter", deadLetterTopic=dead, columns="queueOffset,body,decodeError"
    )
    assert {row.queueOffset for row in shown.collect() if row.decodeError} == set(BAD)
    require_letters(broker, dead)


def test_a_stream(
    spark: SparkSession, broker: Standalone, options: dict[str, str], tmp_path: Path
) -> None:
    topic = options["topic"]

    def source(name: str, mode: str, **more: str) -> dict[str, str]:
        return {
            **options,
            "group": f"{name}-{topic}",
            "startingOffsets": "earliest",
            "onBadRecord": mode,
            **more,
        }

    def plain(name: str, mode: str, **more: str) -> DataFrame:
        return spark.readStream.format("rocketmq").options(**source(name, mode, **more)).load()

    def observed(frame: DataFrame, name: str) -> DataFrame:
        errors = F.count("decodeError") if "decodeError" in frame.columns else F.sum(F.lit(0))
        return frame.observe(name, F.count("*"), F.count("body"), errors).select("body")

    def run(frame: DataFrame, checkpoint: str) -> StreamingQuery:
        writer = frame.writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / checkpoint)).start()
        query.awaitTermination()
        return query

    with pytest.raises(PySparkException, match="set onBadRecord to null, skip or deadLetter"):
        run(plain("one", "fail"), "one")
    left_out, as_rows = (len(GOOD), len(GOOD), 0), (COUNT, len(GOOD), len(BAD))
    # The checkpoint of a failed query is resumed with another mode.
    counted = counted_stream(spark, source("one", "skip"))
    assert counted.columns == list(COLUMNS)
    query = run(observed(counted, "skip"), "one")
    assert left_out in counts(query, "skip")
    assert (COUNT, len(BAD)) in counts(query, "turbopump")

    shown = {"columns": "queueOffset,body,decodeError"}
    dead = source("counted", "deadLetter", **shown)
    frames = {
        "null": plain("null", "null"),
        "skip": plain("skip", "skip"),
        "dead": plain("dead", "deadLetter"),
        "shown": plain("shown", "deadLetter", **shown),
        "counted": counted_stream(spark, dead, metrics="bad"),
    }
    # One query, as starting each takes seconds.
    query = run(reduce(DataFrame.union, (observed(f, name) for name, f in frames.items())), "all")
    expected = {
        name: as_rows if "decodeError" in f.columns else left_out for name, f in frames.items()
    }
    assert list(expected.values()) == [as_rows, left_out, left_out, as_rows, as_rows]
    assert expected == {name: max(counts(query, name)) for name in frames}
    assert (COUNT, len(BAD)) in counts(query, "bad")
    for name in ("dead", "shown", "counted"):
        require_letters(broker, dead_letter_topic(f"{name}-{topic}"))


def counts(query: StreamingQuery, metrics: str) -> list[tuple[int, ...]]:
    return [tuple(each.observedMetrics[metrics]) for each in query.recentProgress]


def test_a_consumer(
    spark: SparkSession, broker: Standalone, options: dict[str, str], tmp_path: Path
) -> None:
    def consumer(group: str, bad: str, **more: Any) -> SparkConsumer:
        return SparkConsumer(
            group,
            more.pop("handler", lambda message: bool(message.body)),
            spark=spark,
            nameserver=broker.nameserver,
            subscriptions={options["topic"]: "*"},
            checkpoint=tmp_path / group,
            start_from="first",
            options={"onBadRecord": bad},
            **more,
        )

    with pytest.raises(InvalidArgument, match="onBadRecord=null needs mode pandas or arrow"):
        consumer("null-rows", "null")
    group = f"c-{options['topic']}"
    with pytest.raises(PySparkException, match="set onBadRecord to null, skip or deadLetter"):
        consumer(f"{group}-fail", "fail").run(available_now=True)
    sending = consumer(group, "deadLetter").start(available_now=True)
    skipping = consumer(f"{group}-skip", "skip").start(available_now=True)
    for run in (sending, skipping):
        run.await_termination()
        report = run.report()
        assert (report.handled, report.bad, report.dead) == (len(GOOD), len(BAD), 0)
        assert "2 bad records" in str(report)
    assert sending.query.name == f"{options['topic']} (group {group})"
    assert lag(sending.query)[0].bad == len(BAD)
    require_letters(broker, dead_letter_topic(group))
    # Neither these letters nor one that does not inflate itself stop a redrive, or are sent.
    send_not_inflating(broker.nameserver, dead_letter_topic(group))
    redriven = redrive(spark, group, broker.nameserver)
    assert (redriven.letters, redriven.sent) == (len(BAD) + 1, 0)
    assert sum(each.origin_unknown for each in redriven.topics) == len(BAD) + 1

    def agree(batch: Any) -> bool:
        errors, bodies = batch.column("decodeError"), batch.column("body")
        return bool(errors.null_count == len(bodies) - bodies.null_count)

    report = consumer(f"{group}-null", "null", mode="arrow", handler=agree).run(available_now=True)
    assert (report.handled, report.bad) == (COUNT, len(BAD))


def test_an_archive(
    spark: SparkSession, broker: Standalone, options: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "skip"
    with pytest.raises(SparkError, match="set onBadRecord to null, skip or deadLetter"):
        archive(spark, path, options)
    report = archive(spark, path, {**options, "onBadRecord": "skip"})
    assert (report.rows, report.bad_records) == (len(GOOD), len(BAD))
    rows = read_archive(spark, path)
    assert "decodeError" not in rows.columns
    assert numbers(rows.collect()) == GOOD

    dead = {"onBadRecord": "deadLetter", "deadLetterTopic": f"{options['topic']}-dead"}
    report = archive(spark, tmp_path / "dead", {**options, **dead})
    assert (report.rows, report.bad_records) == (len(GOOD), len(BAD))
    assert numbers(read_archive(spark, tmp_path / "dead").collect()) == GOOD
    require_letters(broker, dead["deadLetterTopic"])

    whole = tmp_path / "null"
    report = archive(spark, whole, {**options, "onBadRecord": "null"})
    assert (report.rows, report.bad_records) == (COUNT, len(BAD))
    kept = read_archive(spark, whole)
    assert kept.where("decodeError IS NOT NULL").count() == len(BAD)
    target = f"{options['topic']}-copy"
    sent = replay(spark, whole, {"nameserver": broker.nameserver}, {"*": target})
    assert sent.sent == len(GOOD)
