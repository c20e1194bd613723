"""One file of the key index: a header, a table of hash slots, and entries chained backwards."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple
from numpy.typing import NDArray

from turbopump.core import chain_entries, whole_entries
from turbopump.machine.files import Files, OpenFiles, erase_from
from turbopump.message import PhysicalOffset
from turbopump.store.consume_queue import EntryAt
from turbopump.store.outcomes import Cold, FilePart, Ints

HEADER_BYTES = 40
SLOT_BYTES = 4
ENTRY_BYTES = 20
NAME_DIGITS = 17

_HEADER = struct.Struct(">qqqqii")
_SLOT = struct.Struct(">i")
_ENTRY = struct.Struct(">iqii")
ENTRY_DTYPE = np.dtype(
    [("hash", ">i4"), ("physical_offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")]
)
_SLOT_DTYPE = np.dtype(">i4")
"""Byte order as in the file: pages are written as they are."""
_PAGE_SLOTS = 1024
_INT_MAX = 0x7FFF_FFFF
_REWRITTEN_AT_ONCE = 50_000
_READ_AT_ONCE = 4096 // ENTRY_BYTES
_FETCHED_AT_ONCE = 64 * 1024
"""Read before an entry that is not in memory, too: chains lead backwards, mostly to neighbors."""
EXAMINED_AT_ONCE = 512
"""Entries examined in one step of a search: a few milliseconds if they are far apart."""
_TIME_TOLERANCE_MS = 2000
"""Entries hold whole seconds; after a crash, the header's times are derived from them."""


class IndexHeader(Struct, frozen=True):
    """What a file covers; ``count`` is the number of its entries plus the unused first one."""

    begin_ms: int
    end_ms: int
    begin_offset: int
    end_offset: int
    used_slots: int
    count: int

    def overlaps(self, begin_ms: int, end_ms: int) -> bool:
        """Whether entries of a time range can be in the file."""
        inside = self.begin_ms <= begin_ms <= self.end_ms or self.begin_ms <= end_ms <= self.end_ms
        return inside or (begin_ms < self.begin_ms and end_ms > self.end_ms)


EMPTY = IndexHeader(0, 0, 0, 0, 0, 1)


class KeySearch(Struct):
    """What to find in the files of the index, and what was found so far."""

    key_hash: int
    begin_ms: int
    end_ms: int
    count_max: int
    examined_max: int
    found: list[int] = []
    """Positions in the log, newest first."""
    examined: int = 0
    """Entries, and slots: one in each file."""
    is_stopped: bool = False
    """Whether more would have to be examined than may be."""

    def may_examine(self) -> bool:
        """Count one more entry or slot, unless the limit is reached."""
        if self.examined >= self.examined_max:
            self.is_stopped = True
            return False
        self.examined += 1
        return True

    @property
    def is_slice_over(self) -> bool:
        """Whether others get their turn now."""
        return self.examined % EXAMINED_AT_ONCE == 0


