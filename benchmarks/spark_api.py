"""The limits of Spark's Python interface: a source of ready rows, and sinks that drop rows.

They are baselines for the real source and sink. Each worker process reads ready rows from a file
once and then returns them repeatedly, so that only Spark itself is measured.
"""

# ruff: noqa: N802 - the names of methods are Spark's

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import StructType

from turbopump.spark.records.schema import spark_schema

_PAUSE_S = 0.005


@lru_cache(maxsize=4)
def ready_batch(path: str) -> pa.RecordBatch:
    """Return the rows of a file, read once."""
    with pa.OSFile(path, "rb") as file, pa.ipc.open_file(file) as found:
        return found.get_batch(0)


def ready_rows(path: str, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the given number of rows, in batches like the file's."""
    batch = ready_batch(path)
    for start in range(0, rows, batch.num_rows):
        yield batch.slice(0, min(batch.num_rows, rows - start))


class ReadyRows(DataSource):
    """Rows from memory; options ``path``, ``rows``, ``partitions``, and ``rate`` for streams."""

    @classmethod
    def name(cls) -> str:
        return "ready-rows"

    def schema(self) -> StructType:
        return spark_schema()

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - the arguments are Spark's
        return ReadyReader(self.options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002 - the arguments are Spark's
        return ReadyStream(self.options)


def _divided(rows: int, partitions: int) -> list[InputPartition]:
    return [
        InputPartition(rows * (number + 1) // partitions - rows * number // partitions)
        for number in range(partitions)
    ]


class ReadyReader(DataSourceReader):
    """All rows in one batch."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)

    def partitions(self) -> list[InputPartition]:
        return _divided(int(self._options["rows"]), int(self._options["partitions"]))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return ready_rows(self._options["path"], partition.value)


class ReadyStream(DataSourceStreamReader):
    """All rows in one batch, or ``rate`` rows per second."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._started: float | None = None

    def initialOffset(self) -> dict[str, Any]:
        return {"row": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: ARG002 - the arguments are Spark's
        rate = float(self._options.get("rate", 0))
        if not rate:
            return {"row": int(self._options["rows"])}
        if self._started is None:
            self._started = time.monotonic()
        # Like a topic that is being written to: new rows arrive shortly.
        while (row := int((time.monotonic() - self._started) * rate)) <= start["row"]:
            time.sleep(_PAUSE_S)
        return {"row": row}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return _divided(end["row"] - start["row"], int(self._options["partitions"]))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return ready_rows(self._options["path"], partition.value)


class CountingWriter(DataSourceArrowWriter):
    """Drops all rows."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]
        for _ in iterator:
            pass
        return WriterCommitMessage()


class ConvertingWriter(DataSourceArrowWriter):
    """Converts all cells to Python values."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]
        for batch in iterator:
            for column in batch.columns:
                column.to_pylist()
        return WriterCommitMessage()


class Counting(DataSource):
    @classmethod
    def name(cls) -> str:
        return "counting"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002 - the arguments are Spark's
        return CountingWriter()


class Converting(DataSource):
    @classmethod
    def name(cls) -> str:
        return "converting"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002 - the arguments are Spark's
        return ConvertingWriter()
