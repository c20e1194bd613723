"""A log that lacks flushed data is rejected, unchanged; repair accepts that loss, and no more."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from appending import append
from turbopump.errors import StoreDamaged
from turbopump.machine import Machine
from turbopump.message import PhysicalOffset
from turbopump.store import Files, Found, OffsetTooSmall, RetentionConfig, Store
from turbopump.store.outcomes import MessageDamaged
from turbopump.store.repair import stopped_store
from turbopump.wire.record import decode_record
from unit.store.disks import Killed, KilledFiles
from unit.store.support import ManualClock, bodies, offset, record, small_config

pytestmark = pytest.mark.slow

CONFIG = small_config(queue_segment_units=100)
SEGMENT = 4096
COUNT = 40
"""Four messages fit into a file."""


def body(number: int) -> bytes:
    return b"%03d" % number * 300


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A stopped store with ten files."""
    root = tmp_path / "store"
    clock = ManualClock()
    with Store.open(root, CONFIG, machine=Machine(clock=clock)) as store:
        for number in range(COUNT):
            clock.advance(1000)
            append(store, [record(body(number), topic=f"T{number % 2}", KEYS=f"k{number}")])
    commit(root, {"T0@group": {"0": 20}, "T1@group": {"0": 7}})
    return root


def commit(root: Path, offsets: dict[str, dict[str, int]]) -> None:
    text = json.dumps({"offsetTable": offsets})
    (root / "config" / "consumerOffset.json").write_text(text)


def committed(root: Path) -> object:
    return json.loads((root / "config" / "consumerOffset.json").read_text())["offsetTable"]


def log_file(root: Path, number: int) -> Path:
    return root / "commitlog" / f"{number * SEGMENT:020d}"


