"""Storing and reading: offsets, rolling, batches, the nine outcomes, limits and filters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appending import append, append_all
from store_work import close_files, log_of, queues_of, wait_idle
from turbopump.errors import DiskFailed, InvalidArgument, WriteFailed
from turbopump.machine import Machine
from turbopump.message import PhysicalOffset
from turbopump.store import (
    Arrival,
    Filter,
    FlushMode,
    Found,
    MessagesRemoved,
    NoMatch,
    OffsetTooLarge,
    OffsetTooSmall,
    QueueEmpty,
    QueueUnknown,
    ReadLimits,
    RetentionConfig,
    Store,
    UpToDate,
)
from turbopump.store.dispatch import ANY_TAG, Watch
from turbopump.wire.hashing import tags_code
from turbopump.wire.record import Record, decode_record
from unit.store.support import (
    ManualClock,
    bodies,
    offset,
    read_all,
    record,
    small_config,
)

PREPARED, COMMIT, ROLLBACK = 0x4, 0x8, 0xC


@pytest.fixture(params=list(FlushMode))
def mode(request: pytest.FixtureRequest) -> FlushMode:
    mode: FlushMode = request.param
    return mode


def stored(store: Store, *args: bytes, **kwargs: Any) -> None:
    for body in args:
        append(store, [record(body, **kwargs)]).durable.result()


def test_a_message_gets_position_offset_and_time(tmp_path: Path, mode: FlushMode) -> None:
    clock = ManualClock(1_234_567)
    with Store.open(tmp_path, small_config(mode), machine=Machine(clock=clock)) as store:
        first = append(store, [record(b"a")])
        second = append(store, [record(b"bb")])
        other = append(store, [record(b"c", queue_id=1)])
        assert [first.physical_offset, first.queue_offset] == [0, 0]
        assert [second.physical_offset, second.queue_offset] == [first.end_offset, 1]
        assert [other.physical_offset, other.queue_offset] == [second.end_offset, 0]
        assert first.store_timestamp_ms == 1_234_567
        other.durable.result()
        assert [(view.stored_body, view.queue_offset) for view in read_all(store)] == [
            (b"a", 0),
            (b"bb", 1),
        ]
        assert bodies(store, queue_id=1) == [b"c"]


def test_messages_survive_closing_and_many_files(tmp_path: Path, mode: FlushMode) -> None:
    expected = [b"%d" % number * (number % 50) for number in range(300)]
    with Store.open(tmp_path, small_config(mode)) as store:
        for body in expected:
            append(store, [record(body, TAGS="T")])
        append(store, [record(b"last")]).durable.result()
        assert bodies(store) == [*expected, b"last"]
    assert len(list((tmp_path / "commitlog").iterdir())) > 5
    assert len(list((tmp_path / "consumequeue" / "Topic" / "0").iterdir())) == 31
    with Store.open(tmp_path, small_config(mode)) as store:
        assert not store.recovered.crashed
        assert store.recovered.replayed == 0
        assert bodies(store) == [*expected, b"last"]


def test_no_record_is_split_and_files_end_with_a_blank(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        appended = [append(store, [record(b"x" * size)]) for size in (1500, 1500, 1500, 900)]
    assert [one.physical_offset for one in appended] == [0, 1596, 4096, 5692]
    blank = (tmp_path / "commitlog" / f"{0:020d}").read_bytes()[3192:]
    assert blank[:8] == bytes.fromhex("00000388cbd43194")
    assert not any(blank[8:])


def test_a_record_may_fill_a_file_up_to_the_blank(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        exact = record(b"x" * (4096 - 8 - 96))
        assert exact.size == 4096 - 8
        for start in (0, 4096, 8192):
            assert append(store, [exact]).physical_offset == start
        with pytest.raises(InvalidArgument, match="must be at most"):
            append(store, [record(b"x" * (4096 - 8 - 95))])
        stored(store, b"after")
        assert len(bodies(store)) == 4


def test_a_batch_stays_in_one_file(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        stored(store, b"x" * 3000)
        batch = append(store, [record(b"%d" % number * 100) for number in range(10)])
        assert batch.physical_offset == 4096
        assert batch.queue_offset == 1
        assert len(batch.physical_offsets) == 10
        assert [view.queue_offset for view in read_all(store)] == list(range(11))
        assert [view.physical_offset for view in read_all(store)][1:] == list(
            batch.physical_offsets
        )


def test_several_groups_are_one_write(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config(segment_bytes=1 << 20)) as store:
        appended = append_all(
            store, [[record(b"a")], [record(b"b"), record(b"c")], [record(b"d", queue_id=3)]]
        )
        assert [one.queue_offset for one in appended] == [0, 1, 0]
        assert bodies(store) == [b"a", b"b", b"c"]
        many = append_all(store, [[record(b"%d" % number)] for number in range(1000)])
        assert [one.queue_offset for one in many] == list(range(3, 1003))


def test_groups_roll_within_one_call(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        many = append_all(store, [[record(b"%04d" % number)] for number in range(200)])
        assert bodies(store) == [b"%04d" % number for number in range(200)]
        assert many[-1].end_offset == store.written_end
        assert len({one.physical_offset // 4096 for one in many}) > 3


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ([record(sys_flag=PREPARED)] * 2, "transaction"),
        ([record(b"x" * 3000), record(b"x" * 3000)], "must be at most"),
        ([record(topic="a/b")], "directory"),
        ([record(topic="..")], "directory"),
        ([record(queue_id=-1)], "negative"),
        ([record(a="b\0c")], "zero byte"),
        ([record(topic="a/b", sys_flag=PREPARED)], "directory"),
        ([record(queue_id=1 << 40)], "must fit"),
    ],
)
def test_messages_that_cannot_be_stored_leave_no_trace(
    tmp_path: Path, group: list[Record], reason: str
) -> None:
    with Store.open(tmp_path, small_config()) as store:
        stored(store, b"before")
        end = store.written_end
        good = [record(b"x" * 900) for _ in range(3)]
        with pytest.raises(InvalidArgument, match=reason):
            append_all(store, [[one] for one in good] + [group])
        assert store.written_end == end
        stored(store, b"after")
        assert bodies(store) == [b"before", b"after"]
    with Store.open(tmp_path, small_config()) as store:
        assert bodies(store) == [b"before", b"after"]


def test_a_message_over_the_limit_is_rejected(tmp_path: Path) -> None:
    config = small_config(record_bytes_max=200)
    with Store.open(tmp_path, config) as store:
        with pytest.raises(InvalidArgument, match="at most 200"):
            append(store, [record(b"x" * 150)])
        append(store, [record(b"x" * 50)])


def test_the_nine_outcomes(tmp_path: Path) -> None:
    clock = ManualClock()
    retention = RetentionConfig(reserved_ms=1000, delete_hours=frozenset(range(24)))
    config = small_config(retention=retention)
    with Store.open(tmp_path, config, machine=Machine(clock=clock)) as store:
        assert store.read("Topic", 0, offset(5), 1) == QueueEmpty(
            next_offset=offset(0), min_offset=offset(0), max_offset=offset(0)
        )
        assert isinstance(store.read("a/b", 0, offset(0), 1), QueueUnknown)
        assert isinstance(store.read("\ud800", 0, offset(0), 1), QueueUnknown)
        assert isinstance(store.read("Topic", -1, offset(0), 1), QueueUnknown)
        for number in range(25):
            stored(store, b"%d" % number * 300, TAGS="A")
        clock.advance(10_000)
        stored(store, b"young", TAGS="A")
        low, high = offset(0), offset(26)
        assert store.queue_range("Topic", 0) == (low, high)
        match store.read("Topic", 0, offset(0), 3):
            case Found(messages=messages, next_offset=next_offset, size=size):
                assert (len(messages), next_offset) == (3, 3)
                assert size == sum(map(len, messages))
            case other:
                raise AssertionError(other)
        nothing = store.read("Topic", 0, offset(0), 3, Filter(tags_codes=frozenset({1})))
        assert isinstance(nothing, NoMatch)
        assert nothing.next_offset == 10
        too_small = store.read("Topic", 0, offset(-1), 3)
        assert isinstance(too_small, OffsetTooSmall)
        assert too_small.next_offset == 0
        assert isinstance(store.read("Topic", 0, high, 3), UpToDate)
        too_large = store.read("Topic", 0, offset(99), 3)
        assert isinstance(too_large, OffsetTooLarge)
        assert too_large.next_offset == high
        store.tick()
        clock.advance(2000)
        store.tick()
        (tmp_path / "consumequeue" / "Topic" / "0" / f"{200:020d}").unlink()
        close_files(store)
        with pytest.raises(DiskFailed, match=f"{200:020d}"):
            store.read("Topic", 0, offset(12), 3)


@pytest.mark.parametrize("removed", ["consumequeue", "consumequeue/Topic"])
def test_queues_removed_under_a_running_store_are_recreated(tmp_path: Path, removed: str) -> None:
    clock = ManualClock()

    def pass_time(store: Store) -> None:
        for _ in range(4):
            clock.advance(1000)
            store.tick()
            wait_idle(store)

    with Store.open(tmp_path, small_config(), machine=Machine(clock=clock)) as store:
        for topic in ("Topic", "Other"):
            for _ in range(25):
                append(store, [record(topic=topic)])
        pass_time(store)
        shutil.rmtree(tmp_path / removed)
        append(store, [record()])
        pass_time(store)
        assert store.refusal is not None
        for _ in range(3):
            with pytest.raises(WriteFailed, match="removed while the store is open: restart"):
                append(store, [record()])
            pass_time(store)
        assert len(bodies(store)) == 26, "reading continues while files are open"
        close_files(store)
        with pytest.raises(DiskFailed):
            store.read("Topic", 0, offset(12), 3)
        pass_time(store)
        assert store.refusal is not None
    with Store.open(tmp_path, small_config(), machine=Machine(clock=clock)) as store:
        assert store.queue_range("Topic", 0) == (0, 26)
        assert store.queue_range("Other", 0) == (0, 25)
        append(store, [record()])


def test_messages_whose_file_is_missing(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config(queue_segment_units=100)) as store:
        stored(store, *[b"x" * 900] * 12)
        store.flush()
        log_of(store).drop_first()
        # The queue has not been notified yet, as when a read happens in between.
        removed = store.read("Topic", 0, offset(0), 1)
        assert isinstance(removed, MessagesRemoved)
        assert removed.next_offset == 2
        found = store.read("Topic", 0, offset(0), 32, Filter(units=lambda units: units["size"] > 0))
        assert isinstance(found, Found)
        assert found.queue_offsets[0] == 4


def test_limits_by_count_and_bytes(tmp_path: Path) -> None:
    config = small_config(segment_bytes=1 << 20, queue_segment_units=1000)
    with Store.open(tmp_path, config) as store:
        stored(store, *[b"x" * 1000] * 100)

        def count(limits: ReadLimits, count_max: int = 1000) -> int:
            outcome = store.read("Topic", 0, offset(0), count_max, limits=limits)
            assert isinstance(outcome, Found)
            assert outcome.next_offset == len(outcome.messages)
            return len(outcome.messages)

        assert count(ReadLimits()) == 32
        assert count(ReadLimits(), 5) == 5
        assert count(ReadLimits(), 0) == 1
        assert count(ReadLimits(memory_count_max=50)) == 50
        assert count(ReadLimits(memory_count_max=50, memory_bytes_max=10 * 1096)) == 10
        assert count(ReadLimits(memory_bytes_max=1)) == 1
        assert count(ReadLimits(recent_bytes=1)) == 8
        assert count(ReadLimits(recent_bytes=1, disk_count_max=9, disk_bytes_max=1096 * 4)) == 4
        # The first ten messages are old, the rest is recent: the tenth and all before it count.
        recent_bytes = 1096 * 90
        assert count(ReadLimits(recent_bytes=recent_bytes, disk_count_max=20)) == 32
        far = store.read("Topic", 0, offset(0), 1, limits=ReadLimits(recent_bytes=1))
        assert isinstance(far, Found)
        assert far.suggest_slave
        near = store.read("Topic", 0, offset(0), 1)
        assert isinstance(near, Found)
        assert not near.suggest_slave


def test_a_filter_stops_where_a_loop_over_units_would(tmp_path: Path) -> None:
    """A unit that does not match, but is too large to add, ends the scan as in Apache RocketMQ."""
    config = small_config(segment_bytes=1 << 20, queue_segment_units=1000)
    with Store.open(tmp_path, config) as store:
        for number in range(60):
            wanted = number % 6 == 0
            stored(store, b"x" * (100 if wanted else 10 * number), TAGS="A" if wanted else "B")
        wanted_a = Filter(tags_codes=frozenset({tags_code("A")}))
        for bytes_max in (300, 500, 900, 1300, 5000):
            for count_max in (1, 2, 5, 100):
                limits = ReadLimits(memory_bytes_max=bytes_max, memory_count_max=7)
                got = store.read("Topic", 0, offset(3), count_max, wanted_a, limits)
                assert isinstance(got, Found)
                expected = slow_scan(store, 3, count_max, limits)
                assert (got.queue_offsets, got.next_offset) == expected


def slow_scan(
    store: Store, first: int, count_max: int, limits: ReadLimits
) -> tuple[list[int], int]:
    queue = queues_of(store).find("Topic", 0)
    assert queue is not None
    found: list[int] = []
    total = 0
    for number in range(first, queue.max_offset):
        unit = queue.unit(offset(number))
        assert unit is not None
        _, size, code = unit
        full = len(found) >= min(count_max, limits.memory_count_max)
        if found and (full or total + size > limits.memory_bytes_max):
            return found, number
        if code == tags_code("A"):
            found.append(number)
            total += size
    return found, queue.max_offset


def test_filters_on_tags_units_and_properties(tmp_path: Path) -> None:
    config = small_config(segment_bytes=1 << 20, queue_segment_units=10_000)
    with Store.open(tmp_path, config) as store:
        for number in range(1000):
            stored(store, b"%d" % number, TAGS=f"T{number % 97}", n=str(number))

        def offsets(wanted: Filter, first: int = 0) -> list[int]:
            outcome = store.read("Topic", 0, offset(first), 32, wanted)
            return list(outcome.queue_offsets) if isinstance(outcome, Found) else []

        assert offsets(Filter(tags_codes=frozenset({tags_code("T96")}))) == list(range(96, 800, 97))
        several = frozenset(tags_code(f"T{number}") for number in (1, 2))
        assert offsets(Filter(tags_codes=several))[:4] == [1, 2, 98, 99]
        many = frozenset(tags_code(f"T{number}") for number in range(60))
        assert offsets(Filter(tags_codes=many), 50)[:12] == [*range(50, 60), 97, 98]
        assert offsets(Filter(tags_codes=frozenset())) == []
        assert offsets(Filter(properties=lambda text: b"n\x01500" in text)) == [500]
        biggest = Filter(units=lambda units: np.asarray(units["size"] > 125))
        assert offsets(biggest) == []
        both = Filter(
            tags_codes=frozenset({tags_code("T3")}), properties=lambda text: b"n\x01100" in text
        )
        assert offsets(both) == [100]
        scan = ReadLimits(scan_units_max=50)
        nothing = store.read("Topic", 0, offset(0), 32, Filter(tags_codes=frozenset({1})), scan)
        assert nothing.next_offset == 50


def test_transactions_show_only_what_is_committed(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        stored(store, b"plain")
        prepared = append(store, [record(b"half", sys_flag=PREPARED, KEYS="k1")])
        rolled_back = append(store, [record(b"undone", sys_flag=ROLLBACK, KEYS="k2")])
        stored(store, b"committed", sys_flag=COMMIT)
        assert prepared.queue_offset == rolled_back.queue_offset == 0
        assert bodies(store) == [b"plain", b"committed"]
        half = store.message_at(prepared.physical_offset)
        assert half is not None
        assert decode_record(half).stored_body == b"half"
        assert len(store.messages_by_key("Topic", "k1", 9, 0, 1 << 60)) == 1
        assert not store.messages_by_key("Topic", "k2", 9, 0, 1 << 60)


def test_delayed_messages_keep_their_delivery_time(tmp_path: Path) -> None:
    clock = ManualClock(5_000_000)
    config = small_config(delay_levels=(1000, 60_000))
    codes: list[int] = []
    with Store.open(tmp_path, config, machine=Machine(clock=clock)) as store:
        store.listen(lambda arrivals: codes.extend(one.tags_code for one in arrivals))
        for level in ("1", "2", "9", "0", "x"):
            stored(store, b"later", topic="SCHEDULE_TOPIC_XXXX", DELAY=level, TAGS="A")
        stored(store, b"now", DELAY="1", TAGS="A")
        assert codes == [5_001_000, 5_060_000, 5_060_000, 65, 65, 65]


def test_the_listener_is_notified_of_each_message_once_readable(
    tmp_path: Path, mode: FlushMode
) -> None:
    heard: list[Arrival] = []
    with Store.open(tmp_path, small_config(mode)) as store:
        store.listen(heard.extend)
        appended = append(store, [record(b"a", TAGS="A"), record(b"b")])
        appended.durable.result()
        store.dispatch()
        assert [(one.topic, one.queue_id, one.queue_offset, one.tags_code) for one in heard] == [
            ("Topic", 0, 0, 65),
            ("Topic", 0, 1, 0),
        ]
        assert heard[0].properties == b"TAGS\x01A\x02"
        assert heard[0].store_timestamp_ms == appended.store_timestamp_ms
        store.listen(None)
        stored(store, b"c")
    assert len(heard) == 2


def test_the_listener_is_notified_of_watched_queues_and_of_delays(tmp_path: Path) -> None:
    calls: list[list[tuple[str, int, int]]] = []
    watched = {("Topic", 1): Watch({ANY_TAG})}

    def heard(arrivals: list[Arrival]) -> None:
        calls.append([(one.topic, one.queue_id, one.queue_offset) for one in arrivals])

    with Store.open(tmp_path, small_config()) as store:
        stored(store, b"before", queue_id=1)
        store.listen(heard, watched)
        stored(store, b"b", queue_id=1)
        stored(store, b"c", queue_id=2)
        stored(store, b"later", topic="SCHEDULE_TOPIC_XXXX", DELAY="1")
        watched[("Topic", 2)] = Watch({ANY_TAG})
        stored(store, b"d", queue_id=2)
    assert calls == [[("Topic", 1, 1)], [], [("SCHEDULE_TOPIC_XXXX", 0, 0)], [("Topic", 2, 1)]]


def test_the_listener_is_notified_only_of_awaited_tags(tmp_path: Path) -> None:
    heard: list[Arrival] = []
    tags_codes: set[int | None] = {tags_code("A")}
    watch = Watch(tags_codes)
    with Store.open(tmp_path, small_config()) as store:
        store.listen(heard.extend, {("Topic", 0): watch})
        groups = [[record(tag.encode(), TAGS=tag)] for tag in "ABAB"] + [[record(b"none")]]
        append_all(store, groups)
        assert [one.queue_offset for one in heard] == [0, 2]
        assert watch.seen == 5, "others were examined as well, or a sweep would wake for them"
        tags_codes.add(ANY_TAG)
        append_all(store, groups)
        assert [one.queue_offset for one in heard] == [0, 2, 5, 6, 7, 8, 9]


def test_lookups(tmp_path: Path) -> None:
    clock = ManualClock(1_000_000)
    with Store.open(tmp_path, small_config(), machine=Machine(clock=clock)) as store:
        for number in range(30):
            clock.wall_ms = 1_000_000 + number * 10_000
            stored(store, b"%d" % number, KEYS=f"all k{number}", UNIQ_KEY=f"U{number}")

        def by_key(key: str, begin_ms: int = 0, end_ms: int = 1 << 60, most: int = 64) -> list[int]:
            found = store.messages_by_key("Topic", key, most, begin_ms, end_ms)
            return [int(decode_record(message).stored_body) for message in found]

        assert by_key("k7") == by_key("U7") == [7]
        assert by_key("all") == list(range(30))
        assert by_key("all", most=3) == [27, 28, 29]
        assert by_key("all", 1_050_000, 1_080_000) == [5, 6, 7, 8]
        assert by_key("nothing") == []
        assert store.offset_by_time("Topic", 0, 1_072_000) == 7
        assert store.offset_by_time("Topic", 0, 1_076_000) == 8
        assert store.offset_by_time("Topic", 0, 0) == 0
        assert store.offset_by_time("Topic", 0, 1 << 60) == 29
        assert store.offset_by_time("Other", 0, 0) == 0
        assert store.store_timestamp_ms("Topic", 0, offset(3)) == 1_030_000
        assert store.store_timestamp_ms("Topic", 0, offset(99)) is None
        assert store.store_timestamp_ms("Other", 0, offset(0)) is None
        assert store.message_at(PhysicalOffset(1)) is None
        assert store.message_at(PhysicalOffset(1 << 40)) is None
        assert store.queue_ids() == [("Topic", 0)]


def test_the_index_can_be_disabled(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config(index_enabled=False)) as store:
        stored(store, b"a", KEYS="k")
        assert store.messages_by_key("Topic", "k", 9, 0, 1 << 60) == []
    assert not list((tmp_path / "index").iterdir())


def test_a_deleted_topic_starts_again(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as store:
        stored(store, b"a", b"b")
        stored(store, b"other", topic="Other")
        store.tick()
        store.remove_topic("Topic")
        assert "Topic" not in store._queues._by_topic
        assert not (tmp_path / "consumequeue" / "Topic").exists()
        assert store.queue_ids() == [("Other", 0)]
        stored(store, b"c")
        assert bodies(store) == [b"c"]
        assert [view.queue_offset for view in read_all(store)] == [0]
