"""Archives as Delta tables: Spark writes a batch's files, one commit adds them to the table.

The commit carries an application transaction, the query's id and the batch number, so a batch that
is repeated after a crash is found in the table and not added again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from turbopump.errors import InvalidArgument, MissingPackage
from turbopump.spark.pipelines.archive_reader import Size, parquet_files
from turbopump.spark.pipelines.local_files import local_directory
from turbopump.spark.records.schema import arrow_schema

_FILES = "data"
"""Relative to the table: a folder for each batch, replaced whole when the batch is repeated."""
_DERIVED = {"date": pa.date32(), "hour": pa.int32()}
_NULL = "__HIVE_DEFAULT_PARTITION__"
_TIMESTAMPS = "spark.sql.parquet.outputTimestampType"


class DeltaArchive:
    """A Delta table that receives batches."""

    def __init__(self, path: str, columns: Sequence[str], partition_by: Sequence[str]) -> None:
        self._delta, self._directory = require_delta(path)
        self._partition_by = list(partition_by)
        derived = [pa.field(n, _DERIVED[n]) for n in partition_by if n not in columns]
        self._schema = pa.schema([*arrow_schema(columns), *derived])
        self._table: Any = self._delta.DeltaTable.create(
            str(self._directory), self._schema, mode="ignore", partition_by=self._partition_by
        )
        self.size = Size(0, 0)
        """What this run has added."""

    def has(self, query_id: str, batch_id: int) -> bool:
        """Whether a batch has been committed."""
        self._table.update_incremental()
        newest = self._table.transaction_version(query_id)
        return newest is not None and newest >= batch_id

    def add(self, rows: DataFrame, query_id: str, batch_id: int) -> None:
        """Write the files of a batch, replacing those of an earlier attempt, and commit them."""
        # Delta's readers need not know the older type that Spark may write.
        rows.sparkSession.conf.set(_TIMESTAMPS, "TIMESTAMP_MICROS")
        folder = self._directory / _FILES / f"{query_id}-{batch_id:010}"
        rows.write.mode("overwrite").partitionBy(*self._partition_by).parquet(str(folder))
        actions = [self._action(file) for file in parquet_files(folder)]
        if actions:
            self._commit(actions, query_id, batch_id)

    def _commit(self, actions: Sequence[Any], query_id: str, batch_id: int) -> None:
        transaction = self._delta.Transaction(query_id, batch_id)
        self._table.create_write_transaction(
            actions,
            "append",
            self._delta.Schema.from_arrow(self._schema),
            partition_by=self._partition_by,
            commit_properties=self._delta.CommitProperties(app_transactions=[transaction]),
        )
        added = sum(each.size for each in actions)
        self.size = Size(self.size.files + len(actions), self.size.file_bytes + added)

    def _action(self, file: Path) -> Any:
        relative = file.relative_to(self._directory)
        pairs = (part.partition("=") for part in relative.parts[2:-1])
        values = {name: None if text == _NULL else unquote(text) for name, _, text in pairs}
        rows = pq.read_metadata(file).num_rows
        return self._delta.transaction.AddAction(
            # The package escapes it once more, as the format requires.
            path=relative.as_posix(),
            size=file.stat().st_size,
            partition_values=values,
            modification_time=int(time.time() * 1000),
            data_change=True,
            stats=json.dumps({"numRecords": rows}),
        )


def require_delta(path: str) -> tuple[Any, Path]:
    """Return the package and the directory of a table; raises if there cannot be one."""
    directory = local_directory(path)
    if directory is None:
        raise InvalidArgument(
            f"an archive of format delta must be a directory of this machine, got {path!r}"
        )
    try:
        import_module("deltalake.transaction")
        # By name: type checks also run where it is not installed.
        return import_module("deltalake"), directory
    except ImportError as error:
        raise MissingPackage.of_extra("delta", "archives of format delta need deltalake") from error
