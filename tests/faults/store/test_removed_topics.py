"""A topic is removed and re-created: old messages stay deleted, new ones are found."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from pathlib import Path

import pytest

from appending import append
from store_work import write_tables
from turbopump.errors import WriteFailed
from turbopump.machine import Machine
from turbopump.message import QueueOffset
from turbopump.store import Files, FlushMode, Store, StoreConfig
from unit.store.disks import Killed, KilledFiles
from unit.store.support import FaultyFiles, ManualClock, bodies, record, small_config

pytestmark = pytest.mark.slow

ASYNC = small_config()
SYNC = small_config(FlushMode.SYNC)
MARKERS = "removed-topics.json"


def killed(store: Store, root: Path, target: Path) -> Path:
    """Return the directory as a kill would leave it."""
    shutil.copytree(root, target)
    store.close()
    return target


def store_all(store: Store, texts: list[bytes], topic: str = "Topic") -> None:
    for text in texts:
        append(store, [record(text, topic=topic)]).durable.result()


@pytest.mark.parametrize("config", [ASYNC, SYNC], ids=["async", "sync"])
@pytest.mark.parametrize("old", [1, 3, 30])
@pytest.mark.parametrize("new", [1, 3, 30])
def test_recreated_and_killed(config: StoreConfig, old: int, new: int, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "running", config)
    store_all(store, [b"old %d" % number for number in range(old)])
    store.remove_topic("Topic")
    fresh = [b"new %d" % number for number in range(new)]
    store_all(store, fresh)
    root = killed(store, tmp_path / "running", tmp_path / "killed")
    for _ in range(2):
        with Store.open(root, config) as again:
            assert bodies(again) == fresh
            appended = append(again, [record(b"another")])
            assert appended.queue_offset == len(fresh)
            appended.durable.result()
            fresh.append(b"another")
        (root / "abort").touch()


@pytest.mark.parametrize("crashed", [False, True])
def test_removed_at_the_end_of_the_log(crashed: bool, tmp_path: Path) -> None:
    with Store.open(tmp_path, ASYNC) as store:
        store_all(store, [b"kept"], "Keep")
        store_all(store, [b"a", b"b"], "Gone")
        store.remove_topic("Gone")
    if crashed:
        (tmp_path / "abort").touch()
    with Store.open(tmp_path, ASYNC) as store:
        assert store.queue_ids() == [("Keep", 0)]
        assert bodies(store, "Keep") == [b"kept"]
    assert not (tmp_path / "consumequeue" / "Gone").exists()


def test_killed_at_any_step_of_the_removal(tmp_path: Path) -> None:
    """The topic is either complete or gone, and messages stored later are found."""
    whole = [b"%d" % number for number in range(25)]
    with Store.open(tmp_path / "before", ASYNC) as store:
        store_all(store, whole)
    outcomes = set()
    for changes in range(100):
        root = tmp_path / f"killed{changes}"
        shutil.copytree(tmp_path / "before", root)
        files = KilledFiles(1000)
        store = Store.open(root, ASYNC, machine=Machine(files=files))
        files._changes_left = changes
        try:
            store.remove_topic("Topic")
        except Killed:
            pass
        else:
            break
        finally:
            files._changes_left = 1000
        root = killed(store, root, tmp_path / f"copy{changes}")
        (root / "spare.tmp").unlink(missing_ok=True)
        with Store.open(root, ASYNC) as again:
            found = bodies(again)
            assert found in ([], whole)
            outcomes.add(len(found))
            assert append(again, [record(b"new")]).queue_offset == len(found)
            assert bodies(again) == [*found, b"new"]
    assert outcomes == {0, 25}


class SlowFiles(Files):
    """A disk whose flusher waits for a test."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def sync(self, fd: int) -> None:
        if threading.current_thread().name == "store-flusher":
            self.may_go_on.wait()
        super().sync(fd)


def test_messages_in_flight_are_removed_with_their_topic(tmp_path: Path) -> None:
    """Messages unflushed when the topic is removed take no offsets from those that follow."""
    files = SlowFiles()
    store = Store.open(tmp_path / "running", SYNC, machine=Machine(files=files))
    store_all(store, [b"old"])
    files.may_go_on.clear()
    late = append(store, [record(b"in flight")])
    store.remove_topic("Topic")
    files.may_go_on.set()
    late.durable.result()
    store_all(store, [b"new"])
    assert bodies(store) == [b"new"]
    root = killed(store, tmp_path / "running", tmp_path / "killed")
    with Store.open(root, SYNC) as again:
        assert bodies(again) == [b"new"]


def test_new_messages_take_removed_ones_positions_in_a_log_that_lost_its_tail(
    tmp_path: Path,
) -> None:
    store = Store.open(tmp_path / "running", ASYNC)
    store_all(store, [b"kept"], "Keep")
    end = store.written_end
    store_all(store, [b"a", b"b"])
    store.remove_topic("Topic")
    root = killed(store, tmp_path / "running", tmp_path / "killed")
    log = root / "commitlog" / f"{0:020d}"
    log.write_bytes(log.read_bytes()[:end].ljust(ASYNC.segment_bytes, b"\0"))
    store = Store.open(root, ASYNC)
    store_all(store, [b"new"])
    assert bodies(store) == [b"new"]
    root = killed(store, root, tmp_path / "again")
    with Store.open(root, ASYNC) as again:
        assert bodies(again) == [b"new"]
        assert bodies(again, "Keep") == [b"kept"]


def test_new_messages_take_removed_ones_positions_in_a_repaired_log(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    store = Store.open(tmp_path / "running", SYNC, machine=Machine(files=files, clock=clock))
    store_all(store, [b"old"])
    files.sync_error = errno.EIO
    with pytest.raises(WriteFailed):
        append(store, [record(b"x" * 500)]).durable.result()
    files.sync_error = None
    store.remove_topic("Topic")
    clock.advance(1000)
    store_all(store, [b"new"])
    assert bodies(store) == [b"new"]
    root = killed(store, tmp_path / "running", tmp_path / "killed")
    with Store.open(root, SYNC) as again:
        assert bodies(again) == [b"new"]


def test_markers_are_removed_with_the_log(tmp_path: Path) -> None:
    files = FaultyFiles()
    with Store.open(tmp_path, ASYNC, machine=Machine(files=files)) as store:
        store_all(store, [b"a"], "Early")
        store.remove_topic("Early")
        store.remove_topic("Unknown")
        assert set(json.loads((tmp_path / MARKERS).read_text())) == {"Early"}
        store_all(store, [b"x" * 500] * 40, "Other")
        store.flush()
        store.dispatch()
        write_tables(store)
        files.ratio = 0.86
        assert store.retain().segments > 0
        files.ratio = 0.1
        store.remove_topic("Other")
        assert set(json.loads((tmp_path / MARKERS).read_text())) == {"Other"}
    for path in (tmp_path / "commitlog").iterdir():
        path.unlink()
    # Nothing else refers to messages.
    (tmp_path / "checkpoint").unlink()
    with Store.open(tmp_path, ASYNC) as store:
        assert json.loads((tmp_path / MARKERS).read_text()) == {}
        store_all(store, [b"new"], "Other")
        assert store.queue_range("Other", 0) == (QueueOffset(0), QueueOffset(1))
