"""Members of consumer groups and their queue locks, remembered across a restart.

Clients in the field send heartbeats only every 30 s, even after a reconnect. Without this table, a
restarted broker would list only the members whose heartbeat came first: each of them would take
over the queues of members that are still consuming them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from turbopump.broker.clients import AbsentPeer, ConsumerGroup, Consumers, Member
from turbopump.broker.groups import check_group_name
from turbopump.broker.queue_locks import QueueLocks
from turbopump.clock import Clock
from turbopump.message import MessageQueue
from turbopump.tables import Table, TableFile
from turbopump.wire.bodies import ConsumeFrom, ConsumeType, MessageModel, Subscription
from turbopump.wire.schema import Body

_log = logging.getLogger(__name__)

TABLE_BYTES_MAX = 16 * 1024 * 1024
"""Most bytes of groups in the file; groups that do not fit are not remembered."""

ABSENCE_SAVE_MS = 2000
"""How often to save how long clients have been absent, for a start after a crash."""

_UNKNOWN_EPOCH = -1
"""In place of the epoch of a file that cannot be read."""

_NO_GROUP = ConsumerGroup(None, None, None, {}, {})


class RememberedMember(Body, frozen=True, kw_only=True):
    """One client of a group, and the queues that it has locked."""

    client_id: str
    language: int | None
    version: int
    locked_queues: list[MessageQueue]
    absent_ms: int = 0
    """For how long the broker had run without seeing it; 0 if it was seen since the last start."""
    is_disconnected: bool = False
    """No longer a member, but its locks have not expired: it may reconnect, as absent members may,
    and still own its queues."""


class RememberedGroup(Body, frozen=True, kw_only=True):
    """One consumer group that has members, or queues that are locked."""

    consume_type: ConsumeType | None
    message_model: MessageModel | None
    consume_from_where: ConsumeFrom | None
    subscriptions: list[Subscription]
    members: list[RememberedMember]


class RememberedGroups(Body, frozen=True, kw_only=True):
    """The file (groupMembers.json)."""

    groups: dict[str, RememberedGroup]
    epoch: int = 0
    """The epoch of the master that granted the locks."""


class MembershipFile:
    """Persists the members of groups and their queue locks."""

    def __init__(
        self, file: TableFile, consumers: Consumers, locks: QueueLocks, clock: Clock
    ) -> None:
        self._file = file
        self._consumers = consumers
        self._locks = locks
        self._clock = clock
        self._table = Table("members of groups", file, self._encoded)
        self._left_out = False
        self._updates = 0
        self._epoch = self._epoch_before = 0

    def load(self, groups_max: int, epoch: int = 0) -> None:
        """Restore the members of an earlier run as absent members and owners of their locks.

        An unreadable file does not prevent the start: members reconnect anyway. Locks of another
        epoch are not restored: another broker has granted locks since. Neither are those of a
        backup, which may be older. In both cases, no locks are granted until those have expired.
        """
        self._epoch = epoch
        saved = self._file.load_expendable(
            RememberedGroups, "members of groups are not remembered over this restart"
        )
        now_ms, epoch_ms = self._clock.monotonic_ms(), self._clock.now_ms()
        if not self._file.is_current:
            self._epoch_before = _UNKNOWN_EPOCH
        elif saved is not None:
            self._epoch_before = saved.epoch
        if self._epoch_before != epoch:
            self._locks.withhold(now_ms)
        if saved is None:
            return
        for name, group in list(saved.groups.items())[:groups_max]:
            if group.members and check_group_name(name) is None:
                self._restore(name, group, now_ms, epoch_ms)

    def _restore(self, name: str, group: RememberedGroup, now_ms: int, epoch_ms: int) -> None:
        def since(member: RememberedMember) -> int:
            return now_ms - max(0, member.absent_ms)

        known = ConsumerGroup(
            group.consume_type,
            group.message_model,
            group.consume_from_where,
            {each.topic: each for each in group.subscriptions},
            {},
        )
        nowhere = AbsentPeer()
        members = [
            Member(nowhere, each.client_id, each.language, each.version, since(each), epoch_ms)
            for each in group.members
            if not each.is_disconnected
        ]
        if members:
            self._consumers.remember(name, known, members)
        if self._epoch_before == self._epoch:
            for each in group.members:
                self._locks.remember(name, each.client_id, each.locked_queues, since(each))

    def forget_absent(self, wait_ms: int) -> list[tuple[str, str]]:
        """Drop members that have not reconnected for some time; return group and id of each.

        With them go the locks that they had before the restart, and those of clients that were
        disconnected even then. For the others, the file gets how long they have been absent, so
        that restarts do not prolong it. Downtime does not count: clients cannot reconnect then.
        """
        since_ms = self._clock.monotonic_ms() - wait_ms
        gone = self._consumers.forget_absent(since_ms)
        for group in {group for group, _ in self._locks.remembered}:
            members = self._consumers.members(group)
            self._locks.note_seen(group, {each.client_id for each in members if not each.is_absent})
        for (group, client_id), awaited_ms in self._locks.remembered.items():
            if awaited_ms <= since_ms:
                self._locks.forget_remembered(group, client_id)
        self._updates += 1
        self.save_soon()
        return gone

    @property
    def awaited(self) -> dict[tuple[str, str], int]:
        """Members and owners of locks that have not reconnected, and since when."""
        return {**self._locks.remembered, **self._consumers.absent}

    def unregister_absent(self, client_id: str, group: str) -> None:
        """Remove a client from a group that it left before its first heartbeat."""
        if self._consumers.unregister_absent(client_id, group):
            self._locks.forget_remembered(group, client_id)

    # --- the file ---------------------------------------------------------------------------------

    @property
    def saving(self) -> Table:
        """What keeps the file up to date."""
        self._table.changes = self._consumers.changes + self._locks.changes + self._updates
        return self._table

    def save_soon(self) -> None:
        """Save the file soon if anything changed, without blocking the event loop."""
        self.saving.save_soon()

    async def save_locks(self) -> None:
        """Return when all locks granted so far are on disk; raises WriteFailed."""
        changes = self._locks.changes
        await self.saving.save()
        self._locks.note_saved(changes)

    def _snapshot(self) -> dict[str, RememberedGroup]:
        now_ms = self._clock.monotonic_ms()
        groups = self._consumers.groups
        return {
            name: self._remembered(name, groups.get(name, _NO_GROUP), now_ms)
            for name in {**groups, **self._locks.groups}
        }

    def _remembered(self, name: str, group: ConsumerGroup, now_ms: int) -> RememberedGroup:
        locks, awaited = self._locks.held(name, now_ms), self._locks.awaited(name)
        # A client id with two connections is one client: it will come back as one.
        by_id = {member.client_id: member for member in group.members.values()}
        return RememberedGroup(
            consume_type=group.consume_type,
            message_model=group.message_model,
            consume_from_where=group.consume_from,
            subscriptions=list(group.subscriptions.values()),
            members=[
                RememberedMember(
                    client_id=member.client_id,
                    language=member.language,
                    version=member.version,
                    locked_queues=locks.get(member.client_id, []),
                    absent_ms=now_ms - member.heartbeat_ms if member.is_absent else 0,
                )
                for member in by_id.values()
            ]
            + [
                RememberedMember(
                    client_id=client_id,
                    language=None,
                    version=0,
                    locked_queues=locks[client_id],
                    absent_ms=now_ms - awaited.get(client_id, now_ms),
                    is_disconnected=True,
                )
                for client_id in sorted(locks.keys() - by_id.keys())
            ],
        )

    def _encoded(self) -> bytes:
        # After a restart meanwhile, locks must be withheld again.
        is_withheld = self._locks.withheld_ms(self._clock.monotonic_ms()) > 0
        epoch = self._epoch_before if is_withheld else self._epoch
        body, left_out = encoded(self._snapshot(), TABLE_BYTES_MAX, epoch)
        self._note_left_out(left_out)
        return body

    def _note_left_out(self, names: list[str]) -> None:
        if names and not self._left_out:
            _log.warning(
                "members of %d groups, such as %s, will not be remembered over a restart: they need"
                " more than %d bytes, or have client ids that are not valid UTF-8",
                len(names),
                names[0],
                TABLE_BYTES_MAX,
            )
        self._left_out = bool(names)


def encoded(
    groups: Mapping[str, RememberedGroup], bytes_max: int, epoch: int = 0
) -> tuple[bytes, list[str]]:
    """Return the file's text, and the groups left out: too large, or with text that is no UTF-8."""
    left_bytes, rows, left_out = bytes_max, {}, []
    for name, group in groups.items():
        try:
            row = msgspec.json.encode(group)
        except UnicodeEncodeError:
            row = b""
        if row and len(row) <= left_bytes:
            left_bytes -= len(row)
            rows[name] = msgspec.Raw(row)
        else:
            left_out.append(name)
    return msgspec.json.encode({"groups": rows, "epoch": epoch}), left_out
