"""One consume queue: where its messages lie in the log, 20 bytes each.

New units wait in memory and are written in batches. Nothing depends on them being written: they can
always be rebuilt from the log.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np

from turbopump.core import RecordEntry
from turbopump.machine.files import Files, OpenFiles, erase_from
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.config import UNIT_BYTES
from turbopump.store.outcomes import UNIT_DTYPE, FilePart, Units
from turbopump.store.segments import Segments
from turbopump.wire.record import FIXED_BYTES

UNIT = struct.Struct(">qiq")
_packed = UNIT.pack
FILLER_SIZE = 0x7FFF_FFFF
_FILLER = UNIT.pack(0, FILLER_SIZE, 0)
"""Precedes the first unit of a queue whose older messages are not in the log."""

EntryAt: TypeAlias = Callable[[PhysicalOffset], RecordEntry | None]
"""Reads the record at a position of the log."""

QueueKey: TypeAlias = tuple[str, int]
"""Topic and queue id."""

_RECOVERED_FILES = 3
_SCAN_UNITS = 4096
_AHEAD_UNITS = 512
"""Units read in one call for a sequential reader: the call costs more than the units."""
_REPAIRED_MAX = 1024
"""Rebuilt units of a queue that are kept in memory while they cannot be written."""


class ConsumeQueue:
    """Where the messages of one queue lie. ``max_offset`` is one past the last unit."""

    __slots__ = (
        "_ahead", "_ahead_from", "_files", "_first_gap",
        "_open_files", "_pending", "_repaired", "_segments", "entered_from", "is_shifted",
        "is_waiting", "key", "max_offset", "min_offset", "next_offset", "physical_end", "queue_id",
        "stored_topic", "topic", "written_offset",
    )  # fmt: skip

    def __init__(
        self, topic: str, queue_id: int, segments: Segments, files: Files, open_files: OpenFiles
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.key: QueueKey = (topic, queue_id)
        self.min_offset = QueueOffset(0)
        self.max_offset = QueueOffset(0)
        self.next_offset = QueueOffset(0)
        """The next stored message's offset; ahead of ``max_offset`` while some are unflushed."""
        self.written_offset = QueueOffset(0)
        """One past the last unit that its file has; later ones are in memory."""
        self.physical_end = PhysicalOffset(-1)
        """Position in the log after the last message; -1 if there is none."""
        self.is_waiting = False
        """Whether units are known to wait for being written."""
        self._segments = segments
        self._files = files
        self._open_files = open_files
        self._pending = bytearray()
        # Rebuilt units that could not be written.
        self._repaired: dict[int, bytes] = {}
        # The last read of a file, for sequential readers.
        self._ahead = b""
        self._ahead_from = 0
        self.entered_from = QueueOffset(0)
        """Messages from here on were entered by this process: where it closed a gap, their records
        have other queue offsets."""
        # The first empty unit that others follow, found when the files were loaded.
        self._first_gap: QueueOffset | None = None
        self.stored_topic = bytes((len(topic.encode()),)) + topic.encode()
        """The topic with a length prefix, as in records."""
        self.is_shifted = False
        """Whether queue offsets in records differ from those of their units: where units were
        missing, as in stores of Apache RocketMQ, the gap is closed."""

    @property
    def units_per_segment(self) -> int:
        return self._segments.segment_bytes // UNIT_BYTES

    @property
    def last_position(self) -> int:
        """Position after the last message, or after the start of a lost one; -1 if none."""
        unit = self.unit(QueueOffset(self.max_offset - 1)) if self.physical_end < 0 else None
        return self.physical_end if unit is None else unit[0] + 1

    @property
    def pending_bytes(self) -> int:
        """Size of the units that are not written yet."""
        return len(self._pending)

    def add(
        self, offset: QueueOffset, physical_offset: PhysicalOffset, size: int, tags_code: int
    ) -> bool:
        """Add a message's unit; return False if it is present, as after a replay of the log."""
        end = physical_offset + size
        if end <= self.physical_end:
            return False
        if offset < self.max_offset:
            if not self._is_re_created(offset, physical_offset):
                return False
            self.destroy()
        if offset > self.max_offset and self._is_without_units():
            self._begin_at(offset)
        # A gap anywhere else is closed: the unit takes the next place, as in Apache RocketMQ.
        self._pending += _packed(physical_offset, size, tags_code)
        self.max_offset = after = QueueOffset(self.max_offset + 1)
        self.physical_end = PhysicalOffset(end)
        if self.next_offset < after:
            # A slave's messages arrive with their offsets; once promoted, it continues from there.
            self.next_offset = after
        return True

    def _is_re_created(self, offset: QueueOffset, physical_offset: PhysicalOffset) -> bool:
        """Whether a message has the offset of an earlier one: its topic was deleted in between.

        Only slaves see this: a master drops the queues of a topic that it deletes.
        """
        if not 0 <= self.physical_end <= physical_offset:
            return False
        unit = self.unit(offset)
        is_expired = offset < self.min_offset
        return is_expired or (unit is not None and unit[1] != FILLER_SIZE)

    def add_units(self, units: bytes, end: PhysicalOffset) -> None:
        """Add units of messages that follow the last one and end at a position of the log."""
        self._pending += units
        self.max_offset = after = QueueOffset(self.max_offset + len(units) // UNIT_BYTES)
        self.physical_end = end
        if self.next_offset < after:
            self.next_offset = after

    def units(self, offset: QueueOffset, count: int) -> bytes | None:
        """Return up to ``count`` units from an offset on, limited to one file."""
        at = (offset - self._ahead_from) * UNIT_BYTES
        if 0 <= at <= len(self._ahead) - count * UNIT_BYTES:
            return self._ahead[at : at + count * UNIT_BYTES]
        start = self._segments.start_at(offset * UNIT_BYTES)
        if offset >= self.written_offset:
            at = (offset - self.written_offset) * UNIT_BYTES
            in_file = self.units_per_segment - offset % self.units_per_segment
            with memoryview(self._pending) as pending:
                return bytes(pending[at : at + min(count, in_file) * UNIT_BYTES])
        if start is None:
            return None
        file_end = start // UNIT_BYTES + self.units_per_segment
        count = min(count, file_end - offset, self.max_offset - offset)
        written = min(count, self.written_offset - offset)
        data = self._read_ahead(start, offset, written)
        if len(data) == written * UNIT_BYTES and written < count:
            data += self._pending[: (count - written) * UNIT_BYTES]
        return data or None

    def _read_ahead(self, start: int, offset: int, count: int) -> bytes:
        """Read units of a file, and the following ones if reads are sequential."""
        if count > _AHEAD_UNITS:
            return self._read(start, offset, count)
        wanted = count
        if self._ahead_from <= offset <= self._ahead_from + len(self._ahead) // UNIT_BYTES:
            in_file = start // UNIT_BYTES + self.units_per_segment - offset
            wanted = min(_AHEAD_UNITS, in_file, self.written_offset - offset)
        self._ahead_from, self._ahead = offset, self._read(start, offset, wanted)
        return self._ahead[: count * UNIT_BYTES]

    def replace_unit(
        self, offset: QueueOffset, position: PhysicalOffset, size: int, tags_code: int
    ) -> None:
        """Overwrite a damaged unit."""
        unit = _packed(position, size, tags_code)
        self._ahead = b""
        if offset >= self.written_offset:
            at = (offset - self.written_offset) * UNIT_BYTES
            self._pending[at : at + UNIT_BYTES] = unit
            return
        start = self._segments.start_at(offset * UNIT_BYTES)
        if start is not None:
            try:
                fd = self._open_files.fd_to_write(self._segments.path(start))
                self._files.write(fd, unit, offset * UNIT_BYTES - start)
            except OSError:
                if len(self._repaired) >= _REPAIRED_MAX:
                    raise
                # The message can be read on a full disk too; the next start repairs the file.
                self._repaired[offset] = unit

    def path_of(self, offset: QueueOffset) -> Path:
        """Return the file that a unit is in."""
        size = self._segments.segment_bytes
        return self._segments.path(offset * UNIT_BYTES // size * size)

    def part_from(self, offset: QueueOffset, size: int) -> list[FilePart]:
        """Return where a file has the units from an offset on, if it has any."""
        position = offset * UNIT_BYTES
        start = self._segments.start_at(position)
        if start is None:
            return []
        end = min(start + self._segments.segment_bytes, self.written_offset * UNIT_BYTES)
        return [FilePart(self._segments.path(start), position - start, min(size, end - position))]

    def unit(self, offset: QueueOffset) -> tuple[PhysicalOffset, int, int] | None:
        """Return position, size and tags code of one message; None if there is no such unit."""
        data = self.unit_bytes(offset)
        if data is None:
            return None
        position, size, tags_code = UNIT.unpack(data)
        return PhysicalOffset(position), size, tags_code

    def unit_bytes(self, offset: int) -> bytes | bytearray | None:
        """Return the unit of one message as it is stored; None if there is no such unit."""
        if not self.min_offset <= offset < self.max_offset:
            return None
        at = (offset - self._ahead_from) * UNIT_BYTES
        data: bytes | bytearray | None = self._ahead
        if not 0 <= at <= len(self._ahead) - UNIT_BYTES:
            if offset >= self.written_offset:
                at, data = (offset - self.written_offset) * UNIT_BYTES, self._pending
            else:
                at, data = 0, self.units(QueueOffset(offset), 1)
        if data is None or len(data) < at + UNIT_BYTES:
            return None
        return data[at : at + UNIT_BYTES]

    def last_before(self, position: PhysicalOffset) -> QueueOffset:
        """Return the offset of the last message that begins before a position of the log.

        If there is none, the one before the first.
        """
        low, high = self.min_offset, self.max_offset
        while low < high:
            middle = QueueOffset((low + high) // 2)
            unit = self.unit(middle)
            if unit is not None and unit[0] < position:
                low = QueueOffset(middle + 1)
            else:
                high = middle
        return QueueOffset(low - 1)

    def file_ranges(self) -> list[tuple[QueueOffset, QueueOffset]]:
        """Return first and end offset of each file, and of the units without a file yet."""
        per_file = self.units_per_segment
        first = self._segments.starts[0] // UNIT_BYTES if self._segments.starts else 0
        return [
            (
                QueueOffset(max(start, self.min_offset)),
                QueueOffset(min(start + per_file, self.max_offset)),
            )
            for start in range(first, self.max_offset, per_file)
            if start + per_file > self.min_offset
        ]

    def write_pending(self, touched: dict[Path, int], new: set[Path]) -> None:
        """Write the pending units; add files to be synced (from a position on), and new ones."""
        self._require_files()
        while self._pending:
            position = self.written_offset * UNIT_BYTES
            start = self._segments.start_at(position)
            if start is None:
                start = position // self._segments.segment_bytes * self._segments.segment_bytes
                self._create(start)
                new.add(self._segments.path(start))
            part = self._pending[: start + self._segments.segment_bytes - position]
            path = self._segments.path(start)
            self._files.write(self._open_files.fd_to_write(path), part, position - start)
            touched.setdefault(path, position - start)
            del self._pending[: len(part)]
            self.written_offset = QueueOffset(self.written_offset + len(part) // UNIT_BYTES)
            # With thousands of queues, the last unit of each is read without opening its file.
            self._ahead_from, self._ahead = self.written_offset - 1, bytes(part[-UNIT_BYTES:])

    def rewrite(self, path: Path, position: int, entry_at: EntryAt) -> bool:
        """Rewrite a file's units from a position on: a failed sync may have dropped them.

        Returns False if they differ from the log: then memory has lost them as well.
        """
        start = int(path.name)
        end = min(start + self._segments.segment_bytes, self.written_offset * UNIT_BYTES)
        count = (end - start - position) // UNIT_BYTES
        if start not in self._segments.starts or count <= 0:
            return True
        data = self._read(start, (start + position) // UNIT_BYTES, count)
        for at, size, _ in UNIT.iter_unpack(data):
            entry = None if size == FILLER_SIZE else entry_at(PhysicalOffset(at))
            if size != FILLER_SIZE and (entry is None or entry.size != size):
                return False
        self._files.write(self._open_files.fd_to_write(path), data, position)
        return len(data) == count * UNIT_BYTES

    def load(self) -> None:
        """Find the files and their units; only the last three files are read."""
        # An empty file may also have been cut; its content is found in the log.
        self._segments.load(may_end_empty=False)
        starts = self._segments.starts
        if not starts:
            return
        end = starts[max(0, len(starts) - _RECOVERED_FILES)] // UNIT_BYTES
        for start in starts[-_RECOVERED_FILES:]:
            count = self._valid_units(start)
            if count or start == starts[0]:
                end = start // UNIT_BYTES + count
            if count < self.units_per_segment and self._first_gap is None:
                self._first_gap = QueueOffset(end)
        if self._first_gap == end:
            self._first_gap = None
        self.min_offset = QueueOffset(starts[0] // UNIT_BYTES)
        self._end_at(QueueOffset(end))

    def truncate(
        self, log_end: PhysicalOffset | None, replayed_from: PhysicalOffset | None = None
    ) -> bool:
        """Drop units that point past the end of a log that may have been cut.

        After a crash, an empty unit whose neighbor lies in the replayed part of the log was never
        written, and neither were the ones after it. Returns whether files still have units.
        """
        assert not self._pending
        end, gap = self.max_offset, self._first_gap
        if gap is not None and replayed_from is not None:
            before = self.unit(QueueOffset(gap - 1))
            end = gap if before is None or before[0] >= replayed_from else end
        while log_end is not None and end > self.min_offset:
            unit = self.unit(QueueOffset(end - 1))
            if unit is not None and unit[0] + unit[1] <= log_end and unit[0] >= 0:
                break
            if unit is not None and unit[1] == FILLER_SIZE:
                break
            end = QueueOffset(end - 1)
        more_files = bool(self._segments.starts) and self._segments.starts[-1] > end * UNIT_BYTES
        has_more = end < self.max_offset or more_files
        self._end_at(end)
        return has_more

    def erase_unused(self) -> None:
        """Clear the files after the last unit.

        What a crash left there would reappear once the gap before it is filled.
        """
        position = self.written_offset * UNIT_BYTES
        while len(self._segments.starts) > 1 and self._segments.starts[-1] >= position:
            self._open_files.close(self._segments.drop_last())
        if self._segments.starts and position < self._segments.end:
            start = self._segments.starts[-1]
            fd = self._open_files.fd_to_write(self._segments.path(start))
            erase_from(self._files, fd, position - start, self._segments.segment_bytes)

    def rewrite_since(self, position: PhysicalOffset) -> dict[Path, int]:
        """Rewrite the units of messages from a position on.

        Returns their files, at least the last one, each with the start of those units in it.
        """
        at, found = self._first_written_since(position) * UNIT_BYTES, {}
        for start in self._segments.starts:
            if start + self._segments.segment_bytes > at or start == self._segments.starts[-1]:
                path, begin = self._segments.path(start), max(0, at - start)
                fd = self._open_files.fd_to_write(path)
                units = min(self.written_offset * UNIT_BYTES - start, self._segments.segment_bytes)
                self._files.write(fd, self._files.read(fd, max(0, units - begin), begin), begin)
                found[path] = begin
        return found

    def _first_written_since(self, position: PhysicalOffset) -> QueueOffset:
        """Return the offset from which all written units are of messages from a position on."""
        end = self.written_offset
        while end > self.min_offset:
            # Units of one file, as many as one read returns.
            file_first = (end - 1) // self.units_per_segment * self.units_per_segment
            first = QueueOffset(max(self.min_offset, file_first, end - _SCAN_UNITS))
            units = as_units(self.units(first, end - first) or b"")
            if len(units) < end - first:
                break
            earlier = np.flatnonzero(units["physical_offset"] < position)
            if len(earlier):
                return QueueOffset(first + int(earlier[-1]) + 1)
            end = first
        return end

    def fill_to(self, offset: QueueOffset) -> None:
        """Skip offsets whose messages cannot be read from the log."""
        if self._is_without_units():
            # With at least one unit: without a file the end is lost.
            self._begin_at(QueueOffset(offset - 1))
        # Positions ascend: they show which files have no messages any more.
        filler = _packed(max(0, self.physical_end), FILLER_SIZE, 0)
        self._pending += filler * (offset - self.max_offset)
        self.max_offset = self.next_offset = offset

    def raise_minimum(self, log_min: PhysicalOffset) -> None:
        """Follow the log's deletion: drop files and skip units whose messages are deleted."""
        self._ahead = b""
        while len(self._segments.starts) > 1 and self._is_first_file_gone(log_min):
            self._open_files.close(self._segments.drop_first())
        first = self._segments.starts[0] // UNIT_BYTES if self._segments.starts else 0
        low = max(QueueOffset(first), self.min_offset)
        self.min_offset = self._first_at_or_behind(low, log_min)

    def destroy(self) -> None:
        """Delete all files."""
        while self._segments.starts:
            self._open_files.close(self._segments.drop_last())
        self._files.remove_directory(self._segments.directory)
        self._files.remove_directory(self._segments.directory.parent)
        self._pending.clear()
        self.min_offset = QueueOffset(0)
        self._end_at(QueueOffset(0))

    def _is_without_units(self) -> bool:
        return self.max_offset == 0 and not self._segments.starts

    def _begin_at(self, offset: QueueOffset) -> None:
        """Start a queue in the middle, with filler before the first unit of its file."""
        first = offset // self.units_per_segment * self.units_per_segment
        self.written_offset = QueueOffset(first)
        self._pending += _FILLER * (offset - first)
        self.max_offset = self.min_offset = offset

    def _create(self, start: int) -> None:
        fd = self._open_files.retry_on_emfile(lambda: self._segments.create(start))
        self._open_files.adopt(self._segments.path(start), fd)

    def _read(self, start: int, offset: int, count: int) -> bytes:
        at = offset * UNIT_BYTES - start
        fd = self._open_files.fd(self._segments.path(start))
        data = self._files.read(fd, count * UNIT_BYTES, at)
        return self._with_repaired(offset, data) if self._repaired else data

    def _with_repaired(self, first: int, data: bytes) -> bytes:
        """Return units that were read from a file, with those repaired that it does not have."""
        units = bytearray(data)
        for offset, unit in self._repaired.items():
            at = (offset - first) * UNIT_BYTES
            if 0 <= at < len(units):
                units[at : at + UNIT_BYTES] = unit
        return bytes(units)

    def _require_files(self) -> None:
        """Raise FileNotFoundError if the files were removed while in use.

        A new file beside missing ones would be all of the queue that the next start finds; if there
        are none, it rebuilds the queue from the log.
        """
        if self._segments.starts:
            last = self._segments.path(self._segments.starts[-1])
            if not self._files.exists(last):
                raise FileNotFoundError(
                    errno.ENOENT,
                    "removed while the store is open: restart the broker, which rebuilds the queue"
                    " from the log",
                    str(last),
                )

    def _valid_units(self, start: int) -> int:
        """Count the non-empty units at the start of a file."""
        count = 0
        while count < self.units_per_segment:
            part = min(_SCAN_UNITS, self.units_per_segment - count)
            units = as_units(self._read(start, start // UNIT_BYTES + count, part))
            bad = np.flatnonzero((units["size"] <= 0) | (units["physical_offset"] < 0))
            if not len(bad):
                count += part
                continue
            count += int(bad[0])
            following = self._next_plausible(start, count)
            if following is None:
                return count
            if self._first_gap is None:
                self._first_gap = QueueOffset(start // UNIT_BYTES + count)
            count = following
        return count

    def _next_plausible(self, start: int, count: int) -> int | None:
        """Return the next unit after an invalid one, None if that is the end of the queue.

        Flipped bits in unwritten space do not yield a position after the previous one.
        """
        first = start // UNIT_BYTES
        before_start = start if count else start - self._segments.segment_bytes
        last = 0
        if before_start in self._segments.starts:
            before = as_units(self._read(before_start, first + count - 1, 1))
            last = int(before["physical_offset"][0]) if len(before) else 0
        left = self.units_per_segment - count - 1
        units = as_units(self._read(start, first + count + 1, min(_SCAN_UNITS, left)))
        is_unit = (units["size"] >= FIXED_BYTES) & (units["physical_offset"] > last)
        found = np.flatnonzero(is_unit)
        return count + 1 + int(found[0]) if len(found) else None

    def _end_at(self, end: QueueOffset) -> None:
        self._ahead = b""
        self._repaired.clear()
        self.max_offset = self.next_offset = self.written_offset = self.entered_from = end
        self.min_offset = min(self.min_offset, end)
        unit = self.unit(QueueOffset(end - 1))
        filled = unit is not None and unit[1] != FILLER_SIZE
        self.physical_end = PhysicalOffset(unit[0] + unit[1] if unit and filled else -1)

    def _is_first_file_gone(self, log_min: PhysicalOffset) -> bool:
        """Whether all messages of the first file are deleted; one unit alone may be damaged."""
        behind = self._segments.starts[1] // UNIT_BYTES
        last, before, following = (
            self._position(QueueOffset(offset)) for offset in (behind - 1, behind - 2, behind)
        )
        return (last < log_min and before < log_min) or 0 <= following <= log_min

    def _position(self, offset: QueueOffset) -> int:
        data = self.units(offset, 1)
        return UNIT.unpack(data)[0] if data is not None and len(data) == UNIT_BYTES else -1

    def _first_at_or_behind(self, offset: QueueOffset, log_min: PhysicalOffset) -> QueueOffset:
        """Return the first offset whose message lies at or after a position of the log."""
        while offset < self.max_offset:
            data = self.units(offset, min(_SCAN_UNITS, self.max_offset - offset))
            if not data:
                break
            units = as_units(data)
            positions = units["physical_offset"]
            # Damaged ones, which readers handle, have impossible positions or stand alone.
            is_filler = units["size"] == FILLER_SIZE
            gone = (positions >= 0) & (positions < log_min) & ~is_filler
            good = ~gone & ~is_filler
            good[:-1] &= ~gone[1:]
            found = np.flatnonzero(good)
            if len(found):
                return QueueOffset(offset + int(found[0]))
            offset = QueueOffset(offset + len(units))
        return offset


def as_units(data: bytes | bytearray | memoryview) -> Units:
    """View bytes as units, without copying them."""
    return np.frombuffer(data, UNIT_DTYPE, count=len(data) // UNIT_BYTES)
