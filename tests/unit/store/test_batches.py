"""A batch stored in one call leaves the same files as messages stored one by one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbopump.errors import DiskFull, InvalidArgument, StoreError
from turbopump.machine import Machine
from turbopump.message import QueueOffset
from turbopump.store import FlushMode, Found, Store, StoreConfig, key_index
from turbopump.store.dispatch import ANY_TAG, Watch
from turbopump.store.entry_batch import Batch
from turbopump.store.key_hashes import key_hashes
from turbopump.store.outcomes import Arrival
from turbopump.wire.aligned_properties import Ints
from turbopump.wire.batch import BatchEntry, encode_batch
from turbopump.wire.property_texts import PropertyTexts
from turbopump.wire.record import Record
from turbopump.wire.record_batch import record_batch
from turbopump.wire.record_list import record_list
from unit.store.support import HOST, FaultyFiles, ManualClock, bodies, record, small_config

COUNTS = st.sampled_from([1, 2, 5, 140])
"""The records of few messages are encoded one by one, those of many with arrays."""
CONFIG = {"segment_bytes": 32_768, "queue_segment_units": 30, "index_entries": 150}
TEXTS = st.sampled_from(
    [
        "TAGS\x01a",
        "TAGS\x01ü\x02KEYS\x01k ö",
        "UNIQ_KEY\x01U\x02KEYS\x01a  b",
        "KEYS\x01",
        "X\x01y",
        "UNIQ_KEY\x01#\x02KEYS\x01k# x y#z",
    ]
)
"""A # stands for the message's number."""
SHARED = st.sampled_from(["CLUSTER\x01c", "KEYS\x01all\x02TAGS\x01t", "UNIQ_KEY\x01same"])


def made(
    texts: list[str], shared: str = "CLUSTER\x01c", queue_id: int = 0, body_bytes: int = 1
) -> Batch:
    """Return a batch; its messages are numbered, with at least n digits."""
    like = Record(
        topic=b"Topic",
        queue_id=queue_id,
        body=b"",
        born_timestamp_ms=1_600_000_000_000,
        born_host=HOST,
        store_host=HOST,
    )
    entries = [
        BatchEntry(b"%0*d" % (body_bytes, number), text.replace("#", f"{number:03}").encode())
        for number, text in enumerate(texts)
    ]
    body = encode_batch(entries)
    return record_batch(like, body, shared.encode()) or record_list(like, body, shared.encode())


def config(mode: FlushMode = FlushMode.ASYNC) -> StoreConfig:
    return small_config(mode, **CONFIG)


def files(directory: Path) -> dict[str, bytes]:
    """Return the content of all files except those about the process and its progress."""
    kept = (path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in kept
        if path.parent != directory
    }


