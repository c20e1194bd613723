"""``format("rocketmq")``: topics as tables and streams, read and written."""

# ruff: noqa: N802 - the names of methods are Spark's

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from turbopump.errors import InvalidArgument
from turbopump.spark.needed_packages import needs_packages
from turbopump.spark.worker_process import BeginsCall, begin_call

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from turbopump.spark.reading.offsets import Marks, Offsets
    from turbopump.spark.reading.options import SourceOptions
    from turbopump.spark.reading.stream_driver import StreamDriver

FORMAT = "rocketmq"

# Readers and writers are imported on use: Spark imports this module to find the source, for every
# query of any source, and must not fail or wait because of it.


def register(spark: SparkSession) -> None:
    """Register ``format("rocketmq")`` with a session.

    ::

        turbopump.spark.register(spark)
        spark.read.format("rocketmq").option("topic", "orders").load()
    """
    spark.dataSource.register(DefaultSource)


class DefaultSource(BeginsCall, DataSource):
    """Topics, as Spark sees them."""

    @classmethod
    def name(cls) -> str:
        begin_call()
        return FORMAT

    @needs_packages(FORMAT)
    def schema(self) -> StructType:
        from turbopump.spark.reading.options import columns_of
        from turbopump.spark.records.schema import spark_schema

        return spark_schema(columns_of(self.options))

    @needs_packages(FORMAT)
    def reader(self, schema: StructType) -> DataSourceReader:
        from turbopump.spark.reading.options import SourceOptions

        options = _with_columns(SourceOptions.for_batch(self.options), schema)
        return BatchReader(options)

    @needs_packages(FORMAT)
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from turbopump.spark.reading.options import SourceOptions

        return StreamReader(_with_columns(SourceOptions.for_stream(self.options), schema))

    @needs_packages(FORMAT)
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from turbopump.spark.writing.writer import batch_writer

        if overwrite:
            raise InvalidArgument(
                'mode must be "append", got "overwrite": messages cannot be replaced'
            )
        return batch_writer(self.options, schema)

    @needs_packages(FORMAT)
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: ARG002 - the arguments are Spark's
        from turbopump.spark.writing.writer import stream_writer

        return stream_writer(self.options, schema)


def _with_columns(options: SourceOptions, schema: StructType) -> SourceOptions:
    """Return options with the columns of a schema, which a user may have given instead."""
    from turbopump.spark.records.schema import KNOWN_COLUMNS, spark_schema, with_suggestions

    columns = tuple(schema.fieldNames())
    types = {field.name: field.dataType for field in spark_schema(KNOWN_COLUMNS)}
    unknown = [name for name in columns if name not in types]
    if unknown or len(set(columns)) < len(columns):
        wanted = with_suggestions(unknown) or "a column twice"
        raise InvalidArgument(
            f"the schema has {wanted}, which messages do not: columns are "
            f"{', '.join(f'{each} {types[each].simpleString()}' for each in types)}"
        )
    wrong = [
        f"{field.name} as {field.dataType.simpleString()}, expected "
        f"{field.name} {types[field.name].simpleString()}"
        for field in schema
        if types[field.name] != field.dataType
    ]
    if wrong:
        raise InvalidArgument(
            f"the schema has the wrong type: {', '.join(wrong)}; convert columns in the query, as "
            "in CAST(body AS STRING)"
        )
    others = [name for name in columns if name not in options.columns]
    if others:
        raise InvalidArgument(
            f"the schema has {', '.join(others)}, which the options columns or includeProperties "
            "omit: use one of the two"
        )
    return replace(options, columns=columns)


# --- batch ----------------------------------------------------------------------------------------


class BatchReader(BeginsCall, DataSourceReader):
    """Reads what exists when the query is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        from turbopump.spark.reading.batch_planner import plan_batch
        from turbopump.spark.reading.cluster import Cluster
        from turbopump.spark.shared_session import shared_session

        options = self._options
        planned = shared_session(options.client).run(
            lambda session: plan_batch(Cluster(session, options), options)
        )
        return [InputPartition(partition) for partition in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    with needs_packages(FORMAT):
        from turbopump.spark.reading.partition_reader import PartitionReader

    # Spark creates an empty partition of its own if there is none.
    return PartitionReader(options).read(partition.value or ())


# --- stream ---------------------------------------------------------------------------------------

_NO_LIMIT = 2**63 - 1


class StreamReader(BeginsCall, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows queues; everything except `read` runs in one process of the driver."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._driver: StreamDriver | None = None
        self._written: dict[str, Any] = {}
        self._read: tuple[Offsets, Marks] = {}, {}
        """Spark's latest offsets, as text and parsed."""

    def initialOffset(self) -> dict[str, Any]:
        """Return that nothing is known yet, always.

        Spark asks again after a restart before the first batch has finished. The stream starts
        where the first batch ends: that batch only records the position.
        """
        return {}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        from turbopump.spark.reading.offsets import NO_QUEUES, flat, flat_marks, nested

        if isinstance(limit, ReadAllAvailable):
            raise InvalidArgument(
                "trigger(once=True) is not supported: its only batch would record where the stream "
                "starts and read nothing; use trigger(availableNow=True)"
            )
        # With thousands of queues, do not parse the same offsets again.
        if start != self._written:
            self._read, self._written = (flat(start), flat_marks(start)), start
        (known, marks), has_begun = self._read, bool(start)
        end = self._on_driver().run(
            lambda planner: planner.latest(known, has_begun=has_begun, marks=marks),
            is_first=not has_begun,
        )
        found = end, self._on_driver().planner.marks
        # The first position counts even if there are no queues: later ones are read completely.
        if not has_begun or found != (known, marks):
            self._read, self._written = found, nested(*found) or NO_QUEUES
        return self._written

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return any limit but "all available", by which Spark signals ``trigger(once=True)``.

        `latestOffset` applies all limits of the options itself.
        """
        return ReadMaxRows(self._options.trigger.rows_max or _NO_LIMIT)

    def prepareForTriggerAvailableNow(self) -> None:
        self._on_driver().run(lambda planner: planner.freeze(), is_first=True)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        from turbopump.spark.reading.offsets import reported

        if self._driver is None:
            return None
        return reported(self._driver.planner.latest_known, self._options.group)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        from turbopump.spark.reading.offsets import flat, flat_marks
        from turbopump.spark.reading.partition_planner import plan, ranges_between

        known = flat(start)
        if end == self._written:
            until, marks = self._read
        else:
            planned_end, marks = flat(end), flat_marks(end)
            before = flat_marks(start)
            until = self._on_driver().run(
                lambda planner: planner.without_lost(known, planned_end, before, marks)
            )
        ranges = ranges_between(known, until, marks)
        planned = plan(ranges, self._options.plan, queues=len(known))
        return [InputPartition(partition) for partition in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        from turbopump.spark.reading.offsets import flat

        offsets = self._read[0] if end == self._written else flat(end)
        self._on_driver().run(lambda planner: planner.commit(offsets))

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.close()

    def _on_driver(self) -> StreamDriver:
        from turbopump.spark.reading.stream_driver import StreamDriver

        if self._driver is None:
            self._driver = StreamDriver(self._options)
        return self._driver
