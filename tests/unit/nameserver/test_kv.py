"""Key-values: what is requested, what is on disk, what survives."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from turbopump.errors import InvalidArgument, StoreDamaged, WriteFailed
from turbopump.machine.files import Files
from turbopump.nameserver import kv as kv_module
from turbopump.nameserver.kv import KvConfig
from turbopump.tables import TableFile, TableWriter
from turbopump.testing import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "namesrv" / "kvConfig.json"


WRITER = TableWriter()


def loaded(path: Path) -> KvConfig:
    kv = KvConfig(TableFile(path, writer=WRITER))
    kv.load()
    return kv


def test_a_value_is_replaced_only_if_it_is_the_expected_one(path: Path) -> None:
    async def scenario() -> None:
        kv = loaded(path)
        assert not await kv.replace("ns", "key", "1", "2")
        assert await kv.replace("ns", "key", None, "1")
        assert not await kv.replace("ns", "key", None, "2")
        # One of those that expect the same.
        done = await asyncio.gather(*(kv.replace("ns", "key", "1", str(n)) for n in range(2, 9)))
        assert done.count(True) == 1

    asyncio.run(scenario())
    assert loaded(path).value("ns", "key") == "2"


def test_stored_values_survive_a_restart(path: Path) -> None:
    async def put() -> None:
        kv = loaded(path)
        await kv.put("ns", "key", "wert ü")
        await kv.put("ns", "key2", "2")
        await kv.put("other", "key", "3")
        assert kv.value("ns", "key") == "wert ü"

    asyncio.run(put())
    kv = loaded(path)
    assert kv.namespace("ns") == {"key": "wert ü", "key2": "2"}
    assert kv.value("other", "key") == "3"
    assert kv.value("other", "key2") is None
    assert kv.namespace("none") is None


def test_file_has_the_shape_that_java_reads(path: Path) -> None:
    asyncio.run(loaded(path).put("ns", "key", "value"))
    assert json.loads(path.read_bytes())["configTable"] == {"ns": {"key": "value"}}


def test_file_written_by_java_is_read(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{\n\t"configTable":{"ORDER_TOPIC_CONFIG":{"T":"broker-a:2"}\n\t}\n}')
    assert loaded(path).value("ORDER_TOPIC_CONFIG", "T") == "broker-a:2"


def test_a_namespace_remains_when_its_last_key_is_deleted(path: Path) -> None:
    async def put_and_delete() -> None:
        kv = loaded(path)
        await kv.put("ns", "key", "1")
        await kv.delete("ns", "key")
        await kv.delete("ns", "key")
        await kv.delete("none", "key")

    asyncio.run(put_and_delete())
    assert loaded(path).namespace("ns") == {}
    assert loaded(path).namespace("none") is None


def test_changes_at_the_same_time_all_count(path: Path) -> None:
    async def put_many() -> None:
        kv = loaded(path)
        await asyncio.gather(*(kv.put("ns", str(n), str(n)) for n in range(20)))

    asyncio.run(put_many())
    assert loaded(path).namespace("ns") == {str(n): str(n) for n in range(20)}


def test_backup_is_read_when_the_file_is_damaged(path: Path) -> None:
    async def put_twice() -> None:
        kv = loaded(path)
        await kv.put("ns", "key", "1")
        await kv.put("ns", "key", "2")

    asyncio.run(put_twice())
    path.write_text('{"configTa')
    assert loaded(path).value("ns", "key") == "1"


@pytest.mark.parametrize("text", ["{", "[]", '{"configTable":{"ns":1}}'])
def test_a_damaged_file_does_not_count_as_empty(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(StoreDamaged, match="kvConfig"):
        loaded(path)


class FullDisk(Files):
    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        raise OSError(28, "No space left on device")


def test_a_change_that_cannot_be_written_is_not_applied(path: Path) -> None:
    async def put() -> None:
        kv = KvConfig(TableFile(path, FullDisk(), WRITER))
        with pytest.raises(WriteFailed, match="No space"):
            await kv.put("ns", "key", "1")
        assert kv.namespace("ns") is None

    asyncio.run(put())
    assert not path.exists()


def test_the_total_size_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_module, "TEXT_BYTES_MAX", 100)

    async def put() -> None:
        kv = loaded(path)
        with pytest.raises(InvalidArgument, match="at most 100 bytes"):
            await kv.put("ns", "key", "x" * 100)
        assert kv.namespace("ns") is None

    asyncio.run(put())


class SlowDisk(Files):
    """Reports when a write has started, and continues when released."""

    def __init__(self) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        self.begun.set()
        assert self.may_go_on.wait(10)
        super().write(fd, data, at)


def test_memory_and_disk_agree_when_the_peer_disconnects_during_a_change(path: Path) -> None:
    async def put_and_leave() -> None:
        disk = SlowDisk()
        kv = KvConfig(TableFile(path, disk, WRITER))
        putting = asyncio.create_task(kv.put("ns", "key", "1"))
        await asyncio.to_thread(disk.begun.wait, 10)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert kv.value("ns", "key") is None
        disk.may_go_on.set()
        await wait_until(lambda: kv.value("ns", "key") == "1")

    asyncio.run(put_and_leave())
    assert loaded(path).value("ns", "key") == "1"


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (("n" * 513, "k", "v"), "namespace must be at most 512 characters, got 513"),
        (("n", "k" * 513, "v"), "key must be at most 512 characters, got 513"),
        (("n", "k", "v" * 65_537), "value must be at most 65536 characters, got 65537"),
    ],
)
def test_long_texts_are_rejected(path: Path, entry: tuple[str, str, str], complaint: str) -> None:
    kv = loaded(path)
    with pytest.raises(InvalidArgument, match=complaint):
        asyncio.run(kv.put(*entry))
    assert kv.namespace(entry[0]) is None
