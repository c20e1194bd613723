"""Damage in the middle of the log, and pages that reached the disk out of order."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from appending import append
from turbopump.machine import Machine
from turbopump.store import Files, Store
from unit.store.disks import Killed, KilledFiles
from unit.store.support import bodies, read_all, record, small_config

pytestmark = pytest.mark.slow

CONFIG = small_config()
COUNT = 30


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A store with a flipped bit in the second of many files, and no checkpoint."""
    root = tmp_path / "damaged"
    with Store.open(root, CONFIG) as store:
        for number in range(COUNT):
            append(store, [record(b"%02d" % number * 400)])
    log = root / "commitlog" / f"{4096:020d}"
    data = bytearray(log.read_bytes())
    data[200] ^= 1
    log.write_bytes(data)
    (root / "abort").touch()
    (root / "checkpoint").unlink()
    return root


def content(root: Path) -> bytes:
    paths = sorted((root / "commitlog").iterdir())
    return b"".join(path.read_bytes() for path in paths)


def check_saved(root: Path, before: bytes, end: int) -> None:
    """Check that everything after the cut can be reconstructed."""
    assert end == 4096
    kept = root / f"damaged-{end}"
    names = [f"{start:020d}" for start in range(end, len(before), 4096)]
    assert sorted(path.name for path in kept.iterdir()) == names
    for name in names:
        start = int(name)
        data = (kept / name).read_bytes()
        assert data.ljust(4096, b"\0") == before[start : start + 4096]


def test_truncated_data_is_reported_and_saved_aside(
    damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = content(damaged)
    with Store.open(damaged, CONFIG) as store:
        end = store.recovered.end
        files = (before[start : start + 4096] for start in range(end, len(before), 4096))
        assert store.recovered.cut_bytes == sum(len(file.rstrip(b"\0")) for file in files)
        assert len(bodies(store)) == 4
        assert append(store, [record(b"new")]).queue_offset == 4
    check_saved(damaged, before, end)
    (error,) = (one for one in caplog.records if one.levelname == "ERROR")
    for part in (end, store.recovered.cut_bytes, f"damaged-{end}"):
        assert str(part) in error.getMessage()


def test_saving_aside_resumes_after_a_kill(damaged: Path, tmp_path: Path) -> None:
    before = content(damaged)
    for changes in range(200):
        root = tmp_path / f"killed{changes}"
        shutil.copytree(damaged, root)
        try:
            Store.open(root, CONFIG, machine=Machine(files=KilledFiles(changes))).close()
        except Killed:
            with Store.open(root, CONFIG) as store:
                assert len(bodies(store)) == 4
            check_saved(root, before, 4096)
            continue
        break
    else:
        raise AssertionError("recovery did not complete")
    assert changes > 10


def test_a_log_on_its_own_disk_is_copied(damaged: Path) -> None:
    class TwoDisks(Files):
        def rename(self, old: Path, new: Path) -> None:
            if old.parent.name == "commitlog" and new.parent != old.parent:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            super().rename(old, new)

    before = content(damaged)
    with Store.open(damaged, CONFIG, machine=Machine(files=TwoDisks())) as store:
        end = store.recovered.end
    check_saved(damaged, before, end)


def test_a_torn_tail_is_not_saved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Store.open(tmp_path, CONFIG) as store:
        first = append(store, [record(b"a")])
        append(store, [record(b"b" * 100, TAGS="x")])
        end = store.written_end
    log = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[end - 50] ^= 1
    log.write_bytes(data)
    (tmp_path / "abort").touch()
    (tmp_path / "checkpoint").unlink()
    with Store.open(tmp_path, CONFIG) as store:
        assert store.recovered.cut_bytes == end - first.end_offset
        assert bodies(store) == [b"a"]
    assert not list(tmp_path.glob("damaged*"))
    assert "cut off" in caplog.text


def test_properties_that_lack_a_page_are_torn_behind_the_last_flush(tmp_path: Path) -> None:
    running, root = tmp_path / "running", tmp_path / "crashed"
    store = Store.open(running, CONFIG)
    append(store, [record(b"zero")])
    store.flush()
    append(store, [record(b"one", TAGS="x", KEYS="order-1", P="v" * 1200)])
    append(store, [record(b"two")])
    shutil.copytree(running, root)
    store.close()
    _lose_a_page(root)
    with Store.open(root, CONFIG) as again:
        assert bodies(again) == [b"zero"]


def test_properties_with_zero_bytes_stay_before_the_last_flush(tmp_path: Path) -> None:
    """Another broker may have stored such properties, and flushed data lacks no page."""
    with Store.open(tmp_path, CONFIG) as store:
        append(store, [record(b"one", TAGS="x", KEYS="order-1", P="v" * 1200)])
        append(store, [record(b"two")])
    _lose_a_page(tmp_path)
    (tmp_path / "abort").touch()
    with Store.open(tmp_path, CONFIG) as store:
        assert [view.stored_body for view in read_all(store)] == [b"one", b"two"]


def _lose_a_page(root: Path) -> None:
    log = root / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[512:1024] = bytes(512)
    log.write_bytes(data)
