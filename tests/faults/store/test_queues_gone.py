"""Queue files were deleted or damaged while the store was stopped: they are rebuilt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from appending import append
from store_work import write_tables
from turbopump.machine import Machine
from turbopump.store import Store
from unit.store.support import FaultyFiles, bodies, record, small_config

pytestmark = pytest.mark.slow

CONFIG = small_config()
LARGE_FILES = small_config(segment_bytes=1 << 20)
TOPICS = ("A", "B")
COUNT = 25


def fill(root: Path, count: int = COUNT) -> None:
    with Store.open(root, LARGE_FILES) as store:
        for topic in TOPICS:
            for number in range(count):
                append(store, [record(b"%s%d" % (topic.encode(), number), topic=topic)])


def check(root: Path, count: int = COUNT) -> None:
    with Store.open(root, LARGE_FILES) as store:
        for topic in TOPICS:
            expected = [b"%s%d" % (topic.encode(), number) for number in range(count)]
            assert bodies(store, topic) == expected
            assert append(store, [record(b"new", topic=topic)]).queue_offset == count
    with Store.open(root, LARGE_FILES) as store:
        assert store.recovered.replayed == 0


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("topic", TOPICS)
def test_one_queue_is_missing(topic: str, crashed: bool, tmp_path: Path) -> None:
    fill(tmp_path)
    shutil.rmtree(tmp_path / "consumequeue" / topic)
    if crashed:
        (tmp_path / "abort").touch()
    check(tmp_path)


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("first_lost", [0, 1, 5])
def test_the_end_of_a_queue_is_missing(first_lost: int, crashed: bool, tmp_path: Path) -> None:
    fill(tmp_path)
    directory = tmp_path / "consumequeue" / "A" / "0"
    *_, last = sorted(directory.iterdir())
    data = last.read_bytes()
    last.write_bytes(data[: first_lost * 20].ljust(len(data), b"\0"))
    if crashed:
        (tmp_path / "abort").touch()
    check(tmp_path)


def test_a_missing_queue_with_first_messages_in_older_files(tmp_path: Path) -> None:
    with Store.open(tmp_path, CONFIG) as store:
        for number in range(40):
            append(store, [record(b"%d" % number * 200, topic=TOPICS[number % 2])])
    assert len(list((tmp_path / "commitlog").iterdir())) > 3
    shutil.rmtree(tmp_path / "consumequeue" / "A")
    with Store.open(tmp_path, CONFIG) as store:
        assert bodies(store, "A") == [b"%d" % number * 200 for number in range(0, 40, 2)]
        assert len(bodies(store, "B")) == 20


def test_a_missing_queue_with_deleted_first_messages(tmp_path: Path) -> None:
    files = FaultyFiles()
    with Store.open(tmp_path, CONFIG, machine=Machine(files=files)) as store:
        for number in range(40):
            append(store, [record(b"%d" % number * 200, topic=TOPICS[number % 2])])
        store.flush()
        store.dispatch()
        write_tables(store)
        files.ratio = 0.86
        assert store.retain().segments > 0
        files.ratio = 0.1
        expected, bounds = bodies(store, "A"), store.queue_range("A", 0)
    assert bounds[0] > 0
    shutil.rmtree(tmp_path / "consumequeue" / "A")
    with Store.open(tmp_path, CONFIG) as store:
        assert bodies(store, "A") == expected
        assert store.queue_range("A", 0) == bounds


def test_messages_without_units_in_files_are_not_deleted(tmp_path: Path) -> None:
    """However full the disk is: after a kill, the offsets in use would be unknown."""
    running, root = tmp_path / "running", tmp_path / "killed"
    files = FaultyFiles()
    store = Store.open(running, CONFIG, machine=Machine(files=files))
    for number in range(40):
        append(store, [record(b"%d" % number * 200, topic=TOPICS[number % 2])])
    store.flush()
    files.ratio = 0.86
    assert store.retain().segments == 0
    shutil.copytree(running, root)
    store.dispatch()
    write_tables(store)
    assert store.retain().segments > 0
    store.close()
    with Store.open(root, CONFIG) as store:
        assert len(bodies(store, "A")) == len(bodies(store, "B")) == 20


def test_messages_deleted_before_their_units_were_on_disk(tmp_path: Path) -> None:
    """A queue holds only units of deleted messages; its next message keeps its offset."""
    with Store.open(tmp_path / "short", CONFIG) as store:
        append(store, [record(b"%d" % number * 200) for number in range(4)])
    files = FaultyFiles()
    shutil.copytree(tmp_path / "short", tmp_path / "full")
    with Store.open(tmp_path / "full", CONFIG, machine=Machine(files=files)) as store:
        for number in range(4, 40):
            append(store, [record(b"%d" % number * 200)])
        store.flush()
        store.dispatch()
        write_tables(store)
        files.ratio = 0.86
        for _ in range(3):
            store.retain()
        files.ratio = 0.1
        expected, bounds = bodies(store), store.queue_range("Topic", 0)
    assert bounds[0] > 4
    shutil.rmtree(tmp_path / "full" / "consumequeue")
    shutil.copytree(tmp_path / "short" / "consumequeue", tmp_path / "full" / "consumequeue")
    (tmp_path / "full" / "abort").touch()
    with Store.open(tmp_path / "full", CONFIG) as store:
        assert bodies(store) == expected
        assert store.queue_range("Topic", 0) == bounds
