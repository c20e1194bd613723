"""Reading partitions where executors run: from a broker's records to Arrow batches."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from turbopump.client.config import ClientConfig
from turbopump.errors import RecordError
from turbopump.spark.reading.blocking_pull import BufferedChunk, start_blocking_pull
from turbopump.spark.reading.options import Pulling, SourceOptions
from turbopump.spark.reading.partition_planner import Partition, QueueRange
from turbopump.spark.reading.retrying_pull import Chunk, RetryingPull
from turbopump.spark.records.arrow_arrays import keep_freed_memory
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.spark.records.record_run import RecordRun
from turbopump.spark.shared_session import SharedSession, shared_session


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
        """Read ranges one after the other; the connection outlives the task."""
        keep_freed_memory()
        shared = shared_session(self.client)
        for each in partition:
            made = RecordColumns(self.columns, tags=self.pulling.of(each.topic).tags)
            yield from self._read_range(shared, made, each)

    def _read_range(
        self, shared: SharedSession, made: RecordColumns, of: QueueRange
    ) -> Iterator[pa.RecordBatch]:
        at = yield from self._read_blocking(shared, made, of)
        if at < of.end:
            yield from self._read_with_retries(shared, made, replace(of, start=at))

    def _read_blocking(
        self, shared: SharedSession, made: RecordColumns, of: QueueRange
    ) -> Generator[pa.RecordBatch, None, int]:
        """Read as far as nothing unusual happens; return how far that was."""
        pull = start_blocking_pull(shared, of, self.group, self.pulling)
        if pull is None:
            return of.start
        at = of.start
        try:
            while (chunk := pull.next_chunk()) is not None:
                run = _whole(made, chunk)
                if run is None:
                    break
                for batch in made.batches_of(run, broker=of.broker):
                    yield self._named(batch, of.topic)
                at = chunk.end
        finally:
            pull.close()
        return at

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
                        yield self._named(batch, of.topic)
                if not self.pulling.of(of.topic).is_filtered:
                    self._require_all(pull, chunk, rows)
        finally:
            shared.run(lambda _: pull.close())

    def _require_all(self, pull: RetryingPull, chunk: Chunk, rows: int) -> None:
        """Offsets have no gaps: fewer messages than offsets means that some are gone."""
        missing = chunk.end - chunk.start - rows
        if missing:
            pull.lost(chunk.start, chunk.end, f"{missing} of them were deleted")

    def _named(self, batch: pa.RecordBatch, topic: str) -> pa.RecordBatch:
        """Show the topic by the application's name of it, without the namespace."""
        if not self.client.namespace or "topic" not in self.columns:
            return batch
        place = self.columns.index("topic")
        return batch.set_column(
            place, batch.schema.field(place), pa.repeat(pa.scalar(topic), batch.num_rows)
        )


def _whole(made: RecordColumns, chunk: BufferedChunk) -> RecordRun | None:
    """Return all records of a chunk, None if some are damaged or missing."""
    try:
        run = made.found(chunk.data, chunk.spans, start=chunk.start, end=chunk.end)
    except RecordError:
        return None
    return run if len(run) == chunk.end - chunk.start else None
