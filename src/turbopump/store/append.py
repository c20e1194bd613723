"""Appending: assigns offsets to messages and writes many of them with one system call."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TypeAlias, cast

from turbopump.clock import Clock
from turbopump.errors import InvalidArgument
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import StoreConfig
from turbopump.store.dispatch import INVISIBLE_BIT
from turbopump.store.entry_batch import Batch, EntryBatch
from turbopump.store.entry_run import EntryRun
from turbopump.store.log_scan import UNWRITTEN, scan_runs
from turbopump.store.queues import Queues
from turbopump.wire.record import BLANK_BYTES, MAGIC, Record, RecordEntry
from turbopump.wire.record_batch import RecordBatch
from turbopump.wire.record_list import RecordList

_RECORD_START = struct.Struct(">iI")
"""Size and magic number."""

Place: TypeAlias = tuple[Sequence[PhysicalOffset], QueueOffset, int, PhysicalOffset]
"""Where a message or batch was stored: the first fields of `turbopump.store.outcomes.Appended`."""

Group: TypeAlias = Sequence[Record] | Batch
"""A message, or a batch that is stored contiguously."""


class Appender:
    """The single writer of messages to the log."""

    def __init__(self, config: StoreConfig, clock: Clock, log: CommitLog, queues: Queues) -> None:
        self._config = config
        self._clock = clock
        self._log = log
        self._queues = queues
        # Of a write in progress.
        self._entries: list[RecordEntry | EntryBatch] = []
        self._parts: list[bytes | memoryview] = []
        self._size_limit = config.record_bytes_max
        # Where the next message goes, and where it must end to fit into the current file.
        self._end = PhysicalOffset(0)
        self._end_limit = 0
        self.store_timestamp_ms = 0
        """Of the last message written."""

    def write(self, groups: Sequence[Group]) -> tuple[list[Place], list[RecordEntry | EntryBatch]]:
        """Write groups, each within one file; after an error, call `undo`."""
        self._parts.clear()
        self._end = self._log.written
        self._end_limit = self._end + self._log.room - BLANK_BYTES
        now_ms = self._clock.now_ms()
        places = []
        for group in groups:
            if type(group) is RecordBatch or type(group) is RecordList:
                places.append(self._place_run(group, now_ms))
                continue
            place = self._place if len(group) == 1 else self._place_batch
            places.append(place(group, now_ms))
        self._write_parts()
        entries, self._entries = self._entries, []
        return places, entries

    def write_one(self, record: Record) -> RecordEntry:
        """Write one message: `write` without the overhead for several, 2 of 20 µs a send."""
        log, now_ms = self._log, self._clock.now_ms()
        queue = self._queues.by_record[record.topic, record.queue_id]
        invisible = record.sys_flag & INVISIBLE_BIT
        offset = QueueOffset(0) if invisible else queue.next_offset
        at = log.written
        data = record.encode(offset, at, now_ms)
        size = len(data)
        if size > self._size_limit or UNWRITTEN in record.properties:
            self._refuse(record, size)
        if at + size > log.tail_end - BLANK_BYTES and self._moved_to_next_file(size):
            at = log.written
            data = record.encode(offset, at, now_ms)
        log.write(data)
        if not invisible:
            queue.next_offset = QueueOffset(offset + 1)
        self.store_timestamp_ms = now_ms
        return RecordEntry(
            size, record.queue_id, offset, at, record.sys_flag, now_ms,
            record.topic, record.properties,
        )  # fmt: skip

    def undo(self, begin: PhysicalOffset, *, torn: bool) -> None:
        """Undo a `write` that raised; ``torn`` if bytes may remain after the end."""
        for entry in self._entries:
            if not entry.sys_flag & INVISIBLE_BIT:
                queue = self._queues.by_record[entry.topic, entry.queue_id]
                queue.next_offset = min(queue.next_offset, entry.queue_offset)
        self._entries = []
        # Also for `write_one`, which starts a new file with what is left here.
        self._parts.clear()
        if torn or self._log.written != begin:
            self._log.truncate(begin)

    def write_raw(self, position: PhysicalOffset, data: bytes | memoryview) -> None:
        """Write bytes of another log at the same position."""
        log = self._log
        room = log.segment_bytes - position % log.segment_bytes
        if len(data) > room:
            raise InvalidArgument(f"{len(data)} bytes at {position} cross the end of a log file")
        if log.written == log.min_offset and position != log.written:
            start = position // log.segment_bytes * log.segment_bytes
            if position != start:
                raise InvalidArgument(f"an empty log must start at a file boundary, got {position}")
            # The very first write failed and left a file.
            log.truncate(PhysicalOffset(log.min_offset - 1))
            log.begin_at(position, position)
        if position != log.written:
            raise InvalidArgument(
                f"expected bytes for {log.written}, the end of the log, got {position}"
            )
        log.write(data)

    def complete_records(self, start: PhysicalOffset) -> list[RecordEntry | EntryRun]:
        """Return the completely written messages from a position on.

        Raises InvalidArgument if the bytes after them cannot become a message.
        """
        entries: list[RecordEntry | EntryRun] = []
        for found in scan_runs(self._log, start, check_crc=False, end=self._log.written):
            if isinstance(found, int):
                self._check_unfinished(found)
            else:
                entries.append(found)
        return entries

    def _check_unfinished(self, position: PhysicalOffset) -> None:
        """Refuse bytes that cannot be the start of a record: they would never be complete."""
        log = self._log
        written = log.view(position, log.written - position)
        if written is None or len(written) < BLANK_BYTES:
            return
        size, magic = _RECORD_START.unpack_from(written)
        room = log.segment_bytes - position % log.segment_bytes
        if magic == MAGIC and size <= min(self._size_limit, room) and len(written) < size:
            return
        raise InvalidArgument(
            f"no record at {position}: size {size}, magic {magic:#x}; expected a"
            f" message of at most {self._size_limit} bytes, or a blank of {room} bytes: are"
            " mappedFileSizeCommitLog and maxMessageSize the same as the master's?"
        )

    def _place(self, group: Sequence[Record], now_ms: int) -> Place:
        """Assign a position to a message and queue it for writing."""
        record = group[0]
        topic, queue_id, flag, text = (
            record.topic, record.queue_id, record.sys_flag, record.properties
        )  # fmt: skip
        queue = self._queues.by_record[topic, queue_id]
        invisible = flag & INVISIBLE_BIT
        offset = QueueOffset(0) if invisible else queue.next_offset
        at = self._end
        data = record.encode(offset, at, now_ms)
        size = len(data)
        if size > self._size_limit or UNWRITTEN in text:
            self._refuse(record, size)
        if at + size > self._end_limit and self._moved_to_next_file(size):
            at = self._end
            data = record.encode(offset, at, now_ms)
        self._entries.append(RecordEntry(size, queue_id, offset, at, flag, now_ms, topic, text))
        self._parts.append(data)
        self._end = end = PhysicalOffset(at + size)
        self.store_timestamp_ms = now_ms
        if not invisible:
            queue.next_offset = QueueOffset(offset + 1)
        return (at,), offset, now_ms, end

    def _place_batch(self, group: Sequence[Record], now_ms: int) -> Place:
        """Assign positions to a batch and queue it for writing."""
        _check_batch(group)
        for record in group:
            if record.size > self._size_limit or UNWRITTEN in record.properties:
                self._refuse(record, record.size)
        total = sum(record.size for record in group)
        if self._end + total > self._end_limit:
            self._moved_to_next_file(total)
        places = [self._place((record,), now_ms) for record in group]
        return tuple([place[0][0] for place in places]), places[0][1], now_ms, self._end

    def _place_run(self, batch: Batch, now_ms: int) -> Place:
        """Do as `_place_batch`, for all messages in one step."""
        total = batch.total_bytes
        if batch.first.sys_flag & INVISIBLE_BIT or batch.largest_bytes > self._size_limit:
            # `_place_batch` refuses it and names the message.
            return self._place_batch(list(batch.records()), now_ms)
        queue = self._queues.by_record[batch.first.topic, batch.first.queue_id]
        if self._end + total > self._end_limit:
            self._moved_to_next_file(total)
        at, first = self._end, queue.next_offset
        data, positions = batch.placed(first, at, now_ms)
        self._parts.append(data)
        self._entries.append(EntryBatch(batch, total, first, at, positions, now_ms))
        self._end = PhysicalOffset(at + total)
        self.store_timestamp_ms = now_ms
        queue.next_offset = QueueOffset(first + len(batch))
        # Not a list for many messages: that would need an object for each number.
        offsets = positions if isinstance(positions, list) else array("q", positions.tobytes())
        return cast(Sequence[PhysicalOffset], offsets), first, now_ms, self._end

    def _moved_to_next_file(self, size: int) -> bool:
        """Start a new file; False if the position does not change."""
        if size > self._config.group_bytes_max:
            raise InvalidArgument(
                f"a batch must be at most {self._config.group_bytes_max} bytes, got {size}"
            )
        log = self._log
        self._write_parts()
        moved = log.room > 0
        if moved:
            log.fill_up()
        # The new file is created by the first write to it.
        self._end = log.written
        self._end_limit = log.written + self._config.group_bytes_max
        return moved

    def _refuse(self, record: Record, size: int) -> None:
        if size > self._size_limit:
            raise InvalidArgument(f"a message must be at most {self._size_limit} bytes, got {size}")
        raise InvalidArgument(f"properties must not contain a zero byte, got {record.properties!r}")

    def _write_parts(self) -> None:
        parts = self._parts
        if parts:
            self._log.write(parts[0] if len(parts) == 1 else b"".join(parts))
            parts.clear()


def _check_batch(group: Sequence[Record]) -> None:
    if not group:
        raise InvalidArgument("a batch must have at least one message")
    first = group[0]
    for record in group:
        if record.topic != first.topic or record.queue_id != first.queue_id:
            raise InvalidArgument("all messages of a batch must go to the same queue")
        if record.sys_flag & INVISIBLE_BIT:
            raise InvalidArgument("a batch cannot be transactional")
