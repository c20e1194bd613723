"""The key index's arithmetic, and finding properties without parsing them."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appending import append, append_all
from example_counts import at_most
from store_work import wait_idle
from turbopump.errors import InvalidArgument, StoreDamaged
from turbopump.machine import Machine
from turbopump.machine.files import OpenFiles
from turbopump.store import Store, index_file, parse_delay_levels
from turbopump.store.index_file import IndexFile, KeySearch, read_header
from turbopump.store.outcomes import FoundByKey
from turbopump.wire.record import decode_record
from unit.store.support import FaultyFiles, ManualClock, record, small_config


@pytest.mark.slow
def test_colliding_keys_and_full_files(tmp_path: Path) -> None:
    """Few slots, so that every chain is long, and files so small that they fill up."""
    clock = ManualClock()
    config = small_config(segment_bytes=1 << 16, index_slots=3, index_entries=50)
    with Store.open(tmp_path, config, machine=Machine(clock=clock)) as store:
        for number in range(300):
            clock.advance(700)
            append(store, [record(b"%d" % number, KEYS=f"k{number % 10} Aa{number} BB{number}")])
            if number % 37 == 0:
                store.messages_by_key("Topic", "k0", 1, 0, 1 << 60)

        def found(key: str, most: int = 64) -> list[int]:
            messages = store.messages_by_key("Topic", key, most, 0, 1 << 60)
            return [int(decode_record(message).stored_body) for message in messages]

        assert found("k3") == list(range(3, 300, 10))
        assert found("k3", 2) == [283, 293]
        # Their hashes are the same, and the index knows nothing else.
        assert found("Aa7") == found("BB7") == [7]
        assert len(store._index.files if store._index else ()) == 19
    with Store.open(tmp_path, config, machine=Machine(clock=clock)) as store:
        assert len(store.messages_by_key("Topic", "k3", 64, 0, 1 << 60)) == 30
        clock.advance(700)
        append(store, [record(b"300", KEYS="k0")])
        assert len(store.messages_by_key("Topic", "k0", 64, 0, 1 << 60)) == 31


def test_a_search_stops_at_its_limit_and_survives_deleted_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_file, "EXAMINED_AT_ONCE", 10)
    clock = ManualClock()
    config = small_config(segment_bytes=1 << 16, index_slots=3, index_entries=101)
    with Store.open(tmp_path, config, machine=Machine(clock=clock)) as store:
        for number in range(400):
            clock.advance(1000)
            append(store, [record(b"%d" % number, KEYS="k")])

        def found(entries_max: int) -> tuple[list[int], bool]:
            *_, found = store.find_by_key("Topic", "k", 9, 0, clock.now_ms() - 98_500, entries_max)
            assert isinstance(found, FoundByKey)
            bodies = [int(decode_record(each).stored_body) for each in found.messages]
            return bodies, found.is_complete

        assert found(90) == ([], False)
        # The slot of each file counts as an entry.
        assert found(101) == ([300], False)
        assert found(200) == (list(range(292, 301)), True)
        search = store.find_by_key("Topic", "k", 9, 0, clock.now_ms() - 350_000)
        assert [next(search), next(search)] == [None, None]
        assert store._index is not None
        store._index.clear()
        *_, last = search
        assert isinstance(last, FoundByKey)
        assert last.messages == []


def test_a_search_of_many_files_pauses_and_stops_whatever_each_of_them_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_file, "EXAMINED_AT_ONCE", 10)
    config = small_config(segment_bytes=1 << 16, index_slots=3, index_entries=6)
    with Store.open(tmp_path, config) as store:
        for number in range(300):
            append(store, [record(b"x", KEYS=f"k{number}")])

        def search(key: str, entries_max: int) -> tuple[int, bool]:
            *slices, found = store.find_by_key("Topic", key, 9, 0, 1 << 60, entries_max)
            assert isinstance(found, FoundByKey)
            assert slices == [None] * len(slices)
            return len(slices), found.is_complete

        # 60 files, and up to 5 entries in each: those of other keys with the same slot.
        store.messages_by_key("Topic", "k0", 1, 0, 1 << 60)
        slices, is_complete = search("missing", 10_000)
        assert is_complete
        assert 60 // 10 < slices <= 1 + 60 * 6 // 10
        assert search("missing", 50) == (1 + 50 // 10, False)


HASHES = st.lists(st.integers(0, 20), min_size=1, max_size=30)


@settings(max_examples=at_most(25))
@given(st.lists(st.tuples(HASHES, st.booleans()), min_size=1, max_size=4))
def test_entries_are_chained_newest_first_and_failed_ones_leave_no_trace(
    groups: list[tuple[list[int], bool]],
) -> None:
    with tempfile.TemporaryDirectory() as root:
        disk = FaultyFiles()
        open_files = OpenFiles(disk, 8)
        file = IndexFile(Path(root, "index"), 7, 200, disk, open_files)
        file.path.write_bytes(bytes(file.size))
        wanted: dict[int, list[int]] = {}
        at = 1
        for hashes, is_full in groups:
            disk.bytes_left = 10 if is_full else None
            positions = np.arange(at, at + len(hashes))
            at += len(hashes)
            with pytest.raises(OSError, match="space") if is_full else nullcontext():
                file.extend(np.array(hashes), positions, np.full(len(hashes), 1000))
            for key_hash, position in zip(hashes, positions.tolist(), strict=True):
                if not is_full:
                    wanted.setdefault(key_hash, []).insert(0, position)
            for key_hash in range(21):
                search = KeySearch(key_hash, 0, 2000, 100, 1000)
                list(file.search(search))
                assert search.found == wanted.get(key_hash, [])
        open_files.close_all()


def test_the_index_is_repaired_after_a_crash_whatever_its_slots_say(tmp_path: Path) -> None:
    config = small_config(segment_bytes=1 << 16, index_slots=20, index_entries=200)
    with Store.open(tmp_path, config) as store:
        for number in range(100):
            append(store, [record(b"%d" % number, KEYS=f"k{number}")])
    (path,) = (tmp_path / "index").iterdir()
    data = bytearray(path.read_bytes())
    data[40 : 40 + 80] = b"\xff" * 80
    data[40 + 80 + 60 * 20 : 40 + 80 + 70 * 20] = bytes(200)
    path.write_bytes(data)
    (tmp_path / "abort").touch()
    with Store.open(tmp_path, config) as store:
        for number in range(100):
            found = store.messages_by_key("Topic", f"k{number}", 64, 0, 1 << 60)
            assert [decode_record(one).stored_body for one in found] == [b"%d" % number]


def test_partially_indexed_keys_of_a_message_are_completed(tmp_path: Path) -> None:
    """Killed when only the first of two files had its share of the last message's keys."""
    config = small_config(index_slots=20, index_entries=11)
    with Store.open(tmp_path, config) as store:
        for number in range(3):
            append(
                store, [record(b"%d" % number, KEYS=" ".join(f"{number}{key}" for key in "abcd"))]
            )
    paths = sorted((tmp_path / "index").iterdir())
    assert len(paths) == 2
    paths[1].unlink()
    (tmp_path / "abort").touch()
    with Store.open(tmp_path, config) as store:
        for number in range(3):
            for key in "abcd":
                found = store.messages_by_key("Topic", f"{number}{key}", 64, 0, 1 << 60)
                assert [decode_record(one).stored_body for one in found] == [b"%d" % number]


