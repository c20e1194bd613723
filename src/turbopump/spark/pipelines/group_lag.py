"""Lag analytics: how far groups are behind, sampled over time from the brokers' own figures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its conventional name
from pyspark.sql.column import Column

from turbopump.admin.administration import Admin
from turbopump.admin.progress import Progress
from turbopump.client.config import ClientConfig
from turbopump.client.session import Session
from turbopump.durations import Duration, seconds
from turbopump.errors import NotThere
from turbopump.spark.pipelines.arguments import (
    require_count,
    require_driver,
    require_window,
    window_ms,
)
from turbopump.spark.pipelines.local_files import full_path
from turbopump.spark.pipelines.progress import Step, Watch, unwatched
from turbopump.spark.pipelines.reports import Table, facts, table
from turbopump.spark.pipelines.spark_errors import explain_errors
from turbopump.spark.records.schema import report_schemas
from turbopump.spark.shared_session import shared_session

_SPARK, _ARROW = report_schemas(
    "time_ms long, group string, topic string, broker string, queue_id int, committed long, "
    "max_offset long, lag long, delay_ms long"
)
_QUEUE = ("group", "topic", "broker", "queue_id")

Sample: TypeAlias = dict[str, str | int | None]
"""A group's position in one queue at one time; None if only members know where they start."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a group was behind in a topic, in one window or (None) overall."""

    window_ms: int | None
    group: str
    topic: str
    samples: int
    lag_mean: float | None
    """Over all queues, as are the others.

    Samples in which the lag of a queue is unknown do not count; None if it is in all of them.
    """

    lag_max: int | None
    lag_last: int | None
    """None if the lag of a queue was unknown in the last sample."""

    delay_max_ms: int | None
    """How long the oldest unconsumed message had been waiting."""

    consumed: int | None
    """How far committed offsets advanced from the first sample to the last; None if unknown."""

    arrived: int
    """How far the queues grew from the first sample to the last."""


@dataclass(frozen=True, slots=True)
class LagReport:
    """How far groups were behind while they were sampled."""

    window: str
    samples: int
    """The number of sample times, including those of the history."""

    groups: tuple[Lag, ...]
    by_window: tuple[Lag, ...]
    seconds: float

    def tables(self) -> tuple[Table, ...]:
        columns = (
            "group, topic, samples, lag mean, lag max, lag now, delay max ms, consumed, arrived"
        )
        lags = table("lag", columns, self.groups)
        return lags, facts("", samples=self.samples, seconds=self.seconds)


def lag(
    spark: SparkSession,
    nameserver: str | Sequence[str],
    groups: Sequence[str] = (),
    *,
    samples: int = 10,
    interval: Duration = 1,
    window: str = "10 seconds",
    history: str | os.PathLike[str] | None = None,
    watch: Watch = unwatched,
    stop: threading.Event | None = None,
) -> LagReport:
    """Sample the positions of groups ``samples`` times; of all groups unless some are named.

    With ``history``, a directory of Parquet files, the samples are added to it, and those of
    earlier runs are included.
    """
    require_driver(spark, "lag")
    require_count("samples", samples)
    interval_s = seconds(interval, "interval")
    require_window(spark, window)
    started_s = time.monotonic()
    client = ClientConfig(nameserver)
    stopped = stop or threading.Event()
    taken: list[Sample] = []
    for number in range(samples):
        taken += shared_session(client).run(lambda session: _sample(session, groups))
        watch(Step("samples taken", number + 1, samples))
        if number + 1 < samples and stopped.wait(interval_s):
            break
    with explain_errors():
        frame = spark.createDataFrame(pa.Table.from_pylist(taken, _ARROW))
        if history is not None:
            frame.coalesce(1).write.mode("append").parquet(full_path(history))
            frame = spark.read.schema(_SPARK).parquet(full_path(history))
        moments = frame.select("time_ms").distinct().count()
        return LagReport(
            window, moments, _lags(frame, None), _lags(frame, window), time.monotonic() - started_s
        )


async def _sample(session: Session, groups: Sequence[str]) -> list[Sample]:
    """Sample the positions of groups now; raises NotThere for a named one that does not exist."""
    admin = Admin(session=session)
    names = groups or [each.settings.group for each in await admin.groups.list()]
    now_ms = session.clock.now_ms()
    found: list[Progress] = []
    for name in names:
        try:
            found.append(await admin.groups.progress(name))
        except NotThere:
            # Deleted just now; only groups that were named must exist.
            if groups:
                raise
    return [
        {
            "time_ms": now_ms,
            "group": progress.group,
            "topic": each.queue.topic,
            "broker": each.queue.broker,
            "queue_id": each.queue.queue_id,
            "committed": each.committed,
            "max_offset": each.max_offset,
            "lag": each.lag,
            "delay_ms": each.delay_ms,
        }
        for progress in found
        for each in progress.queues
    ]


def _lags(frame: DataFrame, window: str | None) -> tuple[Lag, ...]:
    keys = ("window_ms", "group", "topic")
    placed = frame.withColumn("window_ms", window_ms(window))
    is_known = F.count("lag") == F.count(F.lit(1))
    moments = placed.groupBy(*keys, "time_ms").agg(
        F.when(is_known, F.sum("lag")).alias("lag"),
        F.when(is_known, F.max("delay_ms")).alias("delay_ms"),
    )
    levels = moments.groupBy(*keys).agg(
        F.count(F.lit(1)).alias("samples"),
        F.avg("lag").alias("lag_mean"),
        F.max("lag").alias("lag_max"),
        F.max_by("lag", "time_ms").alias("lag_last"),
        F.max("delay_ms").alias("delay_max_ms"),
    )
    # Queue by queue: a queue missing from some samples would look like a jump of the sum.
    moved = (
        placed.groupBy("window_ms", *_QUEUE)
        .agg(_moved("committed"), _moved("max_offset"))
        .groupBy(*keys)
        .agg(F.sum("committed").alias("consumed"), F.sum("max_offset").alias("arrived"))
    )
    joined = [levels[name].eqNullSafe(moved[name]) for name in keys]
    columns = [levels[each] for each in levels.columns]
    rows = levels.join(moved, joined).select(*columns, "consumed", "arrived").orderBy(*keys)
    return tuple(Lag(*row) for row in rows.collect())


def _moved(column: str) -> Column:
    # Unknown positions are not compared.
    known_ms = F.when(F.col(column).isNotNull(), F.col("time_ms"))
    return (F.max_by(column, known_ms) - F.min_by(column, known_ms)).alias(column)
