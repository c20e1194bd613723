"""The layout of an archive directory: which folder belongs to which batch, and what to merge.

::

    archive/orders/
        _archive.json                                    its columns and partitioning
        _checkpoint/                                     how far the query is (Spark's)
        _compaction/                                     merging that is under way
        topic=orders/date=2026-11-15/
            batch=3f2a9c1e-0000000000/part-….parquet     what batch 0 of a query wrote
            batch=3f2a9c1e-0000000001-0000000041/…       batches 1 to 41, merged

Readers of Parquet directories skip names with an underscore. Pure: listings in, decisions out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

BATCH = "batch"
"""The last partition column: a batch that is written again replaces only its own folder."""

SETTINGS_FILE = "_archive.json"
CHECKPOINT = "_checkpoint"
COMPACTION = "_compaction"

_QUERY_CHARS = 8
_NAME = re.compile(rf"{BATCH}=([0-9a-f]{{{_QUERY_CHARS}}})-(\d{{10}})(?:-(\d{{10}}))?")


@dataclass(frozen=True, slots=True)
class BatchFolder:
    """What a query wrote into one partition in one batch, or in several merged ones."""

    partition: str
    """Relative to the archive: ``topic=orders/date=2026-11-15``."""

    query: str
    first: int
    last: int
    files: int = 0
    file_bytes: int = 0

    @property
    def name(self) -> str:
        return f"{BATCH}={batch_value(self.query, self.first, self.last)}"

    @property
    def path(self) -> str:
        """Relative to the archive."""
        return f"{self.partition}/{self.name}" if self.partition else self.name


HaveSameColumns: TypeAlias = Callable[[BatchFolder, BatchFolder], bool]
"""Whether the files of two folders have the same columns."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Folders of one partition to merge into one."""

    sources: tuple[BatchFolder, ...]
    files: int
    """The number of files to produce."""

    @property
    def merged(self) -> BatchFolder:
        first, last = self.sources[0], self.sources[-1]
        return BatchFolder(first.partition, first.query, first.first, last.last)


def batch_value(query_id: str, first: int, last: int | None = None) -> str:
    """Return the value of the column ``batch``.

    It includes the query: another query, with its own checkpoint, counts its batches from 0 again
    and must not replace what this one wrote.
    """
    start = f"{query_id[:_QUERY_CHARS]}-{first:010}"
    return start if last is None or last == first else f"{start}-{last:010}"


def parsed_folder(path: str) -> BatchFolder | None:
    """Parse the relative path of a folder; None if it is not a batch's."""
    partition, _, name = path.rpartition("/")
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    first = int(found[2])
    last = int(found[3]) if found[3] else first
    return BatchFolder(partition, found[1], first, last)


def merges(
    folders: Iterable[BatchFolder],
    target_bytes: int,
    have_same_columns: HaveSameColumns = lambda *_: True,
) -> tuple[Merge, ...]:
    """Decide which folders to merge into files of about ``target_bytes``.

    Only folders with the same columns are merged.

    The newest batch of a query is not merged: if the query died before recording that this batch is
    done, it writes it again, and must find it under its own name. The existence of a later batch
    proves that the earlier ones were recorded.
    """
    every = sorted(folders, key=lambda each: (each.partition, each.query, each.first))
    newest: dict[str, int] = {}
    for each in every:
        newest[each.query] = max(newest.get(each.query, -1), each.last)
    finished = [each for each in every if each.last < newest[each.query]]
    return tuple(
        merge
        for _, group in groupby(finished, key=lambda each: (each.partition, each.query))
        for run in _runs(group, target_bytes, have_same_columns)
        if (merge := _worthwhile(run, target_bytes)) is not None
    )


def _runs(
    folders: Iterable[BatchFolder], target_bytes: int, have_same_columns: HaveSameColumns
) -> Iterator[list[BatchFolder]]:
    """Yield runs of neighbours that add up to about one file; large ones stay alone."""
    run: list[BatchFolder] = []
    run_bytes = 0
    for each in folders:
        is_full = run_bytes + each.file_bytes > target_bytes
        if run and (is_full or not have_same_columns(run[-1], each)):
            yield run
            run, run_bytes = [], 0
        run.append(each)
        run_bytes += each.file_bytes
    if run:
        yield run


def _worthwhile(run: Sequence[BatchFolder], target_bytes: int) -> Merge | None:
    # A single folder would have to replace itself, which no rename does in one step.
    if len(run) < 2:
        return None
    files_now = sum(each.files for each in run)
    needed = max(1, -(-sum(each.file_bytes for each in run) // target_bytes))
    return Merge(tuple(run), needed) if needed < files_now else None
