"""Reads one part of a store's log, as a task does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import pyarrow as pa

from turbopump.core import RecordTable, scan_records
from turbopump.errors import DamagedMessage, StoreDamaged
from turbopump.spark.offline.log_partitions import DamagedBytes, LogPart, records_of
from turbopump.spark.offline.options import StoreOptions, Wanted
from turbopump.spark.records.bad_records import BadRecords, OnBadRecord
from turbopump.spark.records.record_columns import RecordColumns

_BATCH_BYTES = 16 * 1024 * 1024
"""Small batches are merged up to this size."""


class PartReader:
    """Reads the chosen messages of a part."""

    def __init__(self, options: StoreOptions) -> None:
        self._options = options

    def read(self, part: LogPart, broker: str) -> Iterator[pa.RecordBatch]:
        mode = self._options.on_bad_record
        bad = BadRecords(mode, keeps_rows=mode is OnBadRecord.NULL, remedies="null or skip")
        made = RecordColumns(
            self._options.columns, tags=self._options.wanted.tags, check_bodies=False, bad=bad
        )
        try:
            yield from _joined(self._batches(made, part, broker), self._options.batch_rows_max)
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
                piece = chosen[first : first + rows_max]
                yield from made.batches_of(piece, broker=broker)

    def _damaged(
        self, made: RecordColumns, item: DamagedBytes, broker: str
    ) -> Iterator[pa.RecordBatch]:
        """Return rows for a range of bytes: damaged messages as far as they are readable."""
        records, _ = scan_records(item.data)
        if len(records):
            chosen = _chosen(records, self._options.wanted)
            yield from made.batches_of(chosen, broker=broker, reason=item.reason)
        else:
            # Whatever its topic and time.
            size = len(item.data.rstrip(b"\0"))
            yield made.row(broker=broker, size=size, decodeError=item.reason)


def _chosen(records: RecordTable, wanted: Wanted) -> RecordTable:
    topics, indices = records.topics()
    of_topic = [wanted.has_topic(topic.decode("utf-8", "replace")) for topic in topics]
    start_ms = -math.inf if wanted.start_ms is None else wanted.start_ms
    end_ms = math.inf if wanted.end_ms is None else wanted.end_ms
    if all(of_topic) and start_ms == -math.inf and end_ms == math.inf:
        return records
    rows = zip(indices, records.store_times_ms(), strict=True)
    return records.where(bytes(of_topic[topic] and start_ms <= at < end_ms for topic, at in rows))


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
