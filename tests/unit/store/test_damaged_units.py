"""Old files with wrong bits: damage is reported and skipped, nothing else is lost."""

from __future__ import annotations

import logging
import os
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appending import append
from turbopump.machine import Machine
from turbopump.message import QueueOffset
from turbopump.store import Filter, Found, ReadLimits, Store, unit_repair
from turbopump.store.consume_queue import FILLER_SIZE
from turbopump.store.outcomes import MessageDamaged
from turbopump.testing import Disk
from turbopump.wire.hashing import tags_code
from turbopump.wire.hosts import host
from turbopump.wire.record import decode_record
from unit.store.support import record, small_config

pytestmark = pytest.mark.slow

COUNT = 90
QUEUES = (("Topic", 0), ("Topic", 1), ("Other", 0))
CONFIG = small_config()
UNIT_BYTES = 20
FLIPS_IN_UNIT = [(at, bit) for at in range(12) for bit in (0, 3, 7)]
"""Position and size of the message; a flipped tag hash cannot be seen in the record's header."""


def fill(root: Path, machine: Machine | None = None) -> None:
    with Store.open(root, CONFIG, machine) as store:
        for number in range(COUNT):
            topic, queue_id = QUEUES[number % len(QUEUES)]
            tag = "even" if number % 2 == 0 else "odd"
            append(store, [record(b"%03d" % number * 9, topic=topic, queue_id=queue_id, TAGS=tag)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "store"
    fill(root)
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "store"))


def pulled(
    store: Store, topic: str, queue_id: int, wanted: Filter | None = None
) -> Iterator[tuple[int, bytes]]:
    """Read like a consumer: continue at each response's next offset."""
    offset, end = store.queue_range(topic, queue_id)
    for _ in range(10_000):
        if offset >= end:
            return
        outcome = store.read(topic, queue_id, offset, 32, wanted or Filter())
        if isinstance(outcome, Found):
            assert sum(map(len, outcome.pieces)) == outcome.size
            for number, message in zip(outcome.queue_offsets, outcome.messages, strict=True):
                yield number, bytes(message)
        else:
            assert isinstance(outcome, MessageDamaged) or wanted is not None, outcome
        offset = outcome.next_offset
    raise AssertionError(f"{topic} {queue_id} stands still at {offset}")


def everything(store: Store) -> dict[tuple[str, int], list[tuple[int, bytes]]]:
    return {queue: list(pulled(store, *queue)) for queue in QUEUES}


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def unit_file(root: Path, topic: str = "Topic", queue_id: int = 0, number: int = 0) -> Path:
    files = sorted((root / "consumequeue" / topic / str(queue_id)).iterdir())
    return files[number]


def record_place(root: Path, messages: list[tuple[int, bytes]], offset: int) -> tuple[Path, int]:
    """Return the file of a message, and its position there."""
    position = decode_record(dict(messages)[offset]).physical_offset
    size = CONFIG.segment_bytes
    return root / "commitlog" / f"{position // size * size:020d}", position % size


