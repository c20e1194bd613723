"""All tables of servers and clients: what survives kills, power failures, damage and full disks."""

from __future__ import annotations

import asyncio
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker_parts import FakePeer
from imports import SOURCE, calls, modules, name_of
from turbopump.broker.clients import Consumers, Member
from turbopump.broker.config import BrokerConfig, GroupsConfig, IdentityConfig, TopicsConfig
from turbopump.broker.consumer_filters import ConsumerFilters
from turbopump.broker.delays import Delays
from turbopump.broker.groups import Groups
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.membership_file import MembershipFile
from turbopump.broker.message_writer import MessageWriter
from turbopump.broker.offsets import Offsets
from turbopump.broker.queue_locks import QueueLocks
from turbopump.broker.replication.mastership import Mastership
from turbopump.broker.replication.roles import RoleRecord
from turbopump.broker.topics import Topics
from turbopump.broker.versioned_table import VersionedTable
from turbopump.client.offsets import LocalOffsets
from turbopump.errors import ConnectFailed, StoreDamaged, WriteFailed
from turbopump.machine import Machine
from turbopump.machine.files import read_text
from turbopump.machine.text_files import backup_of, save_text
from turbopump.message import MessageQueue, PhysicalOffset, QueueOffset
from turbopump.nameserver.config import NameServerConfig
from turbopump.nameserver.kv import KvConfig
from turbopump.nameserver.live_config import LiveConfig as NameServerSettings
from turbopump.settings import parse_properties
from turbopump.store.outcomes import QueueEmpty
from turbopump.store.store import Store
from turbopump.supervisor import Supervisor
from turbopump.tables import TableFile, TableWriter
from turbopump.testing import VirtualClock
from turbopump.testing.disk import Disk
from turbopump.wire.bodies import ConsumerData, GroupConfig, Subscription, TopicConfig
from turbopump.wire.command import Command

DIRECTORY = Path("/store/config")
NOW_MS = 1_794_728_151_040


