"""An archive in its directory: listing it, and reading it as it was meant.

Archives are written by Spark alone, so they may lie wherever Spark writes. What is done here by
hand, listing and merging, needs a file system of this machine that renames in one step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DataType, DateType, IntegerType, StringType, StructField, StructType

from turbopump.errors import InvalidArgument
from turbopump.spark.pipelines.layout import (
    BATCH,
    COMPACTION,
    SETTINGS_FILE,
    BatchFolder,
    parsed_folder,
)
from turbopump.spark.records.schema import COLUMNS, spark_schema

_JOURNAL = ".json"
_DERIVED: dict[str, DataType] = {"date": DateType(), "hour": IntegerType(), BATCH: StringType()}


class ArchiveSettings(msgspec.Struct, frozen=True):
    """What has to be the same on every run that writes into an archive."""

    partition_by: tuple[str, ...]


class PendingMerge(msgspec.Struct, frozen=True):
    """A merge that is decided: from now on the merged folder counts, and its sources do not."""

    staged: str
    """Where the merged files are until they are moved; all paths are relative to the archive."""

    merged: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """What lies in a directory."""

    files: int
    file_bytes: int


def local_directory(path: str) -> Path | None:
    """Return a path of this machine's file system, None if it is one elsewhere."""
    parts = urlsplit(path)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if "://" in path else Path(path)


def full_path(path: str | os.PathLike[str]) -> str:
    """Return a path that means the same to Java, which may have been started elsewhere."""
    text = os.fspath(path)
    return text if "://" in text or text.startswith("file:") else str(Path(text).absolute())


def read_archive(spark: SparkSession, path: str | os.PathLike[str]) -> DataFrame:
    """Return an archive as a table: the source's columns, those it is partitioned by, and `batch`.

    Consistent even when a merge was interrupted halfway, which other readers of the directory see
    as repeated rows until the next run mends it.
    """
    text = full_path(path)
    directory = local_directory(text)
    if directory is not None and not directory.is_dir():
        raise InvalidArgument(f"archive is {text!r}: there is no such directory")
    paths = [text] if directory is None else _paths(directory)
    reader = spark.read.option("basePath", text)
    try:
        found = reader.parquet(*paths).schema
    except AnalysisException as error:
        if error.getCondition() in ("UNABLE_TO_INFER_SCHEMA", "PATH_NOT_FOUND"):
            raise InvalidArgument(f"archive is {text!r}: nothing was archived there yet") from error
        raise
    # Spark guesses types of partition columns from their text: a topic "42" would become a number.
    return reader.schema(_meant(found)).parquet(*paths)


def _meant(found: StructType) -> StructType:
    known = {field.name: field.dataType for field in spark_schema(COLUMNS).fields}
    types = {**known, **_DERIVED}
    return StructType(
        [StructField(each.name, types.get(each.name, each.dataType)) for each in found.fields]
    )


def _paths(directory: Path) -> list[str]:
    """Return what to read: all of it, or without the folders that merged ones stand for."""
    merged = [each for each in pending_merges(directory) if (directory / each.merged).is_dir()]
    if not merged:
        return [str(directory)]
    replaced = {path for each in merged for path in each.sources}
    return [
        str(directory / each.path) for each in batch_folders(directory) if each.path not in replaced
    ]


# --- by hand, in a directory of this machine ------------------------------------------------------


def batch_folders(directory: Path) -> list[BatchFolder]:
    """List the folders of batches, with how much is in each."""
    found = []
    for parent, names, _ in os.walk(directory):
        names[:] = sorted(name for name in names if not name.startswith(("_", ".")))
        relative = Path(parent).relative_to(directory).as_posix()
        if parsed_folder(relative) is not None:
            names.clear()
            size = size_of(Path(parent))
            folder = parsed_folder(relative, files=size.files, file_bytes=size.file_bytes)
            assert folder is not None
            found.append(folder)
    return found


def size_of(directory: Path) -> Size:
    """Count the Parquet files in a directory and below, and their bytes."""
    sizes = [
        file.stat().st_size
        for file in directory.rglob("*.parquet")
        if not _is_hidden(file.relative_to(directory))
    ]
    return Size(len(sizes), sum(sizes))


def pending_merges(directory: Path) -> list[PendingMerge]:
    """Return the merges that are decided and not finished."""
    journals = sorted((directory / COMPACTION).glob(f"*{_JOURNAL}"))
    return [msgspec.json.decode(each.read_bytes(), type=PendingMerge) for each in journals]


def journal_path(directory: Path, name: str) -> Path:
    """Return where a merge is noted while it is pending."""
    return directory / COMPACTION / f"{name}{_JOURNAL}"


def keep_settings(directory: Path, partition_by: Sequence[str]) -> None:
    """Note how an archive is partitioned; raises InvalidArgument if it is so in another way."""
    wanted = ArchiveSettings(tuple(partition_by))
    file = directory / SETTINGS_FILE
    if file.exists():
        noted = msgspec.json.decode(file.read_bytes(), type=ArchiveSettings)
        if noted != wanted:
            raise InvalidArgument(
                f"partition_by is {','.join(partition_by)!r}: the archive {str(directory)!r} is "
                f"partitioned by {','.join(noted.partition_by)}, choose that or another directory"
            )
        return
    directory.mkdir(parents=True, exist_ok=True)
    write_in_one_step(file, msgspec.json.encode(wanted))


def write_in_one_step(file: Path, content: bytes) -> None:
    """Write a file that is there completely or not at all, also after a loss of power."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    with unfinished.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    unfinished.replace(file)
    sync_directory(file.parent)


def sync_directory(directory: Path) -> None:
    """Let names in a directory survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(("_", ".")) for part in path.parts)
