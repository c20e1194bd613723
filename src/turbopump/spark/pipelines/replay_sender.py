"""Sending rows that were messages, when they are due: the executors' part of a replay.

Executors call the sink's own writer, slice by slice, so that rows are sent as soon as they are due;
through Spark's writer they would wait for its buffers to fill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
from pyspark import BarrierTaskContext, TaskContext
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - its conventional name
from pyspark.sql.column import Column

from turbopump.spark.clocks import CLOCK_MARGIN_MS
from turbopump.spark.pipelines.pacing import Pace, Pacer, slices
from turbopump.spark.records.schema import report_schemas
from turbopump.spark.shared_session import shared_session
from turbopump.spark.worker_process import begins_call
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.row_encoder import Origin
from turbopump.spark.writing.writer import Written, send_rows

FROM = "fromTopic"
TIME_MS = "timeMs"
DUE_MS = "dueMs"
"""The latest time of a row and of those before it in its queue, none of which it overtakes.

If that is more than ``CLOCK_MARGIN_MS`` late, it is the row's own time: no clock is set back so
far; rather, the earlier rows belong to another queue of the same name, or one had a wrong time.
"""
NO_TIME_MS = 0
"""For rows of unknown time; they are due first, or with the row before them."""

SENT_SCHEMA, _SENT_ARROW = report_schemas(
    "startedMs long, fromTopic string, topic string, rows long, sends long, bodyBytes long, "
    "repeated long"
)

_MESSAGE = ("topic", "body", "tags", "keys", "properties", "shardingKey")
_PLACE = ("broker", "queueId")
_QUEUE = "oldQueue"
_LIFE = "oldQueueLife"
"""Distinguishes queues of the same name: of other brokers, or of a re-created topic."""
_LOG_PLACE = "oldLogPlace"
_LOG_PLACE_DIGITS = 16
"""A broker's message id ends with the position in its log, in hexadecimal digits."""
_IDS = "^([0-9A-F]{32}|[0-9A-F]{56})$"
"""Ids of brokers, which start with an address; other senders may assign other ids."""
_WINDOW_ROWS = "spark.sql.windowExec.buffer.in.memory.threshold"
_WINDOW_ROWS_MAX = 16
"""Whole messages, up to 4 MB each; Spark would keep 4,096 of them in each task's memory."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the rows of each task are due; the same for every attempt of a task."""

    pace: Pace
    parts: Mapping[int, float]
    """The share of all rows in each partition."""

    first_ms: int


def as_messages(
    frame: DataFrame, target: Column, marks: Mapping[str, Column], partitions: int
) -> DataFrame:
    """Return rows as the sink takes them, those of a queue in one task; `in_order` sorts them.

    ``marks`` are properties to add, except those with a null value.
    """
    columns = frame.columns
    stored_ms = (
        F.unix_millis("storeTimestamp") if "storeTimestamp" in columns else F.lit(NO_TIME_MS)
    )
    own = F.coalesce("properties", F.create_map()) if "properties" in columns else F.create_map()
    added = F.map_from_arrays(
        F.array(*map(F.lit, marks)), F.array(*(mark.cast("string") for mark in marks.values()))
    )
    fresh = F.map_filter(own, lambda name, _: ~name.isin(*marks))
    queue = _queue(columns)
    rows = frame.select(
        target.alias("topic"),
        F.col("body"),
        *(F.col(each) for each in ("tags", "keys") if each in columns),
        F.map_filter(F.map_concat(fresh, added), lambda _, value: value.isNotNull()).alias(
            "properties"
        ),
        *queue.values(),
        F.col("topic").alias(FROM),
        F.coalesce(stored_ms, F.lit(NO_TIME_MS)).alias(TIME_MS),
        *(F.col(each) for each in _PLACE if each in columns),
        *([F.col("queueOffset").cast("long")] if "queueOffset" in columns else []),
    ).repartition(partitions, *([_QUEUE] if queue else []))
    return _with_due(rows)


def _queue(columns: Sequence[str]) -> dict[str, Column]:
    """Return columns for a row's original queue and its position in its broker's log."""
    if "queueId" not in columns:
        return {}
    place = ["topic", *(each for each in _PLACE if each in columns)]
    # Rows of one queue stay in order: they go to one queue, by one task.
    queue = F.when(F.col("queueId").isNotNull(), F.concat_ws("@", *place))
    # Derived from the row, though empty: Spark does not partition rows by a constant.
    nothing = F.coalesce(F.left(F.col("body").cast("string"), F.lit(0)), F.lit(""))
    found = {
        "shardingKey": queue,
        _QUEUE: F.coalesce(F.concat(queue, nothing), F.xxhash64("body").cast("string")),
    }
    if "offsetMsgId" in columns:
        known = F.when(F.col("offsetMsgId").rlike(_IDS), F.col("offsetMsgId"))
        place_digits = F.lit(_LOG_PLACE_DIGITS)
        found[_LIFE] = F.left(known, F.length(known) - place_digits)
        found[_LOG_PLACE] = F.right(known, place_digits)
    return {name: column.alias(name) for name, column in found.items()}


