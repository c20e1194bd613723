"""``format("rocketmq-store")``: the messages of a stopped or copied store, read from its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from turbopump.errors import DamagedMessage, InvalidArgument, StoreDamaged
from turbopump.spark.offline.log_partitions import DamagedBytes, LogPart, plan, records_of
from turbopump.spark.offline.options import FORMAT, StoreOptions, Wanted, columns_of
from turbopump.spark.offline.store_files import broker_name, log_files, require_stopped
from turbopump.spark.records.bad_records import BadRecords, OnBadRecord
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.spark.records.record_finder import find_records
from turbopump.spark.records.record_run import RecordRun
from turbopump.spark.records.schema import spark_schema

_BATCH_BYTES = 16 * 1024 * 1024
"""Small batches are merged up to this size."""


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

    def streamReader(self, schema: StructType) -> NoReturn:  # noqa: ARG002, N802 - the names are Spark's
        raise InvalidArgument(
            f"format {FORMAT} reads the files of a stopped broker and cannot stream: use "
            'format("rocketmq") to read messages as they arrive'
        )

    def writer(self, schema: StructType, overwrite: bool) -> NoReturn:  # noqa: ARG002 - the arguments are Spark's
        raise InvalidArgument(
            f'format {FORMAT} is read-only: use format("rocketmq") to send to a broker'
        )

    streamWriter = writer  # noqa: N815 - Spark's name


class StoreReader(DataSourceReader):
    """Plans on the driver, reads on executors; both must see the directory."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Inspect and divide the directory; refuse one that is not a store, or is open."""
        options = self._options
        files = log_files(options.directory, ignore_damage=options.ignore_damage)
        require_stopped(options.directory)
        parts = plan(
            files, options.wanted, options.partition_bytes, ignore_damage=options.ignore_damage
        )
        name = broker_name(options.directory) if options.broker is None else options.broker
        return [InputPartition((name, part)) for part in parts] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:
            return
        name, part = partition.value
        assert isinstance(part, LogPart)
        mode = self._options.on_bad_record
        bad = BadRecords(mode, keeps_rows=mode is OnBadRecord.NULL, remedies="null or skip")
        made = RecordColumns(
            self._options.columns, tags=self._options.wanted.tags, check_bodies=False, bad=bad
        )
        try:
            yield from _joined(self._batches(made, part, name), self._options.batch_rows_max)
        except DamagedMessage as error:
            raise StoreDamaged(f"{part.file.path}: {error}") from error
        finally:
            bad.close()

    def _batches(self, made: RecordColumns, part: LogPart, broker: str) -> Iterator[pa.RecordBatch]:
        rows_max = self._options.batch_rows_max
        for item in records_of(part):
            if isinstance(item, DamagedBytes):
                if made.bad.keeps_rows:
                    yield from self._damaged(made, item, broker)
                continue
            chosen = _chosen(item, self._options.wanted)
            for first in range(0, len(chosen), rows_max):
                piece = chosen.where(slice(first, first + rows_max))
                yield from made.batches_of(piece, broker=broker)

    def _damaged(
        self, made: RecordColumns, item: DamagedBytes, broker: str
    ) -> Iterator[pa.RecordBatch]:
        """Return rows for a range of bytes: damaged messages as far as they are readable."""
        run, _ = find_records(item.data)
        if len(run):
            chosen = _chosen(run, self._options.wanted)
            yield from made.batches_of(chosen, broker=broker, reason=item.reason)
        else:
            # Whatever its topic and time.
            size = len(item.data.rstrip(b"\0"))
            yield made.row(broker=broker, size=size, decodeError=item.reason)


def _chosen(run: RecordRun, wanted: Wanted) -> RecordRun:
    topics, codes = run.topics()
    names = (topic.decode("utf-8", "replace") for topic in topics)
    mask = np.array([wanted.has_topic(name) for name in names], np.bool_)[codes]
    if wanted.start_ms is not None:
        mask &= run.store_times_ms() >= wanted.start_ms
    if wanted.end_ms is not None:
        mask &= run.store_times_ms() < wanted.end_ms
    return run if mask.all() else run.where(mask)


def _joined(batches: Iterable[pa.RecordBatch], rows_max: int) -> Iterator[pa.RecordBatch]:
    """Merge small batches: each costs Spark about the same."""
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
