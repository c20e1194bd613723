"""Replay, redrive, lag and trace on real Spark and a real broker."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it
from typer.testing import CliRunner, Result

from bad_records import send_not_inflating
from servers import Standalone
from stored_messages import stored
from turbopump import ConsumeResult, LitePullConsumer, Message, Producer, PushConsumer
from turbopump.admin import Admin, Destination, GroupSettings
from turbopump.cli.app import app
from turbopump.errors import InvalidArgument, NotThere
from turbopump.spark.pipelines import Pace, lag, redrive, replay, trace
from turbopump.spark.pipelines.pacing import SLICE_MS
from turbopump.spark.pipelines.plots import save_lag_plot, save_trace_plot
from turbopump.spark.pipelines.progress import Step
from turbopump.spark.pipelines.replay_sender import FROM, as_messages, in_order
from turbopump.wire.record import MessageView

BEGIN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
PNG = b"\x89PNG\r\n"
WAIT_S = 30.0
NOBODY = "127.0.0.1:1"


@pytest.fixture
def name() -> str:
    return f"pipeline-{uuid.uuid4().hex}"


@pytest.fixture
def producer(broker: Standalone) -> Iterator[Producer]:
    with Producer("pipeline-tests", nameserver=broker.nameserver) as running:
        yield running


@pytest.fixture
def run(broker: Standalone, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in the shared session."""
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)

    def call(*line: str) -> Result:
        return CliRunner().invoke(app, ["pipeline", *line], env={"NAMESRV_ADDR": broker.nameserver})

    return call


