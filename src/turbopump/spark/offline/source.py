"""``format("rocketmq-store")``: the messages of a stopped or copied store, read from its files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from turbopump.errors import InvalidArgument, RecordError, StoreDamaged
from turbopump.spark.offline.log_partitions import Damage, LogPart, plan, records_of
from turbopump.spark.offline.options import FORMAT, StoreOptions, Wanted, columns_of
from turbopump.spark.offline.store_files import broker_name, log_files, require_stopped
from turbopump.spark.records.record_columns import RecordColumns, unreadable
from turbopump.spark.records.record_run import RecordRun
from turbopump.spark.records.schema import spark_schema
from turbopump.spark.worker_exit import end_quietly

_log = logging.getLogger(__name__)

end_quietly()

_BATCH_BYTES = 16 * 1024 * 1024
"""Batches are not made larger than this by putting small ones together."""


class DefaultSource(DataSource):
    """Reads a store's directory.

    ::

        spark.read.format("rocketmq-store").load("/data/store-copy").groupBy("topic").count()
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return spark_schema(columns_of(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = StoreOptions.parse(self.options)
        own = spark_schema(options.columns)
        if [(field.name, field.dataType) for field in schema] != [
            (field.name, field.dataType) for field in own
        ]:
            raise InvalidArgument(
                f"the schema of format {FORMAT} is fixed: select columns with the option columns"
            )
        return StoreReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802 - the names are Spark's
        raise InvalidArgument(
            f"format {FORMAT} reads the files of a stopped broker and cannot stream: use "
            'format("rocketmq") to read messages as they arrive'
        )

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: ARG002 - the arguments are Spark's
        raise _read_only()

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,  # noqa: ARG002 - the arguments are Spark's
        overwrite: bool,  # noqa: ARG002 - the arguments are Spark's
    ) -> DataSourceStreamWriter:
        raise _read_only()


def _read_only() -> InvalidArgument:
    return InvalidArgument(
        f'format {FORMAT} is read-only: use format("rocketmq") to send to a broker'
    )


class StoreReader(DataSourceReader):
    """Plans on the driver, reads on executors; both must see the directory."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self._columns = RecordColumns(options.columns, tags=options.wanted.tags, check_bodies=False)

    def partitions(self) -> Sequence[InputPartition]:
        """Look at the directory and divide it; refuses one that is no store, or is open."""
        options = self._options
        files = log_files(options.directory, ignore_damage=options.ignore_damage)
        require_stopped(options.directory)
        parts = plan(
            files, options.wanted, options.partition_bytes, ignore_damage=options.ignore_damage
        )
        name = broker_name(options.directory) if options.broker is None else options.broker
        return [InputPartition((name, part)) for part in parts] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one part of the log."""
        if partition.value is None:
            return
        name, part = partition.value
        assert isinstance(part, LogPart)
        yield from _joined(self._batches(part, name), self._options.batch_rows_max)

    def _batches(self, part: LogPart, broker: str) -> Iterator[pa.RecordBatch]:
        rows_max = self._options.batch_rows_max
        for run in records_of(part):
            chosen = _chosen(run, self._options.wanted)
            for first in range(0, len(chosen), rows_max):
                piece = chosen.where(slice(first, first + rows_max))
                if part.damage is Damage.IS_PASSED_OVER:
                    piece = self._readable(piece, part)
                yield from self._decoded(piece, part, broker)

    def _readable(self, run: RecordRun, part: LogPart) -> RecordRun:
        """Leave out messages whose bodies do not inflate, if bodies are wanted."""
        bad = unreadable(run) if "body" in self._columns.columns else {}
        if not bad:
            return run
        first = next(iter(bad.values()))
        _log.warning("%s: %s; messages skipped: %d", part.file.path, first.reason, len(bad))
        good = np.ones(len(run), np.bool_)
        good[list(bad)] = False
        return run.where(good)

    def _decoded(self, run: RecordRun, part: LogPart, broker: str) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._columns.batches_of(run, broker=broker)
        except RecordError as error:
            raise StoreDamaged(
                f"{part.file.path}: {error.reason}; ignoreDamage=true skips such messages"
            ) from error


def _chosen(run: RecordRun, wanted: Wanted) -> RecordRun:
    mask = _of_topics(run, wanted)
    if wanted.start_ms is not None:
        mask &= run.store_times_ms() >= wanted.start_ms
    if wanted.end_ms is not None:
        mask &= run.store_times_ms() < wanted.end_ms
    return run if mask.all() else run.where(mask)


def _of_topics(run: RecordRun, wanted: Wanted) -> npt.NDArray[np.bool_]:
    topics, codes = run.topics()
    return np.array([wanted.has_topic(topic.decode()) for topic in topics], np.bool_)[codes]


def _joined(batches: Iterable[pa.RecordBatch], rows_max: int) -> Iterator[pa.RecordBatch]:
    """Put small batches together: each costs Spark about the same."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if waiting and (rows + batch.num_rows > rows_max or size + batch.nbytes > _BATCH_BYTES):
            yield _one(waiting)
            waiting, rows, size = [], 0, 0
        if batch.num_rows:
            waiting.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
    if waiting:
        yield _one(waiting)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
