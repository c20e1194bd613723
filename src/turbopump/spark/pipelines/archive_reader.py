"""An archive in its directory: listing it, and reading it consistently.

Spark alone writes archives, so they may be anywhere that Spark writes. Listing and merging here
need a local file system with atomic renames.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DataType, DateType, IntegerType, StringType, StructField, StructType

from turbopump.errors import InvalidArgument
from turbopump.spark.pipelines.archive_layout import BATCH, COMPACTION, BatchFolder, parsed_folder
from turbopump.spark.pipelines.archive_settings import (
    ArchiveSettings,
    recorded_settings,
    require_parquet,
)
from turbopump.spark.pipelines.arguments import require_driver
from turbopump.spark.pipelines.local_files import folders_stay, full_path, local_directory
from turbopump.spark.records.schema import COLUMNS, spark_schema

_JOURNAL = ".json"
_DERIVED: dict[str, DataType] = {"date": DateType(), "hour": IntegerType(), BATCH: StringType()}


class PendingMerge(msgspec.Struct, frozen=True):
    """A merge that is decided: from now on the merged folder counts, and its sources do not."""

    staged: str
    """Where the merged files are before they are moved; all paths are relative to the archive."""

    merged: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """The number and size of files in a directory."""

    files: int
    file_bytes: int


def read_archive(spark: SparkSession, path: str | os.PathLike[str]) -> DataFrame:
    """Return an archive as a table: the source's columns, those it is partitioned by, and `batch`.

    Each row appears once, even while small files are being merged or after an interrupted merge,
    which other readers of the directory see as repeated rows.
    """
    require_driver(spark, "read_archive")
    text = full_path(path)
    directory = local_directory(text)
    if directory is None:
        return _read(spark, text, [text])
    if not directory.is_dir():
        raise InvalidArgument(f"archive {text!r} does not exist")
    # Spark lists the files here, once, and not when the table is used.
    with folders_stay(directory):
        return _read(spark, text, _paths(directory))


def _read(spark: SparkSession, archive: str, paths: Sequence[str]) -> DataFrame:
    reader = spark.read.option("basePath", archive)
    settings = recorded_settings(spark, archive)
    require_parquet(archive, settings)
    if settings is not None and settings.columns:
        return reader.schema(_recorded_schema(settings)).parquet(*paths)
    try:
        # If the columns were not recorded, each file may have others.
        found = reader.option("mergeSchema", "true").parquet(*paths).schema
    except AnalysisException as error:
        if error.getCondition() in ("UNABLE_TO_INFER_SCHEMA", "PATH_NOT_FOUND"):
            raise InvalidArgument(f"archive {archive!r} is empty") from error
        raise
    return reader.schema(_corrected_schema(found)).parquet(*paths)


def _recorded_schema(settings: ArchiveSettings) -> StructType:
    derived = [name for name in settings.partition_by if name not in settings.columns]
    added = [StructField(name, _DERIVED[name]) for name in (*derived, BATCH)]
    return StructType([*spark_schema(settings.columns).fields, *added])


def _corrected_schema(found: StructType) -> StructType:
    """Undo Spark's guess of partition column types: a topic "42" would be a number."""
    known = {field.name: field.dataType for field in spark_schema(COLUMNS).fields}
    types = {**known, **_DERIVED}
    return StructType(
        [StructField(each.name, types.get(each.name, each.dataType)) for each in found.fields]
    )


def _paths(directory: Path) -> list[str]:
    """Return the paths to read: all, or without the folders that merged ones replace."""
    merged = [each for each in pending_merges(directory) if (directory / each.merged).is_dir()]
    if not merged:
        return [str(directory)]
    replaced = {path for each in merged for path in each.sources}
    return [
        str(directory / each.path) for each in batch_folders(directory) if each.path not in replaced
    ]


def batch_folders(directory: Path) -> list[BatchFolder]:
    found = []
    for parent, names, _ in os.walk(directory):
        names[:] = sorted(name for name in names if not name.startswith(("_", ".")))
        folder = parsed_folder(Path(parent).relative_to(directory).as_posix())
        if folder is not None:
            names.clear()
            size = size_of(Path(parent))
            found.append(replace(folder, files=size.files, file_bytes=size.file_bytes))
    return found


def size_of(directory: Path) -> Size:
    """Count the Parquet files in a directory tree, and their bytes."""
    sizes = [file.stat().st_size for file in parquet_files(directory)]
    return Size(len(sizes), sum(sizes))


def parquet_files(directory: Path) -> Iterator[Path]:
    """Yield the Parquet files in a directory tree that its readers see, sorted."""
    for file in sorted(directory.rglob("*.parquet")):
        if not any(part.startswith(("_", ".")) for part in file.relative_to(directory).parts):
            yield file


def pending_merges(directory: Path) -> list[PendingMerge]:
    """Return the merges that are decided but not finished."""
    journals = sorted((directory / COMPACTION).glob(f"*{_JOURNAL}"))
    return [msgspec.json.decode(each.read_bytes(), type=PendingMerge) for each in journals]


def journal_path(directory: Path, name: str) -> Path:
    """Return where a pending merge is recorded."""
    return directory / COMPACTION / f"{name}{_JOURNAL}"
