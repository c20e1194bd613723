"""A queue's files are missing or have the wrong size: the start rebuilds it from the log."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from appending import append
from turbopump.errors import StoreDamaged
from turbopump.machine import Machine
from turbopump.store import Files, Store
from unit.store.disks import Killed, KilledFiles
from unit.store.support import FaultyFiles, bodies, record, small_config

pytestmark = pytest.mark.slow

CONFIG = small_config()
"""10 units in a file of a queue: 200 bytes."""
COUNT = 35


def body(number: int) -> bytes:
    return b"%03d" % number * 100


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A stopped store; the messages of `A` are all before the part that a clean start reads."""
    root = tmp_path / "store"
    with Store.open(root, CONFIG) as store:
        for topic in ("A", "B"):
            for number in range(COUNT):
                append(store, [record(body(number), topic=topic)])
    return root


def queue(root: Path) -> Path:
    return root / "consumequeue" / "A" / "0"


def queue_file(root: Path, number: int) -> Path:
    return queue(root) / f"{number * 200:020d}"


def middle_missing(root: Path) -> None:
    queue_file(root, 1).unlink()


def two_missing(root: Path) -> None:
    queue_file(root, 1).unlink()
    queue_file(root, 2).unlink()


def first_cut(root: Path) -> None:
    os.truncate(queue_file(root, 0), 50)


def last_cut(root: Path) -> None:
    os.truncate(queue_file(root, 3), 21)


def last_emptied(root: Path) -> None:
    os.truncate(queue_file(root, 3), 0)


def middle_emptied(root: Path) -> None:
    os.truncate(queue_file(root, 1), 0)


def last_grown(root: Path) -> None:
    os.truncate(queue_file(root, 3), 230)


def wrong_name(root: Path) -> None:
    queue_file(root, 3).rename(queue(root) / f"{10**18:020d}")


DAMAGES: list[Callable[[Path], None]] = [
    middle_missing,
    two_missing,
    first_cut,
    last_cut,
    last_emptied,
    middle_emptied,
    last_grown,
    wrong_name,
]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def backups(root: Path) -> list[Path]:
    return sorted(root.glob("repair-*"))


def check_whole(root: Path) -> None:
    with Store.open(root, CONFIG) as store:
        for topic in ("A", "B"):
            assert bodies(store, topic) == [body(number) for number in range(COUNT)]
            assert append(store, [record(b"new", topic=topic)]).queue_offset == COUNT
    with Store.open(root, CONFIG) as store:
        assert store.recovered.replayed == 0
        assert store.queue_range("A", 0) == (0, COUNT + 1)


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_the_queue_is_rebuilt(
    damage: Callable[[Path], None], crashed: bool, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(root)
    before = contents(queue(root))
    if crashed:
        (root / "abort").touch()
    check_whole(root)
    (backup,) = backups(root)
    assert contents(backup / "consumequeue" / "A" / "0") == before
    errors = [each.message for each in caplog.records if each.levelno == logging.ERROR]
    assert any(str(queue(root)) in error and "rebuilt" in error for error in errors)


def expire(root: Path, count: int) -> None:
    """Expire all messages of `A`."""
    files = FaultyFiles()
    with Store.open(root, CONFIG, machine=Machine(files=files)) as store:
        files.ratio = 0.86
        while store.queue_range("A", 0)[0] < count:
            assert store.retain().segments > 0


@pytest.mark.parametrize("count", [COUNT, 40])
def test_the_end_offset_of_a_queue_without_messages_in_the_log_is_preserved(
    count: int, root: Path
) -> None:
    """Even if its last file is full: 40 units fill four files."""
    with Store.open(root, CONFIG) as store:
        for number in range(COUNT, count):
            append(store, [record(body(number), topic="A")])
        for number in range(COUNT, 2 * COUNT):
            append(store, [record(body(number), topic="B")])
    expire(root, count)
    # Retention leaves the last file of a queue; one far before it stands for a gap.
    shutil.copy(queue_file(root, 3), queue_file(root, 1))
    for _ in range(2):
        with Store.open(root, CONFIG) as store:
            assert store.queue_range("A", 0) == (count, count)
    with Store.open(root, CONFIG) as store:
        assert append(store, [record(b"new", topic="A")]).queue_offset == count
        assert bodies(store, "A") == [b"new"]
    with Store.open(root, CONFIG) as store:
        assert bodies(store, "A") == [b"new"]
        assert store.queue_range("A", 0) == (count, count + 1)


def test_killed_anywhere_the_next_start_rebuilds_it(root: Path, tmp_path: Path) -> None:
    last_cut(root)
    before = contents(queue(root))
    for step in range(1000):
        copy = tmp_path / f"copy-{step}"
        shutil.copytree(root, copy)
        try:
            Store.open(copy, CONFIG, machine=Machine(files=KilledFiles(step))).close()
        except Killed:
            pass
        else:
            break
        check_whole(copy)
        (backup,) = backups(copy)
        assert contents(backup / "consumequeue" / "A" / "0") == before
        shutil.rmtree(copy)
    assert 10 < step < 999


def test_queues_on_their_own_disk(root: Path) -> None:
    class OtherDisk(Files):
        def rename(self, old: Path, new: Path) -> None:
            if "consumequeue" in old.parts:
                raise OSError(18, "Invalid cross-device link", str(old))
            super().rename(old, new)

    middle_missing(root)
    before = contents(queue(root))
    Store.open(root, CONFIG, machine=Machine(files=OtherDisk())).close()
    check_whole(root)
    (backup,) = backups(root)
    assert contents(backup / "consumequeue" / "A" / "0") == before


def test_a_different_configured_size_is_rejected(root: Path) -> None:
    before = contents(queue(root))
    with pytest.raises(
        StoreDamaged, match=r"200 bytes instead of 400: .* move .*consumequeue away"
    ):
        Store.open(root, small_config(queue_segment_units=20))
    assert contents(queue(root)) == before
    check_whole(root)
    assert not backups(root)
