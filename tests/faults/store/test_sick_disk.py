"""Disks that are full or fail to flush: all waiters get errors, and the store recovers."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from appending import append, append_all
from store_work import checkpoint_of, table_failure, wait_idle
from turbopump.errors import DiskFull, WriteFailed, WriteRefused
from turbopump.machine import Machine
from turbopump.store import FlushConfig, FlushMode, Store, StoreConfig, UpToDate
from unit.store.support import FaultyFiles, ManualClock, bodies, offset, record, small_config

pytestmark = pytest.mark.slow

ASYNC = small_config(FlushMode.ASYNC)
SYNC = small_config(FlushMode.SYNC)


@pytest.mark.parametrize("config", [ASYNC, SYNC], ids=["async", "sync"])
@pytest.mark.parametrize("room", [0, 1, 50, 200, 391])
def test_a_full_disk_rejects_writes_and_recovers_by_itself(
    config: StoreConfig, room: int, tmp_path: Path
) -> None:
    files = FaultyFiles()
    with Store.open(tmp_path, config, machine=Machine(files=files)) as store:
        append(store, [record(b"before")]).durable.result()
        files.bytes_left = room
        with pytest.raises(DiskFull, match="No space left"):
            append(store, [record(b"1" * 100), record(b"2" * 100)])
        files.bytes_left = None
        appended = append(store, [record(b"after")])
        assert appended.queue_offset == 1
        appended.durable.result()
        assert bodies(store) == [b"before", b"after"]
    with Store.open(tmp_path, config) as store:
        assert bodies(store) == [b"before", b"after"]


def test_leftovers_of_a_rejected_write_never_appear(tmp_path: Path) -> None:
    """Part of a batch reached the disk; the next message is as large as the batch's first."""
    files = FaultyFiles()
    store = Store.open(tmp_path, ASYNC, machine=Machine(files=files))
    files.bytes_left = 2 * record(b"1" * 100).size + 5
    with pytest.raises(DiskFull):
        append(store, [record(b"%d" % number * 100) for number in range(1, 4)])
    files.bytes_left = None
    append(store, [record(b"x" * 100)])
    log = (tmp_path / "commitlog" / f"{0:020d}").read_bytes()
    assert b"2" * 100 not in log
    assert bodies(store) == [b"x" * 100]
    store.close()


