"""The settings that an archive was started with, recorded beside it: later runs must match them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from turbopump.errors import InvalidArgument, SparkError
from turbopump.spark.pipelines.archive_layout import SETTINGS_FILE
from turbopump.spark.pipelines.local_files import local_directory, write_atomically

PARQUET, DELTA = FORMATS = ("parquet", "delta")

_FILE_LIST = "_spark_metadata"


class ArchiveSettings(msgspec.Struct, frozen=True):
    """The settings that must be the same on every run that writes into an archive."""

    partition_by: tuple[str, ...]
    columns: tuple[str, ...] = ()
    """The columns of the source; empty if they were not recorded."""
    format: str = PARQUET


def require_no_file_list(spark: SparkSession, path: str) -> None:
    """Raise InvalidArgument if Spark's own file sink wrote to the directory.

    It left a list of its files there, and Spark reads no others: any other file written into such
    a directory is invisible, without an error.
    """
    directory = local_directory(path)
    if directory is not None:
        is_listed = (directory / _FILE_LIST).exists()
    else:
        with _explained(path):
            system, place = _file_elsewhere(spark, path, _FILE_LIST)
            is_listed = bool(system.exists(place))
    if is_listed:
        raise InvalidArgument(
            f"archive {path!r} was written by Spark's file sink: Spark reads only the files listed "
            f"in its {_FILE_LIST}; choose another directory"
        )


def record_settings(spark: SparkSession, path: str, wanted: ArchiveSettings) -> None:
    """Record the settings of an archive; raises InvalidArgument if it has others."""
    noted = recorded_settings(spark, path)
    if noted is None and not _note(spark, path, wanted):
        # Another run recorded them first.
        noted = recorded_settings(spark, path)
    if noted is not None:
        _compare(path, noted, wanted)


def require_parquet(path: str, noted: ArchiveSettings | None) -> None:
    """Raise InvalidArgument for an archive whose files must not be listed."""
    if noted is not None and noted.format == DELTA:
        raise InvalidArgument(
            f"archive {path!r} is a Delta table: use deltalake, or Spark with Delta Lake, to read "
            "or compact it"
        )


def recorded_settings(spark: SparkSession, path: str) -> ArchiveSettings | None:
    content = _content(spark, path)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=ArchiveSettings)
    except msgspec.DecodeError as error:
        raise InvalidArgument(
            f"{path}/{SETTINGS_FILE} is not an archive's settings file: {error}"
        ) from error


def _compare(path: str, noted: ArchiveSettings, wanted: ArchiveSettings) -> None:
    if noted.format != wanted.format:
        raise InvalidArgument(
            f"archive {path!r} has the format {noted.format}, got {wanted.format}: use the same, "
            "or another directory"
        )
    if noted.partition_by != wanted.partition_by:
        raise InvalidArgument(
            f"archive {path!r} is partitioned by {','.join(noted.partition_by)}, got partition_by "
            f"{','.join(wanted.partition_by)}: use the same, or another directory"
        )
    # Readers assume the columns of one file for all.
    if noted.columns and set(noted.columns) != set(wanted.columns):
        raise InvalidArgument(
            f"archive {path!r} has the columns {','.join(noted.columns)}, got "
            f"{','.join(wanted.columns)}: use the same, or another directory"
        )


# --- where settings are stored: locally, or through Hadoop ----------------------------------------


def _content(spark: SparkSession, path: str) -> bytes | None:
    directory = local_directory(path)
    if directory is not None:
        file = directory / SETTINGS_FILE
        return file.read_bytes() if file.exists() else None
    with _explained(path):
        system, place = _file_elsewhere(spark, path, SETTINGS_FILE)
        if not system.exists(place):
            return None
        stream = system.open(place)
        try:
            return bytes(stream.readAllBytes())
        finally:
            stream.close()


def _note(spark: SparkSession, path: str, wanted: ArchiveSettings) -> bool:
    """Write the settings; return whether no other run wrote any in the meantime."""
    content = msgspec.json.encode(wanted)
    directory = local_directory(path)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / SETTINGS_FILE, content)
        return True
    with _explained(path):
        system, place = _file_elsewhere(spark, path, SETTINGS_FILE)
        _, unfinished = _file_elsewhere(spark, path, f".{SETTINGS_FILE}.{uuid.uuid4().hex}")
        stream = system.create(unfinished, False)
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()
        if system.rename(unfinished, place):
            return True
        system.delete(unfinished, False)
        return False


def _file_elsewhere(spark: SparkSession, path: str, name: str) -> tuple[Any, Any]:
    """Return Hadoop's file system of a path, and a file there."""
    context = spark.sparkContext
    # PySpark has no other access to a file that is not a table.
    jvm: Any = context._jvm  # noqa: SLF001 - no other way
    java_context: Any = context._jsc  # noqa: SLF001 - no other way
    file = jvm.org.apache.hadoop.fs.Path(f"{path.rstrip('/')}/{name}")
    return file.getFileSystem(java_context.hadoopConfiguration()), file


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        words = getattr(error, "java_exception", None)
        if words is None:
            raise
        raise SparkError(f"archive {path!r}: {words.toString()}") from error