class StoredTable(ABC):
    """A table that holds a number, in a file on a disk; re-created by each start of its owner."""

    name = "table.json"
    is_expendable = False
    """Whether its owner starts without a damaged file, because clients restore the content."""
    is_loaded = True
    """Whether its owner reads the file itself; settings are read with the command line."""
    has_version = True
    """Whether the file has a version; settings and files that other clients also read have none."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.clock = VirtualClock(NOW_MS)
        self.writer = TableWriter(clock=self.clock)
        self.path = DIRECTORY / self.name
        self.file = TableFile(self.path, disk, self.writer)

    @abstractmethod
    async def begin(self) -> None:
        """Create the table, from its file if it exists."""

    @abstractmethod
    async def change(self, number: int) -> None:
        """Return once the table and the disk hold another number; raises WriteFailed."""

    @abstractmethod
    def value(self) -> int:
        """Return the number that the table holds; 0 if it holds none."""

    def end(self) -> None:
        self.writer.close()


class StoredTopics(StoredTable):
    async def begin(self) -> None:
        self.table = Topics(TopicsConfig(), IdentityConfig(), self.file)
        self.table.load()

    async def change(self, number: int) -> None:
        await self.table.update(TopicConfig(topic_name="T", write_queue_nums=number))

    def value(self) -> int:
        found = self.table.find("T")
        return 0 if found is None else found.write_queue_nums


class StoredGroups(StoredTable):
    async def begin(self) -> None:
        self.table = Groups(GroupsConfig(), self.file)
        self.table.load()

    async def change(self, number: int) -> None:
        await self.table.update(GroupConfig(group_name="g", retry_max_times=number))

    def value(self) -> int:
        found = self.table.table.get("g")
        return 0 if found is None else found.retry_max_times


class StoredOffsets(StoredTable):
    async def begin(self) -> None:
        self.table = Offsets(self.file)
        self.table.load()

    async def change(self, number: int) -> None:
        self.table.commit("g", "T", 0, number)
        await self.table.saving.save()

    def value(self) -> int:
        return self.table.find("g", "T", 0) or 0


class EmptyStore:
    """A store that has delivered everything."""

    steady_clock = SimpleNamespace(shift_ms=0)
    flushed_end = written_end = PhysicalOffset(1 << 40)

    def read(self, *_: object) -> QueueEmpty:
        nothing = QueueOffset(0)
        return QueueEmpty(next_offset=nothing, min_offset=nothing, max_offset=nothing)


class StoredDelays(StoredTable):
    async def begin(self) -> None:
        store, writer = cast(Store, EmptyStore()), cast(MessageWriter, None)
        topics = cast(Topics, None)
        self.table = Delays(store, writer, self.file, [1000], topics, self.clock, Supervisor())
        self.table.load()

    async def change(self, number: int) -> None:
        self.table._skip_to(self.table._levels[0], QueueOffset(number))
        await self.table.saving.save()

    def value(self) -> int:
        return self.table.progress.offset_table.get(1, 0)


class StoredMembers(StoredTable):
    is_expendable = True

    async def begin(self) -> None:
        self.consumers = Consumers()
        self.table = MembershipFile(self.file, self.consumers, QueueLocks(), self.clock)
        self.table.load(groups_max=10)

    async def change(self, number: int) -> None:
        wanted = Subscription(topic="T", sub_string="*", sub_version=number)
        data = ConsumerData(group_name="g", subscription_data_set=[wanted])
        self.consumers.heartbeat(Member(FakePeer(), "c", None, 0, 0, 0), data)
        await self.table.saving.save()

    def value(self) -> int:
        found = self.consumers.subscription("g", "T")
        return 0 if found is None else found.sub_version


class StoredFilters(StoredTable):
    is_expendable = True

    async def begin(self) -> None:
        self.table = ConsumerFilters(self.file, self.clock)
        self.table.load()

    async def change(self, number: int) -> None:
        wanted = Subscription(
            topic="T", sub_string=f"a = {number}", expression_type="SQL92", sub_version=number
        )
        self.table.register("g", [wanted])
        await self.table.saving.save()

    def value(self) -> int:
        found = self.table.find("g", "T")
        return 0 if found is None else found.data.client_version


class StoredKeyValues(StoredTable):
    async def begin(self) -> None:
        self.table = KvConfig(self.file)
        self.table.load()

    async def change(self, number: int) -> None:
        await self.table.put("ns", "key", str(number))

    def value(self) -> int:
        return int(self.table.value("ns", "key") or 0)


class StoredBroadcasting(StoredTable):
    is_expendable = True
    has_version = False
    queue = MessageQueue("T", "a", 0)

    async def begin(self) -> None:
        self.table = LocalOffsets(self.path, Machine(files=self.disk))
        await self.table.open()

    async def change(self, number: int) -> None:
        self.table.positions.replace(self.queue, QueueOffset(number))
        await self.table.persist([self.queue])
        if self.table.has_uncommitted([]):
            raise WriteFailed("as was logged")

    def value(self) -> int:
        return self.table._stored.get(self.queue, 0)

    def end(self) -> None:
        with suppress(OSError):
            self.table.close()
        super().end()


class StoredRole(StoredTable):
    async def begin(self) -> None:
        clock = VirtualClock()
        self.table = Mastership(
            BrokerConfig(), self.file, _no_server_answers, Random(1), clock, tuple
        )
        self.table.load()

    async def change(self, number: int) -> None:
        await self.table.save(RoleRecord(epoch=number))

    def value(self) -> int:
        return self.table.record.epoch


async def _no_server_answers(address: str, command: Command, timeout_ms: int) -> Command:
    raise ConnectFailed(address)


class StoredSettings(StoredTable):
    """Settings, which are read where servers are started: here from the file."""

    name = "server.conf"
    is_loaded = has_version = False
    settings: Any
    key: str

    async def change(self, number: int) -> None:
        await self.settings.change({self.key: str(number)})

    def value(self) -> int:
        found = parse_properties(read_text(self.disk, self.path))
        return int(found.get(self.key, 0))


class StoredBrokerSettings(StoredSettings):
    key = "flushConsumerOffsetInterval"

    async def begin(self) -> None:
        if not self.disk.exists(self.path):
            save_text(self.disk, self.path, "brokerName=a\n")
        self.settings = LiveConfig(BrokerConfig(), self.clock, self.path, self.disk, self.writer)


class StoredNameServerSettings(StoredSettings):
    key = "orderMessageEnable"

    async def begin(self) -> None:
        if not self.disk.exists(self.path):
            save_text(self.disk, self.path, "listenPort=9876\n")
        config = NameServerConfig(config_store_path=self.path)
        self.settings = NameServerSettings(config, self.writer, self.disk)

    async def change(self, number: int) -> None:
        await self.settings.change({self.key: str(number == 2).lower()})

    def value(self) -> int:
        found = parse_properties(read_text(self.disk, self.path)).get(self.key)
        return {None: 0, "false": 1, "true": 2}[found]


TABLES: dict[str, type[StoredTable]] = {
    "topics": StoredTopics,
    "groups": StoredGroups,
    "offsets": StoredOffsets,
    "delays": StoredDelays,
    "members of groups": StoredMembers,
    "consumer filters": StoredFilters,
    "roles": StoredRole,
    "key-values": StoredKeyValues,
    "offsets of broadcasting": StoredBroadcasting,
    "settings of a broker": StoredBrokerSettings,
    "settings of a name server": StoredNameServerSettings,
}
LOADED = {name: kind for name, kind in TABLES.items() if kind.is_loaded}
VERSIONED = {name: kind for name, kind in TABLES.items() if kind.has_version}

Work = Callable[[StoredTable], Any]


async def using(kind: type[StoredTable], disk: Disk, work: Work) -> Any:
    """Start a table's owner, use the table, and stop the owner."""
    kept = kind(disk)
    try:
        await kept.begin()
        return await work(kept)
    finally:
        kept.end()


