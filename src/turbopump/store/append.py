"""Appending: gives messages their offsets and writes many of them with one system call."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from turbopump.clock import Clock
from turbopump.errors import InvalidArgument
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.commit_log import UNWRITTEN, CommitLog, scan
from turbopump.store.config import StoreConfig
from turbopump.store.queues import Queues
from turbopump.wire.record import BLANK_BYTES, Record, RecordEntry

_INVISIBLE_BIT = 0x4
"""Set in the system flag of prepared and rolled back messages, and of no others."""


class Placed(Struct, frozen=True):
    """Where a message or a batch went."""

    physical_offsets: tuple[PhysicalOffset, ...]
    queue_offset: QueueOffset
    store_timestamp_ms: int
    end_offset: PhysicalOffset


class Appender:
    """The only one who writes messages to the log."""

    def __init__(self, config: StoreConfig, clock: Clock, log: CommitLog, queues: Queues) -> None:
        self._config = config
        self._clock = clock
        self._log = log
        self._queues = queues
        self._entries: list[RecordEntry] = []
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self.store_timestamp_ms = 0
        """Of the last message written."""

    def write(self, groups: Sequence[Sequence[Record]]) -> tuple[list[Placed], list[RecordEntry]]:
        """Write groups, each within one file; after an error, call `undo`."""
        self._entries = []
        self._parts.clear()
        self._parts_bytes = 0
        placed = [self._place(group) for group in groups]
        self._write_parts()
        return placed, self._entries

    def undo(self, begin: PhysicalOffset, *, torn: bool) -> None:
        """Take back all of a `write` that raised; ``torn`` when bytes may lie behind the end."""
        for entry in self._entries:
            if not entry.sys_flag & _INVISIBLE_BIT:
                queue = self._queues.for_record(entry.topic, entry.queue_id)
                queue.next_offset = min(queue.next_offset, entry.queue_offset)
        if torn or self._log.written != begin:
            self._log.truncate(begin)

    def write_raw(self, position: PhysicalOffset, data: bytes | memoryview) -> None:
        """Write bytes of another log at the same position."""
        log = self._log
        if not log.starts:
            start = position // log.segment_bytes * log.segment_bytes
            if position != start:
                raise InvalidArgument(f"an empty log starts with a file, not at {position}")
            log.begin_at(position, position)
        if position != log.written:
            raise InvalidArgument(f"bytes for {position}, but the log ends at {log.written}")
        room = log.segment_bytes - position % log.segment_bytes
        if len(data) > room:
            raise InvalidArgument(f"{len(data)} bytes at {position} go across the end of a file")
        log.write(data)

    def complete_records(self, start: PhysicalOffset) -> list[RecordEntry]:
        """Return the messages from a position on that have been written completely."""
        entries = scan(self._log, start, check_crc=False, end=self._log.written)
        return [entry for entry in entries if isinstance(entry, RecordEntry)]

    def _place(self, group: Sequence[Record]) -> Placed:
        if not group:
            raise InvalidArgument("a batch without messages cannot be stored")
        log, now_ms = self._log, self._clock.now_ms()
        at = log.written + self._parts_bytes
        encoded = self._encode(group, at, now_ms)
        size = sum(map(len, encoded))
        if size + BLANK_BYTES > log.room - self._parts_bytes:
            at, encoded = self._in_next_file(group, size, at, encoded, now_ms)
        return self._accept(group, encoded, at, now_ms)

    def _encode(self, group: Sequence[Record], at: int, now_ms: int) -> list[bytes]:
        first = group[0]
        queue = self._queues.for_record(first.topic, first.queue_id)
        offset = queue.next_offset
        if len(group) == 1:
            offset = QueueOffset(0) if first.sys_flag & _INVISIBLE_BIT else offset
            encoded = [first.encode(offset, PhysicalOffset(at), now_ms)]
        else:
            encoded = []
            for number, record in enumerate(group):
                if record.topic != first.topic or record.queue_id != first.queue_id:
                    raise InvalidArgument("a batch goes to one queue of one topic")
                if record.sys_flag & _INVISIBLE_BIT:
                    raise InvalidArgument("a batch cannot be part of a transaction")
                data = record.encode(QueueOffset(offset + number), PhysicalOffset(at), now_ms)
                encoded.append(data)
                at += len(data)
        if any(UNWRITTEN in record.properties for record in group):
            raise InvalidArgument("properties with a zero byte: it would look like a torn write")
        largest, largest_allowed = max(map(len, encoded)), self._config.record_bytes_max
        if largest > largest_allowed:
            raise InvalidArgument(f"message of {largest} bytes: at most {largest_allowed}")
        return encoded

    def _in_next_file(
        self, group: Sequence[Record], size: int, at: int, encoded: list[bytes], now_ms: int
    ) -> tuple[int, list[bytes]]:
        """Make room in a new file, unless the log is just about to begin with one."""
        if size > self._config.group_bytes_max:
            raise InvalidArgument(f"{size} bytes do not fit into a file of the log")
        log = self._log
        self._write_parts()
        if not log.room or size + BLANK_BYTES <= log.room:
            return at, encoded
        log.fill_up()
        return log.written, self._encode(group, log.written, now_ms)

    def _accept(
        self, group: Sequence[Record], encoded: list[bytes], at: int, now_ms: int
    ) -> Placed:
        first = group[0]
        queue = self._queues.for_record(first.topic, first.queue_id)
        invisible = first.sys_flag & _INVISIBLE_BIT
        queue_offset = offset = QueueOffset(0) if invisible else queue.next_offset
        positions = []
        for record, data in zip(group, encoded, strict=True):
            position, size = PhysicalOffset(at), len(data)
            self._entries.append(
                RecordEntry(
                    size, record.queue_id, offset, position, record.sys_flag, now_ms,
                    record.topic, record.properties,
                )
            )  # fmt: skip
            positions.append(position)
            at += size
            self._parts_bytes += size
            offset = QueueOffset(offset + 1)
        self._parts += encoded
        if not invisible:
            queue.next_offset = offset
        self.store_timestamp_ms = now_ms
        return Placed(tuple(positions), queue_offset, now_ms, PhysicalOffset(at))

    def _write_parts(self) -> None:
        parts = self._parts
        if parts:
            self._log.write(parts[0] if len(parts) == 1 else b"".join(parts))
            parts.clear()
            self._parts_bytes = 0