STEPS = st.lists(
    st.tuples(
        st.lists(TEXTS, min_size=1, max_size=3),
        SHARED,
        st.integers(0, 1),
        st.sampled_from([1, 3]),
        st.booleans(),
        COUNTS,
    ),
    min_size=1,
    # More messages would be indexed earlier, in files that are named by the time.
    max_size=3,
)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(STEPS)
def test_files_are_the_same(steps: list[tuple[list[str], str, int, int, bool, int]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        for name in ("at-once", "one-by-one"):
            clock = ManualClock()
            with Store.open(Path(root, name), config(), machine=Machine(clock=clock)) as store:
                for texts, shared, queue_id, body_bytes, with_single, count in steps:
                    clock.advance(1)
                    batch = made((texts * count)[:count], shared, queue_id, body_bytes)
                    group = batch if name == "at-once" else list(batch.records())
                    single = [[record(b"single", TAGS="a", KEYS="k")]] * with_single
                    appended = store.append_all([*single, group, *single])
                    assert len(appended[-1 - with_single].physical_offsets) == count
        assert files(Path(root, "at-once")) == files(Path(root, "one-by-one"))


def test_keys_are_searched_in_bounded_chunks_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def counted(topics: Sequence[bytes], texts: PropertyTexts) -> tuple[Ints, Ints]:
        looks.append(int(texts.lengths.sum()))
        return key_hashes(topics, texts)

    monkeypatch.setattr(key_index, "key_hashes", counted)
    groups: list[Batch | list[Record]] = [
        made([f"KEYS\x01a b c d e k{number}" for number in range(600)]),
        [record(b"single", KEYS=f"s{number} a b c d e f g h") for number in range(40)],
        made([f"KEYS\x01a b c d e l{number}" for number in range(600)]),
        made([f"KEYS\x01longer{number}" for number in range(600)]),
    ]
    large = small_config(segment_bytes=1 << 20, index_entries=30_000)
    for name, limits in (("whole", (1 << 20, 0)), ("parts", (1000, 1000))):
        monkeypatch.setattr(key_index, "_TEXT_BYTES_MAX", limits[0])
        monkeypatch.setattr(key_index, "_WORDS_MAX", limits[1])
        looks.clear()
        with Store.open(tmp_path / name, large, machine=Machine(clock=ManualClock())) as store:
            store.append_all(groups)
            for key in ("k0", "k599", "s39", "l300", "longer599"):
                assert len(store.messages_by_key("Topic", key, 10, 0, 1 << 60)) == 1, key
    *parts, few_words = looks
    assert max(parts) <= 1000 + 50
    assert few_words > 5000, "which takes no more memory than the text does"
    assert files(tmp_path / "whole") == files(tmp_path / "parts")


@pytest.mark.parametrize("mode", FlushMode)
def test_messages_can_be_read_and_found(tmp_path: Path, mode: FlushMode) -> None:
    with Store.open(tmp_path, config(mode)) as store:
        appended = store.append(made([f"KEYS\x01k{number}" for number in range(40)]))
        appended.durable.result(10)
        assert bodies(store) == [b"%d" % number for number in range(40)]
        (found,) = store.messages_by_key("Topic", "k17", 10, 0, 1 << 60)
        assert store.message_at(appended.physical_offsets[17]) == found


def test_listeners_are_notified_of_each_message(tmp_path: Path) -> None:
    told: list[Arrival] = []
    with Store.open(tmp_path, config()) as store:
        store.listen(told.extend)
        store.append(made(["TAGS\x01a", "KEYS\x01k"] * 20))
    assert [arrival.queue_offset for arrival in told] == list(range(40))
    assert {arrival.properties for arrival in told} == {
        b"TAGS\x01a\x02CLUSTER\x01c",
        b"KEYS\x01k\x02CLUSTER\x01c",
    }
    assert {arrival.tags_code for arrival in told} == {0, ord("a")}


def test_listeners_are_notified_of_awaited_messages(tmp_path: Path) -> None:
    told: list[Arrival] = []
    tags_codes: set[int | None] = {ord("b")}
    watch = Watch(tags_codes)
    batch = made(["TAGS\x01a", "TAGS\x01b"] * 20)
    with Store.open(tmp_path, config()) as store:
        store.listen(told.extend, {("Topic", 0): watch})
        store.append(batch)
        assert [arrival.queue_offset for arrival in told] == list(range(1, 40, 2))
        tags_codes.clear()
        store.append(batch)
        assert (len(told), watch.seen) == (20, 80), "examined, for the sweep, and not reported"
        tags_codes.add(ANY_TAG)
        store.append(batch)
    assert [arrival.queue_offset for arrival in told[20:]] == list(range(80, 120))


def test_a_message_that_is_too_large_is_named(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config(segment_bytes=1 << 16, record_bytes_max=150)) as store:
        with pytest.raises(InvalidArgument, match=r"at most 150 bytes, got 2"):
            store.append(made(["X\x01y"] * 39 + ["X\x01" + "y" * 100]))
        assert store.written_end == 0
        store.append(made(["X\x01y"] * 40))
        assert bodies(store) == [b"%d" % number for number in range(40)]


def test_a_batch_larger_than_a_file_is_rejected(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        with pytest.raises(InvalidArgument, match="a batch must be at most"):
            store.append(made(["X\x01y"] * 80))
        assert store.written_end == 0


def test_a_full_disk_rolls_back_the_whole_batch(tmp_path: Path) -> None:
    disk = FaultyFiles()
    with Store.open(tmp_path, config(), machine=Machine(files=disk)) as store:
        store.append(made(["X\x01y"] * 40))
        disk.bytes_left = 1000
        with pytest.raises(StoreError):
            store.append(made(["X\x01y"] * 40))
        disk.bytes_left = None
        outcome = store.read("Topic", 0, QueueOffset(0), 100)
        assert isinstance(outcome, Found)
        assert outcome.max_offset == 40


def test_a_restart_finds_batches(tmp_path: Path) -> None:
    with Store.open(tmp_path, config()) as store:
        store.append(made(["KEYS\x01k"] * 40))
    with Store.open(tmp_path, config()) as store:
        assert store.append(made(["KEYS\x01k"] * 40)).queue_offset == 40
        assert len(bodies(store)) == 80


def test_leftovers_of_a_failed_write_are_not_written_with_the_next_file(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    machine = Machine(files=files, clock=clock)
    with Store.open(tmp_path, small_config(), machine=machine) as store:
        store.append([record(b"a" * 2600)])
        files.bytes_left = 10
        with pytest.raises(DiskFull):
            store.append_all([[record(b"lost")], [record(b"lost too")]])
        files.bytes_left = None
        clock.advance(60_000)
        # It does not fit into the rest of the file.
        assert store.append([record(b"b" * 2600)]).physical_offset == 4096
        assert [body[:1] for body in bodies(store)] == [b"a", b"b"]
    first, *_ = sorted((tmp_path / "commitlog").iterdir())
    assert b"lost" not in first.read_bytes()
