"""Damaged files of the key index: each is judged separately, and lookups in the others continue."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from appending import append
from turbopump.machine import Machine
from turbopump.message import QueueOffset
from turbopump.store import Store, recovery
from turbopump.store.index_file import EMPTY, read_header
from turbopump.wire.record import decode_record
from unit.store.support import ManualClock, record, small_config

pytestmark = pytest.mark.slow

CONFIG = small_config(segment_bytes=1 << 16)
COUNT = 50
HEADER = struct.Struct(">qqqqii")
HEADER_FIELDS = ("begin_ms", "end_ms", "begin_offset", "end_offset", "used_slots", "count")


def fill(root: Path) -> list[Path]:
    clock = ManualClock()
    with Store.open(root, CONFIG, machine=Machine(clock=clock)) as store:
        for number in range(COUNT):
            clock.advance(10_000)
            append(store, [record(b"%d" % number, KEYS=f"k{number}")])
    files = sorted((root / "index").iterdir())
    assert len(files) == 3
    return files


def missing(store: Store) -> list[int]:
    """Return the messages that cannot be found by their keys."""
    found = [
        [
            decode_record(each).body
            for each in store.messages_by_key("Topic", f"k{n}", 9, 0, 1 << 60)
        ]
        for n in range(COUNT)
    ]
    return [number for number in range(COUNT) if b"%d" % number not in found[number]]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("crashed", [False, True])
def test_garbage_in_one_file_leaves_the_others(
    tmp_path: Path, place: int, crashed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = fill(tmp_path)[place]
    path.write_bytes(b"\x5a" * path.stat().st_size)
    if crashed:
        (tmp_path / "abort").touch()
    with Store.open(tmp_path, CONFIG) as store:
        # The newest file is rebuilt from the log.
        assert missing(store) == [*range(place * 19, place * 19 + 19)] * (place < 2)
        assert store.damage.index_files == 1
        append(store, [record(b"new", KEYS="new")])
        assert store.messages_by_key("Topic", "new", 1, 0, 1 << 60)
    assert f"{path} is damaged" in caplog.text
    with Store.open(tmp_path, CONFIG) as store:
        assert store.damage.index_files == (place < 2)
        assert store.messages_by_key("Topic", "new", 1, 0, 1 << 60)


@pytest.mark.parametrize("field", range(4))
@pytest.mark.parametrize("place", [0, 2])
def test_a_wrong_header_is_noticed(tmp_path: Path, field: int, place: int) -> None:
    path = fill(tmp_path)[place]
    data = path.read_bytes()
    values = list(HEADER.unpack_from(data))
    values[field] ^= 1 << 20
    path.write_bytes(HEADER.pack(*values) + data[HEADER.size :])
    with Store.open(tmp_path, CONFIG) as store:
        assert store.damage.index_files == 1, HEADER_FIELDS[field]
        assert missing(store) == [*range(19)] * (place == 0)


def test_an_index_ahead_of_a_log_that_a_power_failure_cut_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_REINDEXED_BYTES_MAX", 0)
    fill(tmp_path)
    with Store.open(tmp_path, CONFIG) as store:
        end = decode_record(store.messages_by_key("Topic", "k45", 1, 0, 1 << 60)[0]).physical_offset
    log = tmp_path / "commitlog" / f"{0:020d}"
    log.write_bytes(log.read_bytes()[:end].ljust(CONFIG.segment_bytes, b"\0"))
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "abort").touch()
    with Store.open(tmp_path, CONFIG) as store:
        assert store.damage.index_files == 0
        assert missing(store) == [*range(45, COUNT)]


def test_searches_by_time_skip_damaged_messages(tmp_path: Path) -> None:
    clock = ManualClock()
    config = small_config(queue_segment_units=100)
    with Store.open(tmp_path, config, machine=Machine(clock=clock)) as store:
        for number in range(80):
            clock.advance(1000)
            append(store, [record(b"%02d" % number)])
        times = [
            store.store_timestamp_ms("Topic", 0, offset) for offset in map(QueueOffset, range(80))
        ]
    unit = tmp_path / "consumequeue/Topic/0" / f"{0:020d}"
    data = bytearray(unit.read_bytes())
    for bad in (39, 40, 79):
        data[bad * 20 + 2] ^= 1
    unit.write_bytes(data)
    with Store.open(tmp_path, config, machine=Machine(clock=clock)) as store:
        for number in (0, 10, 38, 41, 60, 78):
            time_ms = times[number]
            assert time_ms is not None
            assert store.offset_by_time("Topic", 0, time_ms) == number


@pytest.mark.parametrize("size", [0, 39])
def test_a_file_that_a_full_disk_left_short_has_no_entries(size: int) -> None:
    assert read_header(bytes(size)) == EMPTY
