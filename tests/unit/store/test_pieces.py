"""Records examined and entered together give the same as one by one, whatever is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice, repeat
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appending import append_all
from turbopump.core import Records
from turbopump.machine import Machine
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store import Store, log_scan
from turbopump.store.commit_log import CommitLog
from turbopump.store.dispatch import ANY_TAG, Watch
from turbopump.store.log_scan import scan
from turbopump.store.outcomes import Arrival
from turbopump.wire.hashing import tags_code
from turbopump.wire.hosts import host
from turbopump.wire.names import SCHEDULE_TOPIC
from turbopump.wire.record import Record, encode_blank
from turbopump.wire.sysflag import Transaction
from unit.store.support import GOLDEN_LEVELS, HOST, ManualClock, record, small_config

SEGMENT_BYTES = 8192
V6 = host("2001:db8::1", 1)
NOW_MS = 1_700_000_000_000


@dataclass
class LogBytes:
    """Two files of a log, in memory."""

    data: bytes
    segment_bytes: int = SEGMENT_BYTES

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(range(0, len(self.data), self.segment_bytes))

    def rest_of_segment(self, position: int) -> memoryview:
        end = position - position % self.segment_bytes + self.segment_bytes
        return memoryview(self.data)[position:end]

    def data_end(self, _: int) -> int:
        return len(self.data)


@contextmanager
def pieces(records: int) -> Iterator[None]:
    """Examine up to a number of records together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_scan, "_PIECE_BYTES", 1000)
        patch.setattr(log_scan, "_PIECE_RECORDS", records)
        yield


def one_by_one(found: Records | PhysicalOffset) -> list[Any]:
    if not isinstance(found, Records):
        return [found]
    return [tuple(getattr(entry, name) for name in NAMES) for entry in found]


NAMES = (
    "size", "queue_id", "queue_offset", "physical_offset", "sys_flag", "store_timestamp_ms",
    "topic", "properties",
)  # fmt: skip
RECORDS = st.builds(
    Record,
    topic=st.sampled_from([b"a", b"a", b"a", b"longer", "ü".encode(), b"/", b"\xff"]),
    queue_id=st.sampled_from([0, 0, 1, 2]),
    body=st.sampled_from([b"body", b"body", b"", b"long body" * 5]),
    properties=st.sampled_from([b"K\x01v", b"K\x01w", b"", b"K\x01\0", b"K\x01longer\x02"]),
    sys_flag=st.sampled_from([0, 0, 0, int(Transaction.PREPARED)]),
    born_timestamp_ms=st.just(1),
    born_host=st.sampled_from([HOST] * 20 + [V6]),
    store_host=st.sampled_from([HOST] * 20 + [V6]),
)
GROUPS = st.lists(st.tuples(RECORDS, st.integers(1, 12)), max_size=20)
PLACES = st.integers(0, 2 * SEGMENT_BYTES - 1)
DAMAGES = st.lists(
    st.tuples(PLACES, st.sampled_from([b"\0" * 40, b"\xff", b"\x01", b""])), max_size=3
)


def log_of(groups: list[tuple[Record, int]], damages: list[tuple[int, bytes]]) -> LogBytes:
    """Return a log with each record as often as given, as much as fits."""
    data = bytearray()
    for each, count in groups:
        for number in range(count):
            room = SEGMENT_BYTES - len(data) % SEGMENT_BYTES
            if each.size + 8 > room:
                data += encode_blank(room).ljust(room, b"\0")
            if len(data) + each.size > 2 * SEGMENT_BYTES:
                break
            data += each.encode(QueueOffset(number), PhysicalOffset(len(data)), NOW_MS + number)
    data = data[: 2 * SEGMENT_BYTES].ljust(2 * SEGMENT_BYTES, b"\0")
    for at, damage in damages:
        if damage:
            data[at : at + len(damage)] = damage
        else:
            # Torn: everything behind it is lost.
            data[at:] = bytes(len(data) - at)
    return LogBytes(bytes(data[: 2 * SEGMENT_BYTES]))