class IndexFile:
    """A file that can be searched, and extended if it is the newest.

    The slots of the file being extended are kept in memory and written page by page: one system
    call per key would cost more than storing the message.
    """

    def __init__(
        self, path: Path, slots: int, entries: int, files: Files, open_files: OpenFiles
    ) -> None:
        self.path = path
        self.header = EMPTY
        self.is_damaged = False
        """Whether it is excluded from searching and extending."""
        self._slot_count = slots
        self._entry_count = entries
        self._files = files
        self._open_files = open_files
        self._slots: NDArray[np.signedinteger] | None = None
        self._dirty_pages = np.zeros(-(-slots // _PAGE_SLOTS), np.bool_)
        self._header_dirty = False

    @property
    def size(self) -> int:
        return self._entries_at + ENTRY_BYTES * self._entry_count

    @property
    def room(self) -> int:
        """How many more entries fit."""
        return self._entry_count - self.header.count

    @property
    def _entries_at(self) -> int:
        return HEADER_BYTES + SLOT_BYTES * self._slot_count

    def load_header(self) -> None:
        self.header = read_header(self._read(HEADER_BYTES, 0))

    def header_damage(self, entry_at: EntryAt, log_min: int, log_end: int) -> str | None:
        """Return what is wrong with the header, compared with the log; None if nothing is."""
        data = self._read(HEADER_BYTES, 0)
        header = IndexHeader(*_HEADER.unpack(data))
        if header.count <= 1:
            is_unused = header.count >= 0 and not any(data[:32])
            return None if is_unused else f"it says that it has {header.count - 1} entries"
        if header.count > self._entry_count:
            return f"it says that it has {header.count - 1} of {self._entry_count - 1} entries"
        if not 0 <= header.begin_offset <= header.end_offset < log_end:
            return f"it covers positions {header.begin_offset} to {header.end_offset} of the log"
        for position, time_ms in (
            (header.begin_offset, header.begin_ms),
            (header.end_offset, header.end_ms),
        ):
            entry = entry_at(PhysicalOffset(position)) if position >= log_min else None
            if entry is not None and abs(entry.store_timestamp_ms - time_ms) > _TIME_TOLERANCE_MS:
                return f"time {time_ms} is not that of the message at {position} of the log"
        return None

    def extend(
        self, hashes: NDArray[np.int64], offsets: NDArray[np.int64], times_ms: NDArray[np.int64]
    ) -> None:
        """Add entries, which must fit; after an error, none of them is added."""
        header, count = self.header, len(hashes)
        assert 0 < count <= self.room
        begin_ms = header.begin_ms if header.count > 1 else int(times_ms[0])
        slots_of = hashes % self._slot_count
        entries = np.empty(count, ENTRY_DTYPE)
        entries["hash"] = hashes
        entries["physical_offset"] = offsets
        entries["seconds"] = np.clip((times_ms - begin_ms) // 1000, 0, _INT_MAX)
        slots = self._loaded_slots()
        before = slots[slots_of]
        try:
            new_slots = chain_entries(as_bytes(entries), as_bytes(slots), header.count)
            self._write(entries.tobytes(), self._entries_at + header.count * ENTRY_BYTES)
        except BaseException:
            slots[slots_of] = before
            raise
        self._dirty_pages[slots_of // _PAGE_SLOTS] = True
        self.header = IndexHeader(
            begin_ms,
            int(times_ms[-1]),
            header.begin_offset if header.count > 1 else int(offsets[0]),
            int(offsets[-1]),
            header.used_slots + new_slots,
            header.count + count,
        )
        self._header_dirty = True

    def write_out(self, *, with_slots: bool = True) -> bool:
        """Write changed slots (if wanted) and header; return whether anything was written.

        After a crash, slots that were not written are rebuilt from the entries.
        """
        changed = self._header_dirty
        if with_slots and self._dirty_pages.any():
            self._write_slots()
            changed = True
        if self._header_dirty:
            self._write_header()
            self._header_dirty = False
        return changed

    def _write_slots(self) -> None:
        slots = self._loaded_slots()
        # Adjacent pages together, with one call.
        for first, end in ranges(np.flatnonzero(self._dirty_pages)):
            part = slots[first * _PAGE_SLOTS : end * _PAGE_SLOTS]
            at = HEADER_BYTES + first * _PAGE_SLOTS * SLOT_BYTES
            self._write(part.view(np.uint8).data, at)
        self._dirty_pages[:] = False

    def search(self, search: KeySearch) -> Iterator[Cold | None]:
        """Search the entries with the key's hash, newest first.

        Yields None after every `EXAMINED_AT_ONCE`, counted over all files: one key may have
        millions of them, or need a read in each of thousands of files. Yields `Cold` before it
        reads what is not in memory.
        """
        if not search.may_examine():
            return
        if search.is_slice_over:
            yield None
        key_hash, begin_ms, end_ms = search.key_hash, search.begin_ms, search.end_ms
        number = yield from self._newest_in_slot(key_hash % self._slot_count)
        first, block = 0, b""
        found, count_max, examined_max = search.found, search.count_max, search.examined_max
        while 0 < number < self.header.count and len(found) < count_max:
            # As above, which costs two calls for each.
            if search.examined >= examined_max:
                search.is_stopped = True
                return
            search.examined += 1
            if not search.examined % EXAMINED_AT_ONCE:
                yield None
            if not block or number < first:
                # The entries of a frequent key are neighbors: they need one read.
                first = max(1, number - _READ_AT_ONCE + 1)
                at = self._entries_at + first * ENTRY_BYTES
                block = yield from self._fetched((number - first + 1) * ENTRY_BYTES, at)
            entry = _ENTRY.unpack_from(block, (number - first) * ENTRY_BYTES)
            entry_hash, position, seconds, previous = entry
            time_ms = self.header.begin_ms + seconds * 1000
            if seconds < 0:
                return
            if entry_hash == key_hash and begin_ms <= time_ms <= end_ms:
                found.append(position)
            if time_ms < begin_ms or previous >= number:
                # A chain leads backwards; anything else is damage and might never end.
                return
            number = previous

    def repair(self, log_end: int) -> None:
        """After a crash, keep the complete entries and rebuild their chains."""
        self.load_header()
        header, kept = self.header, self._whole_entries(log_end)
        self._slots = np.zeros(self._slot_count, _SLOT_DTYPE)
        self.header = EMPTY
        if kept:
            used_slots = chain_entries(kept, as_bytes(self._slots), 1)
            count = len(kept) // ENTRY_BYTES + 1
            _, last_position, last_s, _ = _ENTRY.unpack_from(kept, len(kept) - ENTRY_BYTES)
            last_ms = header.begin_ms + last_s * 1000 + 999
            self.header = IndexHeader(
                header.begin_ms,
                min(header.end_ms, last_ms) if count < header.count else header.end_ms,
                _ENTRY.unpack_from(kept)[1],
                last_position,
                used_slots,
                count,
            )
        self._write(as_bytes(self._slots), HEADER_BYTES)
        self._write(kept, self._entries_at + ENTRY_BYTES)
        fd = self._open_files.fd_to_write(self.path)
        used = self._entries_at + self.header.count * ENTRY_BYTES
        erase_from(self._files, fd, used, self.size)
        self._dirty_pages[:] = False
        self._write_header()

    def rewrite(self) -> bool:
        """Rewrite everything, as a failed sync may have dropped it; False if entries are lost."""
        last = -1
        for first in range(1, self.header.count, _REWRITTEN_AT_ONCE):
            count = min(_REWRITTEN_AT_ONCE, self.header.count - first)
            at = self._entries_at + first * ENTRY_BYTES
            data = self._read(count * ENTRY_BYTES, at)
            offsets = np.frombuffer(data, ENTRY_DTYPE)["physical_offset"].astype(np.int64)
            if len(offsets) < count or np.any(np.diff(offsets, prepend=last) < 0):
                return False
            self._write(data, at)
            last = int(offsets[-1])
        slots = self._slots
        size = self._slot_count * SLOT_BYTES
        data = self._read(size, HEADER_BYTES) if slots is None else slots.tobytes()
        self._write(data, HEADER_BYTES)
        self._write_header()
        return True

    def seal(self) -> None:
        """Release what only the newest file needs."""
        self.write_out()
        self._slots = None

    def _whole_entries(self, log_end: int) -> bytearray:
        count = min(max(self.header.count, 1), self._entry_count) - 1
        data = self._read(count * ENTRY_BYTES, self._entries_at + ENTRY_BYTES)
        has_position_0 = self.header.begin_offset == 0
        whole = whole_entries(data, log_end, has_position_0=has_position_0)
        return bytearray(memoryview(data)[: whole * ENTRY_BYTES])

    def _newest_in_slot(self, slot: int) -> Generator[Cold, None, int]:
        if self._slots is not None:
            return int(self._slots[slot])
        at = HEADER_BYTES + slot * SLOT_BYTES
        (number,) = _SLOT.unpack((yield from self._fetched(SLOT_BYTES, at)))
        return int(number)

    def _loaded_slots(self) -> NDArray[np.signedinteger]:
        if self._slots is None and self.header.count <= 1:
            self._slots = np.zeros(self._slot_count, _SLOT_DTYPE)
        elif self._slots is None:
            data = self._read(self._slot_count * SLOT_BYTES, HEADER_BYTES)
            self._slots = np.frombuffer(data, _SLOT_DTYPE).copy()
        return self._slots

    def _write_header(self) -> None:
        self._write(_HEADER.pack(*astuple(self.header)), 0)

    def _write(self, data: bytes | bytearray | memoryview, at: int) -> None:
        self._files.write(self._open_files.fd_to_write(self.path), data, at)

    def _fetched(self, size: int, at: int) -> Generator[Cold, None, bytes]:
        """Read a part; yield it before, with what is in front of it, if it is not in memory."""
        data = self._files.read_from_memory(self._open_files.fd(self.path), size, at)
        if data is None:
            begin = max(0, at + size - _FETCHED_AT_ONCE)
            yield Cold((FilePart(self.path, begin, at + size - begin),))
            data = self._read(size, at)
        return data

    def _read(self, size: int, at: int) -> bytes:
        return self._files.read(self._open_files.fd(self.path), size, at)


def as_bytes(values: NDArray[Any]) -> memoryview:
    """Return the bytes of an array, which can be written to."""
    return values.view(np.uint8).data


def ranges(numbers: Ints) -> list[tuple[int, int]]:
    """Join consecutive numbers: return the first of each range, and the one after its last."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]


def read_header(data: bytes) -> IndexHeader:
    """Read a file's first 40 bytes; a new file has zeros, or on a full disk nothing yet."""
    if len(data) < HEADER_BYTES:
        return EMPTY
    header = IndexHeader(*_HEADER.unpack(data))
    return header if header.count > 0 else EMPTY
