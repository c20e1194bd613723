from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker_parts import FakeFile, finished
from brokers import running_broker
from turbopump.broker.config import GroupsConfig
from turbopump.broker.groups import BOOT_GROUPS, Groups, check_group_name
from turbopump.errors import InvalidArgument, RemoteError, WriteFailed
from turbopump.tables import TableFile
from turbopump.testing import virtual_time
from turbopump.wire.bodies import GroupConfig, GroupConfigTable
from turbopump.wire.codes import ResponseCode
from vectors import DATA


def made(file: TableFile | None = None, config: GroupsConfig | None = None) -> Groups:
    groups = Groups(config or GroupsConfig(), file or FakeFile())
    groups.load()
    return groups


def test_groups_at_boot() -> None:
    groups = made()
    assert groups.table.keys() == set(BOOT_GROUPS)
    assert groups.data_version.counter == 0


def test_a_group_is_created_on_first_use() -> None:
    groups = made()
    group = groups.find("g")
    assert group == GroupConfig(group_name="g")
    assert groups.find("g") is group
    assert groups.data_version.counter == 1


def test_no_group_is_created_when_automatic_creation_is_off() -> None:
    groups = made(config=GroupsConfig(auto_create=False))
    assert groups.find("g") is None
    assert groups.find("TOOLS_CONSUMER") is not None
    assert groups.find("CID_RMQ_SYS_TRANS") is not None


@pytest.mark.parametrize("name", ["", " ", "a/b", "..", "g" * 121, "a@b", "a b"])
def test_bad_names_never_become_groups(name: str) -> None:
    groups = made()
    assert check_group_name(name) is not None
    assert groups.find(name) is None
    with pytest.raises(InvalidArgument):
        finished(groups.update(GroupConfig(group_name=name)))
    assert groups.data_version.counter == 0


def test_updates_and_deletions() -> None:
    groups = made()
    changed = GroupConfig(group_name="g", retry_max_times=3, consume_enable=False)
    finished(groups.update(changed))
    assert groups.find("g") == changed
    assert finished(groups.delete("g"))
    assert not finished(groups.delete("g"))
    assert "g" not in groups.table
    assert groups.data_version.counter == 2


@pytest.mark.parametrize("changes", [{"retry_queue_nums": -1}, {"retry_max_times": -2}])
def test_invalid_numbers(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="must be"):
        finished(made().update(replace(GroupConfig(group_name="g"), **changes)))


def test_files_of_apache_rocketmq_are_read() -> None:
    groups = made(TableFile(DATA / "config" / "subscriptionGroup.json"))
    assert groups.data_version.counter == 2
    group = groups.find("cg_store")
    assert group is not None
    assert group.retry_max_times == 1


def test_changes_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "subscriptionGroup.json"
    groups = made(TableFile(path))
    finished(groups.update(GroupConfig(group_name="h", retry_queue_nums=2)))
    groups.find("g")
    groups.saving.save_now()
    again = made(TableFile(path))
    assert again.table == groups.table
    assert again.snapshot == groups.snapshot
    assert not again.saving.is_dirty


def test_the_number_of_groups_is_bounded() -> None:
    groups = made(config=GroupsConfig(groups_max=len(BOOT_GROUPS) + 2))
    groups.find("g")
    finished(groups.update(GroupConfig(group_name="h")))
    with pytest.raises(RemoteError, match=r"group i: .*groupsMax is 9") as caught:
        groups.find("i")
    assert caught.value.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    with pytest.raises(InvalidArgument, match="groupsMax is 9"):
        finished(groups.update(GroupConfig(group_name="i")))
    finished(groups.update(GroupConfig(group_name="h", retry_max_times=3)))
    assert groups.find("g") is not None
    finished(groups.delete("h"))
    assert groups.find("i") is not None


def test_one_host_leaves_room_for_others() -> None:
    groups = made(config=GroupsConfig(groups_max=len(BOOT_GROUPS) + 100))

    def created(host: str) -> int:
        for count in range(200):
            try:
                groups.find(f"{host}-{count}".replace(".", "-"), f"{host}:{count}")
            except RemoteError as error:
                assert error.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
                assert f"clients at {host} have created {count} names" in error.remark
                return count
        raise AssertionError("one host has taken all there is")

    assert [created(f"10.0.0.{number}") for number in range(5)] == [50, 25, 13, 6, 3]
    assert groups.find("made-by-the-broker-itself") is not None
    # Deletions free slots, first of all for the client that created the group.
    for number in range(10):
        finished(groups.delete(f"10-0-0-0-{number}"))
    assert groups.find("again", "10.0.0.9:1") is not None


# --- the file -------------------------------------------------------------------------------------


def test_an_operators_change_that_cannot_be_saved_is_not_applied() -> None:
    file = FakeFile()
    groups = made(file)
    finished(groups.update(GroupConfig(group_name="g")))
    file.full = True
    with pytest.raises(WriteFailed):
        finished(groups.update(GroupConfig(group_name="h")))
    with pytest.raises(WriteFailed):
        finished(groups.delete("g"))
    assert "h" not in groups.table
    assert "g" in groups.table


@virtual_time()
async def test_groups_created_together_are_written_together_and_soon() -> None:
    file = FakeFile()
    groups = made(file)
    for number in range(100):
        groups.find(f"g{number}")
    assert file.saved == []
    await asyncio.sleep(1)
    assert len(file.saved) == 1
    saved = GroupConfigTable.decode(file.saved[0])
    assert saved.subscription_group_table == groups.snapshot.subscription_group_table
    groups.find("later")
    await asyncio.sleep(1)
    assert len(file.saved) == 2


@virtual_time()
async def test_groups_are_usable_on_a_full_disk_and_the_write_is_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = FakeFile()
    groups = made(file)
    file.full = True
    assert groups.find("g") is not None
    await asyncio.sleep(5)
    assert groups.saving.is_dirty
    assert groups.find("h") is not None
    await asyncio.sleep(5)
    with pytest.raises(WriteFailed):
        groups.saving.save_now()
    file.full = False
    assert groups.find("i") is not None
    await asyncio.sleep(5)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert {"g", "h", "i"} < GroupConfigTable.decode(file.saved[-1]).subscription_group_table.keys()


@virtual_time()
async def test_a_new_group_can_pull_while_the_disk_rejects_writes(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await client.send()
        obstacle = tmp_path / "config" / "subscriptionGroup.json.tmp"
        obstacle.mkdir()
        assert (await client.pull(consumer_group="new")).code == ResponseCode.SUCCESS
        await asyncio.sleep(5)
        assert broker.state.groups.saving.is_dirty
        obstacle.rmdir()
        await asyncio.sleep(5)
        assert not broker.state.groups.saving.is_dirty


@virtual_time()
async def test_closing_does_not_wait_for_the_next_write() -> None:
    file = FakeFile()
    groups = made(file)
    groups.find("g")
    groups.saving.save_now()
    groups.saving.save_now()
    await asyncio.sleep(1)
    assert len(file.saved) == 1
