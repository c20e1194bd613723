"""Archive: topics to partitioned Parquet files, each message once.

Spark's checkpoint fixes the offsets of a batch, so a batch that is written again has the same rows.
Each batch writes into its own folders, the innermost partition, by replacing them whole: writing it
twice leaves it once. This needs no log of files beside the data, so every reader of Parquet
directories sees the same rows, and small files can be merged later. Spark's own file sink prevents
both.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its conventional name
from pyspark.sql.column import Column
from pyspark.sql.streaming.query import StreamingQuery

from turbopump.durations import Duration, milliseconds
from turbopump.errors import InvalidArgument, SparkError
from turbopump.spark.pipelines.archive_delta import DeltaArchive, require_delta
from turbopump.spark.pipelines.archive_layout import BATCH, CHECKPOINT, batch_value
from turbopump.spark.pipelines.archive_reader import Size, batch_folders
from turbopump.spark.pipelines.archive_settings import (
    DELTA,
    FORMATS,
    PARQUET,
    ArchiveSettings,
    record_settings,
    require_no_file_list,
)
from turbopump.spark.pipelines.arguments import require_driver
from turbopump.spark.pipelines.local_files import full_path, local_directory, writing_archive
from turbopump.spark.pipelines.progress import Step, Watch, unwatched
from turbopump.spark.pipelines.reports import Table, bytes_text, facts, per_second, timestamp
from turbopump.spark.pipelines.spark_errors import explain_errors
from turbopump.spark.query_lag import lag_of, source_name
from turbopump.spark.records.schema import DECODE_ERROR
from turbopump.spark.stream_counts import counted_options

PARTITION_BY = ("topic", "date")

_TOPIC_OPTIONS = ("topic", "topics", "topicpattern", "assign")
_QUERY_ID = "sql.streaming.queryId"
_POLL_INTERVAL_S = 1
_SECONDS_PER_HOUR = 3600
_HOURS_PER_DAY = 24
_SECONDS_PER_DAY = _SECONDS_PER_HOUR * _HOURS_PER_DAY
_OF_TIME = ("date", "hour")
"""Columns derived from the store timestamp."""


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """What one run archived; rows are counted while they are written."""

    path: str
    checkpoint: str
    batches: int
    rows: int
    body_bytes: int | None
    """None if the column ``body`` is left out."""

    first_stored_ms: int | None
    last_stored_ms: int | None
    files: int | None
    """Files of this run's batches; None where they cannot be listed."""

    file_bytes: int | None
    seconds: float
    bad_records: int = 0
    """Records that could not be decoded, however ``onBadRecord`` handled them."""

    def tables(self) -> tuple[Table, ...]:
        return (
            facts(
                f"archive {self.path}",
                messages=self.rows,
                **({"bad_records": self.bad_records} if self.bad_records else {}),
                bodies=bytes_text(self.body_bytes),
                first_stored=timestamp(self.first_stored_ms),
                last_stored=timestamp(self.last_stored_ms),
                batches=self.batches,
                files=self.files,
                size_of_files=bytes_text(self.file_bytes),
                seconds=self.seconds,
                messages_per_second=per_second(self.rows, self.seconds),
            ),
        )


