"""Replay an archive, or any table of messages, to topics: in real time, faster, or at a rate."""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its conventional name
from pyspark.sql.column import Column

from turbopump.errors import InvalidArgument
from turbopump.spark.pipelines.archive_reader import read_archive
from turbopump.spark.pipelines.arguments import between, require_driver, to_utc
from turbopump.spark.pipelines.pacing import Pace
from turbopump.spark.pipelines.progress import Step, Watch, unwatched
from turbopump.spark.pipelines.replay_sender import (
    DUE_MS,
    FROM,
    NO_TIME_MS,
    SENT_SCHEMA,
    TIME_MS,
    Schedule,
    as_messages,
    in_order,
    sender,
    spill_windows_early,
)
from turbopump.spark.pipelines.reports import Table, bytes_text, facts, per_second, table, timestamp
from turbopump.spark.pipelines.send_progress import SendProgress
from turbopump.spark.pipelines.spark_errors import explain_errors
from turbopump.spark.records.schema import DECODE_ERROR
from turbopump.spark.writing.options import SinkOptions

ANY_TOPIC = "*"
"""In ``to``: the destination of messages of all other topics."""

_SINK = {"stamp": "property", "reservedProperties": "drop"}


@dataclass(frozen=True, slots=True)
class Replayed:
    """The messages of one topic that were selected, and sent to another."""

    topic: str
    target: str
    chosen: int
    sent: int


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay selected and sent; a message counts as ``sent`` once it is stored."""

    write_id: str
    """The prefix of the property ``SPARK_ROW`` of every message that was sent."""

    is_dry_run: bool
    topics: tuple[Replayed, ...]
    first_stored_ms: int | None
    last_stored_ms: int | None
    least_s: float
    """The minimum duration at the requested pace."""

    started_ms: int | None
    """When sending began; with a speed, when the first message was due."""

    sends: int
    body_bytes: int
    repeated: int
    """Sends that were retried after a failure: their messages may be stored twice."""

    seconds: float

    @property
    def chosen(self) -> int:
        return sum(each.chosen for each in self.topics)

    @property
    def sent(self) -> int:
        return sum(each.sent for each in self.topics)

    def tables(self) -> tuple[Table, ...]:
        title = "replay, dry run: nothing was sent" if self.is_dry_run else "replay"
        return (
            table(title, "topic, to, chosen, sent", self.topics),
            facts(
                "",
                messages_chosen=self.chosen,
                messages_sent=self.sent,
                first_stored=timestamp(self.first_stored_ms),
                last_stored=timestamp(self.last_stored_ms),
                seconds_at_least=self.least_s,
                bodies=bytes_text(self.body_bytes),
                sends_tried_again=self.repeated,
                seconds=self.seconds,
                messages_per_second=per_second(self.sent, self.seconds),
            ),
        )


def replay(
    spark: SparkSession,
    messages: DataFrame | str | os.PathLike[str],
    sink: Mapping[str, str],
    to: Mapping[str, str],
    *,
    pace: Pace | None = None,
    where: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    is_dry_run: bool = False,
    watch: Watch = unwatched,
) -> ReplayReport:
    """Send messages of an archive, or of a table with its columns, to topics.

    ``to`` maps source topics to destinations, with ``{"*": topic}`` for all others. ``sink`` are
    options of the sink except ``topic``; a ``writeId`` among them makes repeated replays
    recognizable. ``where`` is a Spark SQL condition; ``since`` and ``until`` bound the store time
    of messages, the end excluded. The old topic, id and times become properties.
    """
    require_driver(spark, "replay")
    since, until = to_utc("since", since), to_utc("until", until)
    started_s = time.monotonic()
    pace = pace or Pace()
    options = SinkOptions.parse({**_SINK, **sink})
    if options.topic is not None:
        raise InvalidArgument(
            f"sink option topic is not supported, got {options.topic!r}: pass "
            f"to={{{ANY_TOPIC!r}: {options.topic!r}}} to send all messages there"
        )
    session = messages.sparkSession if isinstance(messages, DataFrame) else spark
    with explain_errors(), spill_windows_early(session):
        frame = messages if isinstance(messages, DataFrame) else read_archive(spark, messages)
        chosen = _chosen(frame, where, since, until, needs_times=pace.speed is not None)
        partitions = spark.sparkContext.defaultParallelism
        prepared = as_messages(chosen, _target(to), _marks(chosen.columns), partitions)
        watch(Step("choosing messages"))
        plan = _plan(prepared)
        _require_targets(plan)
        watch(Step("messages chosen", plan.rows))
        write_id = options.write_id or str(uuid.uuid4())
        sent = (
            []
            if is_dry_run or not plan.rows
            else _send(prepared, options, plan, pace, write_id, watch)
        )
    return _report(plan, sent, pace, write_id, is_dry_run, time.monotonic() - started_s)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to send, as counted: rows by topic, and by partition."""

    topics: Mapping[tuple[str, str | None], int]
    partitions: Mapping[int, int]
    span_ms: tuple[int, int] | None
    """When the first and the last message was stored, if known."""

    first_due_ms: int
    """When the first message is due, on the clock that they were stored by."""

    @property
    def rows(self) -> int:
        return sum(self.topics.values())