@pytest.mark.parametrize(("at", "bit"), FLIPS_IN_UNIT)
def test_a_damaged_unit_is_rebuilt(
    at: int, bit: int, whole: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(whole, CONFIG) as store:
        expected = everything(store)
    flip(unit_file(root), 5 * UNIT_BYTES + at, bit)
    with Store.open(root, CONFIG) as store:
        assert everything(store) == expected
        # Either when it was read, or by the start, which found the end of the queue too early.
        assert store.damage.repaired_units + store.recovered.replayed > 0
        assert store.damage.messages == 0
        before = store.damage.repaired_units
        assert everything(store) == expected
        assert store.damage.repaired_units == before
    assert not before or "offset 5 was damaged and is rebuilt" in caplog.text
    caplog.clear()
    with Store.open(root, CONFIG) as store:
        assert everything(store) == expected
        assert (store.damage.repaired_units, store.damage.messages) == (0, 0)


def test_a_damaged_unit_is_served_from_memory_on_a_full_disk() -> None:
    disk, root = Disk(), Path("/store")
    fill(root, machine := Machine(disk, disk.background))
    unit = root / "consumequeue/Topic/0" / f"{0:020d}"
    disk.flip_bit(unit, 5 * UNIT_BYTES + 7, 3)
    with Store.open(root, CONFIG, machine) as store:
        disk.fail_writes()
        numbers = [number for number, _ in pulled(store, "Topic", 0)]
        assert numbers == list(range(COUNT // len(QUEUES)))
        assert list(pulled(store, "Topic", 0)) == list(pulled(store, "Topic", 0))
        assert store.damage.repaired_units == 1
        disk.heal()
    with Store.open(root, CONFIG, machine) as store:
        assert [number for number, _ in pulled(store, "Topic", 0)] == numbers
        assert store.damage.repaired_units == 1, "the file was not repaired before"


def test_a_damaged_body_keeps_its_offset_if_a_crash_preceded_its_unit(
    whole: Path, root: Path
) -> None:
    with Store.open(whole, CONFIG) as store:
        last = list(pulled(store, "Other", 0))
    path, at = record_place(root, last, number := last[-1][0])
    flip(path, at + 90, 2)
    units = unit_file(root, "Other", number=-1)
    data, unit_at = units.read_bytes(), number * UNIT_BYTES % units.stat().st_size
    units.write_bytes(data[:unit_at] + bytes(len(data) - unit_at))
    (root / "abort").touch()
    # If the index lacks messages, the log is read again.
    with Store.open(root, replace(CONFIG, index_enabled=False)) as store:
        assert store.queue_range("Other", 0)[1] == number + 1
        assert [offset for offset, _ in pulled(store, "Other", 0)] == list(range(number + 1))


CHECKED = {
    "size": 0, "magic": 4, "queue id": 12, "queue offset": 20, "position": 28, "host kinds": 39,
    "body length": 84, "topic length": 115, "topic": 117, "properties length": 122,
}  # fmt: skip


@pytest.mark.parametrize("field", CHECKED)
def test_a_damaged_record_is_skipped_and_reported(
    field: str, whole: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(whole, CONFIG) as store:
        expected = everything(store)
    path, at = record_place(root, expected["Topic", 1], 4)
    flip(path, at + CHECKED[field], 4)
    with Store.open(root, CONFIG) as store, caplog.at_level(logging.ERROR):
        for _ in range(3):
            found = everything(store)
            lost = dict(set(expected["Topic", 1]) - set(found["Topic", 1]))
            assert list(lost) == [4]
            assert found["Topic", 1] == [each for each in expected["Topic", 1] if each[0] != 4]
            assert {**found, ("Topic", 1): None} == {**expected, ("Topic", 1): None}
        assert store.damage.messages == 1
    (line,) = (one.getMessage() for one in caplog.records)
    for part in ("topic Topic, queue 1, offset 4", str(path), f"at {at}"):
        assert part in line


def test_garbage_in_an_old_segment_affects_only_what_it_covers(
    whole: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(whole, CONFIG) as store:
        expected = everything(store)
    path = sorted((root / "commitlog").iterdir())[1]
    first, last = int(path.name) + 500, int(path.name) + 2500
    with path.open("r+b") as file:
        file.seek(500)
        file.write(random.Random(1).randbytes(2000))
    with Store.open(root, CONFIG) as store:
        found = everything(store)
        lost = store.damage.messages
    for queue, messages in expected.items():
        views = [decode_record(message) for _, message in messages]
        whole_ones = [
            each
            for each, view in zip(messages, views, strict=True)
            if view.physical_offset >= last or view.physical_offset + view.size <= first
        ]
        assert found[queue] == whole_ones
    assert lost == sum(map(len, expected.values())) - sum(map(len, found.values())) > 10
    # One line for the damage in each queue.
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == len(QUEUES)


@pytest.mark.parametrize("what", ["unit", "record"])
def test_filtered_reads_skip_and_rebuild_as_well(what: str, whole: Path, root: Path) -> None:
    wanted = Filter(tags_codes=frozenset({tags_code("even")}))
    with Store.open(whole, CONFIG) as store:
        expected = list(pulled(store, "Other", 0, wanted))
        every = everything(store)
    offset = expected[3][0]
    if what == "unit":
        flip(unit_file(root, "Other"), offset * UNIT_BYTES + 6, 1)
    else:
        path, at = record_place(root, every["Other", 0], offset)
        flip(path, at + 21, 5)
        del expected[3]
    with Store.open(root, CONFIG) as store:
        assert list(pulled(store, "Other", 0, wanted)) == expected
        first = store.read("Other", 0, QueueOffset(offset), 1, wanted)
        assert isinstance(first, Found)


def test_a_record_of_another_topic_is_not_served(tmp_path: Path) -> None:
    """Queue, offset, size and all of the header but the position are the same in both topics."""
    with Store.open(tmp_path, CONFIG) as store:
        for number in range(40):
            topic = ("AAAAA", "BBBBB")[number % 2]
            append(store, [record(b"%02d" % number, topic=topic)])
        wanted = [bytes(message) for _, message in pulled(store, "BBBBB", 0)]
    mine, other = (
        tmp_path / "consumequeue" / name / "0" / f"{0:020d}" for name in ("BBBBB", "AAAAA")
    )
    data = bytearray(mine.read_bytes())
    data[40:48] = other.read_bytes()[40:48]
    mine.write_bytes(data)
    with Store.open(tmp_path, CONFIG) as store:
        assert [bytes(message) for _, message in pulled(store, "BBBBB", 0)] == wanted
        assert store.damage.repaired_units == 1


def test_many_units_with_addresses_of_both_kinds(tmp_path: Path) -> None:
    from msgspec.structs import replace

    config = small_config(segment_bytes=1 << 20, queue_segment_units=5000)
    v6 = host("fe80::1", 10911)
    limits = ReadLimits(memory_count_max=500, memory_bytes_max=1 << 20)
    with Store.open(tmp_path, config) as store:
        for number in range(600):
            one = record(b"%04d" % number)
            kind = number // 150 % 4
            one = replace(one, born_host=v6) if kind & 1 else one
            append(store, [replace(one, store_host=v6) if kind & 2 else one])
    for path, at in ((None, 0), (tmp_path / "consumequeue/Topic/0" / f"{0:020d}", 300 * 20 + 7)):
        if path is not None:
            flip(path, at, 2)
        with Store.open(tmp_path, config) as store:
            bodies: list[bytes] = []
            offset = QueueOffset(0)
            while offset < 600:
                outcome = store.read("Topic", 0, offset, 500, limits=limits)
                assert isinstance(outcome, Found)
                bodies += [decode_record(message).body for message in outcome.messages]
                offset = outcome.next_offset
            assert bodies == [b"%04d" % number for number in range(600)]
            assert store.damage.repaired_units == (path is not None)


def test_a_segment_truncated_under_an_open_store(root: Path) -> None:
    with Store.open(root, CONFIG) as store:
        expected = everything(store)
        path = sorted((root / "commitlog").iterdir())[1]
        os.truncate(path, 0)
        found = everything(store)
        gone = range(int(path.name), int(path.name) + CONFIG.segment_bytes)
        for queue, messages in expected.items():
            assert found[queue] == [
                each for each in messages if decode_record(each[1]).physical_offset not in gone
            ]


def test_a_search_in_the_log_is_bounded_per_read(tmp_path: Path) -> None:
    config = small_config(segment_bytes=1 << 22)
    with Store.open(tmp_path, config) as store:
        append(store, [record(b"first")])
        for _ in range(40):
            append(store, [record(bytes(100_000), queue_id=1)])
        append(store, [record(b"second")])
        append(store, [record(b"third")])
    path = tmp_path / "consumequeue/Topic/0" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[20:28] = struct.pack(">q", 77)
    path.write_bytes(data)
    with Store.open(tmp_path, config) as store:
        outcomes = []
        for _ in range(10):
            outcomes.append(store.read("Topic", 0, QueueOffset(1), 2))
            if isinstance(outcomes[-1], Found):
                break
        assert [type(one) for one in outcomes] == [MessageDamaged] * 3 + [Found]
        assert all(one.next_offset == 1 for one in outcomes[:-1])
        found = store.read("Topic", 0, QueueOffset(1), 2)
        assert isinstance(found, Found)
        assert [decode_record(one).body for one in found.messages] == [b"second", b"third"]


@pytest.mark.parametrize("offset", range(1, 9))
def test_a_reader_that_starts_among_damaged_units_gets_all_that_follow(
    offset: int, whole: Path, root: Path
) -> None:
    path = unit_file(root)
    data = bytearray(path.read_bytes())
    data[UNIT_BYTES : 9 * UNIT_BYTES] = b"?" * (8 * UNIT_BYTES)
    path.write_bytes(data)
    with Store.open(whole, CONFIG) as store:
        expected = everything(store)["Topic", 0]
    with Store.open(root, CONFIG) as store:
        found = store.read("Topic", 0, QueueOffset(offset), 1)
        assert isinstance(found, Found)
        assert everything(store)["Topic", 0] == expected
        assert store.damage.messages == 0


def test_searches_beyond_the_concurrency_limit_all_end(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_repair, "_SEARCHES_MAX", 2)
    monkeypatch.setattr(unit_repair, "_SLICE_BYTES", 100)
    for topic, queue_id in QUEUES:
        path = unit_file(root, topic, queue_id)
        path.write_bytes(b"?" * 9 * UNIT_BYTES + path.read_bytes()[9 * UNIT_BYTES :])
    with Store.open(root, CONFIG) as store:
        left = set(QUEUES)
        for _ in range(500):
            left = {
                queue
                for queue in left
                if not isinstance(store.read(*queue, QueueOffset(0), 1), Found)
            }
        assert not left
        assert [len(messages) for messages in everything(store).values()] == [COUNT // 3] * 3


def test_a_queue_file_before_lost_messages_is_preserved(whole: Path, root: Path) -> None:
    with Store.open(whole, CONFIG) as store:
        expected = everything(store)["Topic", 0]
    # The last messages of the queue's first file, and the first ones of the next.
    for offset in range(8, 12):
        path, at = record_place(root, expected, offset)
        data = bytearray(path.read_bytes())
        data[at : at + 50] = b"?" * 50
        path.write_bytes(data)
    shutil.rmtree(root / "consumequeue")
    (root / "abort").touch()
    left = [message for message in expected if not 8 <= message[0] < 12]
    for _ in range(3):
        with Store.open(root, CONFIG) as store:
            assert list(pulled(store, "Topic", 0)) == left


@pytest.mark.parametrize("crashed", [False, True])
def test_a_recreated_topic_whose_last_messages_are_lost_is_preserved(
    crashed: bool, tmp_path: Path
) -> None:
    with Store.open(tmp_path, CONFIG) as store:
        append(store, [record(b"of the removed topic")])
        store.remove_topic("Topic")
        last = [append(store, [record(b"new")]).physical_offset for _ in range(5)][-1]
        for _ in range(100):
            append(store, [record(bytes(500), topic="Other")])
    path = unit_file(tmp_path)
    data = bytearray(path.read_bytes())
    # As a repair marks the unit of a lost message.
    struct.pack_into(">qi", data, 4 * UNIT_BYTES, last, FILLER_SIZE)
    path.write_bytes(data)
    if crashed:
        (tmp_path / "abort").touch()
    with Store.open(tmp_path, CONFIG) as store:
        assert store.queue_range("Topic", 0) == (0, 5)
        assert [offset for offset, _ in pulled(store, "Topic", 0)][:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("crashed", [False, True])
def test_a_damaged_body_of_the_last_message_is_preserved(root: Path, crashed: bool) -> None:
    with Store.open(root, CONFIG) as store:
        last = decode_record(everything(store)["Other", 0][-1][1])
        end = store.written_end
    size = CONFIG.segment_bytes
    place = last.physical_offset // size * size
    flip(root / "commitlog" / f"{place:020d}", last.physical_offset - place + 90, 2)
    if crashed:
        (root / "abort").touch()
    with Store.open(root, CONFIG) as store:
        assert store.written_end == end == last.physical_offset + last.size
        assert [number for number, _ in everything(store)["Other", 0]] == [*range(30)]
        assert append(store, [record(b"next", topic="Other")]).queue_offset == 30


def places(root: Path) -> list[Path]:
    """Return the files that are no longer written, and all queues and index files."""
    logs = sorted((root / "commitlog").iterdir())[:-1]
    return logs + sorted(
        path
        for name in ("consumequeue", "index")
        for path in (root / name).rglob("*")
        if path.is_file()
    )


@pytest.mark.parametrize("seed", range(8))
def test_any_one_bit(seed: int, whole: Path, tmp_path: Path) -> None:
    with Store.open(whole, CONFIG) as store:
        expected = everything(store)
    chosen = random.Random(seed)
    files = places(whole)
    for number in range(40):
        root = Path(shutil.copytree(whole, tmp_path / str(number)))
        path = root / chosen.choice(files).relative_to(whole)
        at = chosen.randrange(path.stat().st_size)
        flip(path, at, chosen.randrange(8))
        hit = -1 if path.parent.name != "commitlog" else int(path.name) + at
        with Store.open(root, CONFIG) as store:
            check_all_but_one(expected, everything(store), hit, store.damage.messages)
            store.messages_by_key("Topic", "k", 32, 0, 1 << 60)
        shutil.rmtree(root)


def check_all_but_one(
    expected: dict[tuple[str, int], list[tuple[int, bytes]]],
    found: dict[tuple[str, int], list[tuple[int, bytes]]],
    hit: int,
    reported: int,
) -> None:
    """All messages are read in order; only the one with the flipped bit may be missing or wrong."""
    missing = 0
    for queue, messages in expected.items():
        for offset, message in messages:
            view = decode_record(message)
            same = dict(found[queue]).get(offset) == message
            if not view.physical_offset <= hit < view.physical_offset + view.size:
                assert same, (queue, offset)
            missing += offset not in dict(found[queue])
        offsets = [offset for offset, _ in found[queue]]
        assert offsets == sorted(offsets)
        assert set(offsets) <= set(dict(messages))
    assert missing == reported <= 1
