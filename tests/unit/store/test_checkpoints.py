"""When the checkpoint is written: until it is up to date, and then no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from appending import append, append_all
from store_work import checkpoint_of, wait_idle
from turbopump.errors import DiskFull
from turbopump.machine import Machine
from turbopump.machine.files import REAL_FILES
from turbopump.message import PhysicalOffset
from turbopump.store import Files, FlushMode, Store, write_behind
from turbopump.store.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from unit.store.support import FaultyFiles, ManualClock, record, small_config


@pytest.mark.parametrize("mode", FlushMode)
def test_a_checkpoint_that_could_not_be_written_is_written_later_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: FlushMode
) -> None:
    is_broken = True
    tries = 0

    def write(files: Files, path: Path, checkpoint: Checkpoint) -> None:
        nonlocal tries
        tries += 1
        if is_broken:
            raise OSError("no room")
        write_checkpoint(files, path, checkpoint)

    clock, jobs = ManualClock(), 0
    with Store.open(tmp_path, small_config(mode), machine=Machine(clock=clock)) as store:
        monkeypatch.setattr(write_behind, "write_checkpoint", write)
        submit = store._flusher.submit

        def counted(job: Callable[[], None]) -> None:
            nonlocal jobs
            jobs += 1
            submit(job)

        def idle(seconds: int) -> None:
            for _ in range(seconds):
                clock.advance(1000)
                store.tick()
                wait_idle(store)

        monkeypatch.setattr(store._flusher, "submit", counted)
        appended = append(store, [record(b"a", KEYS="k")])
        idle(30)
        assert tries > 5
        assert read_checkpoint(REAL_FILES, tmp_path / "checkpoint").queues_end == 0
        is_broken = False
        idle(30)
        reached = read_checkpoint(REAL_FILES, tmp_path / "checkpoint")
        assert reached.queues_end == store.readable_end > appended.physical_offset
        assert reached == checkpoint_of(store)
        jobs = 0
        idle(30)
        assert jobs == 0, "the flusher is not disturbed"


@pytest.mark.parametrize("mode", FlushMode)
def test_rejected_messages_leave_no_trace_in_the_checkpoint(
    tmp_path: Path, mode: FlushMode
) -> None:
    clock, files = ManualClock(), FaultyFiles()
    store = Store.open(tmp_path, small_config(mode), machine=Machine(clock=clock, files=files))
    files.bytes_left = 0
    with pytest.raises(DiskFull):
        append_all(store, [[record(b"a")], [record(b"b")]])
    files.bytes_left = None
    for _ in range(30):
        clock.advance(1000)
        store.tick()
        wait_idle(store)
    assert read_checkpoint(REAL_FILES, tmp_path / "checkpoint") == Checkpoint()
    store.close()


def test_a_write_torn_at_any_byte_leaves_no_position_that_was_never_reached(
    tmp_path: Path,
) -> None:
    path = tmp_path / "checkpoint"
    images = []
    for reached in (0x4249, 0x6C14):
        end = PhysicalOffset(reached)
        write_checkpoint(REAL_FILES, path, Checkpoint(1000, 1000, 1000, end, end))
        images.append(path.read_bytes())
    old, new = images
    for torn_at in range(128):
        path.write_bytes(new[:torn_at] + old[torn_at:])
        found = read_checkpoint(REAL_FILES, path)
        assert {found.log_end, found.queues_end} <= {0, 0x4249, 0x6C14}, torn_at
