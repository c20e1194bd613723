"""Opening and closing: one at a time, nothing works afterwards, and parts on other disks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appending import append, append_all
from store_work import log_of, open_file_count, write_tables
from turbopump.errors import DiskFailed, StoreClosed, StoreInUse
from turbopump.machine import Machine
from turbopump.machine.files import REAL_FILES, Mapped
from turbopump.message import PhysicalOffset
from turbopump.store import Files, Store
from turbopump.store.checkpoint import Checkpoint, write_checkpoint
from turbopump.store.directory import StoreDirectory
from unit.store.support import ManualClock, bodies, offset, record, small_config

AFTER_CLOSE: list[Callable[[Store], object]] = [
    lambda store: append(store, [record()]),
    lambda store: append_all(store, [[record()]]),
    lambda store: store.append_raw(PhysicalOffset(0), b"x"),
    lambda store: store.dispatch(),
    lambda store: store.tick(),
    lambda store: store.listen(None),
    lambda store: store.retain(at_any_hour=True),
    lambda store: store.remove_topic("Topic"),
    lambda store: store.read("Topic", 0, offset(0), 1),
    lambda store: store.queue_range("Topic", 0),
    lambda store: store.queue_ids(),
    lambda store: store.offset_by_time("Topic", 0, 0),
    lambda store: store.store_timestamp_ms("Topic", 0, offset(0)),
    lambda store: store.message_at(PhysicalOffset(0)),
    lambda store: store.messages_by_key("Topic", "k", 1, 0, 1),
    lambda store: store.raw(PhysicalOffset(0), 1),
]


def test_nothing_works_after_closing(tmp_path: Path) -> None:
    store = Store.open(tmp_path, small_config())
    append(store, [record()])
    store.close()
    files = sorted(tmp_path.rglob("*"))
    for call in AFTER_CLOSE:
        with pytest.raises(StoreClosed):
            call(store)
    assert sorted(tmp_path.rglob("*")) == files


LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    # What Java takes.
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
"""


def test_the_lock_survives_a_copy_by_its_owner(tmp_path: Path) -> None:
    root = tmp_path / "store"
    command = [sys.executable, "-c", LOCK, str(root / "lock")]
    with Store.open(root, small_config()):
        shutil.copytree(root, tmp_path / "copy")
        refused = subprocess.run(command, capture_output=True, check=False)
        assert b"BlockingIOError" in refused.stderr
    assert subprocess.run(command, check=False).returncode == 0


class FewFiles(Files):
    """The process may have n files open, and other code has most of them open."""

    def __init__(self) -> None:
        self.limit = 1000
        self._opened: set[int] = set()

    def _check(self) -> None:
        if len(self._opened) >= self.limit:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def open(self, path: Path) -> int:
        self._check()
        fd = super().open(path)
        self._opened.add(fd)
        return fd

    def open_to_read(self, path: Path) -> int:
        self._check()
        fd = super().open_to_read(path)
        self._opened.add(fd)
        return fd

    def open_new(self, path: Path) -> int:
        self._check()
        fd = super().open_new(path)
        self._opened.add(fd)
        return fd

    def map(self, fd: int, size: int) -> Mapped:
        self._check()
        return super().map(fd, size)

    def close(self, fd: int) -> None:
        self._opened.discard(fd)
        super().close(fd)

    def open_max(self) -> int:
        return 400


def test_cached_files_are_closed_when_the_process_has_too_many(tmp_path: Path) -> None:
    files = FewFiles()
    with Store.open(tmp_path, small_config(), machine=Machine(files=files)) as store:
        for number in range(200):
            append(store, [record(b"%d" % number, topic=f"T{number}")])
        store.dispatch()
        write_tables(store)
        # A quarter of the process's limit.
        assert open_file_count(store) == 100
        files.limit = len(files._opened)
        for number in range(200):
            assert bodies(store, f"T{number}") == [b"%d" % number]
            append(store, [record(b"x" * 500, topic=f"T{number}")])
        write_tables(store)
        files.limit = 0
        with pytest.raises(DiskFailed, match="Too many open files"):
            store.read("T0", 0, offset(1), 1)
        files.limit = 1000
        assert bodies(store, "T0") == [b"0", b"x" * 500]


class OtherDisks(Files):
    """Every directory of the store is a separate disk."""

    def rename(self, old: Path, new: Path) -> None:
        if old.parent != new.parent:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        super().rename(old, new)


def test_parts_may_be_on_separate_disks(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config(), machine=Machine(files=OtherDisks())) as store:
        for number in range(10):
            append(store, [record(b"%d" % number * 500, KEYS="k")])
    for part in ("commitlog", "consumequeue/Topic/0", "index"):
        # As after a kill between two steps.
        (tmp_path / part / "spare.tmp").touch()
    with Store.open(tmp_path, small_config(), machine=Machine(files=OtherDisks())) as store:
        assert bodies(store) == [b"%d" % number * 500 for number in range(10)]
    assert not list(tmp_path.rglob("*.tmp"))


def stored(store: Store, *args: bytes, **kwargs: Any) -> None:
    for body in args:
        append(store, [record(body, **kwargs)]).durable.result()


