"""Unfiltered reads take fast paths, and find what an examination of each unit finds."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from appending import append, append_all
from turbopump.machine import Machine
from turbopump.message import QueueOffset
from turbopump.store import Files, Filter, Found, ReadLimits, Store
from turbopump.store.config import StoreConfig
from turbopump.store.outcomes import Cold, ReadOutcome
from turbopump.store.reading import FILTERED_BYTES_MAX, FILTERED_MESSAGE_BYTES
from turbopump.wire.hosts import host
from turbopump.wire.record import decode_record
from unit.store.support import ManualClock, bodies, record, small_config

FILTERED_BYTES = FILTERED_MESSAGE_BYTES + len(b"n\x019000")
EACH = Filter(units=lambda units: np.ones(len(units), np.bool_))
UNTAGGED = Filter(tags_codes=frozenset({0}))
LIMITS = st.builds(
    ReadLimits,
    memory_bytes_max=st.integers(1, 3000),
    memory_count_max=st.integers(1, 12),
    disk_bytes_max=st.integers(1, 3000),
    disk_count_max=st.integers(1, 12),
    recent_bytes=st.integers(1, 8000),
)
QUEUES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 300)), min_size=1, max_size=60)


def content(outcome: ReadOutcome) -> object:
    """Return everything observable of an outcome."""
    if not isinstance(outcome, Found):
        return outcome
    messages = [bytes(message) for message in outcome.messages]
    assert b"".join(outcome.pieces) == b"".join(messages)
    assert [len(message) for message in messages] == list(outcome.sizes)
    return (
        messages,
        list(outcome.queue_offsets),
        outcome.size,
        outcome.suggest_slave,
        outcome.next_offset,
        outcome.min_offset,
        outcome.max_offset,
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(QUEUES, LIMITS, st.integers(-1, 20), st.integers(0, 60))
@example(
    # Recent messages are added where the limits of older ones are already reached.
    queues=[(0, 0), (0, 0)],
    limits=ReadLimits(
        memory_bytes_max=192,
        memory_count_max=2,
        disk_bytes_max=1,
        disk_count_max=1,
        recent_bytes=96,
    ),
    count_max=2,
    written=0,
)
def test_the_fast_path_finds_the_same(
    queues: list[tuple[int, int]], limits: ReadLimits, count_max: int, written: int
) -> None:
    clock = ManualClock()
    with (
        tempfile.TemporaryDirectory() as directory,
        Store.open(Path(directory), small_config(), machine=Machine(clock=clock)) as store,
    ):
        for number, (queue_id, size) in enumerate(queues):
            append(store, [record(b"x" * size, queue_id=queue_id)])
            if number == written:
                # Later units wait in memory.
                for _ in range(3):
                    clock.advance(2000)
                    store.tick()
        for queue_id in (0, 1):
            low, high = store.queue_range("Topic", queue_id)
            for offset in map(QueueOffset, range(low, high + 1)):
                short, tagged, long = (
                    store.read("Topic", queue_id, offset, count_max, wanted, limits)
                    for wanted in (Filter(), UNTAGGED, EACH)
                )
                assert content(short) == content(tagged) == content(long)


def test_neighbours_are_one_piece(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config(segment_bytes=1 << 16)) as store:
        for queue_id in (0, 0, 0, 1, 0, 0):
            append(store, [record(b"x", queue_id=queue_id)])
        found = store.read("Topic", 0, QueueOffset(0), 32)
        assert isinstance(found, Found)
        assert [len(piece) // found.sizes[0] for piece in found.pieces] == [3, 2]
        assert len(found.messages) == 5


class CountingFiles(Files):
    """A disk that counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, fd: int, size: int, at: int) -> bytes:
        self.reads += 1
        return super().read(fd, size, at)


