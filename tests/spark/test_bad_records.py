"""Records that cannot be decoded, on real Spark and a real broker: fail, null, skip, deadLetter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

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
from turbopump.spark import SparkConsumer
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
    """Both records are there, once each, with their bytes as they are in the store."""
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
    # Nobody inflates what nobody reads, but checksums are always compared.
    assert read(spark, options, "skip", columns="queueOffset").count() == COUNT - 1

    dead = f"{topic}-bad"
    sent = read(spark, options, "deadLetter", deadLetterTopic=dead)
    assert numbers(sent.collect()) == GOOD
    require_letters(broker, dead)
    # Repeated, as a task that failed is: what is there is not sent again.
    shown = read(
        spark, options, "deadLetter", deadLetterTopic=dead, columns="queueOffset,body,decodeError"
    )
    assert {row.queueOffset for row in shown.collect() if row.decodeError} == set(BAD)
    require_letters(broker, dead)


def test_a_stream(
    spark: SparkSession, broker: Standalone, options: dict[str, str], tmp_path: Path
) -> None:
    group = f"g-{options['topic']}"

    def run(mode: str) -> list[tuple[int, int, int]]:
        source = {"group": group, "startingOffsets": "earliest", "onBadRecord": mode}
        if mode == "deadLetter":
            source["columns"] = "queueOffset,body,decodeError"
        frame = spark.readStream.format("rocketmq").options(**options, **source).load()
        errors = F.count("decodeError") if "decodeError" in frame.columns else F.lit(0)
        frame = frame.observe("read", F.count("*"), F.count("body"), F.max(F.lit(0)) + errors)
        writer = frame.writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / mode)).start()
        query.awaitTermination()
        return [tuple(each.observedMetrics["read"]) for each in query.recentProgress]

    with pytest.raises(PySparkException, match="set onBadRecord to null, skip or deadLetter"):
        run("fail")
    # The checkpoint of a query that failed is read on with another mode.
    (tmp_path / "fail").rename(tmp_path / "skip")
    assert (len(GOOD), len(GOOD), 0) in run("skip")
    assert (COUNT, len(GOOD), len(BAD)) in run("deadLetter")
    require_letters(broker, dead_letter_topic(group))


def test_a_consumer(
    spark: SparkSession, broker: Standalone, options: dict[str, str], tmp_path: Path
) -> None:
    def consumer(group: str, bad: str, **more: Any) -> SparkConsumer:
        return SparkConsumer(
            group,
            more.pop("handler", lambda message: bool(message.body)),
            spark=spark,
            nameserver=broker.nameserver,
            topics={options["topic"]: "*"},
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
    report = consumer(group, "deadLetter").run(available_now=True)
    assert (report.handled, report.bad, report.dead) == (len(GOOD), len(BAD), 0)
    assert "2 bad records" in str(report)
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

    whole = tmp_path / "null"
    report = archive(spark, whole, {**options, "onBadRecord": "null"})
    assert (report.rows, report.bad_records) == (COUNT, len(BAD))
    kept = read_archive(spark, whole)
    assert kept.where("decodeError IS NOT NULL").count() == len(BAD)
    target = f"{options['topic']}-copy"
    sent = replay(spark, whole, {"nameserver": broker.nameserver}, {"*": target})
    assert sent.sent == len(GOOD)
