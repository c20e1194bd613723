"""In which order a replay sends rows, and when each is due: by the rows, not by their input order.

Stamps count rows: if their order were left to chance, a retried task would swap them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from turbopump.spark.clocks import CLOCK_MARGIN_MS
from turbopump.spark.pipelines.archive_replay import replay
from turbopump.spark.pipelines.progress import Step
from turbopump.spark.pipelines.replay_sender import DUE_MS, as_messages, in_order

BEGIN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
BEGIN_MS = round(BEGIN.timestamp() * 1000)
YEAR_MS = 365 * 24 * 3_600_000
SCHEMA = (
    "topic string, broker string, queueId int, queueOffset long, offsetMsgId string, body string, "
    "storeTimestamp timestamp, tags string, properties map<string,string>"
)


@dataclass(frozen=True, slots=True)
class Old:
    """An archived message; its time is after BEGIN."""

    body: str
    time_ms: int | None
    offset: int | None = None
    log_place: int | str | None = None
    queue_id: int | None = 0
    broker: str | None = "a"
    host: str = "7F00000100002A9F"
    topic: str = "old"
    tags: str | None = None
    own: str | None = None

    def row(self) -> tuple[object, ...]:
        place = self.log_place
        if isinstance(place, int):
            place = f"{self.host}{place:016X}"
        stored = None if self.time_ms is None else BEGIN + timedelta(milliseconds=self.time_ms)
        own = {} if self.own is None else {"own": self.own}
        named = (self.topic, self.broker, self.queue_id, self.offset, place, self.body, stored)
        return (*named, self.tags, own)


def sent(frame: DataFrame) -> list[tuple[str, int]]:
    """Return bodies in their order, and when they are due."""
    found = in_order(as_messages(frame, F.lit("new"), {}, 1)).collect()
    return [(row["body"], row[DUE_MS] - BEGIN_MS) for row in found]


def replayed(spark: SparkSession, messages: Sequence[Old], *without: str) -> list[tuple[str, int]]:
    """The same for rows in one input order and in the reverse one; the results must be equal."""
    one, other = (
        sent(
            spark.createDataFrame([each.row() for each in some], SCHEMA).coalesce(1).drop(*without)
        )
        for some in (messages, messages[::-1])
    )
    assert one == other, "the order is not that of the input"
    return one


def as_it_was(messages: Sequence[Old]) -> list[tuple[str, int]]:
    return [(each.body, each.time_ms or 0) for each in messages]


def two_lives(apart_ms: int) -> list[Old]:
    """A topic that was deleted and re-created: offsets restart at 0, the broker's log continues."""
    first = [Old(f"first-{n}", 100 * n, n, 1000 + n) for n in range(5)]
    return first + [Old(f"second-{n}", apart_ms + 100 * n, n, 2000 + n) for n in range(4)]


@pytest.mark.parametrize("apart_ms", [1000, 2 * CLOCK_MARGIN_MS], ids=["seconds", "hours"])
@pytest.mark.parametrize("without", [(), ("offsetMsgId",)], ids=["ids", "no ids"])
def test_generations_of_a_recreated_topic_are_sent_one_after_the_other(
    spark: SparkSession, apart_ms: int, without: tuple[str, ...]
) -> None:
    messages = two_lives(apart_ms)
    assert replayed(spark, messages, *without) == as_it_was(messages)


def test_generations_are_distinguished_even_in_filtered_rows(spark: SparkSession) -> None:
    messages = two_lives(1000)
    messages = messages[0:5:2] + messages[6::2]
    assert replayed(spark, messages) == as_it_was(messages)


def test_brokers_of_two_clusters_may_have_the_same_name(spark: SparkSession) -> None:
    hosts = ("0A00000100002A9F", "0A00000200002A9F")
    messages = [
        Old(f"{host}-{n}", 100 * n + 10_000 * number, n, n * 300 + number, host=host)
        for number, host in enumerate(hosts)
        for n in range(4)
    ]
    assert replayed(spark, messages) == as_it_was(messages)