def _with_due(rows: DataFrame) -> DataFrame:
    """Add when rows are due: after those before them, even if a clock was set back."""
    if not {"queueId", "queueOffset"} <= set(rows.columns):
        return rows.withColumn(DUE_MS, F.col(TIME_MS))
    if _LOG_PLACE not in rows.columns:
        # An offset with several times was assigned that many times.
        same = Window.partitionBy(_QUEUE, "queueOffset").orderBy(TIME_MS)
        rows = rows.withColumn(_LIFE, F.dense_rank().over(same))
    order = [each for each in (_LOG_PLACE, "queueOffset", TIME_MS) if each in rows.columns]
    unknown = F.col("queueOffset").isNull()
    earlier = Window.partitionBy(_QUEUE, _LIFE, unknown).orderBy(*order)
    until_here = earlier.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    late_ms = F.col(DUE_MS) - F.col(TIME_MS)
    is_set_back = ~unknown & ((F.col(TIME_MS) == NO_TIME_MS) | (late_ms <= CLOCK_MARGIN_MS))
    return rows.withColumn(DUE_MS, F.max(TIME_MS).over(until_here)).withColumn(
        DUE_MS, F.when(is_set_back, F.col(DUE_MS)).otherwise(F.col(TIME_MS))
    )


@contextmanager
def spill_windows_early(spark: SparkSession) -> Iterator[None]:
    """Make Spark spill rows to disk early while it compares those of a queue."""
    before = spark.conf.get(_WINDOW_ROWS, None)
    spark.conf.set(_WINDOW_ROWS, _WINDOW_ROWS_MAX)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(_WINDOW_ROWS)
        else:
            spark.conf.set(_WINDOW_ROWS, before)


def in_order(rows: DataFrame) -> DataFrame:
    """Sort the messages of each task by content only, never by arrival.

    Stamps count rows, and a retried task must assign the same ones.
    """
    known = (*_PLACE, _LOG_PLACE, "queueOffset", TIME_MS, "keys", "tags", "body")
    order = [each for each in known if each in rows.columns]
    ordered = rows.sortWithinPartitions(DUE_MS, FROM, *order, F.map_entries("properties"))
    return ordered.drop(_QUEUE, _LIFE, _LOG_PLACE)


def sender(
    options: SinkOptions, schedule: Schedule, write_id: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a task's function: it sends its rows when they are due, and counts them."""

    @begins_call
    def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        pace = schedule.pace.shared(schedule.parts.get(partition, 1.0))
        start_s, ready = _started(batches, is_together=pace.speed is not None)
        pacer = Pacer(pace, start_s)
        number = 0
        for batch in ready:
            times_ms = np.asarray(batch.column(DUE_MS), np.int64)
            for due in slices(times_ms, schedule.first_ms, pace):
                time.sleep(pacer.wait_s(due, time.time()))
                pacer.sent(due.end - due.start, time.time())
                rows = batch.slice(due.start, due.end - due.start)
                origin = Origin(write_id, str(number), partition)
                names = [each for each in _MESSAGE if each in rows.schema.names]
                messages = iter([rows.select(names)])
                shared = shared_session(options.client())
                written = send_rows(shared, messages, frozenset(names), options, origin)
                yield _counted(rows, written, start_s)
                number += 1

    return send


def _started(
    batches: Iterator[pa.RecordBatch], *, is_together: bool
) -> tuple[float, Iterator[pa.RecordBatch]]:
    """Return when this task starts, in seconds since 1970, and its rows.

    Rows that keep their spacing need all tasks to start at the same time, each with rows at hand;
    so they run as a barrier stage and agree. The machines' clocks are assumed to agree as well.
    """
    first = next(batches, None)
    ready = batches if first is None else chain([first], batches)
    if not is_together:
        return time.time(), ready
    starts_s = BarrierTaskContext.get().allGather(repr(time.time()))
    return max(map(float, starts_s)), ready


def _counted(rows: pa.RecordBatch, written: Written, start_s: float) -> pa.RecordBatch:
    """Return the row counts by source and destination; the first row has the totals."""
    topics = pa.Table.from_batches([rows.select([FROM, "topic"])]).group_by([FROM, "topic"])
    counts = topics.aggregate([([], "count_all")]).to_pylist()
    none = {"startedMs": int(start_s * 1000), "sends": 0, "bodyBytes": 0, "repeated": 0}
    reported = [{**none, **each, "rows": each["count_all"]} for each in counts]
    reported[0].update(sends=written.sends, bodyBytes=written.body_bytes, repeated=written.repeated)
    return pa.RecordBatch.from_pylist(reported, schema=_SENT_ARROW)
