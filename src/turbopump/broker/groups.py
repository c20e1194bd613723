"""The consumer groups of a broker and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from turbopump.broker.config import GroupsConfig
from turbopump.broker.config_file import ConfigFile
from turbopump.broker.names import check_name, retry_topic
from turbopump.broker.topics import next_version
from turbopump.clock import Clock
from turbopump.errors import InvalidArgument
from turbopump.wire.bodies import DataVersion, GroupConfig, GroupConfigTable

BOOT_GROUPS = (
    "TOOLS_CONSUMER",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
)
_SYSTEM_PREFIX = "CID_RMQ_SYS_"
_QUEUES_MAX = 1024


def check_group_name(name: str) -> str | None:
    """Return what is wrong with a group's name, or None: its retry topic must be a topic's name."""
    if not name.strip():
        return "the group's name is blank"
    if check_name(retry_topic(name)) is not None:
        return f"group {name[:200]!r}: up to 120 of the characters % | a-z A-Z 0-9 _ - are allowed"
    return None


class Groups:
    """All groups by name; every change is saved before it counts."""

    def __init__(self, config: GroupsConfig, file: ConfigFile, clock: Clock) -> None:
        self.config = config
        self._file = file
        self._clock = clock
        self._table = {name: GroupConfig(group_name=name) for name in BOOT_GROUPS}
        self.data_version = DataVersion(counter=0, timestamp=clock.now_ms())

    def load(self) -> None:
        """Read what was saved."""
        saved = self._file.load(GroupConfigTable)
        if saved is not None:
            self._table |= saved.subscription_group_table
            self.data_version = saved.data_version

    @property
    def table(self) -> Mapping[str, GroupConfig]:
        """All groups, as they are at any moment."""
        return MappingProxyType(self._table)

    @property
    def snapshot(self) -> GroupConfigTable:
        """All groups, as they are now, and their version."""
        return GroupConfigTable(
            data_version=self.data_version, subscription_group_table=dict(self._table)
        )

    def find(self, name: str) -> GroupConfig | None:
        """Return a group, made when it is not known and that is allowed."""
        known = self._table.get(name)
        if known is not None:
            return known
        allowed = self.config.auto_create or name.startswith(_SYSTEM_PREFIX)
        if not allowed or check_group_name(name) is not None:
            return None
        made = GroupConfig(group_name=name)
        self._save(self._table | {name: made})
        return made

    def update(self, group: GroupConfig) -> None:
        """Make or change a group; raises InvalidArgument for a name or number that cannot be."""
        wrong = check_group_name(group.group_name) or _check_numbers(group)
        if wrong is not None:
            raise InvalidArgument(wrong)
        self._save(self._table | {group.group_name: group})

    def delete(self, name: str) -> bool:
        """Forget a group; whether it was known."""
        if name not in self._table:
            return False
        self._save({key: group for key, group in self._table.items() if key != name})
        return True

    def _save(self, table: dict[str, GroupConfig]) -> None:
        version = next_version(self.data_version, self._clock.now_ms())
        body = GroupConfigTable(data_version=version, subscription_group_table=table)
        self._file.save(msgspec.json.encode(body))
        self._table = table
        self.data_version = version


def _check_numbers(group: GroupConfig) -> str | None:
    if not 0 <= group.retry_queue_nums <= _QUEUES_MAX:
        return f"retryQueueNums is {group.retry_queue_nums}: 0 to {_QUEUES_MAX} is allowed"
    if group.retry_max_times < -1:
        return f"retryMaxTimes is {group.retry_max_times}: at least -1 is allowed"
    return None
