"""Reading partitions where executors run: from a broker's records to Arrow batches."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa

from turbopump.client.config import ClientConfig
from turbopump.client.names import without_namespace
from turbopump.errors import RecordError
from turbopump.spark.reading.blocking_pull import BufferedChunk, start_blocking_pull
from turbopump.spark.reading.options import Pulling, SourceOptions
from turbopump.spark.reading.partition_planner import Partition, QueueRange
from turbopump.spark.reading.retrying_pull import Chunk, RetryingPull
from turbopump.spark.records.arrow_arrays import Encoded, cells, keep_freed_memory
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.spark.records.record_run import RecordRun
from turbopump.spark.shared_session import SharedSession, shared_session

_FAILURES_MAX = 3
"""After so many failures in a row of reading directly, a task does not try again."""


@dataclass(frozen=True, slots=True)
class PartitionReader:
    """Everything that a task needs to read; a value that is sent to executors."""

    client: ClientConfig
    group: str
    pulling: Pulling
    columns: tuple[str, ...]
    fail_on_data_loss: bool

    @classmethod
    def of(cls, options: SourceOptions) -> PartitionReader:
        return cls(
            options.client,
            options.reader_group,
            options.pulling,
            options.columns,
            options.fail_on_data_loss,
        )

    def read(self, partition: Partition) -> Iterator[pa.RecordBatch]:
        """Read ranges of the same broker together; the connection outlives the task."""
        keep_freed_memory()
        shared = shared_session(self.client)
        nonempty = [(each, self.pulling.of(each.topic)) for each in partition if each.rows]
        by_broker = sorted(nonempty, key=lambda each: each[0].broker)
        for (_, pulling), ranges in groupby(by_broker, lambda each: (each[0].broker, each[1])):
            made = RecordColumns(self.columns, tags=pulling.tags)
            yield from self._read_ranges(shared, made, [of for of, _ in ranges], pulling)

    def _read_ranges(
        self,
        shared: SharedSession,
        made: RecordColumns,
        ranges: list[QueueRange],
        pulling: Pulling,
    ) -> Iterator[pa.RecordBatch]:
        failures = 0
        while ranges:
            if failures < _FAILURES_MAX:
                unread = yield from self._read_blocking(shared, made, ranges, pulling)
                failures = failures + 1 if unread == ranges else 0
                ranges = unread
            if ranges:
                yield from self._read_with_retries(shared, made, ranges[0])
                ranges = ranges[1:]

    def _read_blocking(
        self,
        shared: SharedSession,
        made: RecordColumns,
        ranges: list[QueueRange],
        pulling: Pulling,
    ) -> Generator[pa.RecordBatch, None, list[QueueRange]]:
        """Read as far as nothing unusual happens; return what is left."""
        pull = start_blocking_pull(shared, ranges, self.group, pulling)
        if pull is None:
            return ranges
        try:
            while (chunk := pull.next_chunk()) is not None:
                run = whole_run(made, chunk)
                if run is None:
                    return [*chunk.ranges, *pull.unread()]
                for batch in made.batches_of(run, broker=ranges[0].broker):
                    yield self._named(batch)
        finally:
            pull.close()
        return pull.unread()

    def _read_with_retries(
        self, shared: SharedSession, made: RecordColumns, of: QueueRange
    ) -> Iterator[pa.RecordBatch]:
        pull = RetryingPull(
            shared.session, of, self.group, self.pulling, fail_on_data_loss=self.fail_on_data_loss
        )
        try:
            while (chunk := shared.run(lambda _: pull.next_chunk())) is not None:
                rows = 0
                for batch in made.batches(
                    chunk.records, broker=of.broker, start=chunk.start, end=chunk.end
                ):
                    rows += batch.num_rows
                    if batch.num_rows:
                        yield self._named(batch)
                if not self.pulling.of(of.topic).is_filtered:
                    self._require_all(pull, chunk, rows)
        finally:
            shared.run(lambda _: pull.close())

    def _require_all(self, pull: RetryingPull, chunk: Chunk, rows: int) -> None:
        """Offsets have no gaps: fewer messages than offsets means that some are gone."""
        missing = chunk.end - chunk.start - rows
        if missing:
            pull.lost(chunk.start, chunk.end, f"{missing} of them were deleted")

    def _named(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Show topics by the application's names of them, without the namespace."""
        namespace = self.client.namespace
        if not namespace or "topic" not in self.columns:
            return batch
        place = self.columns.index("topic")
        topics: Encoded = batch.column(place).dictionary_encode()
        names = [without_namespace(namespace, name) for name in cells(topics.dictionary)]
        return batch.set_column(
            place, batch.schema.field(place), pa.array(names, pa.string()).take(topics.indices)
        )


def whole_run(made: RecordColumns, chunk: BufferedChunk) -> RecordRun | None:
    """Return all records of a chunk, None if some are damaged or missing."""
    ranges = chunk.ranges
    bounds = {"start": ranges[0].start, "end": ranges[0].end} if len(ranges) == 1 else {}
    try:
        run = made.found(chunk.data, chunk.spans, **bounds)
    except RecordError:
        return None
    is_whole = len(run) == ranges[0].rows if bounds else _are_of(run, ranges)
    return run if is_whole else None


def _are_of(run: RecordRun, ranges: list[QueueRange]) -> bool:
    """Whether records are exactly those of some ranges."""
    rows = np.array([each.rows for each in ranges])
    if len(run) != rows.sum():
        return False
    # How far each range's offsets are from the numbers of its rows.
    shifts = np.array([each.start for each in ranges]) - (np.cumsum(rows) - rows)
    offsets = np.arange(len(run)) + np.repeat(shifts, rows)
    queue_ids = np.repeat([each.queue_id for each in ranges], rows)
    return bool((run.queue_offsets() == offsets).all() and (run.queue_ids() == queue_ids).all())
