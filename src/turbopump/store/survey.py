"""Surveys a store's files for damage, without opening it."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from turbopump.machine.files import Files, read_file
from turbopump.store.config import UNIT_BYTES, StoreConfig
from turbopump.store.consume_queue import FILLER_SIZE, as_units
from turbopump.store.directory import StoreDirectory
from turbopump.store.index_file import (
    ENTRY_BYTES,
    ENTRY_DTYPE,
    HEADER_BYTES,
    SLOT_BYTES,
    IndexHeader,
    ranges,
)
from turbopump.store.outcomes import Ints, Units
from turbopump.store.removed_topics import RemovedTopics
from turbopump.store.segments import entries, is_segment_name
from turbopump.wire.hashing import tags_code
from turbopump.wire.names import SCHEDULE_TOPIC
from turbopump.wire.record import FIXED_BYTES, MessageView

ANY_CODE = -1 << 63
_FOREIGN = "is not a store file"


class Damage(Struct, frozen=True):
    """An inconsistency; ``position`` counts bytes within the file."""

    path: str
    position: int
    reason: str


def numbered_files(
    files: Files, directory: Path, damage: list[Damage]
) -> list[tuple[Path, int, int]]:
    """Return path, start and size of consecutive files; anything else there is damage."""
    found = []
    for path in entries(files, directory):
        if is_segment_name(path.name) and files.is_file(path):
            found.append((path, int(path.name), files.file_size(path)))
        else:
            damage.append(Damage(str(path), 0, _FOREIGN))
    return sorted(found)


def queue_directories(
    files: Files, directory: Path, damage: list[Damage]
) -> list[tuple[str, int, Path]]:
    """Return topic, id and directory of each queue; anything else there is damage."""
    found = []
    for topic in entries(files, directory):
        if not files.is_directory(topic):
            damage.append(Damage(str(topic), 0, _FOREIGN))
            continue
        for queue in entries(files, topic):
            name = queue.name
            if files.is_directory(queue) and name.isdecimal() and str(int(name)) == name:
                found.append((topic.name, int(name), queue))
            else:
                damage.append(Damage(str(queue), 0, _FOREIGN))
    return sorted(found)


def expected_size(rows: Sequence[Sequence[tuple[Path, int, int]]]) -> int:
    """Guess the size that all files of some rows should have; 0 if there are none."""
    sizes = Counter(size for row in rows for _, _, size in row if size)
    steps = [right[1] - left[1] for row in rows for left, right in itertools.pairwise(row)]
    if not sizes:
        return 0
    size = max(sizes, key=lambda one: (sizes[one], one))
    return size if all(step % size == 0 for step in steps) else min(steps)


def check_row(row: Sequence[tuple[Path, int, int]], size: int) -> Iterator[Damage]:
    """Find missing files and files of a wrong size, as opening a store does."""
    for path, _, found in row:
        # A kill may leave an empty file at the end, just created.
        if found != size and not (found == 0 and path == row[-1][0] and len(row) > 1):
            yield Damage(str(path), found, f"file has {found} bytes instead of {size}")
    for (path, left, _), (_, right, _) in itertools.pairwise(row):
        if right - left != size:
            yield Damage(str(path.parent), left + size, f"no file between {left} and {right}")


class LogEntries:
    """Where the log has the messages of each queue, to be compared with the queue's units."""

    def __init__(self, files: Files, directory: Path) -> None:
        self._removed = RemovedTopics(StoreDirectory(directory, files).removed_topics, files)
        self._removed.load()
        self._messages: dict[tuple[str, int], array[int]] = {}
        self._removed_at = array("q")
        """Positions of messages of removed topics: the index has them still."""
        self.min_offset = self.end = 0

    def add(self, view: MessageView) -> None:
        """Add a message that should be in its queue."""
        topic = view.topic.encode()
        if self._removed.covers(topic, view.physical_offset):
            self._removed_at.append(view.physical_offset)
            return
        # Units of delayed messages hold the delivery time, which depends on the settings.
        code = ANY_CODE if view.topic == SCHEDULE_TOPIC else tags_code(view.tags or "")
        found = self._messages.setdefault((view.topic, view.queue_id), array("q"))
        found.extend((view.physical_offset, view.size, view.queue_offset, code))

    def queues(self) -> list[tuple[str, int]]:
        return sorted(self._messages)

    def positions(self) -> Ints:
        """Return the positions of all messages, in order."""
        found = [self._of(*queue)[:, 0] for queue in self._messages]
        return np.sort(np.concatenate([*found, np.array(self._removed_at, np.int64)]))

    def _of(self, topic: str, queue_id: int) -> Ints:
        """Return position, size, queue offset and tag hash of each message of a queue."""
        return np.array(self._messages.get((topic, queue_id), ()), np.int64).reshape(-1, 4)

    def wrong_units(
        self, topic: str, queue_id: int, first: int, units: Units, path: str
    ) -> Iterator[Damage]:
        """Return units that differ from the log, consecutive ones as a range."""
        every = self._of(topic, queue_id)
        wanted = units["physical_offset"].astype(np.int64)
        at = np.searchsorted(every[:, 0], wanted)
        known = at < len(every)
        at[~known] = 0
        # The next start deletes what is left of a removed topic.
        kept_from = max(self.min_offset, self._removed.end_of(topic.encode()))
        gone = ((wanted >= 0) & (wanted < kept_from)) | (units["size"] == FILLER_SIZE)
        codes = known.copy()
        if len(every):
            found = every[at]
            known &= (found[:, 0] == wanted) & (found[:, 1] == units["size"])
            known &= ~_alone(found[:, 2] - np.arange(first, first + len(units)))
            codes = known & (found[:, 3] != units["tags_code"]) & (found[:, 3] != ANY_CODE)
        for kind, reason in (
            (~known & ~gone, "points to no message of its queue"),
            (codes & ~gone, "has another tag than its message"),
        ):
            for begin, end in ranges(np.flatnonzero(kind)):
                more = f", and {end - begin - 1} behind it" if end - begin > 1 else ""
                text = f"unit of offset {first + begin} {reason}{more}"
                yield Damage(path, begin * UNIT_BYTES, text)

    def missing(self, topic: str, queue_id: int, entered: list[Units], known_to: int) -> int:
        """Count the messages of a queue that no unit points to.

        Those after the last unit count only up to a position.
        """
        positions = self._of(topic, queue_id)[:, 0]
        found = [units["physical_offset"].astype(np.int64) for units in entered]
        known = np.concatenate([*found, positions[:0]])
        due = (positions < known_to) | (positions < known.max(initial=0))
        return int(np.count_nonzero(due & ~np.isin(positions, known)))


