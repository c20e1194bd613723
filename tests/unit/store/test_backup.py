"""Copies of a store whose broker writes, deletes and cuts files meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from appending import append
from turbopump.errors import InvalidArgument, StoreDamaged, StoreInUse
from turbopump.message import PhysicalOffset
from turbopump.store import Files, Store
from turbopump.store.backup import back_up
from turbopump.store.inspect import inspect
from unit.store.support import bodies, record, small_config, unpack

CONFIG = small_config()
COUNT = 100


def body(number: int) -> bytes:
    return b"%04d" % number * 30


def fill(store: Store, first: int, count: int = 1) -> None:
    for number in range(first, first + count):
        append(store, [record(body(number), queue_id=number % 2, KEYS=f"k{number}")])


def numbers(root: Path) -> list[int]:
    """Open a copy as a broker would; return the messages in its queues, and add one."""
    assert inspect(root).damage == []
    with Store.open(root, CONFIG) as store:
        assert store.recovered.crashed
        assert store.recovered.cut_bytes == 0
        found = sorted(int(text[:4]) for queue in (0, 1) for text in bodies(store, queue_id=queue))
        fill(store, 9998)
        assert bodies(store, queue_id=0)[-1] == body(9998)
        last = f"k{found[-1]}"
        assert len(store.messages_by_key("Topic", last, 10, 0, 1 << 60)) == 1
    return found


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A stopped store."""
    root = tmp_path / "store"
    with Store.open(root, CONFIG) as store:
        fill(store, 0, COUNT)
    return root


def segments(root: Path) -> list[Path]:
    return sorted((root / "commitlog").iterdir())


QUEUES_AND_REBUILT = "consumequeue", "repair-unfinished/consumequeue"


class Watched(Files):
    """Runs something whenever a file of a copy is about to be written."""

    def __init__(self, act: Callable[[Path], None]) -> None:
        self._act = act

    def open_new(self, path: Path) -> int:
        self._act(path)
        return super().open_new(path)


