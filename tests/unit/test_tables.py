"""Tables and their files: written together, off the loop, again after failures, and at the end."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from broker_parts import FakeFile
from turbopump.errors import WriteFailed
from turbopump.machine.files import Files
from turbopump.tables import Table, TableFile, TableWriter
from turbopump.testing import virtual_loop, virtual_time


class Counted:
    """A table that is a number."""

    def __init__(self, file: TableFile) -> None:
        self.saving = Table("numbers", file, self._encode)

    def add(self) -> None:
        self.saving.changes += 1

    def _encode(self) -> bytes:
        return b'{"number": %d}' % self.saving.changes


def numbers(file: FakeFile) -> list[int]:
    return [json.loads(body)["number"] for body in file.saved]


@virtual_time()
async def test_all_waiters_during_a_write_share_the_next_one() -> None:
    file = FakeFile()
    table = Counted(file)
    waiting = []
    for _ in range(20):
        table.add()
        waiting.append(asyncio.create_task(table.saving.save()))
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert numbers(file)[-1] == 20
    # A write takes a few loop iterations.
    assert len(file.saved) <= 6
    await table.saving.save()
    assert not table.saving.is_dirty
    assert numbers(file)[-1] == 20, "nothing to write"


@virtual_time()
async def test_changes_are_written_soon_and_together() -> None:
    file = FakeFile()
    table = Counted(file)
    for _ in range(100):
        table.add()
        table.saving.save_soon()
    await asyncio.sleep(0.05)
    assert numbers(file) == [100]
    for _ in range(40):
        table.add()
        table.saving.save_soon()
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert numbers(file)[-1] == 140
    assert len(file.saved) <= 7


@virtual_time()
async def test_a_failed_write_is_logged_once_and_retried_until_it_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = FakeFile()
    table = Counted(file)
    file.full = True
    table.add()
    table.saving.save_soon()
    await asyncio.sleep(10)
    with pytest.raises(WriteFailed):
        await table.saving.save()
    await table.saving.try_save()
    assert table.saving.is_dirty
    file.full = False
    await asyncio.sleep(1.1)
    assert not table.saving.is_dirty
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


@virtual_time()
async def test_a_bug_in_encoding_does_not_end_writing(caplog: pytest.LogCaptureFixture) -> None:
    file, bugs = FakeFile(), [LookupError("a bug")]

    def encode() -> bytes:
        if bugs:
            raise bugs.pop()
        return b'{"number": 1}'

    table = Table("things", file, encode)
    table.changes += 1
    table.save_soon()
    await asyncio.sleep(5)
    assert numbers(file) == [1]
    assert "writing of things failed and is started again" in caplog.text


class HeldFiles(Files):
    """Files that wait before each sync until they are released."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.go_on = threading.Event()

    def sync(self, fd: int) -> None:
        self.began.set()
        self.go_on.wait(30)
        super().sync(fd)


def test_a_slow_disk_does_not_block_the_loop_and_no_write_is_lost(tmp_path: Path) -> None:
    files, writer = HeldFiles(), TableWriter()
    file = TableFile(tmp_path / "config" / "numbers.json", files, writer)

    async def check() -> None:
        table = Counted(file)
        table.add()
        asked = asyncio.create_task(table.saving.save())
        await asyncio.to_thread(files.began.wait, 30)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert table.saving.is_dirty, "being written, although no caller waits for it"
        table.add()
        files.go_on.set()
        await table.saving.save()
        assert not table.saving.is_dirty

    asyncio.run(check())
    writer.close()
    assert json.loads(file.path.read_text())["number"] == 2


@virtual_time()
async def test_closing_writes_pending_changes_and_nothing_follows() -> None:
    file = FakeFile()
    table = Counted(file)
    table.add()
    table.saving.save_soon()
    file.writer.close()
    table.saving.save_now()
    table.saving.save_now()
    assert numbers(file) == [1]
    await asyncio.sleep(10)
    assert numbers(file) == [1]
    assert virtual_loop().time() >= 10