def wait_for(fact: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < end, "not met in time"
        time.sleep(0.05)


# --- replay ---------------------------------------------------------------------------------------


def old_messages(spark: SparkSession, offsets_ms: list[int]) -> DataFrame:
    """Two queues of old messages, alternating, at these times after the beginning."""
    rows = [
        (
            "old",
            "a",
            number % 2,
            number // 2,
            f"ID{number}",
            "even" if number % 2 == 0 else "odd",
            f"k{number} l{number}",
            {"own": "kept", "UNIQ_KEY": f"ID{number}", "DELAY": "3"},
            str(number).encode(),
            BEGIN + timedelta(milliseconds=offset_ms - 5),
            BEGIN + timedelta(milliseconds=offset_ms),
        )
        for number, offset_ms in enumerate(offsets_ms)
    ]
    schema = (
        "topic string, broker string, queueId int, queueOffset long, msgId string, tags string, "
        "keys string, properties map<string,string>, body binary, bornTimestamp timestamp, "
        "storeTimestamp timestamp"
    )
    return spark.createDataFrame(rows, schema).repartition(3)


def test_replay_preserves_content_order_and_spacing(
    spark: SparkSession, broker: Standalone, name: str
) -> None:
    times_ms = [number * 400 for number in range(10)]
    # The clock was set back: this was stored before the one in front of it, and stays behind it.
    times_ms[6] = times_ms[4] - 300
    messages = old_messages(spark, times_ms)
    steps: list[Step] = []
    began_ms = int(time.time() * 1000)
    report = replay(
        spark,
        messages,
        {"nameserver": broker.nameserver},
        {"old": name},
        pace=Pace(speed=2.0),
        watch=steps.append,
    )
    assert (report.chosen, report.sent, report.body_bytes, report.repeated) == (10, 10, 10, 0)
    assert report.least_s == pytest.approx(1.8)
    assert steps[-1] == Step("messages sent", 10, 10)

    found = sorted(stored(broker.nameserver, name), key=lambda each: int(each.body))
    assert [int(each.body) for each in found] == list(range(10))
    assert_replayed(found[3], 3)
    for parity in (0, 1):
        ordered = found[parity::2]
        assert len({each.queue_id for each in ordered}) == 1
        offsets = [each.queue_offset for each in ordered]
        assert offsets == sorted(offsets), "messages of a queue stay in order"
    assert report.started_ms is not None
    assert report.started_ms >= began_ms
    for number, message in enumerate(found):
        # Never early, whatever the load of the machine: each 200 ms after the previous one.
        due_ms = max(times_ms[number % 2 : number + 1 : 2]) // 2
        early_ms = report.started_ms + due_ms - message.store_timestamp_ms
        assert early_ms <= SLICE_MS


def test_replay_starts_immediately_although_a_clock_was_set_back(
    spark: SparkSession, broker: Standalone, name: str
) -> None:
    """The earliest time is not that of the first message, which others of its queue wait for."""
    report = replay(
        spark,
        old_messages(spark, [40_000, 40_000, 0, 40_100, 40_500, 40_300]),
        {"nameserver": broker.nameserver},
        {"old": name},
        pace=Pace(speed=1.0),
    )
    assert report.sent == 6
    assert report.least_s == pytest.approx(0.5)
    began_ms = round(BEGIN.timestamp() * 1000)
    assert (report.first_stored_ms, report.last_stored_ms) == (began_ms, began_ms + 40_500)
    assert report.started_ms is not None
    first_ms = min(each.store_timestamp_ms for each in stored(broker.nameserver, name))
    assert first_ms - report.started_ms < 20_000, "however busy the machine is"


def assert_replayed(message: MessageView, number: int) -> None:
    stored_ms = round(BEGIN.timestamp() * 1000) + 400 * number
    assert (message.tags, message.keys) == ("odd", [f"k{number}", f"l{number}"])
    own = message.properties
    assert (own["own"], own["REPLAYED_TOPIC"], own["REPLAYED_MSG_ID"]) == ("kept", "old", "ID3")
    assert own["REPLAYED_STORE_MS"] == str(stored_ms)
    assert own["REPLAYED_BORN_MS"] == str(stored_ms - 5)
    assert own["UNIQ_KEY"] != "ID3"
    assert "DELAY" not in own


def test_the_order_of_a_replay_is_fully_determined(spark: SparkSession) -> None:
    """Stamps count rows: if their order were left to chance, a repeated task would swap them."""
    rows = [
        (topic, "a", 0, offset, b"", BEGIN + timedelta(milliseconds=stored_ms))
        for topic in ("zoo", "ark")
        for offset, stored_ms in enumerate([0, 1000, 500, 1500])
    ]
    schema = (
        "topic string, broker string, queueId int, queueOffset long, body binary, "
        "storeTimestamp timestamp"
    )
    frame = spark.createDataFrame(rows, schema).coalesce(1)
    found = in_order(as_messages(frame, F.lit("new"), {}, 1)).collect()
    # Offset 2 was stored before offset 1, by a clock that was set back.
    assert [(row[FROM], row["queueOffset"]) for row in found] == [
        ("ark", 0),
        ("zoo", 0),
        *(("ark", 1), ("ark", 2)),
        *(("zoo", 1), ("zoo", 2)),
        ("ark", 3),
        ("zoo", 3),
    ]


def test_replay_filters_counts_and_keeps_to_the_rate(
    spark: SparkSession, broker: Standalone, name: str, tmp_path: Path, run: Callable[..., Result]
) -> None:
    messages = old_messages(spark, [number * 1000 for number in range(30)])
    sink = {"nameserver": broker.nameserver}
    report = replay(
        spark,
        messages,
        sink,
        {"*": name},
        where="tags = 'even'",
        since=BEGIN + timedelta(seconds=10),
        until=BEGIN + timedelta(seconds=20),
        pace=Pace(10.0),
    )
    assert (report.chosen, report.sent) == (5, 5)
    found = stored(broker.nameserver, name)
    assert Counter(int(each.body) for each in found) == Counter(range(10, 20, 2))
    times_ms = sorted(each.store_timestamp_ms for each in found)
    assert times_ms[-1] - times_ms[0] >= 400 - 60, "10 a second"

    timeless = messages.withColumn("storeTimestamp", F.lit(None).cast("timestamp"))
    counted = replay(
        spark,
        timeless.unionByName(messages),
        sink,
        {"*": name},
        pace=Pace(speed=1.0),
        is_dry_run=True,
    )
    assert (counted.chosen, counted.least_s) == (60, 29.0)
    named = {**sink, "writeId": "monday"}
    plain = replay(spark, messages.select("topic", "body"), named, {"*": f"{name}-plain"})
    assert (plain.sent, plain.first_stored_ms, plain.write_id) == (30, None, "monday")
    stamps = [each.properties["SPARK_ROW"] for each in stored(broker.nameserver, f"{name}-plain")]
    assert len(set(stamps)) == 30
    assert {stamp.split("/")[2] for stamp in stamps} == {"0", "1"}, "all tasks have a share"
    assert {stamp.split("/")[0] for stamp in stamps} == {"monday"}

    path = str(tmp_path / "archive")
    messages.write.partitionBy("topic").parquet(path)
    dry = run("replay", path, "--to", f"old={name}", "--where", "tags = 'odd'", "--dry-run")
    assert dry.exit_code == 0, dry.stderr
    assert "dry run: nothing was sent" in dry.stdout
    assert f"old    {name}      15     0" in dry.stdout
    assert len(stored(broker.nameserver, name)) == 5

    with pytest.raises(InvalidArgument, match="to has no target for messages of old"):
        replay(spark, messages, sink, {"other": name})
    with pytest.raises(InvalidArgument, match="topic is not supported, got 'elsewhere'"):
        replay(spark, messages, {**sink, "topic": "elsewhere"}, {"*": name})
    with pytest.raises(InvalidArgument, match="no column storeTimestamp"):
        replay(spark, messages.drop("storeTimestamp"), sink, {"*": name}, since=BEGIN)
    wrong = run("replay", path, "--to", name, "--where", "nonsense > 1")
    assert wrong.exit_code == 2
    assert "nonsense" in wrong.stderr
    assert "Traceback" not in wrong.stderr


# --- redrive --------------------------------------------------------------------------------------


def make_dead_letters(broker: Standalone, producer: Producer, topic: str, group: str) -> None:
    for number in range(12):
        tag = "even" if number % 2 == 0 else "odd"
        producer.send(Message(topic, b"order %d" % number, tags=tag, properties={"own": "kept"}))

    def fail(messages: Any, context: Any) -> ConsumeResult:
        return ConsumeResult.RETRY_LATER

    letters = f"%DLQ%{group}"
    with (
        PushConsumer(
            group,
            fail,
            nameserver=broker.nameserver,
            subscriptions={topic: "*"},
            start_from="first",
            max_attempts=0,
        ),
        Admin(broker.nameserver) as admin,
    ):
        wait_for(lambda: letters in admin.topics.names())
        wait_for(lambda: admin.topics.status(letters).messages == 12)


def test_redrive_sends_each_letter_once(
    spark: SparkSession,
    broker: Standalone,
    producer: Producer,
    name: str,
    run: Callable[..., Result],
) -> None:
    group = f"group-{name}"
    make_dead_letters(broker, producer, name, group)
    condition = "tags = 'odd' AND body LIKE 'order %'"

    dry = run("redrive", group, "--where", condition, "--dry-run", "--json")
    assert dry.exit_code == 0, dry.stderr
    told = json.loads(dry.stdout)
    assert (told["letters"], told["chosen"]) == (12, 6)
    assert told["topics"] == [
        {
            "topic": name,
            "letters": 6,
            "sent": 0,
            "would_be_sent": 6,
            "sent_before": 0,
            "origin_unknown": 0,
            "origin_gone": 0,
        }
    ]
    assert len(stored(broker.nameserver, name)) == 12

    first = redrive(spark, group, broker.nameserver, where=condition)
    assert (first.chosen, first.sent, first.sent_before, first.gone) == (6, 6, 0, 0)
    # All of them now: earlier ones are recognised, even by a later run with another filter.
    began_ms = int(time.time() * 1000)
    second = redrive(spark, group, broker.nameserver, rate_per_s=20.0)
    assert (second.chosen, second.sent, second.sent_before) == (12, 6, 6)
    copies = [
        each for each in stored(broker.nameserver, name) if "REDRIVEN_FROM" in each.properties
    ]
    times_ms = [each.store_timestamp_ms for each in copies if each.store_timestamp_ms >= began_ms]
    # At most one starts every 50 ms; only the first may be stored late.
    assert max(times_ms) - min(times_ms) >= 4 * 50 - 10
    assert Counter(each.body for each in copies) == Counter(b"order %d" % n for n in range(12))
    assert {each.properties["own"] for each in copies} == {"kept"}
    assert {each.reconsume_times for each in copies} == {0}

    elsewhere = f"{name}-again"
    with Admin(broker.nameserver) as admin:
        admin.topics.create(elsewhere, queues=1)
    letters = sorted(stored(broker.nameserver, f"%DLQ%{group}"), key=lambda each: each.queue_offset)
    since_ms, until_ms = letters[1].store_timestamp_ms, letters[-2].store_timestamp_ms
    expected = {
        each.body for each in letters[:-1] if since_ms <= each.store_timestamp_ms < until_ms
    }
    again = redrive(
        spark,
        group,
        broker.nameserver,
        where="queueOffset < 11",
        since=datetime.fromtimestamp(since_ms / 1000, UTC),
        until=datetime.fromtimestamp(until_ms / 1000, UTC),
        to=elsewhere,
        again=True,
    )
    assert (again.chosen, again.sent) == (len(expected), len(expected))
    assert {each.body for each in stored(broker.nameserver, elsewhere)} == expected


def test_redrive_reports_what_is_wrong(
    spark: SparkSession, broker: Standalone, producer: Producer, run: Callable[..., Result]
) -> None:
    unknown = run("redrive", "nobody-knows", "--yes")
    assert unknown.exit_code == 1
    assert "there is no group 'nobody-knows'" in unknown.stderr
    unsure = run("redrive", "TOOLS_CONSUMER")
    assert unsure.exit_code == 2
    assert "pass --yes" in unsure.stderr
    with pytest.raises(NotThere, match="no dead letter of group 'TOOLS_CONSUMER'"):
        redrive(spark, "TOOLS_CONSUMER", broker.nameserver, to=Destination.RETRY)
    with pytest.raises(InvalidArgument, match="rate_per_s must be a number above 0, got 0"):
        redrive(spark, "TOOLS_CONSUMER", broker.nameserver, rate_per_s=0)


# --- lag ------------------------------------------------------------------------------------------


def test_lag_is_sampled_stored_and_plotted(
    spark: SparkSession,
    broker: Standalone,
    producer: Producer,
    name: str,
    tmp_path: Path,
    run: Callable[..., Result],
) -> None:
    for number in range(20):
        producer.send(Message(name, str(number).encode()))
    group, history = f"group-{name}", tmp_path / "history"
    with LitePullConsumer(
        group, nameserver=broker.nameserver, subscriptions={name: "*"}, start_from="first"
    ) as consumer:
        seen = 0
        while seen < 20:
            seen += len(consumer.poll(timeout=1))
        consumer.commit()
    with Admin(broker.nameserver) as admin:
        wait_for(lambda: admin.groups.progress(group, name).lag == 0)
        first = lag(spark, broker.nameserver, [group], samples=2, interval=0.1, history=history)
        (own,) = [each for each in first.groups if each.topic == name]
        assert (own.samples, own.lag_max, own.lag_last, own.arrived) == (2, 0, 0, 0)
        for number in range(5):
            producer.send(Message(name, str(number).encode()))
        wait_for(lambda: admin.groups.progress(group, name).lag == 5)

    picture = tmp_path / "lag.png"
    line = ["lag", group, "--samples", "1", "--history", str(history), "--plot", str(picture)]
    told = run(*line, "--json")
    assert told.exit_code == 0, told.stderr
    report = json.loads(told.stdout)
    assert report["samples"] == 3
    windows = [each for each in report["by_window"] if each["topic"] == name]
    assert sum(each["samples"] for each in windows) == 3
    assert windows[-1]["lag_last"] == 5
    assert all(each["window_ms"] % 10_000 == 0 for each in windows)
    (later,) = [each for each in report["groups"] if each["topic"] == name]
    figures = ("samples", "lag_max", "lag_last", "arrived", "consumed")
    assert [later[figure] for figure in figures] == [3, 5, 5, 5, 0]
    assert later["lag_mean"] == pytest.approx(5 / 3)
    assert picture.read_bytes().startswith(PNG)

    save_lag_plot(first, tmp_path / "first.png")
    with pytest.raises(InvalidArgument, match="samples must be a whole number, 1 or more, got 0"):
        lag(spark, broker.nameserver, samples=0)
    with pytest.raises(InvalidArgument, match="interval must be at least 0 seconds"):
        lag(spark, broker.nameserver, interval=-1)
    for wrong in ("soon", "", "1 month", "-1 seconds"):
        with pytest.raises(InvalidArgument, match=f"window must be a length .*, got {wrong!r}"):
            lag(spark, NOBODY, window=wrong)


def test_samples_with_an_unknown_lag_do_not_count(
    spark: SparkSession, broker: Standalone, name: str, tmp_path: Path
) -> None:
    columns = (
        "time_ms long, group string, topic string, broker string, queue_id int, committed long,"
        " max_offset long, lag long, delay_ms long"
    )
    samples = [
        # Time, topic, queue, committed, end, lag, delay.
        (1000, "known", 0, 1, 5, 4, 70),
        (1000, "known", 1, None, 9, None, None),
        (2000, "known", 0, 2, 5, 3, 90),
        (2000, "known", 1, 7, 9, 2, 80),
        (1000, "unknown", 0, None, 5, None, None),
    ]
    rows = [(at, "g", topic, "b", *figures) for at, topic, *figures in samples]
    history = str(tmp_path / "history")
    spark.createDataFrame(rows, columns).write.parquet(history)
    with Admin(broker.nameserver) as admin:
        admin.groups.create(GroupSettings(f"group-{name}"))
    report = lag(spark, broker.nameserver, [f"group-{name}"], samples=1, history=history)
    known, unknown = report.groups
    assert (known.lag_mean, known.lag_max, known.lag_last, known.delay_max_ms) == (5, 5, 5, 90)
    assert (known.samples, known.consumed, known.arrived) == (2, 1, 0)
    figures = (unknown.lag_mean, unknown.lag_max, unknown.lag_last, unknown.delay_max_ms)
    assert figures == (None, None, None, None)
    assert (unknown.samples, unknown.consumed, unknown.arrived) == (1, None, 0)
    save_lag_plot(report, tmp_path / "lag.png")


# --- trace ----------------------------------------------------------------------------------------


def record(*fields: object) -> str:
    return "\x01".join("null" if each is None else str(each) for each in fields) + "\x02"


def trace_bodies(topic: str) -> Iterator[bytes]:
    """Trace of 100 messages, number n consumed after n + 1 ms; and failures a minute later."""
    begin_ms, host = 1_800_000_000_000, "127.0.0.1:10911"
    for number in range(100):
        sent_ms, own, call = begin_ms + number * 100, f"ID{number}", f"R{number}"
        tag, success = "even" if number % 2 == 0 else None, str(number != 4).lower()
        took_ms = number + 1
        pub = ("Pub", sent_ms, "R", "shop", topic, own, tag, "k", host, 10, took_ms, 0, "O", "true")
        text = record(*pub)
        text += record("SubBefore", sent_ms + took_ms, "R", "billing", call, own, 0, "")
        if number != 99:
            text += record("SubAfter", call, own, 5, success, "", 0, sent_ms, "billing")
        yield text.encode()
    later_ms = begin_ms + 60_000
    pub = ("Pub", later_ms, "R", "shop", topic, "NO", None, "k", host, 10, 3000, 0, "O", "false")
    yield (
        record(*pub)
        + record("SubBefore", later_ms, "R", "billing", "R4b", "ID4", 1, "")
        + record("SubAfter", "R4b", "ID4", 7, "true", "", 0, later_ms, "billing")
        + record("SubBefore", later_ms, "R", "audit", "X", "UNHEARD", 0, "")
        + record("Nonsense", 1)
    ).encode()


def test_trace_is_analysed_by_topic_group_and_tag(
    spark: SparkSession,
    broker: Standalone,
    producer: Producer,
    name: str,
    tmp_path: Path,
    run: Callable[..., Result],
) -> None:
    messages = list(trace_bodies("orders"))
    for body in messages:
        producer.send(Message(name, body))
    send_not_inflating(broker.nameserver, name)
    report = trace(spark, {"nameserver": broker.nameserver, "topic": name})
    assert (report.trace_messages, report.unreadable) == (102, 2)
    assert report.records == 300 + 5

    sends = {each.tag: each for each in report.sends}
    assert (sends["even"].sent, sends["even"].failed, sends["even"].body_bytes) == (50, 0, 500)
    assert (sends["even"].p50_ms, sends["even"].p99_ms) == (49, 99)
    assert (sends[None].sent, sends[None].failed) == (50, 1)

    found = {(each.topic, each.group, each.tag): each for each in report.consumptions}
    even, odd = found["orders", "billing", "even"], found["orders", "billing", None]
    assert (even.consumed, even.failed, even.retried, even.unfinished) == (51, 1, 1, 0)
    # Only of the first calls: that of the retry would include its delay.
    assert (even.latency_p50_ms, even.latency_p99_ms) == (49, 99)
    assert (even.processing_p50_ms, even.processing_p99_ms) == (5, 7)
    assert (odd.consumed, odd.failed, odd.retried, odd.unfinished) == (50, 0, 0, 1)
    unknown = found[None, "audit", None]
    assert (unknown.consumed, unknown.latency_p50_ms) == (1, None)
    assert sum(each.consumed for each in report.consumptions_by_window) == 102
    assert len({each.window_ms for each in report.consumptions_by_window}) == 2

    picture = tmp_path / "trace.png"
    save_trace_plot(report, picture)
    assert picture.read_bytes().startswith(PNG)
    between = ["--since", "1800000005000", "--until", "1800000060000"]
    told = run("trace", "--topic", name, *between, "--window", "2 seconds", "--json")
    assert told.exit_code == 0, told.stderr
    second_half = json.loads(told.stdout)
    sent = {each["tag"]: (each["sent"], each["failed"]) for each in second_half["sends"]}
    assert sent == {"even": (25, 0), None: (25, 0)}
    consumed = {(each["group"], each["tag"]): each for each in second_half["consumptions"]}
    assert {of: each["consumed"] for of, each in consumed.items()} == {
        ("billing", "even"): 25,
        ("billing", None): 25,
    }
    assert len({each["window_ms"] for each in second_half["sends_by_window"]}) == 3
    with pytest.raises(InvalidArgument, match=r"window must be a length .*, got 'soon'"):
        trace(spark, {"nameserver": NOBODY}, window="soon")
    with pytest.raises(InvalidArgument, match="tracing is off: set traceTopicEnable=true"):
        trace(spark, {"nameserver": broker.nameserver})