def test_a_running_store_is_copied(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", CONFIG) as running:
        fill(running, 0, COUNT)
        seen: list[None] = []
        backup = back_up(tmp_path / "store", tmp_path / "copy", lambda: seen.append(None))
        assert (backup.log_start, backup.log_end) == (0, running.written_end)
        assert len(seen) == len(segments(tmp_path / "store"))
    assert numbers(tmp_path / "copy") == list(range(COUNT))


def test_a_stopped_store_is_copied(store: Path, tmp_path: Path) -> None:
    back_up(store, tmp_path / "copy")
    assert numbers(tmp_path / "copy") == list(range(COUNT))


def test_a_store_without_messages_is_copied(tmp_path: Path) -> None:
    Store.open(tmp_path / "store", CONFIG).close()
    back_up(tmp_path / "store", tmp_path / "copy")
    with Store.open(tmp_path / "copy", CONFIG) as copy:
        fill(copy, 0)


def test_what_is_stored_during_the_copy_leaves_no_gap(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", CONFIG) as running:
        fill(running, 0, COUNT)
        stored = COUNT

        def store_more(_: Path) -> None:
            nonlocal stored
            fill(running, stored, 7)
            stored += 7
            running.tick()

        back_up(tmp_path / "store", tmp_path / "copy", files=Watched(store_more))
    found = numbers(tmp_path / "copy")
    assert found == list(range(len(found)))
    assert COUNT < len(found) < stored


def test_an_incomplete_record_at_the_end_is_left_out(store: Path, tmp_path: Path) -> None:
    (store / "abort").touch()
    with Store.open(tmp_path / "other", CONFIG) as other:
        fill(other, 0)
        torn = segments(tmp_path / "other")[0].read_bytes()[: int(other.written_end) - 9]
    end = inspect(store).max_offset
    last = segments(store)[-1]
    data = bytearray(last.read_bytes())
    at = end - int(last.name)
    data[at : at + len(torn)] = torn
    last.write_bytes(data)
    assert back_up(store, tmp_path / "copy").log_end == end
    assert numbers(tmp_path / "copy") == list(range(COUNT))


def test_files_that_expire_during_the_copy_are_left_out(store: Path, tmp_path: Path) -> None:
    first = segments(store)[0]
    queue = store / "consumequeue" / "Topic" / "0"

    def expire(path: Path) -> None:
        if path.parent.name == "commitlog" and path.name == first.name:
            for each in segments(store)[:3]:
                each.unlink()
        if path.parent.name == "0" and path.name == first.name:
            for each in sorted(queue.iterdir())[:2]:
                each.unlink()

    backup = back_up(store, tmp_path / "copy", files=Watched(expire))
    assert backup.log_start == int(segments(store)[0].name) > 0
    assert [path.name for path in segments(tmp_path / "copy")] == [
        path.name for path in segments(store)
    ]
    found = numbers(tmp_path / "copy")
    assert found == list(range(found[0], COUNT))
    assert found[0] > 0


@pytest.mark.parametrize("queue", ["0", "1"])
def test_a_topic_that_is_removed_during_the_copy_is_removed_in_it(
    queue: str, store: Path, tmp_path: Path
) -> None:
    with Store.open(store, CONFIG) as running:

        def remove(path: Path) -> None:
            if path.parent.name == queue and running.queue_range("Topic", 0)[1]:
                running.remove_topic("Topic")

        back_up(store, tmp_path / "copy", files=Watched(remove))
    assert inspect(tmp_path / "copy").damage == []
    with Store.open(tmp_path / "copy", CONFIG) as copy:
        assert copy.queue_ids() == []


def test_a_log_that_is_cut_during_the_copy_is_refused(store: Path, tmp_path: Path) -> None:
    last = segments(store)[-1]

    def cut() -> None:
        last.write_bytes(bytes(len(last.read_bytes())))

    with pytest.raises(StoreDamaged, match="was cut while it was copied: make the backup again"):
        back_up(store, tmp_path / "copy", cut)
    assert not (tmp_path / "copy").exists()


def test_a_log_that_is_cut_before_it_is_copied_is_refused(store: Path, tmp_path: Path) -> None:
    with Store.open(store, CONFIG) as running:
        positions = [running.message_start(PhysicalOffset(6000))]

        def cut(path: Path) -> None:
            if path.parent.name == "0" and positions:
                running.cut(positions.pop())
                fill(running, 0, COUNT)

        with pytest.raises(StoreDamaged, match="was cut while it was copied: make the backup aga"):
            back_up(store, tmp_path / "copy", files=Watched(cut))
    assert not (tmp_path / "copy").exists()


def test_a_backup_takes_no_space_for_what_is_not_used(tmp_path: Path) -> None:
    config = small_config(segment_bytes=64 * 1024 * 1024)
    with Store.open(tmp_path / "store", config) as running:
        fill(running, 0)
        back_up(tmp_path / "store", tmp_path / "copy")
    (path,) = segments(tmp_path / "copy")
    assert path.stat().st_size == config.segment_bytes
    assert path.stat().st_blocks * 512 < 1024 * 1024


def test_tables_are_copied_and_other_files_are_not(store: Path, tmp_path: Path) -> None:
    (store / "config" / "topics.json").write_text("{}")
    (store / "damaged-4096").mkdir()
    (store / "spare.tmp").touch()
    back_up(store, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "abort", "checkpoint", "commitlog", "config", "consumequeue", "index",
    ]  # fmt: skip
    assert (tmp_path / "copy" / "config" / "topics.json").read_text() == "{}"


@pytest.mark.parametrize("archive", ["store", "store_crash", "store_trimmed"])
def test_stores_of_apache_rocketmq_are_copied(archive: str, tmp_path: Path) -> None:
    root = unpack(archive, tmp_path / "original")
    before, _ = inspect(root), back_up(root, tmp_path / "copy")
    after = inspect(tmp_path / "copy")
    assert after.damage == []
    assert (after.messages, after.max_offset) == (before.messages, before.max_offset)


def test_damage_is_not_taken_for_the_end_of_a_log_without_positions(
    store: Path, tmp_path: Path
) -> None:
    path = store / "checkpoint"
    # As of Apache RocketMQ: timestamps only.
    path.write_bytes(path.read_bytes()[:24].ljust(4096, b"\0"))
    first = segments(store)[0]
    data = bytearray(first.read_bytes())
    data[1000:1010] = b"?" * 10
    first.write_bytes(data)
    end = inspect(store).max_offset
    assert back_up(store, tmp_path / "copy").log_end == end
    assert inspect(tmp_path / "copy").messages == inspect(store).messages


def test_queues_whose_rebuild_was_interrupted_are_rebuilt_from_the_copy(
    store: Path, tmp_path: Path
) -> None:
    queue, aside = (store / each / "Topic" / "0" for each in QUEUES_AND_REBUILT)
    aside.parent.mkdir(parents=True)
    queue.rename(aside)
    # Killed meanwhile: only the last file is there again.
    queue.mkdir()
    shutil.copy(max(aside.iterdir()), queue)
    back_up(store, tmp_path / "copy")
    with Store.open(tmp_path / "copy", CONFIG) as copy:
        assert bodies(copy, queue_id=0) == [body(number) for number in range(0, COUNT, 2)]


def test_a_wrong_place_is_refused(store: Path, tmp_path: Path) -> None:
    for target, error in (
        (store / "copy", "must be outside of the store"),
        (store, "must be outside of the store"),
        (tmp_path, "exists: name a new directory"),
    ):
        with pytest.raises(InvalidArgument, match=error):
            back_up(store, target)
    with pytest.raises(InvalidArgument, match="has no commitlog in it"):
        back_up(tmp_path, tmp_path / "copy")


def test_a_backup_never_grows_in_the_place_of_its_store(store: Path, tmp_path: Path) -> None:
    root = store.rename(tmp_path / "copy.unfinished")
    with pytest.raises(InvalidArgument, match=r"would replace .*copy\.unfinished, where the"):
        back_up(root, tmp_path / "copy")
    outer = tmp_path / "outer.unfinished"
    outer.mkdir()
    root = root.rename(outer / "store")
    with pytest.raises(InvalidArgument, match=r"would replace .*outer\.unfinished, where the"):
        back_up(root, tmp_path / "outer")
    assert inspect(root).messages == COUNT


def test_a_backup_into_a_part_of_the_store_on_another_disk_is_refused(
    store: Path, tmp_path: Path
) -> None:
    (store / "commitlog").rename(tmp_path / "log")
    (store / "commitlog").symlink_to(tmp_path / "log")
    with pytest.raises(InvalidArgument, match="must be outside of the store"):
        back_up(store, tmp_path / "log" / "copy")
    back_up(store, tmp_path / "copy")
    assert numbers(tmp_path / "copy") == list(range(COUNT))


def test_two_backups_to_one_place_do_not_mix(store: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def again(path: Path) -> None:
        if path.parent.name == "commitlog" and not refused:
            with pytest.raises(StoreInUse, match="another backup is written to") as raised:
                back_up(store, tmp_path / "copy")
            refused.append(str(raised.value))

    back_up(store, tmp_path / "copy", files=Watched(again))
    assert refused
    assert numbers(tmp_path / "copy") == list(range(COUNT))


def test_what_is_left_of_an_interrupted_backup_is_replaced(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "copy.unfinished")
    back_up(store, tmp_path / "copy")
    assert not (tmp_path / "copy.unfinished").exists()
    assert numbers(tmp_path / "copy") == list(range(COUNT))
