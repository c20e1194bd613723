"""Going through a store's files for damage, without opening it: whatever is wrong is noted."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

from turbopump.store.config import UNIT_BYTES
from turbopump.store.consume_queue import FILLER_SIZE, as_units
from turbopump.store.directory import StoreDirectory
from turbopump.store.files import SPARE_NAME, Files
from turbopump.store.outcomes import Units
from turbopump.store.removed import RemovedTopics
from turbopump.store.segments import is_segment_name

_FOREIGN = "does not belong into a store"


class Damage(Struct, frozen=True):
    """Something that should not be; ``position`` counts bytes within the file."""

    path: str
    position: int
    reason: str


def numbered_files(directory: Path, damage: list[Damage]) -> list[tuple[Path, int, int]]:
    """Return path, start and size of a row of files; anything else there is damage."""
    found = []
    for path in entries(directory):
        if is_segment_name(path.name) and path.is_file():
            found.append((path, int(path.name), path.stat().st_size))
        else:
            damage.append(Damage(str(path), 0, _FOREIGN))
    return sorted(found)


def queue_directories(directory: Path, damage: list[Damage]) -> list[tuple[str, int, Path]]:
    """Return topic, number and directory of each queue; anything else there is damage."""
    found = []
    for topic in entries(directory):
        if not topic.is_dir():
            damage.append(Damage(str(topic), 0, _FOREIGN))
            continue
        for queue in entries(topic):
            name = queue.name
            if queue.is_dir() and name.isdecimal() and str(int(name)) == name:
                found.append((topic.name, int(name), queue))
            else:
                damage.append(Damage(str(queue), 0, _FOREIGN))
    return sorted(found)


def entries(directory: Path) -> list[Path]:
    """Return what is in a directory, if there is one, without what a kill may leave behind."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.name != SPARE_NAME)


def expected_size(rows: Sequence[Sequence[tuple[Path, int, int]]]) -> int:
    """Guess the size that all files of some rows should have; 0 when there are none."""
    sizes = Counter(size for row in rows for _, _, size in row if size)
    steps = [right[1] - left[1] for row in rows for left, right in itertools.pairwise(row)]
    if not sizes:
        return 0
    size = max(sizes, key=lambda one: (sizes[one], one))
    return size if all(step % size == 0 for step in steps) else min(steps)


def check_row(row: Sequence[tuple[Path, int, int]], size: int) -> Iterator[Damage]:
    """Look for files of the wrong size and for missing ones, as opening a store does."""
    for path, _, found in row:
        # An empty one at the end is what a kill leaves of a file just made.
        if found != size and not (found == 0 and path == row[-1][0] and len(row) > 1):
            yield Damage(str(path), found, f"file has {found} bytes instead of {size}")
    for (path, left, _), (_, right, _) in itertools.pairwise(row):
        if right - left != size:
            yield Damage(str(path.parent), left + size, f"no file between {left} and {right}")


class LogEntries:
    """Where the log has the messages of each queue, to be compared with the queue's units."""

    def __init__(self, directory: Path) -> None:
        self._removed = RemovedTopics(StoreDirectory(directory, Files()).removed_topics, Files())
        self._removed.load()
        self._positions: dict[tuple[str, int], array[int]] = {}
        self._sizes: dict[tuple[str, int], array[int]] = {}
        self.min_offset = self.end = 0

    def add(self, topic: str, queue_id: int, position: int, size: int) -> None:
        """Note a message that should be in its queue."""
        if not self._removed.covers(topic.encode(), position):
            self._positions.setdefault((topic, queue_id), array("q")).append(position)
            self._sizes.setdefault((topic, queue_id), array("q")).append(size)

    def queues(self) -> list[tuple[str, int]]:
        return sorted(self._positions)

    def first_wrong(self, topic: str, queue_id: int, units: Units) -> int | None:
        """Return the first unit that points to no message, or to one of another queue."""
        positions = np.array(self._positions.get((topic, queue_id), ()), np.int64)
        sizes = np.array(self._sizes.get((topic, queue_id), ()), np.int64)
        wanted = units["physical_offset"].astype(np.int64)
        at = np.searchsorted(positions, wanted)
        known = at < len(positions)
        at[~known] = 0
        if len(positions):
            known &= (positions[at] == wanted) & (sizes[at] == units["size"])
        gone = (wanted < self.min_offset) | (units["size"] == FILLER_SIZE)
        wrong = np.flatnonzero(~known & ~gone)
        return int(wrong[0]) if len(wrong) else None

    def missing(self, topic: str, queue_id: int, entered: list[Units]) -> int:
        """Return how many messages of a queue no unit points to."""
        positions = np.array(self._positions.get((topic, queue_id), ()), np.int64)
        found = [units["physical_offset"].astype(np.int64) for units in entered]
        return int(np.count_nonzero(~np.isin(positions, np.concatenate([*found, positions[:0]]))))


def used_units(path: Path) -> tuple[Units, int]:
    """Return a queue file's units up to the first empty one, and how many there is room for."""
    data = path.read_bytes()
    units = as_units(data[: len(data) - len(data) % UNIT_BYTES])
    unused = np.flatnonzero((units["size"] <= 0) | (units["physical_offset"] < 0))
    return units[: int(unused[0])] if len(unused) else units, len(units)
