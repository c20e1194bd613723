"""Trace analytics: how long messages took from being sent to being consumed, and what failed.

Based on the trace topic, which clients of all languages write when message trace is on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its conventional name
from pyspark.sql.column import Column

from turbopump.admin.administration import Admin
from turbopump.client.names import with_namespace
from turbopump.spark.pipelines.arguments import (
    between,
    require_driver,
    require_window,
    to_utc,
    window_ms,
)
from turbopump.spark.pipelines.progress import Step, Watch, unwatched
from turbopump.spark.pipelines.reports import Table, facts, table
from turbopump.spark.pipelines.spark_errors import explain_errors
from turbopump.spark.pipelines.trace_records import Kind, no_trace_topic, parsed
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.queue_selection import Topics
from turbopump.spark.records.schema import report_schemas
from turbopump.spark.shared_session import shared_session
from turbopump.spark.worker_process import begins_call
from turbopump.wire.names import TRACE_TOPIC

_SPARK, _ARROW = report_schemas(
    "kind string, msg_id string, time_ms long, group string, topic string, tags string, "
    "request_id string, cost_ms long, is_success boolean, retries long, body_bytes long"
)


@dataclass(frozen=True, slots=True)
class Sends:
    """Sends to a topic with a tag, in one window or (None) overall."""

    window_ms: int | None
    topic: str | None
    tag: str | None
    sent: int
    failed: int
    body_bytes: int
    p50_ms: float | None
    """How long a send took until its response."""

    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Consumptions:
    """Consumption from a topic with a tag by a group, in one window or (None) overall."""

    window_ms: int | None
    topic: str | None
    """None if the send was not traced, or is outside the time span that was read."""

    group: str | None
    tag: str | None
    consumed: int
    """Calls of listeners, for each message."""

    failed: int
    retried: int
    """Calls for redelivered messages."""

    unfinished: int
    """Calls whose end was not traced."""

    latency_p50_ms: float | None
    """From the send to the first call of a listener."""

    latency_p99_ms: float | None
    processing_p50_ms: float | None
    """From the call of the listener to its end."""

    processing_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class TraceReport:
    """What the trace topic reports for a span of time."""

    trace_topic: str
    window: str
    trace_messages: int
    records: int
    unreadable: int
    sends: tuple[Sends, ...]
    consumptions: tuple[Consumptions, ...]
    sends_by_window: tuple[Sends, ...]
    consumptions_by_window: tuple[Consumptions, ...]
    seconds: float

    def tables(self) -> tuple[Table, ...]:
        consumptions = table(
            "consumed",
            "topic, group, tag, calls, failed, retried, unfinished, latency p50 ms, p99 ms, "
            "processing p50 ms, p99 ms",
            self.consumptions,
        )
        columns = "topic, tag, sends, failed, body bytes, p50 ms, p99 ms"
        sends = table("sent", columns, self.sends)
        read = facts(
            f"read from {self.trace_topic}",
            messages=self.trace_messages,
            records=self.records,
            unreadable_records=self.unreadable,
            seconds=self.seconds,
        )
        return consumptions, sends, read


def trace(
    spark: SparkSession,
    source: Mapping[str, str],
    *,
    window: str = "1 minute",
    since: datetime | None = None,
    until: datetime | None = None,
    watch: Watch = unwatched,
) -> TraceReport:
    """Analyze the trace topic: windows of sends and consumptions by topic, group and tag.

    ``source`` are the options of the source; the topic is RMQ_SYS_TRACE_TOPIC unless given. Times
    are those of the clients; ``since`` and ``until`` bound the time of sends and calls.
    """
    require_driver(spark, "trace")
    since, until = to_utc("since", since), to_utc("until", until)
    require_window(spark, window)
    started_s = time.monotonic()
    options = {"columns": "body", "onBadRecord": "null", **source}
    if not {"topic", "topics", "topicPattern", "assign"} & set(options):
        options["topic"] = TRACE_TOPIC
    _require_topic(options)
    with explain_errors():
        watch(Step("reading trace messages"))
        bodies = spark.read.format("rocketmq").options(**options).load().select("body")
        records = bodies.mapInArrow(_parse, _SPARK).persist()
        try:
            messages = bodies.count()
            kinds = {row["kind"]: row["count"] for row in records.groupBy("kind").count().collect()}
            watch(Step("trace messages read", messages, messages))
            chosen = between(records, F.timestamp_millis("time_ms"), since, until)
            sent = chosen.where(F.col("kind") == Kind.SENT.value)
            consumed = _consumed(records, chosen.where(F.col("kind") == Kind.BEGUN.value))
            return TraceReport(
                options.get("topic", TRACE_TOPIC),
                window,
                messages,
                sum(kinds.values()),
                kinds.get(Kind.UNREADABLE.value, 0),
                _sends(sent, None),
                _consumptions(consumed, None),
                _sends(sent, window),
                _consumptions(consumed, window),
                time.monotonic() - started_s,
            )
        finally:
            records.unpersist()


def _require_topic(options: Mapping[str, str]) -> None:
    """Raise InvalidArgument that says how to enable tracing, if there is no trace topic."""
    parsed_options = SourceOptions.for_batch(options)
    if isinstance(parsed_options.chosen, Topics):
        client = parsed_options.client
        known = shared_session(client).run(lambda session: Admin(session=session).topics.names())
        for topic in parsed_options.chosen.names:
            if with_namespace(client.namespace, topic) not in known:
                raise no_trace_topic(topic)


@begins_call
def _parse(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        records = [record for body in batch.column("body").to_pylist() for record in parsed(body)]
        columns = {name: [getattr(record, name) for record in records] for name in _ARROW.names}
        yield pa.RecordBatch.from_pydict(columns, schema=_ARROW)


def _consumed(records: DataFrame, begun: DataFrame) -> DataFrame:
    """Join the start of each call with its end, and with the send of its message."""
    done = records.where(F.col("kind") == Kind.DONE.value).select(
        "request_id", "msg_id", "cost_ms", "is_success"
    )
    # A message that was resent after a failure keeps the id of the first attempt, and counts once.
    sent = (
        records.where((F.col("kind") == Kind.SENT.value) & F.col("is_success"))
        .groupBy("msg_id")
        .agg(
            F.min_by("topic", "time_ms").alias("topic"),
            F.min_by("tags", "time_ms").alias("tags"),
            F.min("time_ms").alias("sent_ms"),
        )
    )
    # Clocks of two machines differ: no message is consumed before it was sent.
    is_first, lasted = F.col("retries") == 0, F.col("time_ms") - F.col("sent_ms")
    return (
        begun.select("request_id", "msg_id", "time_ms", "group", "retries")
        .join(done, ["request_id", "msg_id"], "left")
        .join(sent, "msg_id", "left")
        .withColumn("latency_ms", F.when(is_first & (lasted < 0), 0).when(is_first, lasted))
    )


def _percentiles(column: str, name: str) -> list[Column]:
    parts = {"p50_ms": 0.5, "p99_ms": 0.99}
    return [
        F.percentile_approx(column, part).cast("double").alias(f"{name}{each}")
        for each, part in parts.items()
    ]


def _sends(sent: DataFrame, window: str | None) -> tuple[Sends, ...]:
    keys = ("window_ms", "topic", "tags")
    found = (
        sent.withColumn("window_ms", window_ms(window))
        .groupBy(*keys)
        .agg(
            F.count_if("is_success").alias("sent"),
            F.count_if(~F.col("is_success")).alias("failed"),
            F.coalesce(F.sum("body_bytes"), F.lit(0)).alias("body_bytes"),
            *_percentiles("cost_ms", ""),
        )
    )
    return tuple(Sends(*row) for row in found.orderBy(*keys).collect())


def _consumptions(consumed: DataFrame, window: str | None) -> tuple[Consumptions, ...]:
    keys = ("window_ms", "topic", "group", "tags")
    found = (
        consumed.withColumn("window_ms", window_ms(window))
        .groupBy(*keys)
        .agg(
            F.count(F.lit(1)).alias("consumed"),
            F.count_if(~F.col("is_success")).alias("failed"),
            F.count_if(F.col("retries") > 0).alias("retried"),
            F.count_if(F.col("is_success").isNull()).alias("unfinished"),
            *_percentiles("latency_ms", "latency_"),
            *_percentiles("cost_ms", "processing_"),
        )
    )
    return tuple(Consumptions(*row) for row in found.orderBy(*keys).collect())