def _chosen(
    frame: DataFrame,
    where: str | None,
    since: datetime | None,
    until: datetime | None,
    *,
    needs_times: bool,
) -> DataFrame:
    needed = ["topic", "body"]
    if needs_times or since is not None or until is not None:
        needed.append("storeTimestamp")
    missing = [name for name in needed if name not in frame.columns]
    if missing:
        raise InvalidArgument(
            f"the messages to replay have no column {', '.join(missing)}: archive it, or omit "
            "speed, since and until"
        )
    if DECODE_ERROR in frame.columns:
        # Records that could not be decoded have no body to send.
        frame = frame.where(F.col(DECODE_ERROR).isNull())
    frame = between(frame, F.col("storeTimestamp"), since, until)
    return frame if where is None else frame.where(where)


def _target(to: Mapping[str, str]) -> Column:
    if not to:
        raise InvalidArgument(
            f"to must map topics to topics, or {ANY_TOPIC!r} to one for all, got {to!r}"
        )
    named = {topic: target for topic, target in to.items() if topic != ANY_TOPIC}
    target = F.lit(to.get(ANY_TOPIC)).cast("string")
    for topic, own in named.items():
        target = F.when(F.col("topic") == topic, F.lit(own)).otherwise(target)
    return target


def _marks(columns: Sequence[str]) -> dict[str, Column]:
    every = {
        "REPLAYED_TOPIC": ("topic", F.col("topic")),
        "REPLAYED_MSG_ID": ("msgId", F.col("msgId")),
        "REPLAYED_BORN_MS": ("bornTimestamp", F.unix_millis("bornTimestamp")),
        "REPLAYED_STORE_MS": ("storeTimestamp", F.unix_millis("storeTimestamp")),
    }
    return {name: mark for name, (needs, mark) in every.items() if needs in columns}


def _plan(prepared: DataFrame) -> _Plan:
    known = F.when(F.col(TIME_MS) != NO_TIME_MS, F.col(TIME_MS))
    counted = (
        prepared.groupBy(F.spark_partition_id().alias("partition"), FROM, "topic")
        .agg(
            F.count(F.lit(1)).alias("rows"),
            F.min(known).alias("first"),
            F.max(known).alias("last"),
            F.min(F.when(known.isNotNull(), F.col(DUE_MS))).alias("due"),
        )
        .collect()
    )
    topics: Counter[tuple[str, str | None]] = Counter()
    partitions: Counter[int] = Counter()
    for row in counted:
        topics[row[FROM], row["topic"]] += row["rows"]
        partitions[row["partition"]] += row["rows"]
    firsts = [row["first"] for row in counted if row["first"] is not None]
    lasts = [row["last"] for row in counted if row["last"] is not None]
    span_ms = (min(firsts), max(lasts)) if firsts else None
    first_due_ms = min((row["due"] for row in counted if row["due"] is not None), default=0)
    return _Plan(dict(sorted(topics.items(), key=str)), partitions, span_ms, first_due_ms)


def _require_targets(plan: _Plan) -> None:
    lost = [topic for topic, target in plan.topics if target is None]
    if lost:
        raise InvalidArgument(
            f"to has no target for messages of {', '.join(lost)}: add these topics, or "
            f"{ANY_TOPIC!r} for all"
        )


def _send(
    prepared: DataFrame, options: SinkOptions, plan: _Plan, pace: Pace, write_id: str, watch: Watch
) -> list[Row]:
    parts = {partition: rows / plan.rows for partition, rows in plan.partitions.items()}
    task = sender(options, Schedule(pace, parts, plan.first_due_ms), write_id)
    # Tasks that keep the spacing must all run at the same time.
    work = in_order(prepared).mapInArrow(task, SENT_SCHEMA, barrier=pace.speed is not None)
    targets = sorted({target for _, target in plan.topics if target is not None})
    with SendProgress(options.client(), targets, "messages sent", plan.rows, watch):
        return work.collect()


def _report(
    plan: _Plan, sent: Sequence[Row], pace: Pace, write_id: str, is_dry_run: bool, seconds: float
) -> ReplayReport:
    counts: Counter[tuple[str, str | None]] = Counter()
    for row in sent:
        counts[row[FROM], row["topic"]] += row["rows"]
    first_ms, last_ms = plan.span_ms or (None, None)
    return ReplayReport(
        write_id=write_id,
        is_dry_run=is_dry_run,
        topics=tuple(
            Replayed(topic, target or "", rows, counts[topic, target])
            for (topic, target), rows in plan.topics.items()
        ),
        first_stored_ms=first_ms,
        last_stored_ms=last_ms,
        least_s=pace.duration_s(plan.rows, (last_ms or 0) - plan.first_due_ms),
        started_ms=min((row["startedMs"] for row in sent), default=None),
        sends=sum(row["sends"] for row in sent),
        body_bytes=sum(row["bodyBytes"] for row in sent),
        repeated=sum(row["repeated"] for row in sent),
        seconds=seconds,
    )