async def read(kept: StoredTable) -> int:
    return kept.value()


def changing(*numbers: int) -> Work:
    async def work(kept: StoredTable) -> None:
        for number in numbers:
            await kept.change(number)

    return work


def restarted(kind: type[StoredTable], disk: Disk) -> int:
    """Return the content after the next start."""
    disk.close_all()
    return int(asyncio.run(using(kind, disk, read)))


def overwrite(disk: Disk, path: Path, text: bytes) -> None:
    fd = disk.open_new(path)
    disk.write(fd, text, 0)
    disk.close(fd)


def damage(disk: Disk, path: Path) -> None:
    overwrite(disk, path, b'{"half')


def version_in(disk: Disk, path: Path) -> tuple[int, int]:
    version = json.loads(read_text(disk, path))["dataVersion"]
    return version["counter"], version["timestamp"]


@pytest.mark.parametrize("name", TABLES)
def test_applied_changes_survive_a_power_failure(name: str) -> None:
    disk, kind = Disk(), TABLES[name]
    asyncio.run(using(kind, disk, changing(1, 2)))
    disk.lose_unsynced()
    assert restarted(kind, disk) == 2


@pytest.mark.parametrize("loses_power", [True, False])
@pytest.mark.parametrize("name", TABLES)
def test_a_kill_at_any_operation_leaves_the_old_or_the_new_table(
    name: str, loses_power: bool
) -> None:
    kind = TABLES[name]
    found: set[int] = set()
    is_complete = False
    for last in range(100):
        disk, left = Disk(), last

        async def killed(kept: StoredTable, disk: Disk = disk) -> int:
            def count(_operation: str, _path: Path) -> None:
                nonlocal left
                if left == 0:
                    disk.die()
                left -= 1

            await kept.change(1)
            disk.on_operation = count
            await kept.change(2)
            disk.on_operation = None
            return left

        is_complete = asyncio.run(using(kind, disk, killed)) >= 0
        disk.on_operation = None
        if loses_power:
            disk.lose_unsynced()
        found.add(restarted(kind, disk))
        if is_complete:
            break
    assert is_complete
    assert found == {1, 2}


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("left", [None, b"", b'{"half'])
def test_the_backup_replaces_a_damaged_empty_or_missing_file(
    name: str, left: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    disk, kind = Disk(), LOADED[name]
    asyncio.run(using(kind, disk, changing(1, 2)))
    path = DIRECTORY / kind.name
    if left is None:
        disk.remove(path)
    else:
        overwrite(disk, path, left)
    assert restarted(kind, disk) == 1
    assert f"using {backup_of(path)} instead, which may be older" in caplog.text
    if kind.has_version:
        counter, timestamp_ms = version_in(disk, backup_of(path))
        assert f"it has version {counter} of timestamp {timestamp_ms}" in caplog.text
    assert disk.exists(path.with_name(path.name + ".damaged")) == (left is not None)
    assert restarted(kind, disk) == 1, "and again, until the table changes"


@pytest.mark.parametrize("name", LOADED)
def test_a_damaged_file_that_a_crash_left_under_two_names_becomes_no_backup(name: str) -> None:
    disk, kind = Disk(), LOADED[name]
    asyncio.run(using(kind, disk, changing(1, 2)))
    path = DIRECTORY / kind.name
    overwrite(disk, path, b'{"half')
    disk.link(path, path.with_name(path.name + ".damaged"))
    asyncio.run(using(kind, disk, changing(3)))
    overwrite(disk, path, b'{"half')
    assert restarted(kind, disk) == 1


@pytest.mark.parametrize("name", VERSIONED)
def test_the_version_counts_changes_across_restarts(name: str) -> None:
    disk, kind = Disk(), VERSIONED[name]
    path = DIRECTORY / kind.name
    asyncio.run(using(kind, disk, changing(1, 2)))
    seen = [version_in(disk, backup_of(path)), version_in(disk, path)]

    async def later(kept: StoredTable) -> None:
        kept.clock.advance_ns(1_000_000)
        await kept.change(3)

    asyncio.run(using(kind, disk, read))
    assert version_in(disk, path) == seen[-1], "a start is not a change"
    asyncio.run(using(kind, disk, later))
    seen.append(version_in(disk, path))
    counters = [counter for counter, _ in seen]
    assert sorted(set(counters)) == counters
    assert [timestamp_ms - NOW_MS for _, timestamp_ms in seen] == [0, 0, 1]


@pytest.mark.parametrize("name", VERSIONED)
def test_a_file_without_a_version_is_read_and_one_with_a_wrong_version_is_damaged(
    name: str,
) -> None:
    disk, kind = Disk(), VERSIONED[name]
    path = DIRECTORY / kind.name
    asyncio.run(using(kind, disk, changing(1, 2)))
    table = json.loads(read_text(disk, path))
    del table["dataVersion"]
    overwrite(disk, path, json.dumps(table).encode())
    assert restarted(kind, disk) == 2
    overwrite(disk, path, json.dumps({"dataVersion": 7, **table}).encode())
    assert restarted(kind, disk) == 1


@pytest.mark.parametrize("name", LOADED)
def test_an_unreadable_table_is_rejected_unless_clients_restore_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk, kind = Disk(), LOADED[name]
    asyncio.run(using(kind, disk, changing(1, 2)))
    path = DIRECTORY / kind.name
    damage(disk, path)
    damage(disk, backup_of(path))
    if kind.is_expendable:
        assert restarted(kind, disk) == 0
        assert "is damaged" in caplog.text
    else:
        with pytest.raises(StoreDamaged, match=r"table\.json is damaged.*restore it from a copy"):
            restarted(kind, disk)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("fault", ["fail_writes", "fail_syncs"])
def test_a_disk_that_is_full_or_fails_keeps_the_old_table(name: str, fault: str) -> None:
    disk, kind = Disk(), TABLES[name]

    async def fill(kept: StoredTable) -> None:
        await kept.change(1)
        getattr(disk, fault)(matching=f"{kept.path}*")
        with pytest.raises(WriteFailed):
            await kept.change(2)
        disk.heal()

    asyncio.run(using(kind, disk, fill))
    disk.lose_unsynced()
    assert restarted(kind, disk) == 1
    asyncio.run(using(kind, disk, changing(2)))
    assert restarted(kind, disk) == 2


@pytest.mark.parametrize("name", TABLES)
def test_a_disk_that_recovered_accepts_the_next_change(name: str) -> None:
    disk, kind = Disk(), TABLES[name]

    async def heal(kept: StoredTable) -> None:
        await kept.change(1)
        disk.fail_writes(matching=f"{kept.path}*")
        with pytest.raises(WriteFailed):
            await kept.change(2)
        disk.heal()
        await kept.change(2)

    asyncio.run(using(kind, disk, heal))
    disk.lose_unsynced()
    assert restarted(kind, disk) == 2


@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_written_by_the_event_loop(name: str) -> None:
    disk, kind = Disk(), TABLES[name]
    threads: set[threading.Thread] = set()

    async def watched(kept: StoredTable) -> None:
        disk.on_operation = lambda _operation, _path: threads.add(threading.current_thread())
        await kept.change(2)
        disk.on_operation = None

    asyncio.run(using(kind, disk, watched))
    assert threads
    assert threading.current_thread() not in threads


def callers(*names: str) -> set[str]:
    paths = [*modules("broker", "nameserver", "client", "admin"), SOURCE / "tables.py"]
    return {name_of(path) for path in paths for called, _ in calls(path) if called in names}


def test_all_tables_are_those_above() -> None:
    brokers = ("versioned_table", "offsets", "delays", "membership_file", "consumer_filters")
    tables = {f"broker/{name}.py" for name in (*brokers, "replication/mastership")}
    tables.add("client/offsets.py")
    assert callers("Table") == tables
    assert set(VersionedTable.__subclasses__()) == {Topics, Groups}
    assert callers("file.save", "self.file.save") == {"tables.py", "nameserver/kv.py"}
    assert callers("change_text") == {"broker/live_config.py", "nameserver/live_config.py"}
    assert callers("save_text", "save_json") == {"tables.py"}
