"""Reading partitions on executors: from a broker's records to Arrow batches."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from turbopump.client.names import with_namespace, without_namespace
from turbopump.client.pull_config import PullTimes
from turbopump.client.queue_reader import QueueReader
from turbopump.client.session import Session
from turbopump.core import RecordTable, scan_records
from turbopump.errors import DataLost
from turbopump.spark.reading.blocking_pull import BufferedChunk, start_blocking_pull
from turbopump.spark.reading.dead_letters import DeadLetterTopic
from turbopump.spark.reading.message_probes import MessageProbes
from turbopump.spark.reading.offsets import first_texts
from turbopump.spark.reading.options import Pulling, SourceOptions
from turbopump.spark.reading.partition_planner import LastMessage, Partition, QueueRange
from turbopump.spark.reading.retrying_pull import RetryingPull
from turbopump.spark.reading.topic_queries import TopicQueries
from turbopump.spark.records.arrow_arrays import keep_freed_memory, renamed
from turbopump.spark.records.bad_records import BadRecord, BadRecords, OnBadRecord
from turbopump.spark.records.record_columns import RecordColumns, damage_at
from turbopump.spark.records.schema import DECODE_ERROR
from turbopump.spark.shared_session import SharedSession, shared_session

_log = logging.getLogger(__name__)

Mask: TypeAlias = npt.NDArray[np.bool_]

_ANY = LastMessage(-1, -1, 2**63 - 1)
"""Stands for an unknown last message: none is stored after it, and none equals it."""

_FAILURES_MAX = 3
"""After this many consecutive failures of direct reads, a task stops trying them."""


class PartitionReader:
    """Reads the ranges of one task."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def read(self, partition: Partition) -> Iterator[pa.RecordBatch]:
        """Read ranges of the same broker together; the connection outlives the task."""
        keep_freed_memory()
        shared, pulling = shared_session(self.options.client), self.options.pulling
        by_topic = {topic: pulling.of(topic) for topic in {each.topic for each in partition}}
        nonempty = [(each, by_topic[each.topic]) for each in partition if each.rows]
        by_broker = sorted(nonempty, key=lambda each: each[0].broker)
        with closing(self._bad_records()) as bad:
            for (_, pulling), ranges in groupby(by_broker, lambda each: (each[0].broker, each[1])):
                made = RecordColumns(self.options.columns, tags=pulling.tags, bad=bad)
                read = [of for of, _ in ranges]
                yield from self._read_ranges(shared, made, read, pulling)
                if pulling.is_filtered:
                    self._require_unchanged(shared, read, pulling)

    def _bad_records(self) -> BadRecords:
        mode, columns = self.options.on_bad_record, self.options.columns
        keeps_rows = mode is OnBadRecord.NULL or (
            mode is OnBadRecord.DEAD_LETTER and DECODE_ERROR in columns
        )
        return BadRecords(mode, DeadLetterTopic.of(self.options), keeps_rows=keeps_rows)

    def _read_ranges(
        self, shared: SharedSession, made: RecordColumns, ranges: list[QueueRange], pulling: Pulling
    ) -> Iterator[pa.RecordBatch]:
        failures = 0
        while ranges:
            if failures < _FAILURES_MAX:
                unread = yield from self._read_blocking(shared, made, ranges, pulling)
                failures = failures + 1 if unread == ranges else 0
                ranges = unread
            if ranges:
                unread = yield from self._read_with_retries(shared, made, ranges[0])
                ranges = [*unread, *ranges[1:]]

    def _read_blocking(
        self, shared: SharedSession, made: RecordColumns, ranges: list[QueueRange], pulling: Pulling
    ) -> Generator[pa.RecordBatch, None, list[QueueRange]]:
        """Read until something unexpected happens; return what is left."""
        pull = start_blocking_pull(shared, ranges, self.options.reader_group, pulling)
        if pull is None:
            return ranges
        try:
            while (chunk := pull.next_chunk()) is not None:
                table = whole_table(chunk)
                if table is None:
                    return [*chunk.ranges, *pull.unread()]
                table = self._as_planned(table, chunk.sources)
                yield from self._batches(made, table, ranges[0].broker)
        finally:
            pull.close()
        return pull.unread()

    def _read_with_retries(
        self, shared: SharedSession, made: RecordColumns, of: QueueRange
    ) -> Generator[pa.RecordBatch, None, list[QueueRange]]:
        """Read to the end, or past a malformed record; return what is left."""
        group, pulling = self.options.reader_group, self.options.pulling.of(of.topic)
        fails = self.options.fail_on_data_loss
        pull = RetryingPull(shared.session, of, group, pulling, fail_on_data_loss=fails)
        try:
            while (chunk := shared.run(lambda _: pull.next_chunk())) is not None:
                found, damaged_at = scan_records(chunk.records)
                table = found.between([(chunk.start, chunk.end)])
                yield from self._batches(made, self._as_planned(table, [of]), of.broker)
                if damaged_at is not None:
                    at = table.queue_offsets()[-1] + 1 if len(table) else chunk.start
                    rest = replace(of, start=at)
                    return (yield from self._read_malformed(shared, made, pull, rest))
                # Offsets have no gaps, so fewer messages mean that some are gone.
                missing = chunk.end - chunk.start - len(table)
                if missing and not pulling.is_filtered:
                    pull.lost(chunk.start, chunk.end, f"{missing} of them were deleted")
        finally:
            shared.run(lambda _: pull.close())
        return []

    def _read_malformed(
        self, shared: SharedSession, made: RecordColumns, pull: RetryingPull, of: QueueRange
    ) -> Generator[pa.RecordBatch, None, list[QueueRange]]:
        """Read the next record alone, since its end is unknown; return what is left."""
        found = shared.run(lambda _: pull.pull_one(of.start))
        if found is None:
            pull.lost(of.start, of.start + 1, "it is malformed, and cannot be read alone")
            return [replace(of, start=of.start + 1)] if of.rows > 1 else []
        raw, offset = found
        if offset < of.end:
            table, damaged_at = scan_records(raw)
            yield from self._batches(made, self._as_planned(table, [of]), of.broker)
            if damaged_at is not None:
                reason = damage_at(raw, 0).reason
                made.bad.take([BadRecord(of.topic, of.broker, of.queue_id, offset, reason, raw)])
                if made.bad.keeps_rows:
                    yield made.row(
                        topic=of.topic,
                        broker=of.broker,
                        queueId=of.queue_id,
                        queueOffset=offset,
                        size=len(raw),
                        decodeError=reason,
                    )
        return [replace(of, start=offset + 1)] if offset + 1 < of.end else []

    def _as_planned(self, table: RecordTable, sources: Sequence[QueueRange]) -> RecordTable:
        """Return records without those of a topic that was re-created after the plan.

        There is a source for each part of the records' buffer. Raises DataLost if losses are
        errors.
        """
        replaced = _replaced_rows(table, [each.last for each in sources])
        if not replaced.any():
            return table
        row = int(replaced.argmax())
        of = sources[table.spans()[row]]
        self._report_recreated([f"{of.queue}: message {table.queue_offsets()[row]}"])
        return table.where((~replaced).data)

    def _require_unchanged(
        self, shared: SharedSession, ranges: Sequence[QueueRange], pulling: Pulling
    ) -> None:
        """Check the last messages of filtered ranges, which brokers return only if they match.

        Raises DataLost if a topic was re-created and losses are errors.
        """
        lasts = {of.queue: of.last for of in ranges if of.last is not None}
        at = {queue: last.offset for queue, last in lasts.items()}
        found = (
            shared.run(lambda session: self._probes(session, pulling).all_marks(at)) if at else {}
        )
        changed = [
            f"{queue}: message {lasts[queue].offset}"
            for queue, mark in found.items()
            if mark is not None and mark != lasts[queue][1:]
        ]
        if changed:
            self._report_recreated(changed)

    def _probes(self, session: Session, pulling: Pulling) -> MessageProbes:
        group = with_namespace(session.config.namespace, self.options.reader_group)
        reader = QueueReader(session, group, PullTimes(timeout=pulling.timeout_ms / 1000))
        return MessageProbes(reader, TopicQueries(session, reader, group), pulling.retries)

    def _report_recreated(self, changed: Sequence[str]) -> None:
        text = (
            f"{first_texts(changed)} is not the one that was there when the batch was planned: the "
            "topic was re-created, or its broker lost messages"
        )
        if self.options.fail_on_data_loss:
            raise DataLost(f"{text}; failOnDataLoss=false continues without them")
        _log.warning("%s; continuing without them", text)

    def _batches(
        self, made: RecordColumns, table: RecordTable, broker: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows; their topic names are the application's, without the namespace."""
        namespace, columns = self.options.client.namespace, self.options.columns
        for batch in made.batches_of(table, broker=broker):
            if batch.num_rows and namespace and "topic" in columns:
                at = columns.index("topic")
                topics = renamed(batch.column(at), lambda name: without_namespace(namespace, name))
                yield batch.set_column(at, batch.schema.field(at), topics)
            elif batch.num_rows:
                yield batch


def whole_table(chunk: BufferedChunk) -> RecordTable | None:
    """Return all records of a chunk, or None if some are damaged or missing."""
    found, damaged_at = scan_records(chunk.data, chunk.spans)
    if damaged_at is not None:
        return None
    # Without records beyond a range, and those that came with the response before.
    table = found.between(chunk.wanted)
    return table if chunk.is_filtered or _are_of(table, chunk.ranges) else None


def _replaced_rows(table: RecordTable, lasts: Sequence[LastMessage | None]) -> Mask:
    """Return which records were stored after their batch was planned.

    There is a last message for each part of the records' buffer. A log only grows, so a record that
    is stored after the last planned message of its queue replaced a planned one.
    """
    if not len(table) or not any(lasts):
        return np.zeros(len(table), np.bool_)
    flat = np.fromiter(
        chain.from_iterable(last or _ANY for last in lasts), np.int64, 3 * len(lasts)
    )
    offsets, times, positions = flat.reshape(-1, 3)[np.asarray(table.spans())].T
    found = np.asarray(table.physical_offsets())
    is_last = np.asarray(table.queue_offsets()) == offsets
    replaced: Mask = (found > positions) | (
        is_last & ((found != positions) | (np.asarray(table.store_times_ms()) != times))
    )
    return replaced


def _are_of(table: RecordTable, ranges: list[QueueRange]) -> bool:
    """Whether records are exactly those of some ranges."""
    rows = np.array([each.rows for each in ranges])
    if len(table) != rows.sum():
        return False
    # The difference between each range's offsets and its row numbers.
    shifts = np.array([each.start for each in ranges]) - (np.cumsum(rows) - rows)
    offsets = np.arange(len(table)) + np.repeat(shifts, rows)
    ids = np.repeat([each.queue_id for each in ranges], rows)
    return np.array_equal(table.queue_offsets(), offsets) and np.array_equal(table.queue_ids(), ids)