@pytest.mark.parametrize("extra", [1, 2])
def test_preallocated_files_are_accepted(tmp_path: Path, extra: int) -> None:
    with Store.open(tmp_path, small_config()) as store:
        stored(store, b"before")
    for number in range(extra):
        (tmp_path / "commitlog" / f"{4096 * (number + 1):020d}").write_bytes(bytes(4096))
    with Store.open(tmp_path, small_config()) as store:
        assert not store.recovered.crashed
        stored(store, *[b"x" * 900] * 10)
        assert bodies(store) == [b"before", *[b"x" * 900] * 10]
    with Store.open(tmp_path, small_config()) as store:
        assert len(bodies(store)) == 11


def test_a_torn_message_and_a_file_that_ends_with_a_blank(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        stored(store, *[b"x" * 900] * 4)
        assert store.written_end == 4 * 996
        append(store, [record(b"next file")])
    last = tmp_path / "commitlog" / f"{4096:020d}"
    last.write_bytes(bytes(4096))
    # Nothing confirms the last message.
    write_checkpoint(Files(), tmp_path / "checkpoint", Checkpoint(log_end=PhysicalOffset(4 * 996)))
    for crashed in (False, True):
        if crashed:
            (tmp_path / "abort").touch()
        with Store.open(tmp_path, small_config()) as store:
            assert store.written_end == 4096
            assert len(bodies(store)) == 4
    with Store.open(tmp_path, small_config()) as store:
        stored(store, b"again")
        assert store.written_end > 4096
        assert bodies(store)[4:] == [b"again"]


def test_one_store_at_a_time(tmp_path: Path) -> None:
    with (
        Store.open(tmp_path, small_config()) as store,
        pytest.raises(StoreInUse, match="this process"),
    ):
        Store.open(tmp_path, small_config())
    with pytest.raises(StoreClosed):
        append(store, [record()])
    with pytest.raises(StoreClosed):
        store.read("Topic", 0, offset(0), 1)
    store.close()
    assert (tmp_path / "lock").read_bytes() == b"lock"
    assert not (tmp_path / "abort").exists()


def test_queue_files_and_maps_stay_bounded(tmp_path: Path) -> None:
    config = small_config(open_files_max=8, mapped_segments_max=2)
    with Store.open(tmp_path, config) as store:
        for round_ in range(30):
            for topic in range(20):
                stored(store, b"%d" % round_ * 20, topic=f"T{topic}")
        for topic in range(20):
            assert bodies(store, f"T{topic}") == [b"%d" % round_ * 20 for round_ in range(30)]
        store.flush()
        store.tick()
        assert bodies(store, "T3")
        assert open_file_count(store) <= 8
        assert len(log_of(store)._open) <= 3


@pytest.mark.parametrize("now_ms", [253_402_300_800_000, 1 << 62, -1])
def test_a_clock_beyond_all_calendars_stops_nothing(now_ms: int, tmp_path: Path) -> None:
    clock = ManualClock(now_ms)
    with Store.open(tmp_path, small_config(), machine=Machine(clock=clock)) as store:
        for number in range(30):
            append(store, [record(b"%d" % number, KEYS="k")])
        store.retain()
        assert len(bodies(store)) == 30
    assert len(list((tmp_path / "index").iterdir())) == 2


def test_a_link_to_a_missing_directory_is_not_followed(tmp_path: Path) -> None:
    """It may lead to a disk that is not mounted."""
    (tmp_path / "store").symlink_to(tmp_path / "unmounted" / "store")
    with pytest.raises(FileExistsError):
        StoreDirectory(tmp_path / "store", REAL_FILES).acquire()
    assert not (tmp_path / "unmounted").exists()


OPENING = """
import sys
from pathlib import Path
from turbopump.errors import StoreInUse
from turbopump.store import Store
from unit.store.support import small_config
try:
    Store.open(Path(sys.argv[1]), small_config()).close()
except StoreInUse as error:
    print(error)
"""


@pytest.mark.parametrize("replaced", [False, True])
def test_a_deleted_lock_file_lets_no_second_process_in(tmp_path: Path, replaced: bool) -> None:
    """What is locked is the directory too: deleting that takes the whole store."""
    command = [sys.executable, "-c", OPENING, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def opened_elsewhere() -> str:
        done = subprocess.run(
            command, capture_output=True, check=True, env=environment, text=True, timeout=60
        )
        return done.stdout

    with Store.open(tmp_path, small_config()) as store:
        (tmp_path / "lock").unlink()
        if replaced:
            (tmp_path / "lock").write_bytes(b"lock")
        assert "open in another process" in opened_elsewhere()
        stored(store, b"kept")
        assert bodies(store) == [b"kept"]
    assert opened_elsewhere() == ""


def test_a_store_is_locked_by_its_file_alone_where_directories_cannot_be(tmp_path: Path) -> None:
    """On NFS, for example."""

    class NoDirectoryLocks(Files):
        def lock_directory(self, fd: int) -> None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(fd))

    command = [sys.executable, "-c", LOCK, str(tmp_path / "lock")]
    with Store.open(tmp_path, small_config(), machine=Machine(files=NoDirectoryLocks())):
        refused = subprocess.run(command, capture_output=True, check=False)
        assert b"BlockingIOError" in refused.stderr


def test_a_store_locked_by_its_file_alone_is_refused(tmp_path: Path) -> None:
    """Apache RocketMQ, and earlier versions, lock nothing else."""
    with Store.open(tmp_path, small_config()):
        pass
    with (tmp_path / "lock").open("r+b") as file:
        files = Files()
        files.lock(file.fileno())
        with pytest.raises(StoreInUse, match="another process"):
            Store.open(tmp_path, small_config())
        # The refused attempt leaves nothing locked.
    with Store.open(tmp_path, small_config()):
        pass
