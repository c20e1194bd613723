"""A slave truncates its log and dies at any disk operation: the next start continues."""

from __future__ import annotations

import errno
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from appending import append
from turbopump.errors import StoreError
from turbopump.machine import Machine
from turbopump.message import PhysicalOffset
from turbopump.store import FlushMode, Store
from turbopump.testing import Disk
from unit.store.support import ManualClock, bodies, record, small_config

pytestmark = pytest.mark.slow

CONFIG = small_config(FlushMode.SYNC)
ROOT = Path("/store")
COMMON, MORE = 25, 30


def saved_files(disk: Disk) -> list[bytes]:
    """Return the files that were set aside."""
    found = []
    for directory in disk.entries(ROOT):
        if directory.name.startswith("diverged-"):
            for path in sorted(disk.entries(directory)):
                fd = disk.open_to_read(path)
                found.append(disk.read(fd, disk.file_size(path), 0))
                disk.close(fd)
    return found


class Slave:
    """A store with messages, some of which are to be truncated."""

    def __init__(self) -> None:
        self.disk = Disk()
        self.clock = ManualClock()
        self.machine = Machine(self.disk, self.disk.background, self.clock)
        self.store = Store.open(ROOT, CONFIG, self.machine)
        self.all = [b"%02d" % number * 100 for number in range(COMMON + MORE)]
        for number, body in enumerate(self.all):
            if number == COMMON:
                self.common = self.store.written_end
            append(self.store, [record(body, KEYS="k")]).durable.result()

    def cut(self, position: PhysicalOffset | None, dies_at: int | None) -> int:
        """Truncate, and let the process die at the nth disk operation; return how many ran."""
        count = 0

        def look(*_: object) -> None:
            nonlocal count
            count += 1
            if count == dies_at:
                self.disk.die()

        self.disk.on_operation = look
        with ExitStack() as stack:
            if dies_at is not None:
                # Later operations find a dead disk.
                stack.enter_context(suppress(StoreError))
            self.store.cut(position)
        self.disk.on_operation = None
        return count

    def restart(self, *, power_fails: bool) -> None:
        self.disk.die()
        self.store.close()
        if power_fails:
            self.disk.lose_unsynced()
        self.disk.close_all()
        self.store = Store.open(ROOT, CONFIG, self.machine)


@pytest.mark.parametrize("power_fails", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_cut_that_is_interrupted_is_repeated(is_whole: bool, power_fails: bool) -> None:
    first = Slave()
    count = first.cut(None if is_whole else first.common, None)
    first.store.close()
    assert count > 20
    for dies_at in range(1, count + 1, 4):
        slave = Slave()
        position = None if is_whole else slave.common
        slave.cut(position, dies_at)
        slave.restart(power_fails=power_fails)
        left = bodies(slave.store)
        assert left == slave.all[: len(left)]
        assert is_whole or len(left) >= COMMON
        # Nothing is lost: each message is in the log or was set aside.
        aside = b"".join(saved_files(slave.disk))
        assert all(body in aside for body in slave.all[len(left) :])
        if slave.store.written_end != (0 if is_whole else slave.common):
            slave.clock.advance(1000)
            slave.cut(position, None)
        kept = 0 if is_whole else COMMON
        assert bodies(slave.store) == slave.all[:kept]
        assert len(slave.store.messages_by_key("Topic", "k", 64, 0, 1 << 60)) == kept
        slave.store.close()


def test_a_cut_that_fails_leaves_the_store_open() -> None:
    slave = Slave()
    slave.disk.fail_writes(errno.ENOSPC)
    with pytest.raises(StoreError):
        slave.store.cut(slave.common)
    slave.disk.heal()
    assert bodies(slave.store) == slave.all
    slave.clock.advance(1000)
    slave.store.cut(slave.common)
    append(slave.store, [record(b"next", KEYS="k")]).durable.result()
    assert bodies(slave.store) == [*slave.all[:COMMON], b"next"]
    slave.store.close()
