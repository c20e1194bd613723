"""The writers that Spark runs: a task sends its rows, and succeeds once all of them are stored."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from turbopump.client.message_sender import unique_ids
from turbopump.errors import InvalidArgument, SparkError
from turbopump.spark.shared_session import SharedSession, shared_session
from turbopump.spark.worker_process import BeginsCall
from turbopump.spark.writing.blocking_sender import BlockingSender
from turbopump.spark.writing.idempotent_write import Begun, SentRows, TaskWrite, finish, survey
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.retrying_sender import RetryingSender
from turbopump.spark.writing.row_encoder import ROWS_MAX, EncodedRows, Origin, RowEncoder
from turbopump.spark.writing.sink_columns import SinkColumns, sink_columns
from turbopump.spark.writing.write_marks import MarkSurvey

_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
_OF_NO_BATCH = "0"


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """What a task has sent, once all of it is stored."""

    rows: int
    sends: int
    body_bytes: int
    repeated: int
    skipped: int = 0
    """Rows that an earlier attempt has stored."""
    begun: Begun | None = None
    """The identity of an idempotent write."""


def batch_writer(options: Mapping[str, str], schema: StructType) -> BatchWriter:
    """Check on the driver what can be checked, and return the writer of a batch query."""
    parsed = SinkOptions.parse(options)
    # Created once, on the driver: every attempt of every task of this write has it.
    write_id = parsed.write_id or str(uuid.uuid4())
    columns = sink_columns(schema, parsed)
    found = None
    if parsed.idempotent:
        shared = shared_session(parsed.client())
        found = shared.run(lambda session: survey(session, parsed, write_id))
    return BatchWriter(parsed, columns, write_id, found)


def stream_writer(options: Mapping[str, str], schema: StructType) -> StreamWriter:
    """Check on the driver what can be checked, and return the writer of a streaming query."""
    parsed = SinkOptions.parse(options)
    if parsed.write_id is not None:
        raise InvalidArgument(
            f"writeId is for batch writes, got {parsed.write_id!r}: the checkpoint of a streaming "
            "query has its own id; omit the option"
        )
    return StreamWriter(parsed, sink_columns(schema, parsed))


@dataclass(eq=False)
class BatchWriter(BeginsCall, DataSourceArrowWriter):
    """Writes a DataFrame to topics."""

    options: SinkOptions
    columns: SinkColumns
    write_id: str
    marks: MarkSurvey | None = None

    # PySpark's Arrow writers also take other arguments than the writers they derive from.
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:  # type: ignore[override]
        """Send the rows of one task; called on an executor."""
        origin = Origin(self.write_id, _OF_NO_BATCH, _context().partitionId())
        shared = shared_session(self.options.client())
        return send_rows(shared, iterator, self.columns, self.options, origin, self.marks)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Mark an idempotent write complete; what tasks have sent is stored in any case."""
        _finish(self.options, messages, is_stream=False)


@dataclass(eq=False)
class StreamWriter(BeginsCall, DataSourceStreamArrowWriter):
    """Writes the micro-batches of a streaming query to topics."""

    options: SinkOptions
    columns: SinkColumns

    # PySpark's Arrow writers also take other arguments than the writers they derive from.
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:  # type: ignore[override]
        """Send the rows of one task of a micro-batch; called on an executor."""
        context = _context()
        query = context.getLocalProperty(_QUERY_ID)
        batch = context.getLocalProperty(_BATCH_ID)
        if query is None or batch is None:
            raise SparkError(
                f"Spark does not set {_QUERY_ID} and {_BATCH_ID}, which the stamps of messages "
                "need: PySpark 4.2 or newer is required"
            )
        origin = Origin(query, batch, context.partitionId())
        shared = shared_session(self.options.client())
        return send_rows(shared, iterator, self.columns, self.options, origin)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803 - the names are Spark's
        """Mark an idempotent batch complete; what tasks have sent is stored in any case."""
        _finish(self.options, messages, is_stream=True)


def _finish(
    options: SinkOptions, messages: Sequence[WriterCommitMessage | None], *, is_stream: bool
) -> None:
    written = [each for each in messages if isinstance(each, Written)]
    begun = [each.begun for each in written if each.begun is not None]
    if begun:
        shared = shared_session(options.client())
        shared.run(lambda session: finish(session, options, begun, is_stream=is_stream))


def send_rows(
    shared: SharedSession,
    batches: Iterator[pa.RecordBatch],
    columns: SinkColumns,
    options: SinkOptions,
    origin: Origin,
    marks: MarkSurvey | None = None,
) -> Written:
    """Send the rows of one task, and return when all are stored; raises the first failure.

    Rows are converted while earlier ones are in flight.
    """
    parts = _parts(batches)
    first = next(parts, None)
    if first is None:
        # Most tasks after a shuffle of little data: they have nothing to look up.
        return Written(0, 0, 0, 0)
    sending = RetryingSender(shared.session, options, origin.partition)
    sender = BlockingSender(shared, sending, options)
    encoder = RowEncoder(columns, options, origin, unique_ids(shared.session))
    sent, begun, count = SentRows(origin), None, 0
    with ExitStack() as stack:
        stack.callback(sender.close)
        if options.idempotent:
            task = TaskWrite(shared.session, sending.producer, options, origin, marks)
            stack.callback(lambda: shared.run(lambda _: task.lease.stop()))
            sent, sending.lease = shared.run(lambda _: task.begin()), task.lease
            begun = task.begun()
        for batch in chain([first], parts):
            if not sent.is_all:
                sender.take(_unsent(encoder.rows(batch, count), sent))
            count += batch.num_rows
        sender.finish()
    sent.require_no_more(count)
    counts = sending.counts
    stored = counts.rows, counts.sends, counts.body_bytes, counts.repeated
    return Written(*stored, count - counts.rows, begun)


def _unsent(rows: EncodedRows, sent: SentRows) -> EncodedRows:
    if not sent.has_any(rows.first_row, len(rows.topics)):
        return rows
    sent.require_same(rows)
    return replace(rows, sent=sent.rows)


def _parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Split record batches that are too large to encode in one step."""
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_MAX):
            yield batch.slice(start, ROWS_MAX)


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise SparkError("the rocketmq writer was called outside a Spark task")
    return context