@given(GROUPS, DAMAGES, st.booleans(), st.one_of(st.none(), PLACES), st.one_of(st.none(), PLACES))
def test_scans_find_the_same(
    groups: list[tuple[Record, int]],
    damages: list[tuple[int, bytes]],
    check_crc: bool,
    end: PhysicalOffset | None,
    synced_to: PhysicalOffset | None,
) -> None:
    log = cast(CommitLog, log_of(groups, damages))

    def scanned() -> list[Any]:
        start = PhysicalOffset(0)
        found = scan(log, start, check_crc=check_crc, end=end, synced_to=synced_to)
        return [entry for part in found for entry in one_by_one(part)]

    with pieces(1):
        expected = scanned()
    with pieces(5):
        assert scanned() == expected
    assert scanned() == expected


TOPICS = st.sampled_from(["a", "a", "b", "removed", SCHEDULE_TOPIC])
STEPS = st.lists(
    st.tuples(TOPICS, st.integers(0, 1), st.integers(1, 15), st.booleans()), max_size=8
)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    STEPS,
    st.sampled_from(["", "queues", "queue", "index", "queues and index", "checkpoint"]),
    st.integers(0, 400),
    st.booleans(),
)
def test_stores_are_recovered_to_the_same_files(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, int, bool]],
    missing: str,
    cut_bytes: int,
    crashed: bool,
) -> None:
    root = tmp_path_factory.mktemp("stores")
    made = filled(root / "made", steps)
    damage(made, missing, cut_bytes, crashed)
    outcomes = []
    for records in (1, 5, 2048):
        copied = root / str(records)
        shutil.copytree(made, copied)
        with pieces(records):
            outcomes.append(recovered(copied))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def filled(root: Path, steps: list[tuple[str, int, int, bool]]) -> Path:
    with Store.open(root, small_config(), machine=Machine(clock=ManualClock())) as store:
        for number, (topic, queue_id, count, is_half) in enumerate(steps):
            flag = int(Transaction.PREPARED) if is_half and number % 3 == 0 else 0
            properties = {"TAGS": f"t{number % 2}", "KEYS": f"k{number} ü", "DELAY": "2"}
            one = record(b"x" * number, topic=topic, queue_id=queue_id, sys_flag=flag, **properties)
            append_all(store, [(one,)] * count)
            if topic == "removed" and is_half:
                store.remove_topic(topic)
    return root


def damage(root: Path, missing: str, cut_bytes: int, crashed: bool) -> None:
    if "queues" in missing:
        shutil.rmtree(root / "consumequeue", ignore_errors=True)
    if missing == "queue":
        shutil.rmtree(root / "consumequeue" / "a" / "0", ignore_errors=True)
    if "index" in missing:
        shutil.rmtree(root / "index", ignore_errors=True)
    if missing == "checkpoint" or cut_bytes:
        (root / "checkpoint").unlink(missing_ok=True)
    if crashed:
        (root / "abort").touch()
    logs = sorted((root / "commitlog").iterdir())
    if cut_bytes and crashed and logs:
        data = logs[-1].read_bytes()
        used = len(data.rstrip(b"\0"))
        logs[-1].write_bytes(data[: max(0, used - cut_bytes)].ljust(len(data), b"\0"))


def recovered(root: Path) -> Any:
    with Store.open(root, small_config(), machine=Machine(clock=ManualClock())) as store:
        found = store.recovered
    return found, contents(root)


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


# --- slaves ---------------------------------------------------------------------------------------