def test_a_write_that_cannot_be_undone_stops_the_store_until_it_can(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    with Store.open(tmp_path, ASYNC, machine=Machine(files=files, clock=clock)) as store:
        append(store, [record(b"before")])
        files.bytes_left, files.erase_error = 50, errno.EIO
        with pytest.raises(DiskFull):
            append(store, [record(b"1" * 100)])
        files.bytes_left = None
        with pytest.raises(WriteFailed, match="could not be undone"):
            append(store, [record(b"too early")])
        assert isinstance(store.refusal, WriteFailed)
        assert bodies(store) == [b"before"]
        clock.advance(1000)
        with pytest.raises(WriteFailed, match="could not be undone"):
            append(store, [record(b"still broken")])
        files.erase_error = None
        clock.advance(1000)
        append(store, [record(b"after")])
        assert store.refusal is None
        assert bodies(store) == [b"before", b"after"]


def test_a_failed_flush_fails_every_waiter(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    with Store.open(tmp_path, SYNC, machine=Machine(files=files, clock=clock)) as store:
        append(store, [record(b"before")]).durable.result()
        files.sync_error = errno.EIO
        doomed = append_all(store, [[record(b"doomed %d" % number)] for number in range(3)])
        for one in doomed:
            with pytest.raises(WriteFailed, match="Input/output error"):
                one.durable.result()
        # They are not readable, and no writer gets an acknowledgement.
        assert bodies(store) == [b"before"]
        with pytest.raises(WriteFailed, match="flushing"):
            append(store, [record(b"refused")])
        files.sync_error = None
        # A second flush would succeed and prove nothing: a probe must succeed first, after a delay.
        with pytest.raises(WriteFailed):
            append(store, [record(b"refused")])
        clock.advance(1000)
        again = append(store, [record(b"again")])
        again.durable.result()
        assert again.queue_offset == 1
        assert bodies(store) == [b"before", b"again"]
        log = (tmp_path / "commitlog" / f"{0:020d}").read_bytes()
        assert b"doomed" not in log
    with Store.open(tmp_path, SYNC) as store:
        assert bodies(store) == [b"before", b"again"]


def test_a_failed_flush_of_acknowledged_messages_is_retried(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    with Store.open(tmp_path, ASYNC, machine=Machine(files=files, clock=clock)) as store:
        append(store, [record(b"%d" % number * 300) for number in range(3)])
        for number in range(20):
            append(store, [record(b"%d" % number * 300)])
        files.sync_error = errno.EIO
        clock.advance(10_000)
        store.tick()
        wait_idle(store)
        with pytest.raises(WriteFailed, match="flushing"):
            append(store, [record(b"refused")])
        assert len(bodies(store)) == 23
        files.sync_error = None
        writes = files.writes
        clock.advance(1000)
        store.tick()
        # They were rewritten, as the failed flush may have discarded them.
        assert files.writes > writes
        assert store.refusal is None
        assert store.flushed_end == store.written_end
        append(store, [record(b"after")])
        assert len(bodies(store)) == 24


def test_a_disk_that_never_recovers_leaves_the_abort_file(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = Store.open(tmp_path, ASYNC, machine=Machine(files=files))
    append(store, [record(b"a")])
    files.sync_error = errno.EIO
    store.close()
    assert (tmp_path / "abort").exists()
    with Store.open(tmp_path, ASYNC) as store:
        assert store.recovered.crashed
        assert bodies(store) == [b"a"]


def test_queues_that_cannot_be_written_stop_the_store_before_memory_fills(tmp_path: Path) -> None:
    config = small_config(segment_bytes=1 << 20, queue_segment_units=10_000)
    files, clock = FaultyFiles(), ManualClock()
    with Store.open(tmp_path, config, machine=Machine(files=files, clock=clock)) as store:
        files.queue_error = errno.ENOSPC
        while store.refusal is None:
            append(store, [record(b"x")])
        with pytest.raises(DiskFull, match="queues and index"):
            append(store, [record(b"x")])
        count = len(bodies(store))
        assert count < 1000
        files.queue_error = None
        clock.advance(1000)
        append(store, [record(b"x")])
        assert len(bodies(store)) == count + 1
    with Store.open(tmp_path, config) as store:
        assert not store.recovered.crashed
        assert len(bodies(store)) == count + 1


class QueueSyncFails(FaultyFiles):
    """Some flushes of queues and index fail, those of the log never."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.fails = False
        self.at_once = at_once

    def sync(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if self.fails and {"consumequeue", "index"} & set(path.parts):
            raise OSError(errno.EIO, "Input/output error")
        super().sync(fd)

    def sync_file_system(self, fd: int, instead_of: int) -> bool:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        return self.at_once


@pytest.mark.parametrize("topics", [1, 100])
@pytest.mark.parametrize("at_once", [True, False])
def test_queues_and_index_are_written_again_after_a_failed_sync(
    topics: int, at_once: bool, tmp_path: Path
) -> None:
    files, clock = QueueSyncFails(at_once=at_once), ManualClock()
    store = Store.open(tmp_path, ASYNC, machine=Machine(files=files, clock=clock))

    def append_and_tick() -> None:
        for number in range(topics):
            append(store, [record(b"x", topic=f"T{number}", KEYS="k")])
        clock.advance(2000)
        store.tick()
        wait_idle(store)

    append_and_tick()
    files.fails = True
    append_and_tick()
    assert table_failure(store) is not None
    before = checkpoint_of(store).queues_ms
    append_and_tick()
    assert checkpoint_of(store).queues_ms == before
    files.fails = False
    append_and_tick()
    assert table_failure(store) is None
    assert checkpoint_of(store).queues_ms > before
    assert store.refusal is None
    store.close()
    assert not (tmp_path / "abort").exists()
    with Store.open(tmp_path, ASYNC) as store:
        assert len(bodies(store, "T0")) == 4
        assert len(store.messages_by_key("T0", "k", 64, 0, 1 << 60)) == 4


@pytest.mark.parametrize("damaged", ["consumequeue", "index"])
def test_data_lost_from_memory_too_is_recovered_by_the_next_start(
    damaged: str, tmp_path: Path
) -> None:
    files, clock = QueueSyncFails(at_once=True), ManualClock()
    store = Store.open(tmp_path, ASYNC, machine=Machine(files=files, clock=clock))
    append(store, [record(b"x")])
    append(store, [record(b"x", KEYS="k"), record(b"y", KEYS="l")])
    files.fails = True
    clock.advance(2000)
    store.tick()
    wait_idle(store)
    files.fails = False
    path = next(path for path in (tmp_path / damaged).rglob("*") if path.is_file())
    with path.open("r+b") as file:
        at = 20 if damaged == "consumequeue" else 40 + 4 * 7 + 2 * 20
        file.seek(at)
        file.write(bytes(20))
    for _ in range(3):
        clock.advance(2000)
        append(store, [record(b"z")])
        store.tick()
        wait_idle(store)
    assert table_failure(store) is not None
    store.close()
    assert (tmp_path / "abort").exists()
    with Store.open(tmp_path, ASYNC) as store:
        assert bodies(store) == [b"x", b"x", b"y", b"z", b"z", b"z"]
        assert store.messages_by_key("Topic", "l", 9, 0, 1 << 60)


def test_closing_does_not_wait_long_for_queues(tmp_path: Path) -> None:
    class SlowClock(ManualClock):
        def monotonic_ms(self) -> int:
            self.elapsed_ms += 100
            return self.elapsed_ms

    for clock in (ManualClock(), SlowClock()):
        root = tmp_path / type(clock).__name__
        store = Store.open(root, ASYNC, machine=Machine(clock=clock))
        append_all(store, [[record(b"x", topic=f"T{number}")] for number in range(50)])
        store.close()
        assert (root / "abort").exists() == isinstance(clock, SlowClock)
        with Store.open(root, ASYNC) as store:
            assert [bodies(store, f"T{number}") for number in range(50)] == [[b"x"]] * 50


@pytest.mark.parametrize("at_once", [True, False])
def test_many_queues_are_synced_in_one_call(at_once: bool, tmp_path: Path) -> None:
    files = QueueSyncFails(at_once=at_once)
    with Store.open(tmp_path, ASYNC, machine=Machine(files=files)) as store:
        append_all(store, [[record(b"x", topic=f"T{number}")] for number in range(100)])
        before = files.syncs
    assert (files.syncs - before < 10) == at_once


def test_queue_files_that_cannot_be_synced_are_recreated(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    store = Store.open(tmp_path, ASYNC, machine=Machine(files=files, clock=clock))
    append(store, [record(b"a")])
    store.flush()
    files.sync_error = errno.EIO
    clock.advance(2000)
    store.tick()
    wait_idle(store)
    append(store, [record(b"b")])
    before = checkpoint_of(store)
    store.close()
    # The files may be incomplete: the checkpoint stays, and the next start rebuilds them.
    assert checkpoint_of(store) == before
    assert (tmp_path / "abort").exists()
    with Store.open(tmp_path, ASYNC) as store:
        assert bodies(store) == [b"a", b"b"]


def test_one_flush_serves_many_waiters(tmp_path: Path) -> None:
    class SlowFiles(FaultyFiles):
        def __init__(self) -> None:
            super().__init__()
            self.started, self.go_on = threading.Event(), threading.Event()

        def sync(self, fd: int) -> None:
            self.started.set()
            self.go_on.wait()
            super().sync(fd)

    files = SlowFiles()
    files.go_on.set()
    config = small_config(FlushMode.SYNC, segment_bytes=1 << 20)
    with Store.open(tmp_path, config, machine=Machine(files=files)) as store:
        append(store, [record(b"warm")]).durable.result()
        files.go_on.clear()
        files.started.clear()
        first = append(store, [record(b"first")])
        files.started.wait()
        syncs = files.syncs
        others = [append(store, [record(b"%d" % number)]) for number in range(50)]
        assert len({id(one.durable) for one in others}) == 1
        # Not on disk, hence not readable.
        assert isinstance(store.read("Topic", 0, offset(1), 1), UpToDate)
        assert store.message_at(first.physical_offset) is None
        assert store.raw(first.physical_offset, 1000) is None
        # One waiter's cancellation does not affect the others.
        assert not first.durable.cancel()
        files.go_on.set()
        others[-1].durable.result()
        assert files.syncs == syncs + 2
        assert len(bodies(store)) == 52


def test_a_flusher_that_dies_of_a_bug_leaves_no_waiter_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class WrongFiles(FaultyFiles):
        wrong = False

        def sync(self, fd: int) -> None:
            if self.wrong:
                raise TypeError("a mistake")
            super().sync(fd)

    files, clock = WrongFiles(), ManualClock()
    with Store.open(tmp_path, SYNC, machine=Machine(files=files, clock=clock)) as store:
        files.wrong = True
        with pytest.raises(WriteFailed, match="a mistake"):
            append(store, [record(b"lost")]).durable.result()
        wait_idle(store)
        assert "the flusher failed: messages are refused" in caplog.text
        with pytest.raises(WriteFailed, match="a mistake"):
            append(store, [record(b"refused")])
        files.wrong = False
        clock.advance(1000)
        append(store, [record(b"after")]).durable.result()
        assert bodies(store) == [b"after"]


def test_asynchronous_flushing_waits_for_enough_bytes_or_time(tmp_path: Path) -> None:
    flush = FlushConfig(interval_ms=100, dirty_bytes_min=1000, thorough_interval_ms=5000)
    files, clock = FaultyFiles(), ManualClock()
    with Store.open(
        tmp_path,
        small_config(flush=flush, segment_bytes=1 << 20),
        machine=Machine(files=files, clock=clock),
    ) as store:

        def flushed_after(advance_ms: int) -> int:
            clock.advance(advance_ms)
            store.tick()
            wait_idle(store)
            return store.flushed_end

        append(store, [record(b"x" * 100)])
        assert flushed_after(100) == 0
        append(store, [record(b"x" * 1000)])
        assert flushed_after(99) == 0
        assert flushed_after(1) == store.written_end
        end = store.written_end
        append(store, [record(b"x" * 100)])
        assert flushed_after(4000) == end
        assert flushed_after(1000) == store.written_end
        assert checkpoint_of(store).log_ms == store._appender.store_timestamp_ms


def test_units_and_entries_are_written_within_their_interval(tmp_path: Path) -> None:
    clock = ManualClock()
    config = small_config(flush=FlushConfig(queue_interval_ms=300))
    with Store.open(tmp_path, config, machine=Machine(clock=clock)) as store:
        append(store, [record(b"x", KEYS="k")])
        queue = tmp_path / "consumequeue" / "Topic" / "0"
        assert not queue.exists()
        for _ in range(7):
            clock.advance(100)
            store.tick()
        wait_idle(store)
        assert queue.exists()
        assert list((tmp_path / "index").iterdir())
        assert checkpoint_of(store).queues_ms == store._appender.store_timestamp_ms


def test_a_store_above_its_disk_ratio_rejects_writes_until_there_is_room(tmp_path: Path) -> None:
    files = FaultyFiles()
    with Store.open(tmp_path, ASYNC, machine=Machine(files=files)) as store:
        append(store, [record(b"a")])
        files.ratio = 0.91
        assert store.retain().full
        with pytest.raises(DiskFull, match="91%") as refused:
            append(store, [record(b"b")])
        assert refused.value.retriable
        assert isinstance(refused.value, WriteRefused)
        assert bodies(store) == [b"a"]
        files.ratio = 0.5
        store.retain()
        append(store, [record(b"c")])
        assert bodies(store) == [b"a", b"c"]
