"""One queue alone: data read ahead is dropped when it is no longer valid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from turbopump.machine.files import Files, OpenFiles
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.config import UNIT_BYTES
from turbopump.store.consume_queue import UNIT, ConsumeQueue
from turbopump.store.segments import Segments

UNITS_PER_FILE = 300
MESSAGE_BYTES = 100


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[ConsumeQueue]:
    files = Files()
    open_files = OpenFiles(files, count_max=9)
    directory = tmp_path / "consumequeue" / "T" / "0"
    segments = Segments(directory, UNITS_PER_FILE * UNIT_BYTES, files, tmp_path / "spare")
    yield ConsumeQueue("T", 0, segments, files, open_files)
    open_files.close_all()


def extend(queue: ConsumeQueue, count: int, position: int = 0) -> None:
    """Add units for adjacent messages, and write them."""
    for number in range(count):
        at = PhysicalOffset(position + number * MESSAGE_BYTES)
        assert queue.add(queue.max_offset, at, MESSAGE_BYTES, 0)
    queue.write_pending({}, set())


def read(queue: ConsumeQueue, offset: int, count: int) -> list[int] | None:
    """Return the positions of messages."""
    data = queue.units(QueueOffset(offset), count)
    return None if data is None else [position for position, _, _ in UNIT.iter_unpack(data)]


@pytest.mark.parametrize("left", [0, 3])
def test_truncated_units_do_not_reappear(queue: ConsumeQueue, left: int) -> None:
    extend(queue, 8)
    assert read(queue, 0, 2) == [0, 100]
    assert read(queue, 2, 2) == [200, 300]
    queue.truncate(PhysicalOffset(left * MESSAGE_BYTES))
    queue.erase_unused()
    assert queue.max_offset == left
    extend(queue, 8 - left, position=5000)
    kept = [number * MESSAGE_BYTES for number in range(left)]
    new = [5000 + number * MESSAGE_BYTES for number in range(8 - left)]
    assert [position for at in range(8) for position in read(queue, at, 1) or ()] == kept + new


def test_units_of_deleted_files_are_removed(queue: ConsumeQueue) -> None:
    extend(queue, 2 * UNITS_PER_FILE)
    near = UNITS_PER_FILE - 9
    assert read(queue, near, 2) == [near * MESSAGE_BYTES, (near + 1) * MESSAGE_BYTES]
    assert len(read(queue, near + 2, 2) or ()) == 2, "and the others of the file with them"
    first = UNITS_PER_FILE + 10
    queue.raise_minimum(PhysicalOffset(first * MESSAGE_BYTES))
    assert queue.min_offset == first
    assert read(queue, near + 4, 2) is None
    assert read(queue, first, 1) == [first * MESSAGE_BYTES]
