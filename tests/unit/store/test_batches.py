"""A batch stored in one call leaves the same files as messages stored one by one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appending import Batch, append, append_all
from turbopump.errors import DiskFull, InvalidArgument, StoreError
from turbopump.machine import Machine
from turbopump.message import QueueOffset
from turbopump.store import FlushMode, Found, Store, StoreConfig
from turbopump.store.dispatch import ANY_TAG, Watch
from turbopump.store.outcomes import Arrival
from turbopump.wire.record import Record
from unit.store.support import HOST, FaultyFiles, ManualClock, bodies, record, small_config

COUNTS = st.sampled_from([1, 2, 5, 140])
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
    records = [
        Record(
            topic=b"Topic",
            queue_id=queue_id,
            body=b"%0*d" % (body_bytes, number),
            properties=text.replace("#", f"{number:03}").encode(),
            born_timestamp_ms=1_600_000_000_000,
            born_host=HOST,
            store_host=HOST,
        )
        for number, text in enumerate(texts)
    ]
    return Batch(records, shared.encode())


LARGE = small_config(segment_bytes=1 << 20, queue_segment_units=30, index_entries=150)
"""One file has all messages: a batch is not split where others are."""


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
            with Store.open(Path(root, name), LARGE, machine=Machine(clock=clock)) as store:
                for texts, shared, queue_id, body_bytes, with_single, count in steps:
                    clock.advance(1)
                    batch = made((texts * count)[:count], shared, queue_id, body_bytes)
                    single = [[record(b"single", TAGS="a", KEYS="k")]] * with_single
                    if name == "at-once":
                        appended = append_all(store, [*single, batch, *single])
                        assert len(appended[-1 - with_single].physical_offsets) == count
                    else:
                        for each in [*single, *([one] for one in batch.stored()), *single]:
                            append(store, each)
        assert files(Path(root, "at-once")) == files(Path(root, "one-by-one"))


@pytest.mark.parametrize("mode", FlushMode)
def test_messages_can_be_read_and_found(tmp_path: Path, mode: FlushMode) -> None:
    with Store.open(tmp_path, config(mode)) as store:
        appended = append(store, made([f"KEYS\x01k{number}" for number in range(40)]))
        appended.durable.result(10)
        assert bodies(store) == [b"%d" % number for number in range(40)]
        (found,) = store.messages_by_key("Topic", "k17", 10, 0, 1 << 60)
        assert store.message_at(appended.physical_offsets[17]) == found


def test_listeners_are_notified_of_each_message(tmp_path: Path) -> None:
    told: list[Arrival] = []
    with Store.open(tmp_path, config()) as store:
        store.listen(told.extend)
        append(store, made(["TAGS\x01a", "KEYS\x01k"] * 20))
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
        append(store, batch)
        assert [arrival.queue_offset for arrival in told] == list(range(1, 40, 2))
        tags_codes.clear()
        append(store, batch)
        assert (len(told), watch.seen) == (20, 80), "examined, for the sweep, and not reported"
        tags_codes.add(ANY_TAG)
        append(store, batch)
    assert [arrival.queue_offset for arrival in told[20:]] == list(range(80, 120))


def test_a_message_that_is_too_large_is_named(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config(segment_bytes=1 << 16, record_bytes_max=150)) as store:
        with pytest.raises(InvalidArgument, match=r"at most 150 bytes, got 2"):
            append(store, made(["X\x01y"] * 39 + ["X\x01" + "y" * 100]))
        assert store.written_end == 0
        append(store, made(["X\x01y"] * 40))
        assert bodies(store) == [b"%d" % number for number in range(40)]


def test_a_batch_larger_than_a_file_is_rejected(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        with pytest.raises(InvalidArgument, match="a batch must be at most"):
            append(store, made(["X\x01y"] * 80))
        assert store.written_end == 0


def test_a_full_disk_rolls_back_the_whole_batch(tmp_path: Path) -> None:
    disk = FaultyFiles()
    with Store.open(tmp_path, config(), machine=Machine(files=disk)) as store:
        append(store, made(["X\x01y"] * 40))
        disk.bytes_left = 1000
        with pytest.raises(StoreError):
            append(store, made(["X\x01y"] * 40))
        disk.bytes_left = None
        outcome = store.read("Topic", 0, QueueOffset(0), 100)
        assert isinstance(outcome, Found)
        assert outcome.max_offset == 40


def test_a_restart_finds_batches(tmp_path: Path) -> None:
    with Store.open(tmp_path, config()) as store:
        append(store, made(["KEYS\x01k"] * 40))
    with Store.open(tmp_path, config()) as store:
        assert append(store, made(["KEYS\x01k"] * 40)).queue_offset == 40
        assert len(bodies(store)) == 80


def test_leftovers_of_a_failed_write_are_not_written_with_the_next_file(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    machine = Machine(files=files, clock=clock)
    with Store.open(tmp_path, small_config(), machine=machine) as store:
        append(store, [record(b"a" * 2600)])
        files.bytes_left = 10
        with pytest.raises(DiskFull):
            append_all(store, [[record(b"lost")], [record(b"lost too")]])
        files.bytes_left = None
        clock.advance(60_000)
        # It does not fit into the rest of the file.
        assert append(store, [record(b"b" * 2600)]).physical_offset == 4096
        assert [body[:1] for body in bodies(store)] == [b"a", b"b"]
    first, *_ = sorted((tmp_path / "commitlog").iterdir())
    assert b"lost" not in first.read_bytes()
