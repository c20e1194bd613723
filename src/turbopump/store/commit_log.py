"""The commit log: all messages in order of arrival, in consecutive files."""

from __future__ import annotations

import contextlib
import errno
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from turbopump.core import RecordEntry, read_entry
from turbopump.machine.files import Files, OpenFiles, closing, sync_path
from turbopump.message import PhysicalOffset
from turbopump.store.segment import COPIED_AT_ONCE, Segment
from turbopump.store.segments import Segments, segment_path
from turbopump.wire.record import (
    BLANK_BYTES,
    HEAD_BYTES_MAX,
    encode_blank,
    store_timestamp_in,
)

_SMALL_BYTES = 4 * 1024
_ZEROED_AT_ONCE = 64 * 1024


class CommitLog:
    """Written up to ``written``; everything before ``flushed`` is on disk.

    The owner's thread makes all calls except `sync`, which runs on the flusher's thread.
    """

    def __init__(
        self,
        segments: Segments,
        files: Files,
        open_files: OpenFiles,
        mapped_max: int,
        syncing: AbstractContextManager[Any],
    ) -> None:
        self._segments = segments
        self.segment_bytes, self.directory = segments.segment_bytes, segments.directory
        self.files = self._files = files
        self._open_files = open_files
        # A map takes a second descriptor.
        self._mapped_max = min(mapped_max, max(2, files.open_max() // 8))
        self._open: OrderedDict[int, Segment] = OrderedDict()
        self._tail: Segment | None = None
        self._zeroed_to = 0
        self.tail_end = 0
        """End position of the current file, or the start of the next one."""
        # Directory entries that a killed process left may be in memory only.
        self._unsynced_names = True
        # Held while files are synced, and while files that may not be synced yet are removed.
        self._syncing = syncing
        self.written = PhysicalOffset(0)
        self.flushed = PhysicalOffset(0)

    @property
    def starts(self) -> tuple[int, ...]:
        """Start positions of the files."""
        return self._segments.starts

    @property
    def min_offset(self) -> PhysicalOffset:
        """Position of the first message that is not deleted."""
        starts = self._segments.starts
        return PhysicalOffset(starts[0]) if starts else self.written

    def begin_at(self, end: PhysicalOffset, flushed: PhysicalOffset) -> None:
        """Set where the log ends and how much of it is known to be on disk."""
        self.written = end
        self.flushed = min(flushed, end)
        self._zeroed_to = end
        start = self._segments.start_at(end)
        self._tail = None if start is None else self._writable(start)
        self.tail_end = self._segments.end if start is None else start + self.segment_bytes

    @property
    def room(self) -> int:
        """Bytes left in the current file."""
        return self.tail_end - self.written if self._tail is not None else 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write at the end; the data must fit into the rest of the file, or into a new one."""
        tail, at = self._tail, self.written
        if tail is None or at == self.tail_end:
            tail = self._add_segment()
        end = at + len(data)
        assert end <= self.tail_end
        if end > self._zeroed_to and len(data) <= _SMALL_BYTES:
            self._write_zeros(tail, max(at, self._zeroed_to))
        self._files.write(tail.fd, data, at - tail.start)
        self.written = PhysicalOffset(end)

    def _write_zeros(self, tail: Segment, at: int) -> None:
        """Write zeros after the end, so that messages go to existing pages and blocks.

        That costs less than letting each small message add its own.
        """
        size = min(_ZEROED_AT_ONCE, self.tail_end - at)
        self._zeroed_to = at + size
        with contextlib.suppress(OSError):
            # If the disk is full, the message itself may still fit.
            self._files.write(tail.fd, bytes(size), at - tail.start)

    def fill_up(self) -> None:
        """End the current file with the blank record."""
        tail, room = self._tail, self.room
        assert tail is not None
        assert room >= BLANK_BYTES
        tail.write(encode_blank(room), self.written)
        self.written = PhysicalOffset(self.written + room)

    def view(self, position: int, size: int) -> memoryview | None:
        """Return bytes of the log, or None if no file has them (any more)."""
        window = self.window(position)
        if window is None or position + size > window[1]:
            return None
        at = position - window[0]
        return window[2][at : at + size]

    def window(self, position: int) -> tuple[int, int, memoryview] | None:
        """Return the written part of the file with a position: its start, its end and its bytes.

        For callers that want many messages: finding the file costs more than slicing one message.
        """
        start = self._segments.start_at(position)
        if start is None:
            return None
        view = self._view(start)
        file_end = start + self._file_bytes(start)
        return start, min(file_end, start + self.segment_bytes, self.written), view

    def is_in_memory(self, begin: int, end: int) -> bool:
        """Whether a part of the log can be read without waiting for the disk."""
        end = min(end, self.written)
        while begin < end and (start := self._segments.start_at(begin)) is not None:
            file_end = min(end, start + self.segment_bytes)
            self._view(start)
            if not self._open[start].is_in_memory(begin, file_end - begin):
                return False
            begin = file_end
        return True

    def _file_bytes(self, start: int) -> int:
        """Return the size of an open file; reading a map past the end kills the process."""
        return self._files.size(self._open[start].fd)

    def start_at(self, position: int) -> int | None:
        """Return the start of the file that a position lies in."""
        return self._segments.start_at(position)

    def next_start(self, position: int) -> int:
        """Return the start of the file after that of a position."""
        return position - position % self.segment_bytes + self.segment_bytes

    def path_at(self, position: int) -> Path | None:
        """Return the file that a position lies in."""
        start = self._segments.start_at(position)
        return None if start is None else self._segments.path(start)

    def path(self, start: int) -> Path:
        """Return the path of the file that begins at a position."""
        return self._segments.path(start)

    def rest_of_segment(self, position: int) -> memoryview:
        """Return a whole file's bytes from a position on, written or not; for scans."""
        start = self._segments.start_at(position)
        assert start is not None, position
        return self._view(start)[position - start : self._file_bytes(start)]

    def data_end(self, position: int) -> int:
        """Return where the data around a position ends: behind it, its file has a hole."""
        return self._segment_at(position).data_end(position)

    def entry_at(self, position: PhysicalOffset, *, check_crc: bool = False) -> RecordEntry | None:
        """Read the record at a position; None if there is none."""
        window = self.window(position)
        if window is None or position >= window[1]:
            return None
        start, end, view = window
        entry = read_entry(view[: end - start], position - start, check_crc=check_crc)
        return entry if entry is not None and entry.physical_offset == position else None

    def first_store_timestamp_ms(self, start: int) -> int:
        """Return the store timestamp of the first record of a file; 0 if it has none."""
        entry = read_entry(self._view(start)[: self._file_bytes(start)])
        return entry.store_timestamp_ms if entry is not None else 0

    def read_first_store_timestamp_ms(self, start: int) -> int:
        """Do the same, but raise OSError if the file is gone or its disk cannot read it.

        A page that the disk cannot read would end the process if it were read through a map.
        """
        segment = self._open.get(start)
        if segment is not None:
            head = self._files.read(segment.fd, HEAD_BYTES_MAX, 0)
        else:
            path = self._segments.path(start)
            fd = self._open_files.retry_on_emfile(lambda: self._files.open_to_read(path))
            with closing(self._files, fd):
                head = self._files.read(fd, HEAD_BYTES_MAX, 0)
        return store_timestamp_in(head, start)

    def used_bytes_after(self, end: PhysicalOffset) -> int:
        """Count the bytes after a position that were written."""
        behind = (max(start, end) for start in self.starts if start + self.segment_bytes > end)
        return sum(self._segment_at(position).used_bytes_after(position) for position in behind)

    def set_aside(self, end: PhysicalOffset, name: str) -> Path:
        """Move what follows a position to a separate directory beside the log's.

        Copies the rest of a file first, then moves whole files, the last one first. If it is killed
        halfway, the next start resumes.
        """
        directory = self._files.resolve(self._segments.directory).parent / name
        self._files.make_directory(directory)
        if self._segments.start_at(end) is not None:
            self._copy_rest(end, segment_path(directory, end))
        while self.starts and (last := self.starts[-1]) > end:
            try:
                self._segments.move_last(directory)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                # The log is on a different disk.
                self._copy_rest(PhysicalOffset(last), segment_path(directory, last))
                self._segments.drop_last()
            self._release(last)
            self._unsynced_names = True
        self._files.sync_directory(directory)
        self._files.sync_directory(directory.parent)
        return directory

    def _copy_rest(self, position: PhysicalOffset, path: Path) -> None:
        segment = self._segment_at(position)
        at, used = position - segment.start, segment.used_bytes_after(position)
        with closing(self._files, self._files.open_new(path)) as fd:
            for part in range(0, used, COPIED_AT_ONCE):
                end = min(part + COPIED_AT_ONCE, used)
                self._files.write(fd, segment.view()[at + part : at + end], part)
            self._files.sync(fd)

    def _segment_at(self, position: int) -> Segment:
        start = self._segments.start_at(position)
        assert start is not None, position
        return self._segment(start)

    def truncate(self, end: PhysicalOffset) -> None:
        """Drop everything from a position on, permanently: no stale record may ever reappear."""
        with self._syncing:
            # The last file goes first: killed halfway, the remaining files are still contiguous. (A
            # slave whose very first write failed then has no file left.)
            while self.starts and self.starts[-1] > end:
                self._release(self.starts[-1])
                self._segments.drop_last()
                self._unsynced_names = True
            if self.starts and self.starts[-1] <= end < self._segments.end:
                self._writable(self.starts[-1]).erase_from(end)
            self.begin_at(end, self.flushed)

    def rewrite_unflushed(self) -> None:
        """Rewrite the bytes that a failed flush may have dropped from the disk's queue."""
        for start in self._dirty_starts(self.flushed, self.written):
            segment = self._writable(start)
            first = max(start, self.flushed)
            last = min(start + self.segment_bytes, self.written)
            for at in range(first, last, COPIED_AT_ONCE):
                end = min(at + COPIED_AT_ONCE, last)
                segment.write(bytes(segment.view()[at - start : end - start]), at)

    def drop_first(self) -> None:
        """Delete the first file; existing views into it stay valid."""
        assert self.starts[0] + self.segment_bytes <= self.flushed, "only what is flushed may go"
        self._release(self.starts[0])
        self._segments.drop_first()

    def sync(self) -> PhysicalOffset:
        """Sync; return the position up to which all is on disk. Runs on the flusher's thread."""
        with self._syncing:
            target = self.written
            for start in self._dirty_starts(self.flushed, target):
                segment = self._open.get(start)
                if segment is not None:
                    segment.sync()
                else:
                    sync_path(self._files, self._segments.path(start))
            if self._unsynced_names:
                # Before the sync, so that a file created meanwhile is not missed.
                self._unsynced_names = False
                try:
                    self._files.sync_directory(self.directory)
                except OSError:
                    self._unsynced_names = True
                    raise
            self.flushed = max(self.flushed, target)
            return self.flushed

    def close(self) -> None:
        for segment in self._open.values():
            segment.close()
        self._open.clear()

    def _dirty_starts(self, first: int, last: int) -> Iterator[int]:
        # Always the last file: it may have been cut, which leaves no other trace.
        for start in self.starts:
            if start <= last and start + self.segment_bytes > first:
                yield start

    def _add_segment(self) -> Segment:
        start = self._segments.end if self.starts else self.written
        fd = self._open_files.retry_on_emfile(lambda: self._segments.create(start))
        self._unsynced_names = True
        self._tail = self._adopt(start, fd)
        self.tail_end = self._segments.end
        return self._tail

    def _segment(self, start: int) -> Segment:
        """Return a file that is open at least for reading: the disk may be read-only."""
        segment = self._open.get(start)
        if segment is None:
            path = self._segments.path(start)
            fd = self._open_files.retry_on_emfile(lambda: self._files.open_to_read(path))
            return self._adopt(start, fd, is_writable=False)
        self._open.move_to_end(start)
        return segment

    def _writable(self, start: int) -> Segment:
        """Return a file that is open for writing too; if necessary, it is opened again."""
        segment = self._open.get(start)
        if segment is not None and segment.is_writable:
            return segment
        path = self._segments.path(start)
        fd = self._open_files.retry_on_emfile(lambda: self._files.open(path))
        self._release(start)
        return self._adopt(start, fd)

    def _view(self, start: int) -> memoryview:
        segment = self._segment(start)
        return segment.mapped or self._open_files.retry_on_emfile(segment.view)

    def _adopt(self, start: int, fd: int, *, is_writable: bool = True) -> Segment:
        segment = Segment(start, self.segment_bytes, self._files, fd, is_writable=is_writable)
        self._open[start] = segment
        self.close_unused(but=start)
        return segment

    def close_unused(self, but: int = -1) -> None:
        """Close the least recently used files if too many are open."""
        excess = len(self._open) - self._mapped_max
        for start in list(self._open) if excess > 0 else ():
            # A file with unflushed bytes stays open: only the descriptor that wrote them sees an
            # error.
            flushed = start + self.segment_bytes <= self.flushed
            if excess > 0 and flushed and start not in {but, self.starts[-1]}:
                self._release(start)
                excess -= 1

    def _release(self, start: int) -> None:
        segment = self._open.pop(start, None)
        if segment is not None:
            segment.close()