@pytest.mark.parametrize("back_ms", [500, CLOCK_MARGIN_MS - 2])
@pytest.mark.parametrize("without", [(), ("offsetMsgId",)], ids=["ids", "no ids"])
def test_a_queue_keeps_its_order_although_its_clock_was_set_back(
    spark: SparkSession, back_ms: int, without: tuple[str, ...]
) -> None:
    """By steps, of which the largest sum is less than the margin."""
    times_ms = [0, 1000, 1000 - back_ms // 2, 1001 - back_ms, 1500 - back_ms, 1001, 2000]
    messages = [Old(str(n), time_ms, n, 1000 + n) for n, time_ms in enumerate(times_ms)]
    dues_ms = [0, 1000, 1000, 1000, 1000, 1001, 2000]
    expected = list(zip("0123456", dues_ms, strict=True))
    assert replayed(spark, messages, *without) == expected


def test_one_time_in_the_future_delays_no_other_message(spark: SparkSession) -> None:
    messages = [Old(str(n), 1000 * n, n, n) for n in range(5)]
    messages[1] = Old("1", YEAR_MS, 1, 1)
    expected = [("0", 0), ("2", 2000), ("3", 3000), ("4", 4000), ("1", YEAR_MS)]
    assert replayed(spark, messages) == expected


@pytest.mark.parametrize("without", [(), ("offsetMsgId",)], ids=["ids", "no ids"])
def test_a_message_without_a_time_is_due_with_the_one_before_it(
    spark: SparkSession, without: tuple[str, ...]
) -> None:
    messages = [Old(str(n), None if n == 2 else 1000 * n, n, n) for n in range(4)]
    expected = [("0", 0), ("1", 1000), ("2", 1000), ("3", 3000)]
    assert replayed(spark, messages, *without) == expected


def test_offsets_may_be_texts(spark: SparkSession) -> None:
    rows = [Old(str(n), 0, n).row() for n in range(12)]
    frame = spark.createDataFrame(rows, SCHEMA).drop("offsetMsgId")
    texts = frame.withColumn("queueOffset", F.col("queueOffset").cast("string"))
    assert [body for body, _ in sent(texts)] == list(map(str, range(12)))


def test_ids_not_assigned_by_a_broker_are_ignored(spark: SparkSession) -> None:
    messages = [Old(str(n), 0, n, f"id-{9 - n}") for n in range(8)]
    assert replayed(spark, messages) == as_it_was(messages)


def test_queues_that_are_constants_stay_in_their_task(spark: SparkSession) -> None:
    rows = [Old(str(n), 0, n, n).row() for n in range(9)]
    constants = {"topic": F.lit("old"), "broker": F.lit("a"), "queueId": F.lit(0)}
    frame = spark.createDataFrame(rows, SCHEMA).withColumns(constants)
    prepared = as_messages(frame, F.lit("new"), {}, 4)
    place = F.spark_partition_id().alias("place")
    [counted] = prepared.groupBy(place).count().collect()
    [task] = in_order(prepared).select(place).distinct().collect()
    assert (counted["count"], counted["place"]) == (9, task["place"])


def test_a_queue_is_not_held_in_memory(spark: SparkSession) -> None:
    frame = spark.createDataFrame([Old("x", 0, 0, 0).row()], SCHEMA)
    rows = "spark.sql.windowExec.buffer.in.memory.threshold"
    seen: list[str | None] = []

    def watch(_: Step) -> None:
        seen.append(spark.conf.get(rows, None))

    options = {"nameserver": "127.0.0.1:1"}
    for before in (None, "5"):
        if before is not None:
            spark.conf.set(rows, before)
        replay(spark, frame, options, {"*": "new"}, is_dry_run=True, watch=watch)
        assert spark.conf.get(rows, None) == before
    spark.conf.unset(rows)
    assert set(seen) == {"16"}


def test_messages_without_an_offset_are_due_at_their_own_times(spark: SparkSession) -> None:
    unknown = [Old(f"x{time_ms}", time_ms) for time_ms in (2000, 0, 1000)]
    known = [Old("a", 500, 7), Old("b", 400, 8), Old("c", 1500, 9)]
    expected = [("x0", 0), ("a", 500), ("b", 500), ("x1000", 1000), ("c", 1500), ("x2000", 2000)]
    assert replayed(spark, unknown + known) == expected
    assert replayed(spark, unknown + known, "offsetMsgId") == expected
    expected = [("x0", 0), ("b", 400), ("a", 500), ("x1000", 1000), ("c", 1500), ("x2000", 2000)]
    assert replayed(spark, unknown + known, "queueOffset") == expected


def test_messages_without_a_queue_do_not_share_one(spark: SparkSession) -> None:
    unknown = [Old(f"x{n}", 1000 - n, n, queue_id=None) for n in range(20)]
    known = [Old("a", 500, 0, queue_id=0), Old("b", 500, 0, queue_id=1)]
    frame = spark.createDataFrame([each.row() for each in unknown + known], SCHEMA)
    found = as_messages(frame, F.lit("new"), {}, 2)
    keys = {row["body"]: row["shardingKey"] for row in found.collect()}
    assert {keys[each.body] for each in unknown} == {None}
    assert (keys["a"], keys["b"]) == ("old@a@0", "old@a@1")
    assert found.where("shardingKey is null").select(F.spark_partition_id()).distinct().count() == 2
    assert [due_ms for _, due_ms in replayed(spark, unknown)] == list(range(981, 1001))


@pytest.mark.parametrize(
    "without",
    [
        (),
        ("broker",),
        ("broker", "queueId", "queueOffset", "offsetMsgId"),
        ("broker", "queueId", "queueOffset", "offsetMsgId", "storeTimestamp"),
    ],
    ids=lambda names: f"without {len(names)}",
)
def test_messages_that_differ_in_anything_have_an_order(
    spark: SparkSession, without: tuple[str, ...]
) -> None:
    rows = [
        Old(body, 0, 0, broker=broker, tags=tags, own=own).row()
        for body in ("x", "y")
        for broker in ("a", "b")
        for tags in (None, "t")
        for own in (None, "1", "2")
    ]
    one, other = (
        in_order(as_messages(frame.coalesce(1).drop(*without), F.lit("new"), {}, 1))
        .select("body", "tags", "properties")
        .collect()
        for frame in (
            spark.createDataFrame(rows, SCHEMA),
            spark.createDataFrame(rows[::-1], SCHEMA),
        )
    )
    assert one == other
