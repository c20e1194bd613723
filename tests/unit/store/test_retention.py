"""Retention: what may be deleted when, what follows the log, and active readers."""

from __future__ import annotations

import datetime
import errno
from pathlib import Path

import pytest

from appending import append
from store_work import log_of, wait_idle, write_tables
from turbopump.errors import DiskFailed, DiskFull
from turbopump.machine import Machine
from turbopump.machine.files import Mapped
from turbopump.message import PhysicalOffset
from turbopump.store import Found, OffsetTooSmall, RetentionConfig, Store
from turbopump.store.retention import Verdict, is_due
from turbopump.wire.record import decode_record
from unit.store.support import FaultyFiles, ManualClock, bodies, offset, record, small_config

HOUR_MS = 3_600_000
FOUR = int(datetime.datetime(2030, 5, 5, 4, 30).astimezone().timestamp()) * 1000
NOON = FOUR + 8 * HOUR_MS


@pytest.mark.parametrize(
    ("now_ms", "ratio", "any_hour", "expected"),
    [
        (FOUR, 0.1, False, 2),
        (NOON, 0.1, False, 0),
        (NOON, 0.1, True, 3),
        (NOON, 0.76, False, 3),
        (NOON, 0.86, False, 4),
    ],
)
def test_which_segments_are_due(now_ms: int, ratio: float, any_hour: bool, expected: int) -> None:
    ages_ms = [now_ms - FOUR + hours * HOUR_MS for hours in (80, 72, 66, 1)]
    config = RetentionConfig()
    due = [is_due(config, age_ms, now_ms, ratio, at_any_hour=any_hour) for age_ms in ages_ms]
    assert due == [True] * expected + [False] * (len(ages_ms) - expected)


@pytest.mark.parametrize(
    ("now_ms", "ratio", "age_ms", "expected"),
    [
        (NOON, 0.0, HOUR_MS, True),
        (FOUR, 0.0, HOUR_MS, False),
        (FOUR, 0.25, HOUR_MS, True),
        (FOUR, 0.25, HOUR_MS - 1, False),
        (FOUR, 0.35, 0, True),
    ],
)
def test_the_rules_are_configurable(now_ms: int, ratio: float, age_ms: int, expected: bool) -> None:
    config = RetentionConfig(
        delete_hours=frozenset({12}), reserved_ms=HOUR_MS,
        early_ratio=0.2, forced_ratio=0.3, full_ratio=0.4,
    )  # fmt: skip
    assert is_due(config, age_ms, now_ms, ratio, at_any_hour=False) == expected


