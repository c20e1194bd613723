"""A disk that has become read-only is still read: nothing is opened for writing to be read."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from appending import append
from turbopump.errors import WriteRefused
from turbopump.machine import Machine
from turbopump.store import Files, Store
from turbopump.store.inspect import inspect
from turbopump.store.losses import find_losses
from turbopump.testing import Disk
from unit.store.support import ManualClock, bodies, record, small_config

ROOT = Path("/store")
CONFIG = small_config(mapped_segments_max=2, open_files_max=8)
CHANGES = ("open", "open_new", "write", "truncate", "rename", "remove", "make_directory", "sync")
STORED = [b"%02d" % number * 400 for number in range(30)]


def machine_of(disk: Disk, clock: ManualClock) -> Machine:
    return Machine(files=disk, background=disk.background, clock=clock)


def fill(machine: Machine) -> None:
    """Store messages in several files of the log, of queues and of the index, and stop."""
    with Store.open(ROOT, CONFIG, machine) as store:
        for topic in ("T", "Other"):
            for body in STORED:
                append(store, [record(body, topic=topic, KEYS=f"k{body[:2].decode()}")])


def test_a_running_store_reads_all_its_files_on_a_disk_turned_read_only() -> None:
    disk, clock = Disk(), ManualClock()
    fill(machine_of(disk, clock))
    with Store.open(ROOT, CONFIG, machine_of(disk, clock)) as store:
        disk.fail(*CHANGES, number=errno.EROFS)
        for topic in ("T", "Other"):
            assert bodies(store, topic) == STORED
        found = store.messages_by_key("T", "k03", 10, 0, clock.now_ms() + 1000)
        assert [bytes(message)[88:90] for message in found] == [b"03"]
        with pytest.raises(WriteRefused, match="Read-only file system"):
            append(store, [record(b"refused", topic="T")])
        disk.heal()
        clock.advance(10_000)
        store.tick()
        append(store, [record(b"accepted", topic="T")])
        store.tick()
        assert bodies(store, "T") == [*STORED, b"accepted"]
    with Store.open(ROOT, CONFIG, machine_of(disk, clock)) as store:
        assert not store.recovered.crashed
        assert bodies(store, "T") == [*STORED, b"accepted"]


def test_a_stopped_store_is_inspected_on_a_read_only_disk() -> None:
    disk = Disk()
    fill(machine_of(disk, ManualClock()))
    disk.fail(*CHANGES, number=errno.EROFS)
    report = inspect(ROOT, files=disk)
    assert (report.messages, report.damage) == (2 * len(STORED), [])
    assert find_losses(disk, ROOT) is None


class WriteOpens(Files):
    """Counts files opened for writing."""

    def __init__(self) -> None:
        self.opened: list[Path] = []

    def open(self, path: Path) -> int:
        self.opened.append(path)
        return super().open(path)


def test_reading_opens_no_file_for_writing(tmp_path: Path) -> None:
    with Store.open(tmp_path, CONFIG) as store:
        for body in STORED:
            append(store, [record(body)])
    files = WriteOpens()
    with Store.open(tmp_path, CONFIG, Machine(files=files)) as store:
        files.opened.clear()
        assert bodies(store, "Topic") == STORED
        assert files.opened == []