def snapshot(root: Path) -> dict[Path, bytes | None]:
    return {
        path.relative_to(root): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def repair(root: Path, files: Files | None = None, segment_bytes: int | None = None) -> int:
    """Repair a store; return about how many messages are lost."""
    with stopped_store(root, files or Files(), ManualClock()) as store:
        losses = store.losses(segment_bytes)
        assert losses is not None
        store.repair(losses)
    return losses.messages


def empty_log(root: Path) -> None:
    for path in (root / "commitlog").iterdir():
        path.unlink()


def no_log(root: Path) -> None:
    shutil.rmtree(root / "commitlog")


def no_end(root: Path) -> None:
    for number in (8, 9):
        log_file(root, number).unlink()


def no_middle(root: Path) -> None:
    for number in (3, 4):
        log_file(root, number).unlink()


def zeros_at_the_end(root: Path) -> None:
    log_file(root, 9).write_bytes(bytes(SEGMENT))


def cut_end(root: Path) -> None:
    os.truncate(log_file(root, 9), 2500)


def cut_middle(root: Path) -> None:
    os.truncate(log_file(root, 4), 1500)


def emptied_middle(root: Path) -> None:
    os.truncate(log_file(root, 4), 0)


DAMAGES: list[Callable[[Path], None]] = [
    empty_log,
    no_log,
    no_end,
    no_middle,
    zeros_at_the_end,
    cut_end,
    cut_middle,
    emptied_middle,
]


def as_stopped(_: Path) -> None:
    pass


def as_crashed(root: Path) -> None:
    (root / "abort").touch()


def as_of_another_broker(root: Path) -> None:
    """Leave a checkpoint with timestamps only, as Apache RocketMQ writes it."""
    data = (root / "checkpoint").read_bytes()
    (root / "checkpoint").write_bytes(data[:24].ljust(4096, b"\0"))


def as_crashed_of_another_broker(root: Path) -> None:
    as_crashed(root)
    as_of_another_broker(root)


STATES = [
    as_stopped,
    *(
        pytest.param(state, marks=pytest.mark.slow)
        for state in (as_crashed, as_of_another_broker, as_crashed_of_another_broker)
    ),
]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_log_that_lacks_messages_is_rejected_unchanged(
    damage: Callable[[Path], None], state: Callable[[Path], None], root: Path, tmp_path: Path
) -> None:
    state(root)
    mount = tmp_path / "mount"
    shutil.copytree(root / "commitlog", mount)
    damage(root)
    before = snapshot(root)
    with pytest.raises(StoreDamaged) as refused:
        Store.open(root, CONFIG)
    assert snapshot(root) == before
    text = str(refused.value)
    assert f"turbopump store repair {root}" in text
    assert "mounted" in text
    assert "T0" in text
    # The file system is mounted again, with everything on it.
    shutil.rmtree(root / "commitlog", ignore_errors=True)
    shutil.copytree(mount, root / "commitlog")
    with Store.open(root, CONFIG) as store:
        assert bodies(store, "T0") == [body(number) for number in range(0, COUNT, 2)]
        assert append(store, [record(b"new", topic="T0")]).queue_offset == 20


LOST_BY_DAMAGE: dict[Callable[[Path], None], range] = {
    empty_log: range(COUNT),
    no_log: range(COUNT),
    no_end: range(32, COUNT),
    no_middle: range(12, 20),
    zeros_at_the_end: range(36, COUNT),
    cut_end: range(38, COUNT),
    cut_middle: range(17, 20),
    emptied_middle: range(16, 20),
}


def read_on(store: Store, topic: str) -> list[bytes]:
    """Read a queue as a consumer does: continue at the answer's next offset."""
    at, found = offset(0), list[bytes]()
    while at < store.queue_range(topic, 0)[1]:
        outcome = store.read(topic, 0, at, 5)
        assert isinstance(outcome, Found | MessageDamaged | OffsetTooSmall), outcome
        if isinstance(outcome, Found):
            found += [
                decode_record(message, check_crc=True).stored_body for message in outcome.messages
            ]
        # The lost range is skipped step by step.
        assert outcome.next_offset > at or isinstance(outcome, MessageDamaged)
        at = outcome.next_offset
    return found


def check_repaired(root: Path, lost: range) -> None:
    """Check that surviving messages keep their offsets, and new ones follow the lost ones."""
    for opened in range(2):
        with Store.open(root, CONFIG) as store:
            for topic in (0, 1):
                kept = [n for n in range(topic, COUNT, 2) if n not in lost]
                new = [b"new %d" % number for number in range(opened * 6)]
                assert read_on(store, f"T{topic}") == [body(n) for n in kept] + new
                for number in kept:
                    outcome = store.read(f"T{topic}", 0, offset(number // 2), 1)
                    assert isinstance(outcome, Found)
                    assert bytes(outcome.messages[0]).find(body(number)) > 0
                if not opened:
                    for number in range(6):
                        appended = append(store, [record(b"new %d" % number, topic=f"T{topic}")])
                        assert appended.queue_offset == 20 + number
            for number in range(COUNT):
                found = store.messages_by_key(f"T{number % 2}", f"k{number}", 9, 0, 1 << 60)
                assert len(found) == (number not in lost)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_repair_preserves_remaining_messages_and_offsets(
    damage: Callable[[Path], None], state: Callable[[Path], None], root: Path
) -> None:
    state(root)
    damage(root)
    lost = LOST_BY_DAMAGE[damage]
    assert repair(root, segment_bytes=SEGMENT) == len(lost)
    with stopped_store(root, Files(), ManualClock()) as store:
        assert store.losses() is None
    assert committed(root) == {"T0@group": {"0": 20}, "T1@group": {"0": 7}}
    check_repaired(root, lost)


def test_offsets_alone_reveal_a_missing_log(root: Path) -> None:
    shutil.rmtree(root / "consumequeue")
    (root / "checkpoint").unlink()
    no_log(root)
    with pytest.raises(StoreDamaged, match=r"consumerOffset\.json says that groups have consumed"):
        Store.open(root, CONFIG)
    repair(root, segment_bytes=SEGMENT)
    # New messages start at 0, and no group is ahead of them.
    assert committed(root) == {"T0@group": {"0": 0}, "T1@group": {"0": 0}}
    with Store.open(root, CONFIG) as store:
        assert append(store, [record(b"new", topic="T0")]).queue_offset == 0
        assert bodies(store, "T0") == [b"new"]


def test_offsets_committed_before_the_first_message_do_not_count_as_loss(tmp_path: Path) -> None:
    Store.open(tmp_path, CONFIG).close()
    commit(tmp_path, {"T@group": {"0": 7}})
    Store.open(tmp_path, CONFIG).close()


def test_offsets_behind_the_end_of_their_queue_are_lowered(root: Path) -> None:
    """Units were lost together with the log: new messages reuse offsets."""
    commit(root, {"T0@group": {"0": 20, "3": 9}, "T1@group": {"0": 7}})
    (root / "config" / "delayOffset.json").write_text('{"offsetTable":{"1":5}}')
    shutil.rmtree(root / "consumequeue" / "T0")
    empty_log(root)
    repair(root, segment_bytes=SEGMENT)
    assert committed(root) == {"T0@group": {"0": 0, "3": 0}, "T1@group": {"0": 7}}
    [backup] = root.glob("repair-*")
    kept = json.loads((backup / "config" / "consumerOffset.json").read_text())
    assert kept["offsetTable"]["T0@group"] == {"0": 20, "3": 9}
    assert json.loads((root / "config" / "delayOffset.json").read_text()) == {
        "offsetTable": {"1": 0}
    }


@pytest.mark.parametrize("damage", [empty_log, no_end, no_middle, zeros_at_the_end])
def test_after_a_repair_killed_half_way_the_store_is_rejected_or_complete(
    damage: Callable[[Path], None], root: Path, tmp_path: Path
) -> None:
    damage(root)
    for changes in range(200):
        copy = tmp_path / f"killed{changes}"
        shutil.copytree(root, copy)
        try:
            repair(copy, KilledFiles(changes), segment_bytes=SEGMENT)
        except Killed:
            try:
                Store.open(copy, CONFIG).close()
            except StoreDamaged:
                repair(copy, segment_bytes=SEGMENT)
            check_repaired(copy, LOST_BY_DAMAGE[damage])
            shutil.rmtree(copy)
            continue
        break
    else:
        raise AssertionError("the repair did not complete")
    assert changes > 5


def test_a_slave_with_half_a_message_at_its_end_is_complete(root: Path, tmp_path: Path) -> None:
    with Store.open(root, CONFIG) as master, Store.open(tmp_path / "slave", CONFIG) as slave:
        position = PhysicalOffset(0)
        while (piece := master.raw(position, 700)) is not None and position < 9000:
            slave.append_raw(position, piece)
            position = PhysicalOffset(position + len(piece))
        count = len(bodies(slave, "T0"))
    with Store.open(tmp_path / "slave", CONFIG) as slave:
        assert slave.written_end < position
        assert len(bodies(slave, "T0")) == count


@pytest.mark.parametrize("damage", [no_middle, no_end])
def test_a_search_by_time_skips_lost_messages(damage: Callable[[Path], None], root: Path) -> None:
    damage(root)
    repair(root)
    start_ms = ManualClock().now_ms()
    kept = [number for number in range(0, COUNT, 2) if number not in LOST_BY_DAMAGE[damage]]
    with Store.open(root, CONFIG) as store:
        for number in range(0, COUNT, 2):
            found = store.offset_by_time("T0", 0, start_ms + (number + 1) * 1000)
            nearest = min(kept, key=lambda one: abs(one - number))
            assert abs(found - number // 2) == abs(nearest - number) // 2


def test_messages_older_than_a_gap_expire_like_the_rest(root: Path) -> None:
    no_middle(root)
    repair(root)
    clock = ManualClock()
    config = small_config(
        queue_segment_units=100, retention=RetentionConfig(segments_per_run_max=99)
    )
    with Store.open(root, config, machine=Machine(clock=clock)) as store:
        clock.advance(73 * 3_600_000)
        store.retain(at_any_hour=True)
        assert [path.name for path in (root / "commitlog").iterdir()] == [f"{9 * SEGMENT:020d}"]


def flip_a_bit(root: Path, number: int) -> None:
    data = bytearray(log_file(root, number).read_bytes())
    data[1500] ^= 1
    log_file(root, number).write_bytes(data)


@pytest.mark.parametrize("state", STATES)
def test_damage_before_the_end_costs_one_message(
    state: Callable[[Path], None], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state(root)
    flip_a_bit(root, 9)
    for opened in range(2):
        with Store.open(root, CONFIG) as store:
            assert store.queue_range("T0", 0) == store.queue_range("T1", 0) == (0, 20)
            assert store.recovered.cut_bytes == 0
            assert "is damaged from 37865 to" in caplog.text
            for number in range(36, COUNT):
                found = store.messages_by_key(f"T{number % 2}", f"k{number}", 9, 0, 1 << 60)
                assert [bytes(each).count(body(number)) for each in found] == [number != 37]
        caplog.clear()
        if opened == 0:
            # Queues are rebuilt from what can be read.
            shutil.rmtree(root / "consumequeue" / "T0")


def test_damage_in_an_older_file_does_not_stop_a_replay(root: Path) -> None:
    flip_a_bit(root, 2)
    data = bytearray(log_file(root, 2).read_bytes())
    # Not only the body, which a replay does not check.
    data[1000:1600] = bytes(600)
    log_file(root, 2).write_bytes(data)
    shutil.rmtree(root / "consumequeue")
    with Store.open(root, CONFIG) as store:
        assert bodies(store, "T0") == [body(n) for n in range(0, COUNT, 2)]
        assert bodies(store, "T1") == [body(n) for n in range(1, COUNT, 2) if n != 9]


def test_the_only_file_is_cut(tmp_path: Path) -> None:
    with Store.open(tmp_path, CONFIG) as store:
        for number in range(3):
            append(store, [record(body(number))])
    os.truncate(log_file(tmp_path, 0), 1500)
    with pytest.raises(StoreDamaged, match=f"1500 bytes instead of {SEGMENT}") as refused:
        Store.open(tmp_path, CONFIG)
    assert str(refused.value).endswith(f"--segment-bytes {SEGMENT}")
    assert repair(tmp_path, segment_bytes=SEGMENT) == 2
    with Store.open(tmp_path, CONFIG) as store:
        assert append(store, [record(b"new")]).queue_offset == 3
        assert read_on(store, "Topic") == [body(0), b"new"]