def used_units(files: Files, path: Path) -> tuple[Units, int]:
    """Return a queue file's units up to the last one, and its capacity."""
    data = read_file(files, path)
    units = as_units(data[: len(data) - len(data) % UNIT_BYTES])
    is_unit = (units["size"] >= FIXED_BYTES) & (units["physical_offset"] >= 0)
    # A flipped bit in unwritten space changes a size or a position, not both.
    is_unit[1:] &= units["physical_offset"][1:] > 0
    is_unit |= units["size"] == FILLER_SIZE
    used = np.flatnonzero(is_unit)
    return units[: int(used[-1]) + 1] if len(used) else units[:0], len(units)


def _alone(shifts: Ints) -> NDArray[np.bool_]:
    """Return which numbers are not 0 and differ from both neighbors.

    Queue offsets of records may differ from those of their units where a gap was closed: then many
    do.
    """
    alone: NDArray[np.bool_] = shifts != 0
    alone[1:] &= shifts[1:] != shifts[:-1]
    alone[:-1] &= shifts[:-1] != shifts[1:]
    return alone


def wrong_entries(
    files: Files, path: Path, header: IndexHeader, log: LogEntries
) -> Iterator[Damage]:
    """Compare the entries of an index file with the messages of the log."""
    if header.count <= 1:
        return
    if not 0 <= header.begin_offset <= header.end_offset < max(1, log.end):
        reason = f"covers positions {header.begin_offset} to {header.end_offset}, the log ends at"
        yield Damage(str(path), 0, f"index file {reason} {log.end}")
        return
    data = read_file(files, path)
    begin = _first_entry_at(data, header)
    if begin is None:
        yield Damage(str(path), 0, "header and entries of the index file do not agree")
        return
    entries = np.frombuffer(data, ENTRY_DTYPE, header.count - 1, begin)
    offsets = entries["physical_offset"].astype(np.int64)
    wrong = (offsets >= log.min_offset) & ~np.isin(offsets, log.positions())
    wrong |= (offsets < 0) | (entries["hash"] < 0) | (entries["seconds"] < 0)
    wrong |= entries["previous"] > np.arange(1, header.count)
    for first, end in ranges(np.flatnonzero(wrong)):
        more = f", and {end - first - 1} behind it" if end - first > 1 else ""
        reason = f"entry {first + 1} points to no message{more}"
        yield Damage(str(path), begin + first * ENTRY_BYTES, reason)


def _first_entry_at(data: bytes, header: IndexHeader) -> int | None:
    """Find where the entries begin, which depends on the number of slots; None if nowhere."""
    last = (header.count - 2) * ENTRY_BYTES
    room = len(data) - HEADER_BYTES - header.count * ENTRY_BYTES
    usual = StoreConfig().index_slots * SLOT_BYTES
    sizes = [usual] if usual <= room else []
    for slots_bytes in itertools.chain(sizes, range(SLOT_BYTES, room + 1, SLOT_BYTES)):
        at = HEADER_BYTES + slots_bytes + ENTRY_BYTES
        if (len(data) - HEADER_BYTES - slots_bytes) % ENTRY_BYTES or any(data[at - 20 : at]):
            continue
        first, end = (
            int.from_bytes(data[place + 4 : place + 12], "big") for place in (at, at + last)
        )
        if (first, end) == (header.begin_offset, header.end_offset):
            return at
    return None
