"""The consumer groups of a broker and their settings."""

from __future__ import annotations

from turbopump.broker.config import GroupsConfig
from turbopump.broker.versioned_table import VersionedTable
from turbopump.errors import InvalidArgument, RemoteError
from turbopump.tables import TableFile
from turbopump.wire.bodies import GroupConfig, GroupConfigTable
from turbopump.wire.codes import ResponseCode
from turbopump.wire.names import check_name, retry_topic

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
_PRODUCER_GROUP_CHARS_MAX = 255


def is_internal_group(name: str) -> bool:
    """Whether brokers and tools use a group, rather than applications."""
    return name in BOOT_GROUPS or name.startswith(_SYSTEM_PREFIX)


def check_group_name(name: str) -> str | None:
    """Return what is wrong with a group's name, or None: its retry topic must be a topic's name."""
    if not name.strip():
        return "the group's name is blank"
    if check_name(retry_topic(name)) is not None:
        return f"group must be 1 to 120 characters of % | a-z A-Z 0-9 _ -, got {name[:200]!r}"
    return None


def check_producer_group_name(name: str) -> str | None:
    """Return what is wrong with a producer group's name, or None.

    It names nothing on disk, so any characters are valid, as in Apache RocketMQ.
    """
    if not name.strip() or len(name) > _PRODUCER_GROUP_CHARS_MAX:
        most = _PRODUCER_GROUP_CHARS_MAX
        return f"producer group must be 1 to {most} characters and not blank, got {name[:200]!r}"
    return None


class Groups(VersionedTable[GroupConfig]):
    """All groups by name.

    An operator's change is on disk when it is acknowledged, and undone if it cannot be written. A
    group created by its use counts immediately and is saved soon after, by a thread: reads must
    continue when the disk is full, and the next use restores what a crash forgets.
    """

    def __init__(self, config: GroupsConfig, file: TableFile) -> None:
        self.config = config
        boot = {name: GroupConfig(group_name=name) for name in BOOT_GROUPS}
        super().__init__("groups", file, "subscriptionGroupTable", boot)

    def load(self) -> bool:
        """Load the saved groups, if any."""
        saved = self._file.load(GroupConfigTable)
        if saved is not None:
            self._table |= saved.subscription_group_table
        return saved is not None

    @property
    def snapshot(self) -> GroupConfigTable:
        """All groups and their version, as they are now; never changed afterwards."""
        return GroupConfigTable(
            data_version=self.data_version, subscription_group_table=dict(self._table)
        )

    def find(self, name: str, client: str = "") -> GroupConfig | None:
        """Return a group, created if it is unknown and creation is enabled.

        Raises RemoteError when there are too many groups, or when the host of the client, given by
        its address, has created its share.
        """
        known = self._table.get(name)
        if known is not None:
            return known
        allowed = self.config.auto_create or name.startswith(_SYSTEM_PREFIX)
        if not allowed or check_group_name(name) is not None:
            return None
        wrong = self._check_room(name)
        if wrong is None:
            share = self._quota.refusal(client, self.config.groups_max - len(self._table))
            wrong = share and f"group {name} is not created: {share} (groupsMax)"
        if wrong is not None:
            raise RemoteError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, wrong)
        self._quota.note(name, client)
        group = GroupConfig(group_name=name)
        self._put({name: group})
        return group

    async def update(self, group: GroupConfig) -> None:
        """Create or change a group; on InvalidArgument or WriteFailed nothing has changed."""
        name = group.group_name
        wrong = check_group_name(name) or _check_numbers(group) or self._check_room(name)
        if wrong is not None:
            raise InvalidArgument(wrong)
        await self._change(name, group)

    def adopt_copy(self, copied: GroupConfigTable) -> None:
        """Replace the table and its version by a master's; for a slave."""
        groups = copied.subscription_group_table.items()
        valid = {name: group for name, group in groups if check_group_name(name) is None}
        self._adopt(valid, copied.data_version)

    def _check_room(self, name: str) -> str | None:
        """Return why a group cannot be added, or None."""
        count, most = len(self._table), self.config.groups_max
        if name in self._table or count < most:
            return None
        return f"cannot create group {name}: {count} groups exist and groupsMax is {most}"


def _check_numbers(group: GroupConfig) -> str | None:
    if not 0 <= group.retry_queue_nums <= _QUEUES_MAX:
        return f"retryQueueNums must be 0 to {_QUEUES_MAX}, got {group.retry_queue_nums}"
    if group.retry_max_times < -1:
        return f"retryMaxTimes must be at least -1, got {group.retry_max_times}"
    return None
