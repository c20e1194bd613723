"""Appending: assigns offsets to messages and writes many of them with one system call."""

from __future__ import annotations

import struct

from turbopump.clock import Clock
from turbopump.core import Block, Records, find_records
from turbopump.errors import InvalidArgument
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import StoreConfig
from turbopump.store.log_scan import scan
from turbopump.store.queues import Queues
from turbopump.wire.record import BLANK_BYTES, MAGIC, Record

_RECORD_START = struct.Struct(">iI")
"""Size and magic number."""


def add_record(block: Block, record: Record) -> None:
    """Add a message to a block; raises InvalidArgument if it cannot be stored."""
    block.add(
        record.topic,
        record.queue_id,
        record.body,
        record.properties,
        record.flag,
        record.sys_flag,
        record.born_timestamp_ms,
        record.born_host.packed,
        record.store_host.packed,
        record.reconsume_times,
        record.prepared_transaction_offset,
    )


class Appender:
    """The single writer of messages to the log."""

    def __init__(self, config: StoreConfig, clock: Clock, log: CommitLog, queues: Queues) -> None:
        self._config = config
        self._clock = clock
        self._log = log
        self._queues = queues
        self.store_timestamp_ms = 0
        """Of the last message written."""

    def write(self, block: Block) -> list[Records]:
        """Write a block's groups, each within one file; after an error, truncate the log."""
        log, now_ms = self._log, self._clock.now_ms()
        queues = [self._queues.by_record[key] for key in block.queues]
        offsets: list[int] = [queue.next_offset for queue in queues]
        found: list[Records] = []
        first, count = 0, len(block)
        while first < count:
            placed = block.fitting(first, log.room - BLANK_BYTES)
            if not placed:
                placed = self._groups_of_next_file(block, first)
            position = log.written
            data = block.place(first, placed, position, offsets, now_ms)
            records = find_records(data, 0, len(data), position)
            assert records.end_at == len(data), "a block has no record that readers would not find"
            log.write(data)
            found.append(records)
            first += placed
        for queue, offset in zip(queues, offsets, strict=True):
            queue.next_offset = QueueOffset(offset)
        self.store_timestamp_ms = now_ms
        return found

    def _groups_of_next_file(self, block: Block, first: int) -> int:
        """Start a new file; return how many groups fit into it."""
        fitting = block.fitting(first, self._config.group_bytes_max)
        if not fitting:
            raise InvalidArgument(
                f"a batch must be at most {self._config.group_bytes_max} bytes,"
                f" got {block.group_size(first)}"
            )
        # The new file is created by the first write to it.
        if self._log.room:
            self._log.fill_up()
        return fitting

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

    def complete_records(self, start: PhysicalOffset) -> list[Records]:
        """Return the completely written messages from a position on.

        Raises InvalidArgument if the bytes after them cannot become a message.
        """
        found: list[Records] = []
        for each in scan(self._log, start, check_crc=False, end=self._log.written):
            if isinstance(each, int):
                self._check_unfinished(each)
            else:
                found.append(each)
        return found

    def _check_unfinished(self, position: PhysicalOffset) -> None:
        """Refuse bytes that cannot be the start of a record: they would never be complete."""
        log, size_max = self._log, self._config.record_bytes_max
        written = log.view(position, log.written - position)
        if written is None or len(written) < BLANK_BYTES:
            return
        size, magic = _RECORD_START.unpack_from(written)
        room = log.segment_bytes - position % log.segment_bytes
        if magic == MAGIC and size <= min(size_max, room) and len(written) < size:
            return
        raise InvalidArgument(
            f"no record at {position}: size {size}, magic {magic:#x}; expected a"
            f" message of at most {size_max} bytes, or a blank of {room} bytes: are"
            " mappedFileSizeCommitLog and maxMessageSize the same as the master's?"
        )
