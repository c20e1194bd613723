"""A store on a full disk opens: it serves reads, rejects messages, frees space, and recovers."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from appending import append
from store_work import wait_idle, write_tables
from turbopump.errors import DiskFull
from turbopump.machine import Machine
from turbopump.machine.files import REAL_FILES
from turbopump.store import FlushMode, Store, StoreConfig
from turbopump.store.config_files import load_json, save_json
from unit.store.support import FaultyFiles, ManualClock, bodies, record, small_config

pytestmark = pytest.mark.slow

CONFIG = small_config()
COUNT = 30


class FullFiles(FaultyFiles):
    """A disk on which nothing can be created or written, not even existing blocks."""

    def __init__(self, *, full: bool = True) -> None:
        super().__init__()
        self.full = full

    def _check(self, path: Path) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        self._check(Path(f"/proc/self/fd/{fd}").readlink())
        super().write(fd, data, at)

    def open_new(self, path: Path) -> int:
        self._check(path)
        return super().open_new(path)

    def link(self, path: Path, name: Path) -> None:
        self._check(name)
        super().link(path, name)


def body(number: int) -> bytes:
    return b"%03d" % number * 200


def fill(store: Store) -> None:
    for number in range(COUNT):
        append(store, [record(body(number), KEYS=f"k{number}")]).durable.result()


def stopped(root: Path, config: StoreConfig) -> None:
    with Store.open(root, config) as store:
        fill(store)


def killed(root: Path, config: StoreConfig) -> None:
    running = root.with_name("running")
    store = Store.open(running, config)
    fill(store)
    shutil.copytree(running, root)
    store.close()


def killed_with_a_torn_end(root: Path, config: StoreConfig) -> None:
    killed(root, config)
    *_, last = sorted((root / "commitlog").iterdir())
    data = last.read_bytes()
    used = len(data.rstrip(b"\0"))
    last.write_bytes(data[:used].ljust(len(data), b"\0").replace(body(COUNT - 1), b"x" * 600))


def killed_and_queues_gone(root: Path, config: StoreConfig) -> None:
    killed(root, config)
    shutil.rmtree(root / "consumequeue")
    (root / "checkpoint").unlink(missing_ok=True)


STATES = [stopped, killed, killed_with_a_torn_end, killed_and_queues_gone]


@pytest.mark.parametrize("mode", FlushMode)
@pytest.mark.parametrize("state", STATES)
def test_the_store_is_readable_and_recovers_by_itself(
    state: Callable[[Path, StoreConfig], None],
    mode: FlushMode,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, root = small_config(mode), tmp_path / "store"
    state(root, config)
    expected = [body(number) for number in range(COUNT - (state is killed_with_a_torn_end))]
    before = {path: path.read_bytes() for path in (root / "commitlog").iterdir()}
    files, clock = FullFiles(), ManualClock()
    store = Store.open(root, config, machine=Machine(files=files, clock=clock))
    for _ in range(3):
        assert bodies(store) == expected
        with pytest.raises(DiskFull, match="No space left") as refused:
            append(store, [record(b"refused")])
        assert str(root) in str(refused.value)
        clock.advance(1000)
        store.tick()
    assert caplog.text.count("messages are refused") == 1
    assert {path: path.read_bytes() for path in before} == before
    # A kill in this state loses nothing.
    shutil.copytree(root, tmp_path / "again")
    with Store.open(tmp_path / "again", config) as again:
        assert bodies(again) == expected
    files.full = False
    clock.advance(1000)
    store.tick()
    assert store.refusal is None
    assert "messages are accepted again" in caplog.text
    assert (root / "abort").exists()
    appended = append(store, [record(b"after", KEYS="new")])
    appended.durable.result()
    assert appended.queue_offset == len(expected)
    assert len(store.messages_by_key("Topic", "new", 9, 0, 1 << 60)) == 1
    store.close()
    assert not (root / "abort").exists()
    with Store.open(root, config) as store:
        assert not store.recovered.crashed
        assert bodies(store) == [*expected, b"after"]


@pytest.mark.parametrize("state", STATES)
def test_closing_leaves_what_the_next_start_needs(
    state: Callable[[Path, StoreConfig], None], tmp_path: Path
) -> None:
    root = tmp_path / "store"
    state(root, CONFIG)
    expected = [body(number) for number in range(COUNT - (state is killed_with_a_torn_end))]
    for _ in range(2):
        with Store.open(root, CONFIG, machine=Machine(files=FullFiles())) as store:
            assert bodies(store) == expected
        assert (root / "abort").exists() == (state is not stopped)
    with Store.open(root, CONFIG) as store:
        assert store.recovered.crashed == (state is not stopped)
        assert bodies(store) == expected


def killed_later(root: Path, config: StoreConfig) -> None:
    """Kill it when its queues are written, except for the last message."""
    running = root.with_name("running")
    store = Store.open(running, config)
    fill(store)
    store.dispatch()
    write_tables(store)
    append(store, [record(body(COUNT))])
    shutil.copytree(running, root)
    store.close()


@pytest.mark.parametrize("state", [stopped, killed_later])
def test_retention_frees_space(state: Callable[[Path, StoreConfig], None], tmp_path: Path) -> None:
    root = tmp_path / "store"
    state(root, CONFIG)
    files, clock = FullFiles(), ManualClock()
    files.ratio = 1.0
    with Store.open(root, CONFIG, machine=Machine(files=files, clock=clock)) as store:
        segments = len(list((root / "commitlog").iterdir()))
        end = store.queue_range("Topic", 0)[1]
        wait_idle(store)
        assert store.retain().segments == segments - 1
        left = bodies(store)
        assert 0 < len(left) < COUNT
        files.full, files.ratio = False, 0.5
        store.retain()
        clock.advance(1000)
        assert append(store, [record(b"after")]).queue_offset == end
        assert bodies(store) == [*left, b"after"]


def test_other_errors_are_not_treated_as_a_full_disk(tmp_path: Path) -> None:
    class BrokenFiles(FullFiles):
        def _check(self, path: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    stopped(tmp_path, CONFIG)
    with pytest.raises(OSError, match=r"Input/output error.*abort"):
        Store.open(tmp_path, CONFIG, machine=Machine(files=BrokenFiles()))


def test_a_table_that_cannot_be_written_stays_unchanged(tmp_path: Path) -> None:
    class NearlyFull(FaultyFiles):
        def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
            super().write(fd, data[:5], at)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "consumerOffset.json"
    save_json(FaultyFiles(), path, {"offsetTable": {"T@g": {"0": 7}}})
    with pytest.raises(OSError, match="No space"):
        save_json(NearlyFull(), path, {"offsetTable": {"T@g": {"0": 8}}})
    assert load_json(REAL_FILES, path) == {"offsetTable": {"T@g": {"0": 7}}}
    # The partially written new file does not take up space.
    assert [each.name for each in tmp_path.iterdir()] == ["consumerOffset.json"]
