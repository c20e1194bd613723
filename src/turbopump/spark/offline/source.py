"""``format("rocketmq-store")``: the messages of a stopped or copied store, read from its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from turbopump.errors import InvalidArgument
from turbopump.spark.needed_packages import needs_packages
from turbopump.spark.offline import FORMAT
from turbopump.spark.worker_process import BeginsCall, begin_call

if TYPE_CHECKING:
    import pyarrow as pa

    from turbopump.spark.offline.options import StoreOptions

# Imported on use, as in `turbopump.spark.source`: Spark imports this module to find the source.


class DefaultSource(BeginsCall, DataSource):
    """Reads a store's directory.

    ::

        spark.read.format("rocketmq-store").load("/data/store-copy").groupBy("topic").count()
    """

    @classmethod
    def name(cls) -> str:
        begin_call()
        return FORMAT

    @needs_packages(FORMAT)
    def schema(self) -> StructType:
        from turbopump.spark.offline.options import columns_of
        from turbopump.spark.records.schema import spark_schema

        return spark_schema(columns_of(self.options))

    @needs_packages(FORMAT)
    def reader(self, schema: StructType) -> DataSourceReader:
        from turbopump.spark.offline.options import StoreOptions
        from turbopump.spark.records.schema import spark_schema

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


class StoreReader(BeginsCall, DataSourceReader):
    """Plans on the driver, reads on executors; both must see the directory."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options

    @needs_packages(FORMAT)
    def partitions(self) -> Sequence[InputPartition]:
        """Inspect and divide the directory; refuse one that is not a store, or is open."""
        from turbopump.spark.offline.log_partitions import plan
        from turbopump.spark.offline.store_files import broker_name, log_files, require_stopped

        options = self._options
        files = log_files(options.directory, ignore_damage=options.ignore_damage)
        require_stopped(options.directory)
        parts = plan(
            files, options.wanted, options.partition_bytes, ignore_damage=options.ignore_damage
        )
        name = broker_name(options.directory) if options.broker is None else options.broker
        return [InputPartition((name, part)) for part in parts] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with needs_packages(FORMAT):
            from turbopump.spark.offline.part_reader import PartReader

        if partition.value is not None:
            name, part = partition.value
            yield from PartReader(self._options).read(part, name)
