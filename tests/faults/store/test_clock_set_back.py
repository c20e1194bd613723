"""The clock is set back, then the process is killed: store timestamps prove nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from appending import append
from store_work import checkpoint_of, wait_idle
from turbopump.machine import Machine
from turbopump.machine.files import REAL_FILES, Files
from turbopump.message import PhysicalOffset
from turbopump.store import FlushMode, Store
from turbopump.store.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from unit.store.support import ManualClock, bodies, record, small_config

pytestmark = pytest.mark.slow

CONFIG = small_config(FlushMode.SYNC)
HOUR_MS = 3_600_000
TIMES_BYTES = 24


def settled(store: Store, clock: ManualClock) -> None:
    """Write everything, and advance the checkpoint to the end."""
    for _ in range(3):
        clock.advance(5000)
        store.tick()
        wait_idle(store)


def send(store: Store, topic: str, body: bytes) -> None:
    append(store, [record(body, topic=topic)]).durable.result()


def killed_after_the_clock_was_set_back(tmp_path: Path, clock: ManualClock, jumps: int) -> Path:
    """Return a store whose rare messages are only in the log, amid the new timestamps."""
    running, root = tmp_path / "running", tmp_path / "killed"
    store = Store.open(running, CONFIG, machine=Machine(clock=clock))
    for _ in range(6):
        send(store, "Common", b"a" * 900)
        settled(store, clock)
    clock.wall_ms -= HOUR_MS
    send(store, "Rare", b"f" * 900)
    send(store, "Rare", b"precious")
    for number in range(12):
        clock.wall_ms += 10 if number % 6 or not jumps else -HOUR_MS
        send(store, f"Common{number}", b"g" * 900)
    shutil.copytree(running, root)
    store.close()
    return root


def check(root: Path, clock: ManualClock) -> None:
    with Store.open(root, CONFIG, machine=Machine(clock=clock)) as store:
        assert store.recovered.crashed
        assert bodies(store, "Rare") == [b"f" * 900, b"precious"]
        assert len(bodies(store, "Common")) == 6
        for number in range(12):
            assert bodies(store, f"Common{number}") == [b"g" * 900]
        assert append(store, [record(b"next", topic="Rare")]).queue_offset == 2


@pytest.mark.parametrize("jumps", [0, 1])
def test_messages_stored_after_the_clock_was_set_back(jumps: int, tmp_path: Path) -> None:
    clock = ManualClock()
    check(killed_after_the_clock_was_set_back(tmp_path, clock, jumps), clock)


@pytest.mark.parametrize("jumps", [0, 1])
def test_messages_stored_after_the_clock_was_set_back_without_recorded_positions(
    jumps: int, tmp_path: Path
) -> None:
    clock = ManualClock()
    root = killed_after_the_clock_was_set_back(tmp_path, clock, jumps)
    path = root / "checkpoint"
    times = path.read_bytes()[:TIMES_BYTES]
    path.write_bytes(times.ljust(4096, b"\0"))
    assert read_checkpoint(REAL_FILES, path).end == 0
    check(root, clock)


def test_a_replay_begins_at_the_checkpoint(tmp_path: Path) -> None:
    clock = ManualClock()
    running, root = tmp_path / "running", tmp_path / "killed"
    store = Store.open(running, CONFIG, machine=Machine(clock=clock))
    for _ in range(40):
        send(store, "Topic", b"a" * 900)
    settled(store, clock)
    assert checkpoint_of(store).end == store.written_end
    send(store, "Topic", b"new")
    shutil.copytree(running, root)
    store.close()
    with Store.open(root, CONFIG, machine=Machine(clock=clock)) as again:
        # Replayed from the start of the last of ten files.
        assert again.recovered.replayed <= 5
        assert len(bodies(again)) == 41


def test_the_checkpoint_stays_before_units_that_wait_to_be_written(tmp_path: Path) -> None:
    clock = ManualClock()
    running, root = tmp_path / "running", tmp_path / "killed"
    store = Store.open(running, CONFIG, machine=Machine(clock=clock))
    send(store, "Common", b"a")
    settled(store, clock)
    clock.advance(100)
    send(store, "Rare", b"precious")
    for number in range(12):
        send(store, f"Common{number}", b"g" * 900)
    clock.advance(900)
    store.tick()  # too early for the new messages
    wait_idle(store)
    assert not (running / "consumequeue" / "Rare").exists()
    shutil.copytree(running, root)
    store.close()
    with Store.open(root, CONFIG, machine=Machine(clock=clock)) as again:
        assert bodies(again, "Rare") == [b"precious"]


def test_positions_count_for_the_times_they_were_written_with(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    ours = Checkpoint(5, 4, 3)
    ours = ours.joined(Checkpoint(log_end=PhysicalOffset(1000), queues_end=PhysicalOffset(900)))
    write_checkpoint(Files(), path, ours)
    assert read_checkpoint(REAL_FILES, path) == ours
    assert read_checkpoint(REAL_FILES, path).end == 900
    data = bytearray(path.read_bytes())
    data[7] += 1  # another broker has flushed since
    path.write_bytes(data)
    assert read_checkpoint(REAL_FILES, path) == Checkpoint(6, 4, 3)
    path.write_bytes(data[:TIMES_BYTES])
    assert read_checkpoint(REAL_FILES, path) == Checkpoint(6, 4, 3)
    path.write_bytes(b"short")
    assert read_checkpoint(REAL_FILES, path) == Checkpoint()


def test_truncating_the_log_moves_the_checkpoint_back(tmp_path: Path) -> None:
    """Messages stored in place of the cut ones are found after the next kill."""
    clock = ManualClock()
    running, root = tmp_path / "running", tmp_path / "killed"
    store = Store.open(running, CONFIG, machine=Machine(clock=clock))
    for _ in range(20):
        send(store, "Topic", b"a" * 900)
    settled(store, clock)
    shutil.copytree(running, root)
    store.close()
    for path in sorted((root / "commitlog").iterdir())[1:]:
        path.unlink()
    # The power failed: queues were flushed to disk, but only the first file of the log.
    checkpoint = replace(
        read_checkpoint(REAL_FILES, root / "checkpoint"), log_end=PhysicalOffset(3000)
    )
    write_checkpoint(Files(), root / "checkpoint", checkpoint)
    again = Store.open(root, CONFIG, machine=Machine(clock=clock))
    kept = len(bodies(again))
    assert checkpoint_of(again).end == again.written_end
    for number in range(16):
        send(again, "New", b"%d" % number * 500)
    shutil.copytree(root, tmp_path / "again")
    again.close()
    with Store.open(tmp_path / "again", CONFIG, machine=Machine(clock=clock)) as last:
        assert bodies(last, "New") == [b"%d" % number * 500 for number in range(16)]
        assert len(bodies(last)) == kept
