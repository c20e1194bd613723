from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from broker_parts import FakeFile
from turbopump.broker.config import GroupsConfig
from turbopump.broker.config_file import ConfigFile
from turbopump.broker.groups import BOOT_GROUPS, Groups, check_group_name
from turbopump.errors import InvalidArgument, WriteFailed
from turbopump.testing import VirtualClock
from turbopump.wire.bodies import GroupConfig
from vectors import DATA


def made(file: ConfigFile | None = None, config: GroupsConfig | None = None) -> Groups:
    groups = Groups(config or GroupsConfig(), file or FakeFile(), VirtualClock())
    groups.load()
    return groups


def test_groups_at_boot() -> None:
    groups = made()
    assert groups.table.keys() == set(BOOT_GROUPS)
    assert groups.data_version.counter == 0


def test_a_group_comes_when_it_is_used() -> None:
    groups = made()
    group = groups.find("g")
    assert group == GroupConfig(group_name="g")
    assert groups.find("g") is group
    assert groups.data_version.counter == 1


def test_no_group_comes_when_that_is_not_allowed() -> None:
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
        groups.update(GroupConfig(group_name=name))
    assert groups.data_version.counter == 0


def test_updates_and_deletions() -> None:
    groups = made()
    changed = GroupConfig(group_name="g", retry_max_times=3, consume_enable=False)
    groups.update(changed)
    assert groups.find("g") == changed
    assert groups.delete("g")
    assert not groups.delete("g")
    assert "g" not in groups.table
    assert groups.data_version.counter == 2


@pytest.mark.parametrize("changes", [{"retry_queue_nums": -1}, {"retry_max_times": -2}])
def test_numbers_that_cannot_be(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="allowed"):
        made().update(replace(GroupConfig(group_name="g"), **changes))


def test_what_the_original_wrote_is_read() -> None:
    groups = made(ConfigFile(DATA / "config" / "subscriptionGroup.json"))
    assert groups.data_version.counter == 2
    group = groups.find("cg_store")
    assert group is not None
    assert group.retry_max_times == 1


def test_changes_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "subscriptionGroup.json"
    groups = made(ConfigFile(path))
    groups.find("g")
    groups.update(GroupConfig(group_name="h", retry_queue_nums=2))
    again = made(ConfigFile(path))
    assert again.table == groups.table
    assert again.snapshot == groups.snapshot


def test_a_change_that_cannot_be_saved_does_not_happen() -> None:
    file = FakeFile()
    groups = made(file)
    file.full = True
    with pytest.raises(WriteFailed):
        groups.find("g")
    assert "g" not in groups.table
    assert groups.data_version.counter == 0
