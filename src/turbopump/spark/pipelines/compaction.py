"""Merging the small files of an archive, so that readers open few large ones.

A merge is written aside, compared, and then decided by one file, the journal. Before that, nothing
has changed; after it, this run or the next one completes the merge. `read_archive` knows the
journal. Other readers of the directory may see merged rows twice at that point, but never miss any.
A query that was planned earlier may miss a file: it fails, and gives no wrong result.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from turbopump.errors import InvalidArgument, SparkError
from turbopump.spark.pipelines.archive_layout import (
    COMPACTION,
    BatchFolder,
    HaveSameColumns,
    Merge,
    merges,
)
from turbopump.spark.pipelines.archive_reader import (
    PendingMerge,
    batch_folders,
    journal_path,
    pending_merges,
    size_of,
)
from turbopump.spark.pipelines.archive_settings import (
    recorded_settings,
    require_no_file_list,
    require_parquet,
)
from turbopump.spark.pipelines.arguments import require_count, require_driver
from turbopump.spark.pipelines.local_files import (
    full_path,
    local_directory,
    moving_folders,
    sync_directory,
    write_atomically,
)
from turbopump.spark.pipelines.progress import Step, Watch, unwatched
from turbopump.spark.pipelines.reports import Table, bytes_text, facts

TARGET_BYTES = 128 * 1024 * 1024

_ORDER = ("topic", "broker", "queueId", "queueOffset")
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What a compaction found and merged."""

    path: str
    merges: int
    rows: int
    """Counted in the merged files, and the same as in those that they replace."""

    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    finished_for_others: int
    """Merges that an earlier run had decided and could not finish."""

    seconds: float

    def tables(self) -> tuple[Table, ...]:
        return (
            facts(
                f"compaction of {self.path}",
                merges=self.merges,
                rows_merged=self.rows,
                files_before=self.files_before,
                files_after=self.files_after,
                size_before=bytes_text(self.bytes_before),
                size_after=bytes_text(self.bytes_after),
                merges_finished_of_an_earlier_run=self.finished_for_others,
                seconds=self.seconds,
            ),
        )


@dataclass(frozen=True, slots=True)
class Content:
    """The contents of Parquet files, from their footers."""

    rows: int
    columns: frozenset[tuple[str, ...]]
    """Names and types of columns, once for all files that share them."""


def compact(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    target_bytes: int = TARGET_BYTES,
    watch: Watch = unwatched,
) -> CompactionReport:
    """Merge small files of an archive into files of about ``target_bytes``.

    May run while an archive query writes into the same directory; compactions exclude each other.
    """
    require_driver(spark, "compact")
    directory = local_directory(full_path(path))
    if directory is None or not directory.is_dir():
        raise InvalidArgument(
            f"archive {os.fspath(path)!r} must be a local or mounted directory: compaction relies "
            "on atomic renames"
        )
    require_count("target_bytes", target_bytes)
    require_no_file_list(spark, full_path(path))
    require_parquet(full_path(path), recorded_settings(spark, full_path(path)))
    started_s = time.monotonic()
    with _exclusively(directory):
        finished = finish_pending(directory)
        before = size_of(directory)
        plan = merges(batch_folders(directory), target_bytes, _have_same_columns(directory))
        rows = 0
        for number, merge in enumerate(plan):
            watch(Step("folders merged", number, len(plan)))
            rows += _merge(spark, directory, merge)
        watch(Step("folders merged", len(plan), len(plan)))
        after = size_of(directory)
    return CompactionReport(
        str(directory),
        len(plan),
        rows,
        before.files,
        after.files,
        before.file_bytes,
        after.file_bytes,
        finished,
        time.monotonic() - started_s,
    )


def finish_pending(directory: Path) -> int:
    """Complete merges that were decided but not finished; return their number."""
    pending = pending_merges(directory)
    for merge in pending:
        complete_merge(directory, merge)
    # Remove what an earlier run wrote aside but did not decide.
    for each in (directory / COMPACTION).iterdir():
        if each.is_dir():
            shutil.rmtree(each)
    return len(pending)


def complete_merge(directory: Path, merge: PendingMerge) -> None:
    """Move the merged folder into place and remove its sources; repeatable."""
    staged, merged = directory / merge.staged, directory / merge.merged
    with moving_folders(directory):
        if staged.is_dir():
            staged.rename(merged)
            sync_directory(merged.parent)
        # The new ones first: readers in between see rows twice, which their offsets reveal.
        for source in merge.sources:
            if (directory / source).is_dir():
                shutil.rmtree(directory / source)
        sync_directory(merged.parent)
    journal_path(directory, staged.name).unlink(missing_ok=True)


def _merge(spark: SparkSession, directory: Path, merge: Merge) -> int:
    """Write, compare, decide and complete a merge; return the number of merged rows."""
    sources = [directory / each.path for each in merge.sources]
    name = f"{merge.merged.partition.replace('/', '+')}+{merge.merged.name}"
    staged = directory / COMPACTION / name
    frame = spark.read.parquet(*map(str, sources)).coalesce(merge.files)
    order = [column for column in _ORDER if column in frame.columns]
    (frame.sortWithinPartitions(*order) if order else frame).write.parquet(str(staged))

    expected, found = content_of(sources), content_of([staged])
    if expected != found:
        raise SparkError(
            f"merging {len(sources)} folders of {merge.merged.partition} gave {found.rows} rows of "
            f"{expected.rows}{_lost_columns(expected, found)}: nothing was changed; the "
            f"merged files are in {staged}"
        )
    _sync_files(staged)
    pending = PendingMerge(
        staged.relative_to(directory).as_posix(),
        merge.merged.path,
        tuple(each.path for each in merge.sources),
    )
    write_atomically(journal_path(directory, name), msgspec.json.encode(pending))
    complete_merge(directory, pending)
    return found.rows


def _have_same_columns(directory: Path) -> HaveSameColumns:
    """Whether the files have the same columns: Spark reads many files with the columns of one."""

    @cache
    def content(folder: BatchFolder) -> Content:
        return content_of([directory / folder.path])

    def have_same_columns(one: BatchFolder, other: BatchFolder) -> bool:
        return len(content(one).columns) == 1 and content(one).columns == content(other).columns

    return have_same_columns


def content_of(directories: Sequence[Path]) -> Content:
    """Return the contents of directories, read from the files themselves."""
    files = [file for directory in directories for file in sorted(directory.glob("*.parquet"))]
    footers = [pq.read_metadata(file) for file in files]
    return Content(sum(footer.num_rows for footer in footers), frozenset(map(_columns_of, footers)))


def _columns_of(footer: pq.FileMetaData) -> tuple[str, ...]:
    columns = [footer.schema.column(number) for number in range(footer.num_columns)]
    return tuple(
        sorted(f"{each.path} {each.physical_type} {each.logical_type}" for each in columns)
    )


def _lost_columns(expected: Content, found: Content) -> str:
    lost = {each for some in expected.columns for each in some}
    lost -= {each for some in found.columns for each in some}
    return f", without {', '.join(sorted(lost))}" if lost else ""


def _sync_files(directory: Path) -> None:
    """Sync the merged files: they must survive a power failure, as the sources are deleted next."""
    for file in directory.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())
    sync_directory(directory)
    sync_directory(directory.parent)


@contextmanager
def _exclusively(directory: Path) -> Iterator[None]:
    """Exclude other compactions of the same archive, in any process of this machine."""
    (directory / COMPACTION).mkdir(exist_ok=True)
    with (directory / COMPACTION / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SparkError(
                f"another compaction of {directory} is running; wait until it ends"
            ) from error
        yield
