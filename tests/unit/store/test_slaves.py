"""A slave's store: bytes of the master's log at the same positions."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from appending import append
from store_work import wait_idle
from turbopump.errors import DiskFull, InvalidArgument, StoreClosed, StoreError, WriteFailed
from turbopump.machine import Machine
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store import FlushMode, Store
from turbopump.testing import virtual_loop, virtual_time, wait_until
from turbopump.testing.disk import Disk, virtual_machine
from unit.store.support import FaultyFiles, ManualClock, bodies, record, small_config


def stored(store: Store, *args: bytes, **kwargs: Any) -> None:
    for body in args:
        append(store, [record(body, **kwargs)]).durable.result()


def test_a_slave_copies_the_log_byte_for_byte(tmp_path: Path) -> None:
    config = small_config()
    with Store.open(tmp_path / "a", config) as master, Store.open(tmp_path / "b", config) as slave:
        position = PhysicalOffset(0)
        for number in range(60):
            stored(master, b"%d" % number * 50, KEYS=f"k{number}")
            # Pieces that end inside records.
            while (piece := master.raw(position, 37)) is not None:
                slave.append_raw(position, piece)
                position = PhysicalOffset(position + len(piece))
        assert bodies(slave) == bodies(master)
        assert slave.written_end == master.written_end
        with pytest.raises(InvalidArgument, match="the end of the log"):
            slave.append_raw(PhysicalOffset(0), b"x")
        with pytest.raises(InvalidArgument, match="cross"):
            slave.append_raw(slave.written_end, b"x" * 5000)
    for path in (tmp_path / "a" / "commitlog").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / "commitlog" / path.name).read_bytes()


@virtual_time()
async def test_a_message_is_not_read_before_all_of_it_is_on_disk(tmp_path: Path) -> None:
    """A flush may end between two chunks of a message: a power loss then takes the rest of it."""
    config, disk = small_config(FlushMode.SYNC), Disk(virtual_loop())
    with Store.open(tmp_path, config) as master:
        stored(master, b"x" * 300)
        whole = bytes(master.raw(PhysicalOffset(0), 1 << 20) or b"")
    with Store.open(Path("/slave"), config, machine=virtual_machine(disk)) as slave:
        disk.sync_time = 0.01
        first = slave.append_raw(PhysicalOffset(0), whole[:100])
        await asyncio.sleep(0.001)
        rest = slave.append_raw(PhysicalOffset(100), whole[100:])
        await wait_until(first.done)
        slave.dispatch()
        assert not rest.done()
        assert slave.readable_end == 100
        assert slave.queue_range("Topic", 0) == (0, 0)
        await wait_until(rest.done)
        assert bodies(slave) == [b"x" * 300]


def test_a_new_slave_starts_in_the_middle(tmp_path: Path) -> None:
    config = small_config()
    with Store.open(tmp_path / "a", config) as master, Store.open(tmp_path / "b", config) as slave:
        stored(master, *[b"%02d" % number * 200 for number in range(40)])
        position = PhysicalOffset(master.written_end // 4096 * 4096)
        with pytest.raises(InvalidArgument, match="must start at a file boundary"):
            slave.append_raw(PhysicalOffset(position + 1), b"x")
        piece = master.raw(position, 1 << 20)
        assert piece is not None
        slave.append_raw(position, piece)
        low, high = slave.queue_range("Topic", 0)
        assert (slave.min_offset, high) == (position, 40)
        assert low > 30
        assert bodies(slave) == bodies(master)[low:]
        # The master is gone; the slave continues with its offsets.
        assert append(slave, [record(b"mine")]).queue_offset == 40
        assert bodies(slave)[-1] == b"mine"


def test_a_slave_whose_disk_fails_copies_the_bytes_again(tmp_path: Path) -> None:
    config = small_config(FlushMode.SYNC)
    files, clock = FaultyFiles(), ManualClock()
    with (
        Store.open(tmp_path / "a", config) as master,
        Store.open(tmp_path / "b", config, machine=Machine(files=files, clock=clock)) as slave,
    ):
        stored(master, *[b"%02d" % number * 100 for number in range(10)])
        failed = False
        while (piece := master.raw(slave.written_end, 150)) is not None:
            position = slave.written_end
            if position == 900 and not failed:
                files.sync_error, failed = errno.EIO, True
            try:
                slave.append_raw(position, piece)
            except (WriteFailed, InvalidArgument):
                # Rejected, or repaired in the meantime: then unflushed bytes are requested again.
                files.sync_error = None
                clock.advance(1000)
            wait_idle(slave)
        assert bodies(slave) == bodies(master)


@pytest.mark.parametrize("room", [0, 10])
@pytest.mark.parametrize("erase_error", [None, errno.EIO])
def test_a_new_slave_whose_first_write_fails_is_new_again(
    room: int, erase_error: int | None, tmp_path: Path
) -> None:
    files, clock = FaultyFiles(), ManualClock()
    data = record(b"first").encode(QueueOffset(0), PhysicalOffset(8192), 1_700_000_000_000)
    with Store.open(tmp_path, small_config(), machine=Machine(files=files, clock=clock)) as slave:
        files.bytes_left, files.erase_error = room, erase_error
        with pytest.raises(DiskFull):
            slave.append_raw(PhysicalOffset(4096), data)
        assert slave.written_end == 0
        files.bytes_left = files.erase_error = None
        clock.advance(1000)
        # The master may have deleted the file in the meantime.
        slave.append_raw(PhysicalOffset(8192), data)
        assert bodies(slave) == [b"first"]
    with Store.open(tmp_path, small_config()) as slave:
        assert slave.min_offset == 8192
        assert bodies(slave) == [b"first"]


def copied(master: Store, slave: Store, end: int | None = None) -> None:
    """Let a slave copy the log from its end up to a position."""
    while (piece := master.raw(slave.written_end, 700)) is not None:
        position = slave.written_end
        left = len(piece) if end is None else min(len(piece), end - position)
        if left <= 0:
            return
        slave.append_raw(position, piece[:left]).result()


@pytest.mark.parametrize("mode", FlushMode)
@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_tail_that_differs_is_truncated_and_saved_aside(
    mode: FlushMode, is_reopened: bool, tmp_path: Path
) -> None:
    config = small_config(mode)
    told: list[int] = []
    with Store.open(tmp_path / "a", config) as master, Store.open(tmp_path / "b", config) as slave:
        stored(master, *[b"%02d" % number * 100 for number in range(30)], KEYS="both")
        copied(master, slave)
        common = master.written_end
        slave.listen(lambda arrivals: told.append(len(arrivals)))
        stored(slave, *[b"lost %02d" % number * 100 for number in range(40)], KEYS="lost")
        end = slave.written_end
        middle = PhysicalOffset(common + 5)
        assert slave.message_start(middle) == common
        tail = (tmp_path / "b" / "commitlog" / f"{common // 4096 * 4096:020d}").read_bytes()
        kept = slave.cut(common)
        assert kept.name.startswith(f"diverged-{common}-")
        assert slave.written_end == common
        assert bodies(slave) == bodies(master)
        assert not slave.messages_by_key("Topic", "lost", 64, 0, 1 << 60)
        assert len(slave.messages_by_key("Topic", "both", 64, 0, 1 << 60)) == 30
        first, *files = sorted(kept.iterdir())
        assert int(first.name) == common
        assert tail[common % 4096 :].startswith(first.read_bytes().rstrip(b"\0"))
        assert int(files[-1].name) <= end
        if is_reopened:
            slave.close()
            slave = Store.open(tmp_path / "b", config)
        stored(master, *[b"new %02d" % number * 100 for number in range(30)])
        told.clear()
        copied(master, slave)
        slave.dispatch()
        assert is_reopened or sum(told) == 30
        assert bodies(slave) == bodies(master)
        slave.close()


def test_a_failed_truncation_can_be_repeated_after_the_disk_recovers(tmp_path: Path) -> None:
    class FailingLater(FaultyFiles):
        syncs_left = 1 << 30

        def sync(self, fd: int) -> None:
            self.syncs_left -= 1
            self.sync_error = errno.EIO if self.syncs_left < 0 else None
            super().sync(fd)

    closed = 0
    with Store.open(tmp_path / "a", small_config()) as master:
        stored(master, *[b"%02d" % number * 100 for number in range(30)])
        for syncs in range(40):
            files, told = FailingLater(), list[int]()
            slave = Store.open(tmp_path / f"{syncs}", small_config(), machine=Machine(files=files))
            slave.listen(partial(_count, told))
            copied(master, slave)
            common = master.written_end
            stored(slave, *[b"lost %02d" % number * 100 for number in range(40)])
            files.syncs_left = syncs
            try:
                slave.cut(common)
            except StoreError:
                closed += _is_closed(slave)
                files.syncs_left = 1 << 30
                slave.reopen()
                slave.reopen()
                slave.cut(common)
            assert slave.written_end == common
            assert bodies(slave) == bodies(master)
            told.clear()
            stored(slave, b"more")
            slave.dispatch()
            assert sum(told) == 1
            slave.close()
            Store.open(tmp_path / f"{syncs}", small_config()).close()
            if files.syncs_left >= 0 and files.syncs_left < 1 << 29:
                break
    assert closed


def _count(told: list[int], arrivals: Sequence[object]) -> None:
    told.append(len(arrivals))


def _is_closed(store: Store) -> bool:
    try:
        store.queue_ids()
    except StoreClosed:
        return True
    return False


def test_a_store_closed_by_a_failed_truncation_can_be_closed_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    slave = Store.open(tmp_path, small_config(), machine=Machine(files=files))
    stored(slave, *[b"%02d" % number * 100 for number in range(40)])
    with patch.object(Store, "_recover", side_effect=OSError(errno.EIO, "broken")):
        with pytest.raises(StoreError):
            slave.cut(None)
        with pytest.raises(StoreError):
            slave.reopen()
    assert _is_closed(slave)
    slave.close()
    with pytest.raises(StoreClosed):
        slave.cut(None)
    Store.open(tmp_path, small_config()).close()


def test_a_log_that_is_dropped_as_a_whole_begins_anywhere(tmp_path: Path) -> None:
    config = small_config()
    with Store.open(tmp_path / "a", config) as master, Store.open(tmp_path / "b", config) as slave:
        stored(master, *[b"%02d" % number * 100 for number in range(80)])
        stored(slave, *[b"other %d" % number for number in range(50)], topic="Gone")
        kept = slave.cut(None)
        assert len(list(kept.iterdir())) >= 2
        assert slave.written_end == 0
        assert slave.queue_ids() == []
        position = PhysicalOffset(8192)
        while (piece := master.raw(position, 4096)) is not None:
            slave.append_raw(position, piece)
            position = PhysicalOffset(position + len(piece))
        low, _ = slave.queue_range("Topic", 0)
        assert bodies(slave) == bodies(master)[low:]


def test_bytes_that_are_not_a_record_are_rejected(tmp_path: Path) -> None:
    with Store.open(tmp_path, small_config()) as slave:
        good = record(b"good").encode(QueueOffset(0), PhysicalOffset(0), 1_700_000_000_000)
        slave.append_raw(PhysicalOffset(0), good[:50])
        for bad in (b"\0" * 100, good[:4] + b"\1" * 100, b"\x7f" + good[1:]):
            # The rest of the first record, followed by other bytes.
            with pytest.raises(InvalidArgument, match=f"no record at {len(good)}"):
                slave.append_raw(PhysicalOffset(50), good[50:] + bad)
            assert slave.written_end == 50
        elsewhere = record(b"good").encode(QueueOffset(1), PhysicalOffset(77), 1_700_000_000_000)
        with pytest.raises(InvalidArgument, match=f"no record at {len(good)}"):
            slave.append_raw(PhysicalOffset(50), good[50:] + elsewhere)
        slave.append_raw(PhysicalOffset(50), good[50:])
        assert bodies(slave) == [b"good"]


def test_an_unfinished_message_or_filler_is_dropped(tmp_path: Path) -> None:
    config = small_config()
    with Store.open(tmp_path / "a", config) as master, Store.open(tmp_path / "b", config) as slave:
        stored(master, *[b"%02d" % number * 300 for number in range(8)])
        size = 696
        # Five messages fill a file, whose last bytes are a filler.
        expected = {5 * size + 90: 5 * size, 4096: 4096, 4100: 4096}
        for position in (4, 300, size - 1, size, size + 8, *expected):
            copied(master, slave, position)
            slave.drop_unfinished()
            assert slave.written_end == expected.get(position, position // size * size)
        copied(master, slave)
        assert bodies(slave) == bodies(master)


def copy_all(master: Store, slave: Store) -> None:
    while (piece := master.raw(slave.written_end, 1 << 20)) is not None:
        slave.append_raw(slave.written_end, piece)


@pytest.mark.parametrize("is_told_of_it", [True, False])
def test_a_topic_recreated_before_the_slave_learned_of_its_deletion(
    tmp_path: Path, *, is_told_of_it: bool
) -> None:
    config = small_config()
    with Store.open(tmp_path / "a", config) as master:
        with Store.open(tmp_path / "b", config) as slave:
            stored(master, b"old 0", b"old 1", b"old 2")
            stored(master, b"other", topic="Other")
            master.remove_topic("Topic")
            end = master.written_end
            stored(master, b"new 0", b"new 1")
            copy_all(master, slave)
            if is_told_of_it:
                # The table of topics from that time arrives late.
                slave.remove_topic("Topic", end)
            assert bodies(slave) == bodies(master) == [b"new 0", b"new 1"]
            stored(master, b"new 2", b"new 3")
            copy_all(master, slave)
            assert bodies(slave) == bodies(master)
            assert bodies(slave, topic="Other") == [b"other"]
        with Store.open(tmp_path / "b", config) as slave:
            assert bodies(slave) == bodies(master)
            assert append(slave, [record(b"mine")]).queue_offset == 4


def test_a_deletion_hides_no_message_stored_after_it(tmp_path: Path) -> None:
    config = small_config()
    with Store.open(tmp_path / "a", config) as master, Store.open(tmp_path / "b", config) as slave:
        stored(master, b"old 0")
        copy_all(master, slave)
        stored(master, b"old 1")
        master.remove_topic("Topic")
        # The slave lags: messages it has not copied yet are deleted too.
        slave.remove_topic("Topic", master.written_end)
        stored(master, b"new 0")
        copy_all(master, slave)
        assert bodies(slave) == bodies(master) == [b"new 0"]
