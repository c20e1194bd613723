"""Whether the key index knows every message: never claimed when it does not."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from turbopump.machine import Machine
from turbopump.machine.files import REAL_FILES, Files
from turbopump.store import Store
from turbopump.store.checkpoint import read_checkpoint, write_checkpoint
from unit.store.support import FaultyFiles, ManualClock, record, small_config

ON, OFF = small_config(), small_config(index_enabled=False)
FAR_MS = 1 << 62


def fill(store: Store, numbers: range) -> None:
    for number in numbers:
        store.append([record(KEYS=f"k{number}")])


def found(store: Store, number: int) -> int:
    return len(store.messages_by_key("Topic", f"k{number}", 32, 0, FAR_MS))


def opened(path: Path, config: object = ON, files: Files = REAL_FILES) -> Store:
    return Store.open(path, config, machine=Machine(files=files, clock=ManualClock()))  # type: ignore[arg-type]


def index_files(path: Path) -> list[Path]:
    return sorted((path / "index").iterdir())


def test_an_index_that_was_never_off_is_complete_also_after_restarts(tmp_path: Path) -> None:
    for start in (0, 50, 100):
        with opened(tmp_path) as store:
            assert store.index_is_complete
            fill(store, range(start, start + 50))
            store.append([record()])
            assert found(store, start) == 1
            assert store.index_is_complete
    assert len(index_files(tmp_path)) > 5


def test_a_crash_leaves_it_complete(tmp_path: Path) -> None:
    running = tmp_path / "running"
    with opened(running) as store:
        fill(store, range(50))
    with opened(running) as store:
        fill(store, range(50, 80))
        store.flush()
        shutil.copytree(running, tmp_path / "killed")
    with opened(tmp_path / "killed") as store:
        assert store.recovered.crashed
        assert all(found(store, number) == 1 for number in range(80))
        assert store.index_is_complete


def test_what_was_stored_without_index_makes_it_incomplete(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, range(5))
    with opened(tmp_path, OFF) as store:
        fill(store, range(5, 10))
        assert not store.index_is_complete
    for _ in range(2):
        with opened(tmp_path) as store:
            assert (found(store, 1), found(store, 6)) == (1, 0)
            assert not store.index_is_complete
            fill(store, range(10, 15))
            assert found(store, 12) >= 1
            assert not store.index_is_complete


def test_a_run_without_index_and_without_messages_is_forgiven_by_time_only(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, range(5))
    with opened(tmp_path, OFF):
        pass
    with opened(tmp_path) as store:
        # Nothing says that nothing was stored: careful, not wrong.
        assert not store.index_is_complete


def test_it_is_complete_again_when_retention_has_deleted_what_it_lacks(tmp_path: Path) -> None:
    with opened(tmp_path, OFF) as store:
        fill(store, range(10))
    with opened(tmp_path) as store:
        fill(store, range(10, 100))
        assert not store.index_is_complete
    first = min((tmp_path / "commitlog").iterdir())
    first.unlink()
    with opened(tmp_path) as store:
        fill(store, range(100, 101))
        assert found(store, 50) == 1
        assert store.index_is_complete


@pytest.mark.parametrize("gone", ["oldest", "middle", "newest", "all"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_deleted_index_files_make_it_incomplete(tmp_path: Path, gone: str, is_killed: bool) -> None:
    running = tmp_path / "running"
    with opened(running) as store:
        fill(store, range(90))
    with opened(running) as store:
        fill(store, range(90, 100))
        store.flush()
        if is_killed:
            shutil.copytree(running, tmp_path / "killed")
            running = tmp_path / "killed"
    files = index_files(running)
    assert len(files) > 4
    chosen = {"oldest": files[:1], "middle": files[2:3], "newest": files[-1:], "all": files}[gone]
    for path in chosen:
        path.unlink()
    with opened(running) as store:
        lost = [number for number in range(100) if not found(store, number)]
        # After a crash, what the newest lacked is entered again.
        assert lost or is_killed
        assert store.index_is_complete == (not lost)


def test_another_broker_may_have_stored_anything(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, range(5))
    path = tmp_path / "checkpoint"
    known = read_checkpoint(REAL_FILES, path)
    assert known.end > 0
    write_checkpoint(Files(), path, known)
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    with opened(tmp_path) as store:
        assert found(store, 1) == 1
        assert not store.index_is_complete


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"completeFrom": "0"}', b"[]"])
def test_a_damaged_note_promises_nothing(tmp_path: Path, damage: bytes) -> None:
    with opened(tmp_path) as store:
        fill(store, range(5))
    (tmp_path / "index-coverage.json").write_bytes(damage)
    with opened(tmp_path) as store:
        assert not store.index_is_complete


def test_keys_that_a_full_disk_keeps_out_make_it_incomplete_for_a_while(tmp_path: Path) -> None:
    class FullForIndex(FaultyFiles):
        is_full = False

        def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
            if self.is_full and "index" in str(Path(f"/proc/self/fd/{fd}").readlink()):
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(fd, data, at)

    files = FullForIndex()
    with opened(tmp_path, replace(ON), files) as store:
        fill(store, range(5))
        assert found(store, 1) == 1
        files.is_full = True
        store.append([record(KEYS="late")])
        assert not store.messages_by_key("Topic", "late", 32, 0, FAR_MS)
        assert not store.index_is_complete
        files.is_full = False
        assert len(store.messages_by_key("Topic", "late", 32, 0, FAR_MS)) == 1
        assert store.index_is_complete