def archive(
    spark: SparkSession,
    path: str | os.PathLike[str],
    source: Mapping[str, str],
    *,
    partition_by: Sequence[str] = PARTITION_BY,
    checkpoint: str | os.PathLike[str] | None = None,
    interval: Duration | None = None,
    format: str = PARQUET,  # noqa: A002 - the name that Spark and the command have for it
    watch: Watch = unwatched,
    stop: threading.Event | None = None,
) -> ArchiveReport:
    """Append messages of topics to Parquet files below ``path``, each exactly once.

    With ``format="delta"`` they form a Delta table, which requires the extra ``delta``.

    ``source`` are the options of the source. Without ``interval``, it ends when everything
    present at the start is archived; with it, a batch is written so often until ``stop`` is set.
    The next run resumes from the checkpoint, by default ``_checkpoint`` below ``path``.
    """
    require_driver(spark, "archive")
    if format not in FORMATS:
        raise InvalidArgument(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    interval_ms = None if interval is None else milliseconds("interval", interval, 0)
    text = full_path(path)
    if format == DELTA:
        require_delta(text)
    require_no_file_list(spark, text)
    noted = full_path(f"{text.rstrip('/')}/{CHECKPOINT}" if checkpoint is None else checkpoint)
    started_s = time.monotonic()
    with explain_errors():
        options, leaves_out_bad = counted_options({"startingOffsets": "earliest", **source})
        frame = spark.readStream.format("rocketmq").options(**options).load()
        left_out = (DECODE_ERROR,) if leaves_out_bad else ()
        columns = tuple(name for name in frame.columns if name not in left_out)
        partitions = _checked(partition_by, columns)
        record_settings(spark, text, ArchiveSettings(partitions, columns, format))
        delta = DeltaArchive(text, columns, partitions) if format == DELTA else None
        writer = _Writer(text, partitions, leaves_out_bad, delta)
        stream = (
            frame.writeStream.foreachBatch(writer.write)
            .queryName(_query_name(source, text))
            .option("checkpointLocation", noted)
        )
        timed = (
            stream.trigger(availableNow=True)
            if interval_ms is None
            else stream.trigger(processingTime=f"{interval_ms} milliseconds")
        )
        directory = local_directory(text)
        with nullcontext() if directory is None else writing_archive(directory):
            _run(timed.start(), writer, watch, stop or threading.Event())
    return _report(text, noted, writer, time.monotonic() - started_s)


def _query_name(source: Mapping[str, str], path: str) -> str:
    """Return the name of the query in Spark's UI, unique for each archive."""
    given = {name.lower(): value for name, value in source.items()}
    topics = [given[name] for name in _TOPIC_OPTIONS if name in given]
    return f"archive of {source_name(topics, given.get('group'))} in {path}"


@dataclass(slots=True)
class _Writer:
    """Writes the batches of a query, and counts."""

    path: str
    partition_by: tuple[str, ...]
    leaves_out_bad: bool = False
    """Whether records that could not be decoded are only counted."""
    delta: DeltaArchive | None = None
    bad: int = 0
    batches: list[str] = field(default_factory=list)
    rows: int = 0
    body_bytes: int | None = None
    first_ms: int | None = None
    last_ms: int | None = None
    is_writing: bool = False

    def write(self, frame: DataFrame, batch_id: int) -> None:
        """Write a batch, replacing what an earlier attempt left."""
        query_id = frame.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        if query_id is None:
            raise SparkError(f"Spark does not set {_QUERY_ID}: PySpark 4.2 or newer is required")
        self.is_writing = True
        try:
            self._write(frame, query_id, batch_id)
        finally:
            self.is_writing = False

    def _write(self, frame: DataFrame, query_id: str, batch_id: int) -> None:
        if self.delta is not None and self.delta.has(query_id, batch_id):
            return
        seen, batch = Observation(), batch_value(query_id, batch_id)
        rows = frame.observe(seen, *_counts(frame.columns))
        if self.leaves_out_bad:
            rows = rows.where(F.col(DECODE_ERROR).isNull()).drop(DECODE_ERROR)
        rows = rows.withColumns(_derived(self.partition_by))
        if self.delta is not None:
            self.delta.add(rows, query_id, batch_id)
        else:
            (
                rows.withColumn(BATCH, F.lit(batch))
                .write.mode("overwrite")
                .option("partitionOverwriteMode", "dynamic")
                .partitionBy(*self.partition_by, BATCH)
                .parquet(self.path)
            )
        self._note(batch, seen.get)

    def _note(self, batch: str, seen: Mapping[str, int | None]) -> None:
        if not seen["rows"]:
            # The first batch of a query only records where queues start.
            return
        bad = seen.get("bad") or 0
        self.batches.append(batch)
        self.bad += bad
        self.rows += seen["rows"] - (bad if self.leaves_out_bad else 0)
        if "body_bytes" in seen:
            self.body_bytes = (self.body_bytes or 0) + (seen["body_bytes"] or 0)
        first, last = seen.get("first_ms"), seen.get("last_ms")
        if first is not None and last is not None:
            self.first_ms = first if self.first_ms is None else min(first, self.first_ms)
            self.last_ms = last if self.last_ms is None else max(last, self.last_ms)


def _counts(columns: Sequence[str]) -> list[Column]:
    counts = [F.count(F.lit(1)).alias("rows")]
    if "body" in columns:
        counts.append(F.sum(F.length("body")).alias("body_bytes"))
    if DECODE_ERROR in columns:
        counts.append(F.count(DECODE_ERROR).alias("bad"))
    if "storeTimestamp" in columns:
        stored = F.unix_millis("storeTimestamp")
        counts += [F.min(stored).alias("first_ms"), F.max(stored).alias("last_ms")]
    return counts


def _derived(partition_by: Sequence[str]) -> dict[str, Column]:
    """Return the computed columns: dates and hours are in UTC, wherever it runs.

    By arithmetic, because Spark's hour of a timestamp is in the session's time zone.
    """
    stored_s = F.unix_seconds("storeTimestamp")
    day = F.floor(stored_s / _SECONDS_PER_DAY)
    hour = F.floor(stored_s / _SECONDS_PER_HOUR) - day * _HOURS_PER_DAY
    every = {"date": F.date_from_unix_date(day.cast("int")), "hour": hour.cast("int")}
    return {name: column for name, column in every.items() if name in partition_by}


def _checked(partition_by: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    allowed = [*columns, *(_OF_TIME if "storeTimestamp" in columns else ())]
    unfit = ("body", "properties")
    for name in partition_by:
        if name not in allowed or name in unfit:
            fit = ", ".join(each for each in allowed if each not in unfit)
            raise InvalidArgument(
                f"partition_by must be columns of {fit}, got {','.join(partition_by)!r}"
            )
    if len(set(partition_by)) < len(partition_by):
        raise InvalidArgument(f"partition_by is {','.join(partition_by)!r}: a column appears twice")
    return tuple(partition_by)


def _run(query: StreamingQuery, writer: _Writer, watch: Watch, stop: threading.Event) -> None:
    """Wait until the query ends or is to stop, reporting progress."""
    try:
        while not query.awaitTermination(_POLL_INTERVAL_S):
            watch(_step(query, writer))
            # Between batches: one that is cut short is written again by the next run.
            if stop.is_set() and not writer.is_writing:
                break
    finally:
        query.stop()
    watch(Step("messages archived", writer.rows, writer.rows))


def _step(query: StreamingQuery, writer: _Writer) -> Step:
    progress = query.lastProgress
    lags = None if progress is None else lag_of(progress)
    if lags is None or any(each.offsets_total is None for each in lags):
        return Step("messages archived", writer.rows)
    left = sum(each.offsets_total or 0 for each in lags)
    return Step("messages archived", writer.rows, writer.rows + left)


def _report(path: str, checkpoint: str, writer: _Writer, seconds: float) -> ArchiveReport:
    size = _written(path, writer.batches) if writer.delta is None else writer.delta.size
    return ArchiveReport(
        path=path,
        checkpoint=checkpoint,
        batches=len(writer.batches),
        rows=writer.rows,
        body_bytes=writer.body_bytes,
        first_stored_ms=writer.first_ms,
        last_stored_ms=writer.last_ms,
        files=None if size is None else size.files,
        file_bytes=None if size is None else size.file_bytes,
        seconds=seconds,
        bad_records=writer.bad,
    )


def _written(path: str, batches: Sequence[str]) -> Size | None:
    directory = local_directory(path)
    if directory is None:
        return None
    names = {f"{BATCH}={each}" for each in batches}
    folders = [each for each in batch_folders(directory) if each.name in names]
    return Size(sum(each.files for each in folders), sum(each.file_bytes for each in folders))