def test_files_of_another_size_are_rejected(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        append(store, [record(KEYS="k")])
        # From one queue file alone, a start cannot distinguish a wrong setting from damage.
        append(store, [record(topic="Other")])
    others = (
        small_config(index_slots=9),
        small_config(queue_segment_units=11),
        small_config(segment_bytes=8192),
    )
    for config in others:
        with pytest.raises(StoreDamaged, match="instead of"):
            Store.open(tmp_path, config)
    with Store.open(tmp_path, small_config(index_slots=9, index_enabled=False)) as store:
        assert store.queue_range("Topic", 0) == (0, 1)


@pytest.mark.parametrize("part", ["commitlog", "index", "consumequeue/Topic/0", "consumequeue/T"])
def test_foreign_files_are_rejected(tmp_path: Path, part: str) -> None:
    with Store.open(tmp_path, small_config()) as store:
        append(store, [record(KEYS="k")])
    (tmp_path / part).mkdir(exist_ok=True)
    (tmp_path / part / "notes.txt").touch()
    with pytest.raises(StoreDamaged, match="is not a store file"):
        Store.open(tmp_path, small_config())


def test_a_gap_in_the_files_is_rejected(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        for _ in range(12):
            append(store, [record(b"x" * 900)])
    sorted((tmp_path / "commitlog").iterdir())[1].unlink()
    with pytest.raises(StoreDamaged, match=f"files are missing: {4096:020d}\n"):
        Store.open(tmp_path, small_config())


def test_delay_levels() -> None:
    assert parse_delay_levels("1s 2m 3h 1d") == (1000, 120_000, 10_800_000, 86_400_000)
    with pytest.raises(InvalidArgument, match="5x"):
        parse_delay_levels("1s 5x")


def test_slots_are_written_rarely_and_rebuilt_after_a_crash(tmp_path: Path) -> None:
    clock = ManualClock()
    config = small_config(segment_bytes=1 << 16, index_slots=100, index_entries=500)
    slots = slice(40, 40 + 4 * 100)
    with Store.open(tmp_path / "store", config, machine=Machine(clock=clock)) as store:
        append_all(store, [[record(b"%d" % number, KEYS=f"k{number}")] for number in range(50)])
        for _ in range(3):
            clock.advance(2000)
            store.tick()
        (path,) = (tmp_path / "store" / "index").iterdir()
        header = read_header(path.read_bytes()[:40])
        assert header.count == 51
        assert not any(path.read_bytes()[slots])
        shutil.copytree(tmp_path / "store", tmp_path / "crashed")
        clock.advance(10_000)
        store.tick()
        assert any(path.read_bytes()[slots])
    with Store.open(tmp_path / "crashed", config, machine=Machine(clock=clock)) as store:
        assert store.recovered.crashed
        (found,) = store.messages_by_key("Topic", "k17", 10, 0, 1 << 60)
        assert decode_record(found).body == b"17"


def test_slots_of_a_full_file_are_written_immediately(tmp_path: Path) -> None:
    """After a crash such a file is not checked again."""
    clock = ManualClock()
    config = small_config(segment_bytes=1 << 16, index_slots=100, index_entries=51)
    with Store.open(tmp_path / "store", config, machine=Machine(clock=clock)) as store:
        append_all(store, [[record(b"%d" % number, KEYS=f"k{number}")] for number in range(50)])
        for _ in range(3):
            clock.advance(2000)
            store.tick()
            wait_idle(store)
        shutil.copytree(tmp_path / "store", tmp_path / "crashed")
    with Store.open(tmp_path / "crashed", config, machine=Machine(clock=clock)) as store:
        assert store.recovered.crashed
        (found,) = store.messages_by_key("Topic", "k17", 10, 0, 1 << 60)
        assert decode_record(found).body == b"17"