SLAVE_CONFIG = small_config(segment_bytes=16 * 1024, delay_levels=GOLDEN_LEVELS)
MIXED_PROPERTIES = st.sampled_from([
    {"TAGS": "t0", "KEYS": "k1 k2"},
    {"TAGS": "t1", "KEYS": "k1 ü"},
    {"TAGS": "", "UNIQ_KEY": "u"},
    {"TAGS": "ü"},
    {"KEYS": "k", "DELAY": "2"},
    {},
])  # fmt: skip
SENDS = st.lists(
    st.tuples(TOPICS, st.integers(0, 2), st.integers(1, 40), MIXED_PROPERTIES, st.integers(0, 9)),
    min_size=1,
    max_size=12,
)
SMALL_PIECES_MAX = 60
CUTS = st.lists(
    st.tuples(st.integers(1, 9000), st.sampled_from([0, 0, 0, 1, 50, 700, 5000])), min_size=1
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(SENDS, CUTS, st.booleans(), st.booleans())
def test_slaves_add_the_same_entries(
    tmp_path_factory: pytest.TempPathFactory,
    sends: list[tuple[str, int, int, dict[str, str], int]],
    cuts: list[tuple[int, int]],
    begins_late: bool,
    is_told: bool,
) -> None:
    """Wherever chunks end, and however far behind them messages are confirmed to be on disk."""
    root = tmp_path_factory.mktemp("slaves")
    clock = ManualClock()
    with Store.open(root / "m", SLAVE_CONFIG, machine=Machine(clock=clock)) as master:
        removed = sent(master, sends, clock)
        start = min(16 * 1024 if begins_late else 0, master.written_end)
        start = start if master.raw(PhysicalOffset(start), 1) is not None else 0
        outcomes = []
        for records in (1, 5, 2048):
            with pieces(records):
                directory = root / str(records)
                steps = followed(directory, master, PhysicalOffset(start), cuts, removed, is_told)
                outcomes.append((steps, contents(directory)))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def sent(
    master: Store, sends: list[tuple[str, int, int, dict[str, str], int]], clock: ManualClock
) -> dict[str, int]:
    """Store messages; return the topics that were removed, and where the log ended then."""
    removed: dict[str, int] = {}
    for topic, queue_id, count, properties, chance in sends:
        flag = int(Transaction.PREPARED) if chance == 0 else 0
        queues = [queue_id] if chance < 5 else [2, 0, 1]
        groups = [
            [record(b"x" * chance, topic=topic, queue_id=each, sys_flag=flag, **properties)]
            for each in queues * count
        ]
        for group in groups:
            clock.advance(1)
            append_all(master, [group])
        if topic == "removed" and chance % 2:
            master.remove_topic(topic)
            removed[topic] = master.written_end
    return removed


def followed(
    root: Path,
    master: Store,
    position: PhysicalOffset,
    cuts: list[tuple[int, int]],
    removed: dict[str, int],
    is_told: bool,
) -> list[Any]:
    """Return the state of a slave after each chunk of a master's log."""
    steps: list[Any] = []
    confirmed = PhysicalOffset(0)
    watched = {("a", 0): Watch({tags_code("t1"), 0}), ("b", 1): Watch({ANY_TAG})}
    told: list[Arrival] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        Store.open(root, SLAVE_CONFIG, machine=Machine(clock=ManualClock())) as slave,
    ):
        patch.setattr(Store, "readable_end", property(lambda _: confirmed))
        if is_told:
            slave.listen(told.extend, watched)
        # A log has thousands of chunks of a few bytes, all of the same layout.
        large = repeat((SLAVE_CONFIG.segment_bytes, 0))
        for size, unconfirmed in chain(islice(cycle(cuts), SMALL_PIECES_MAX), large):
            piece = raw(master, position, size)
            if not piece:
                break
            slave.append_raw(position, piece)
            position = PhysicalOffset(position + len(piece))
            confirmed = PhysicalOffset(max(confirmed, position - unconfirmed))
            slave.dispatch()
            steps.append(state(slave))
            for topic, end in removed.items():
                if end <= position:
                    slave.remove_topic(topic, PhysicalOffset(end))
        confirmed = position
        slave.dispatch()
        told.sort(key=lambda arrival: (arrival.topic, arrival.queue_id))
        seen = [watch.seen for watch in watched.values()]
        return [*steps, state(slave), told, seen]


def raw(master: Store, position: PhysicalOffset, size: int) -> bytes:
    """Return bytes of a master's log within one file."""
    in_file = SLAVE_CONFIG.segment_bytes - position % SLAVE_CONFIG.segment_bytes
    size = min(size, in_file, master.written_end - position)
    return bytes(master._log.view(position, size) or b"")


def state(slave: Store) -> Any:
    """Return the entries, and what a checkpoint would contain."""
    queues = {
        queue.key: (queue.min_offset, queue.max_offset, queue.next_offset, queue.physical_end)
        for queue in slave._queues
    }
    waiting = [(queue.key, since) for queue, since in slave._queues._waiting.items()]
    dispatcher = slave._dispatcher
    return (
        queues, waiting, slave._queues.entered_to, dispatcher.first_waiting,
        dispatcher.followed_to, dispatcher.followed_ms, dispatcher.store_timestamp_ms,
    )  # fmt: skip