def test_a_run_deletes_a_bounded_number(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock(NOON)
    config = small_config(retention=RetentionConfig(segments_per_run_max=3))
    with Store.open(tmp_path, config, machine=Machine(files=files, clock=clock)) as store:
        for _ in range(30):
            append(store, [record(b"x" * 900)])
        store.flush()
        store.dispatch()
        write_tables(store)
        assert len(log_of(store).starts) > 5
        files.ratio = 0.99
        assert store.retain() == Verdict(3, True)


@pytest.mark.slow
@pytest.mark.parametrize("set_by_ms", [-100 * HOUR_MS, -HOUR_MS, HOUR_MS, 100 * HOUR_MS])
def test_ages_follow_elapsed_time_even_if_the_clock_is_set(tmp_path: Path, set_by_ms: int) -> None:
    clock = ManualClock(NOON)

    def fill(store: Store) -> None:
        for _ in range(30):
            clock.advance(1000)
            append(store, [record(b"x" * 900)])
        store.flush()

    with Store.open(tmp_path, small_config(), machine=Machine(clock=clock)) as store:
        fill(store)
        clock.wall_ms += set_by_ms
        fill(store)
        assert store.retain(at_any_hour=True).segments == 0
        before = len(log_of(store).starts)
        clock.advance(72 * HOUR_MS - 20_000)
        deleted = store.retain(at_any_hour=True).segments
        assert 0 < deleted < before - 1, "only those stored before the clock was set"
        clock.advance(20_000)
        store.retain(at_any_hour=True)
        assert len(log_of(store).starts) == 1


@pytest.mark.parametrize("set_by_ms", [-100 * HOUR_MS, 100 * HOUR_MS])
def test_messages_stored_before_the_start_count_as_young_as_possible(
    tmp_path: Path, set_by_ms: int
) -> None:
    clock = ManualClock(NOON)
    with Store.open(tmp_path, small_config(), machine=Machine(clock=clock)) as store:
        for _ in range(30):
            append(store, [record(b"x" * 900)])
    clock.advance(73 * HOUR_MS)
    with Store.open(tmp_path, small_config(), machine=Machine(clock=clock)) as store:
        clock.wall_ms += set_by_ms
        store.tick()
        is_young = set_by_ms < 0
        assert (store.retain(at_any_hour=True).segments == 0) == is_young


@pytest.mark.slow
def test_queues_and_index_follow_the_log(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock(NOON)
    with Store.open(tmp_path, small_config(), machine=Machine(files=files, clock=clock)) as store:
        append(store, [record(b"quiet", topic="Quiet", KEYS="quiet")])
        for number in range(100):
            clock.advance(1000)
            append(store, [record(b"%d" % number * 100, KEYS=f"k{number}")])
        store.flush()
        store.dispatch()
        write_tables(store)
        held = store.read("Topic", 0, offset(0), 3)
        assert isinstance(held, Found)
        assert len(list((tmp_path / "index").iterdir())) == 6
        files.ratio = 0.86
        verdict = store.retain()
        assert verdict.segments == min(10, len(log_of(store).starts) + verdict.segments - 1)
        low, high = store.queue_range("Topic", 0)
        assert 0 < low < high == 100
        assert bodies(store) == [b"%d" % number * 100 for number in range(low, 100)]
        first = store.read("Topic", 0, low, 1)
        assert isinstance(first, Found)
        assert decode_record(first.messages[0]).physical_offset >= store.min_offset
        too_small = store.read("Topic", 0, offset(0), 1)
        assert isinstance(too_small, OffsetTooSmall)
        assert too_small.next_offset == low
        # A queue without any message left keeps its count.
        assert store.queue_range("Quiet", 0) == (1, 1)
        assert append(store, [record(b"loud", topic="Quiet")]).queue_offset == 1
        assert bodies(store, "Quiet") == [b"loud"]
        # Queue and index files of deleted messages are gone, and so are the keys.
        assert len(list((tmp_path / "index").iterdir())) < 6
        assert not (tmp_path / "consumequeue" / "Topic" / "0" / f"{0:020d}").exists()
        assert not store.messages_by_key("Topic", "k0", 9, 0, 1 << 60)
        assert store.messages_by_key("Topic", "k99", 9, 0, 1 << 60)
        assert store.message_at(PhysicalOffset(0)) is None
        assert store.offset_by_time("Topic", 0, 0) == low
        # Active readers are not disturbed.
        views = [decode_record(message, check_crc=True) for message in held.messages]
        assert [view.stored_body for view in views] == [b"0" * 100, b"1" * 100, b"2" * 100]
    with Store.open(tmp_path, small_config()) as store:
        assert store.queue_range("Topic", 0) == (low, high)
        assert bodies(store, "Quiet") == [b"loud"]


def test_the_active_segment_and_unflushed_ones_are_retained(tmp_path: Path) -> None:
    files = FaultyFiles()
    config = small_config()
    with Store.open(tmp_path, config, machine=Machine(files=files)) as store:
        for _ in range(8):
            append(store, [record(b"x" * 1000)])
        files.ratio = 0.99
        wait_idle(store)
        unflushed = [start for start in log_of(store).starts if start + 4096 > store.flushed_end]
        store.retain()
        assert set(unflushed) <= set(log_of(store).starts)
        store.flush()
        store.dispatch()
        write_tables(store)
        store.retain()
        assert len(log_of(store).starts) == 1
        assert log_of(store).starts[0] <= store.written_end


def test_deletion_survives_a_crash(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    store = Store.open(tmp_path, small_config(), machine=Machine(files=files, clock=clock))
    for number in range(60):
        append(store, [record(b"%d" % number * 100)])
    store.flush()
    store.dispatch()
    write_tables(store)
    files.ratio = 0.86
    store.retain()
    low, high = store.queue_range("Topic", 0)
    store.close()
    (tmp_path / "abort").touch()
    for path in (tmp_path / "consumequeue" / "Topic" / "0").iterdir():
        path.unlink()
    with Store.open(tmp_path, small_config()) as store:
        assert store.recovered.crashed
        assert store.queue_range("Topic", 0) == (low, high)
        assert bodies(store) == [b"%d" % number * 100 for number in range(low, 60)]


class ShrinkingFiles(FaultyFiles):
    """Each deleted file of the log frees one per cent; the one at a number cannot be deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_at = -1

    def remove(self, path: Path) -> None:
        if path.parent.name == "commitlog" and path.name.isdecimal():
            self.fails_at -= 1
            if self.fails_at == 0:
                raise OSError(errno.EIO, "Input/output error")
            self.ratio -= 0.01
        super().remove(path)


def filled(root: Path, files: FaultyFiles) -> Store:
    store = Store.open(root, small_config(), machine=Machine(files=files, clock=ManualClock(NOON)))
    for number in range(100):
        append(store, [record(b"%d" % number * 500)])
    store.flush()
    store.dispatch()
    write_tables(store)
    return store


def test_young_segments_are_deleted_only_until_there_is_room(tmp_path: Path) -> None:
    files = ShrinkingFiles()
    with filled(tmp_path, files) as store:
        files.ratio = 0.865
        assert store.retain() == Verdict(2, False)
        assert store.retain() == Verdict(0, False)
        files.ratio = 0.915
        # The last check counts.
        assert store.retain() == Verdict(7, False)
        assert store.refusal is None


def test_segments_deleted_before_their_time_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = ShrinkingFiles()
    with filled(tmp_path, files) as store:
        files.ratio = 0.865
        store.retain()
        first, last = ("2030-05-05T" in text for text in caplog.messages[0].split(" to ")[-2:])
        assert first
        assert last
        log = tmp_path / "commitlog"
        assert caplog.messages[0].startswith(
            "86% of the disk is used: 2 log files were deleted before their time,"
            f" {log / ('0' * 20)} to {4096:020d}, positions 0 to 8192, messages stored from "
        )
        store._clock.advance(80 * HOUR_MS)  # type: ignore[attr-defined]
        files.ratio = 0.865
        assert store.retain().segments
        assert len(caplog.messages) == 1, "those are old enough"


class CountingReads(ShrinkingFiles):
    """Counts the files of the log that are opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def open_to_read(self, path: Path) -> int:
        if path.parent.name == "commitlog":
            self.opened.append(path.name)
        return super().open_to_read(path)


def test_retention_reads_the_time_of_each_file_once(tmp_path: Path) -> None:
    filled(tmp_path, ShrinkingFiles()).close()
    files, clock = CountingReads(), ManualClock(NOON)
    with Store.open(tmp_path, small_config(), machine=Machine(files=files, clock=clock)) as store:
        store.retain()
        files.opened.clear()
        store.retain()
        assert files.opened == []
        clock.advance(80 * HOUR_MS)
        assert store.retain(at_any_hour=True).segments
        assert files.opened == [], "nothing is logged of those that are old enough"


class UnreadableFiles(ShrinkingFiles):
    """The first page of some files cannot be read, not even through a map."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable: set[str] = set()

    def _check(self, fd: int, at: int) -> None:
        if at == 0 and Path(f"/proc/self/fd/{fd}").readlink().name in self.unreadable:
            raise OSError(errno.EIO, "Input/output error")

    def read(self, fd: int, size: int, at: int) -> bytes:
        self._check(fd, at)
        return super().read(fd, size, at)

    def map(self, fd: int, size: int) -> Mapped:
        self._check(fd, 0)
        return super().map(fd, size)


@pytest.mark.parametrize("damage", ["removed", "emptied", "unreadable"])
@pytest.mark.parametrize("number", [0, 1])
def test_files_that_cannot_be_read_are_deleted_when_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, number: int
) -> None:
    filled(tmp_path, ShrinkingFiles()).close()
    files, clock = UnreadableFiles(), ManualClock(NOON)
    with Store.open(tmp_path, small_config(), machine=Machine(files=files, clock=clock)) as store:
        path = tmp_path / "commitlog" / f"{number * 4096:020d}"
        if damage == "removed":
            path.unlink()
        elif damage == "emptied":
            path.write_bytes(b"")
        else:
            files.unreadable.add(path.name)
        files.ratio = 0.88
        assert store.retain().segments
        assert store.min_offset >= 2 * 4096
        [warning] = caplog.messages
        unknown = "stored from unknown to " if number == 0 else "stored from 2030-05-05T"
        assert unknown in warning
        assert bodies(store)[-1] == b"99" * 500


def test_segments_are_kept_from_a_position_on(tmp_path: Path) -> None:
    files = ShrinkingFiles()
    with filled(tmp_path, files) as store:
        files.ratio, store.kept_from = 0.99, lambda: PhysicalOffset(0)
        assert store.retain() == Verdict(0, True)
        store.kept_from = lambda: PhysicalOffset(2 * 4096 + 1)
        assert store.retain() == Verdict(2, True)
        assert store.min_offset == 2 * 4096


def test_a_segment_that_cannot_be_deleted_stops_nothing_else(tmp_path: Path) -> None:
    files = ShrinkingFiles()
    with filled(tmp_path, files) as store:
        files.ratio, files.fails_at = 0.89, 3
        with pytest.raises(DiskFailed, match="Input/output"):
            store.retain()
        assert store.min_offset == 2 * 4096
        low, _ = store.queue_range("Topic", 0)
        first = store.read("Topic", 0, low, 1)
        assert isinstance(first, Found)
        assert decode_record(first.messages[0]).physical_offset == 2 * 4096
        assert len(bodies(store)) == 100 - low
        assert store.retain().segments


def test_deleting_a_queue_file_is_retried_after_a_failure(tmp_path: Path) -> None:
    class QueueFails(FaultyFiles):
        fails = True

        def remove(self, path: Path) -> None:
            if self.fails and "First" in path.parts:
                raise OSError(errno.EIO, "Input/output error")
            super().remove(path)

    files = QueueFails()
    files.fails = False
    with Store.open(tmp_path, small_config(), machine=Machine(files=files)) as store:
        for number in range(100):
            for topic in ("First", "Second"):
                append(store, [record(b"%d" % number * 100, topic=topic)])
        store.flush()
        store.dispatch()
        write_tables(store)
        files.ratio, files.fails = 0.91, True
        with pytest.raises(DiskFailed):
            store.retain()
        assert store.queue_range("First", 0)[0] == 0
        assert store.queue_range("Second", 0)[0] > 0
        # A full disk is noticed nevertheless.
        assert isinstance(store.refusal, DiskFull)
        files.ratio, files.fails = 0.1, False
        assert store.retain() == Verdict(0, False)
        assert store.queue_range("First", 0)[0] > 0
        assert store.refusal is None