def test_sequential_reads_need_few_reads_of_the_file(tmp_path: Path) -> None:
    config = small_config(segment_bytes=1 << 20, queue_segment_units=1000)
    with Store.open(tmp_path, config) as store:
        append_all(store, [[record(b"%d" % number)] for number in range(900)])
    disk = CountingFiles()
    with Store.open(tmp_path, config, machine=Machine(files=disk)) as store:
        before = disk.reads
        assert bodies(store) == [b"%d" % number for number in range(900)]
        assert disk.reads - before <= 6
        store.remove_topic("Topic")
        append(store, [record(b"new")])
        assert bodies(store) == [b"new"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight", "count_max", "per_read"),
    [
        (0, 32, 800),
        # However much a reader requests, and however long its expression is.
        (0, 1_000_000, FILTERED_BYTES_MAX // FILTERED_BYTES + 1),
        (16_384, 32, FILTERED_BYTES_MAX // (16_384 + FILTERED_BYTES) + 1),
    ],
)
def test_a_rare_match_is_searched_for_in_bounded_slices(
    tmp_path: Path, weight: int, count_max: int, per_read: int
) -> None:
    """Each message is examined once, and the next offset advances by what was examined."""
    count, looked_at = 10_000, [0]

    def is_wanted(properties: bytes) -> bool:
        looked_at[0] += 1
        return properties == b"n\x019000"

    wanted = Filter(properties=is_wanted, weight=weight)
    with Store.open(tmp_path, StoreConfig()) as store:
        append_all(store, [(record(b"", n=f"{number:04}"),) for number in range(count)])
        found, offset, steps = [], QueueOffset(0), []
        while offset < count:
            before = looked_at[0]
            outcome = store.read("Topic", 0, offset, count_max, wanted)
            found += list(outcome.queue_offsets) if isinstance(outcome, Found) else []
            steps.append(outcome.next_offset - offset)
            assert looked_at[0] - before == steps[-1] > 0
            offset = outcome.next_offset
    assert found == [9000]
    assert looked_at[0] == count
    assert max(steps) == steps[0] == per_read


NO_MARK = (-1, -1)


def marks_of(
    store: Store, asked: Sequence[tuple[int, QueueOffset]], topic: str = "Topic"
) -> list[tuple[int, int]]:
    search = store.find_marks(topic, [q for q, _ in asked], [at for _, at in asked])
    times_ms, positions = next(found for found in search if not isinstance(found, Cold))
    return list(zip(times_ms, positions, strict=True))


def test_marks_of_many_queues_are_those_of_the_messages(tmp_path: Path) -> None:
    config, v6 = small_config(segment_bytes=4096), host("2001:db8::1", 10911)
    with Store.open(tmp_path, config) as store:
        for number in range(90):
            made = record(b"x" * (number % 7), queue_id=number % 30)
            append(store, [replace(made, born_host=v6) if number % 30 == 3 else made])
        positions = [(number, QueueOffset(at)) for number in range(30) for at in range(3)]
        marks = marks_of(store, positions)
        for (number, offset), mark in zip(positions, marks, strict=True):
            found = store.read("Topic", number, offset, 1)
            assert isinstance(found, Found)
            view = decode_record(found.messages[0])
            assert mark == (view.store_timestamp_ms, view.physical_offset)
        missing = [(0, QueueOffset(3)), (30, QueueOffset(0)), (0, QueueOffset(-1))]
        asked = [*missing, *positions[:2]]
        assert marks_of(store, asked) == [*[NO_MARK] * 3, *marks[:2]]
        assert marks_of(store, []) == []
        assert marks_of(store, missing, "Unknown") == [NO_MARK] * 3
        damaged = marks[2][1]
    start = damaged // 4096 * 4096
    with (tmp_path / "commitlog" / f"{start:020d}").open("r+b") as file:
        file.seek(damaged - start + 20)
        file.write(b"\xff")
    with Store.open(tmp_path, config) as store:
        assert marks_of(store, positions) == [*marks[:2], NO_MARK, *marks[3:]]
