"""Clients in their groups: joining, leaving, falling silent, and sharing queues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from turbopump.broker.clients import ConsumerGroup, Consumers, Member, Peer, Producers
from turbopump.broker.config import GroupsConfig
from turbopump.broker.consumer_filters import ConsumerFilters
from turbopump.broker.groups import Groups, check_group_name, check_producer_group_name
from turbopump.broker.membership_file import MembershipFile
from turbopump.broker.queue_locks import QueueLocks
from turbopump.broker.subscription_conflicts import SubscriptionConflicts
from turbopump.broker.topics import Topics
from turbopump.clock import Clock
from turbopump.errors import RemoteError, WriteFailed, WriteRefused
from turbopump.message import MessageQueue
from turbopump.wire.bodies import ConsumerData, Heartbeat, LockQueues
from turbopump.wire.codes import ResponseCode

_log = logging.getLogger(__name__)

SWEEP_INTERVAL_MS = 10_000
"""How often to check for silent clients."""

GROUPS_MAX = 1000
"""Most consumer groups of one client, and most producer groups."""

LOCKS_MAX = 10_000
"""Most queues of one request for locks."""

CLIENT_ID_CHARS_MAX = 1000
"""Longest id of a client, which is sent to all members of its groups."""

_UNIT_RETRY_FLAG = 2


@dataclass(eq=False, kw_only=True)
class Membership:
    """The members of groups, and the queues that they have locked."""

    config: GroupsConfig
    consumers: Consumers
    producers: Producers
    locks: QueueLocks
    members: MembershipFile
    topics: Topics
    groups: Groups
    consumer_filters: ConsumerFilters
    conflicts: SubscriptionConflicts
    notify: Callable[[str], None]
    """Called with each group whose members or topics have changed, to notify the members."""
    refuse_if_suspended: Callable[[], None]
    clock: Clock

    def __post_init__(self) -> None:
        self._none_silent_before_ms = 0
        self._swept_expiry_ms = 0
        self.consumers.listen(self._group_changed)

    # --- joining and leaving ----------------------------------------------------------------------

    def heartbeat(self, peer: Peer, beat: Heartbeat, language: int | None, version: int) -> None:
        """Add a client to its groups, or renew its membership; raises RemoteError."""
        wrong = self._check_groups(beat, peer)
        if wrong is not None:
            raise RemoteError.system(wrong)
        now_ms, epoch_ms = self.clock.monotonic_ms(), self.clock.now_ms()
        member = Member(peer, beat.client_id, language, version, now_ms, epoch_ms)
        self._prepare(beat.consumer_data_set, peer.peer_address)
        for data in beat.consumer_data_set:
            self.consumers.heartbeat(member, data)
            self.consumer_filters.register(data.group_name, data.subscription_data_set)
            self.conflicts.heartbeat(peer, beat.client_id, data)
        for producer in beat.producer_data_set:
            self.producers.heartbeat(member, producer.group_name)
        self.members.save_soon()

    def leave(
        self, peer: Peer, client_id: str, producer_group: str | None, consumer_group: str | None
    ) -> None:
        """Remove a client from a group of either kind."""
        if producer_group is not None:
            self.producers.unregister(peer, producer_group)
        if consumer_group is not None:
            self.conflicts.leave(peer, consumer_group)
            self.consumers.unregister(peer, consumer_group)
            self.members.unregister_absent(client_id, consumer_group)
            self.members.save_soon()

    def connection_closed(self, peer: Peer) -> None:
        """Remove a client from all its groups."""
        self.producers.connection_closed(peer)
        for group in self.consumers.joined(peer):
            self.conflicts.leave(peer, group)
        self.consumers.connection_closed(peer)
        self.members.save_soon()

    def forget_absent(self) -> int:
        """Drop members from before a restart that have not reconnected in time.

        Returns for how many ms to wait for the next of the others; 0 if there is none.
        """
        wait_ms = self.config.member_reconnect_ms
        gone = self.members.forget_absent(wait_ms)
        if gone:
            names = ", ".join(f"{client_id} of {group}" for group, client_id in gone[:10])
            _log.warning(
                "%d members did not reconnect within %d ms while the broker ran and are dropped:"
                " %s%s",
                len(gone),
                wait_ms,
                names,
                ", ..." if len(gone) > 10 else "",
            )
        awaited = self.members.awaited
        if not awaited:
            return 0
        return min(awaited.values()) + wait_ms - self.clock.monotonic_ms()

    def sweep(self) -> None:
        """Close the connections of silent clients; call it every `SWEEP_INTERVAL_MS`."""
        now_ms, expiry_ms = self.clock.monotonic_ms(), self.config.client_expiry_ms
        # Heartbeats and new members only make it later.
        if now_ms >= self._none_silent_before_ms or expiry_ms != self._swept_expiry_ms:
            self._close_silent(now_ms, expiry_ms)
        self.locks.forget_expired(now_ms)
        self.consumer_filters.remove_expired()
        self.members.save_soon()

    def _close_silent(self, now_ms: int, expiry_ms: int) -> None:
        silent = self.consumers.expired(now_ms, expiry_ms)
        silent += self.producers.expired(now_ms, expiry_ms)
        for connection in dict.fromkeys(silent):
            _log.info("%s: closed, no heartbeat for %d ms", connection.peer_address, expiry_ms)
            connection.close(f"no heartbeat for {expiry_ms} ms")
        oldest_ms = min(self.consumers.oldest_ms(now_ms), self.producers.oldest_ms(now_ms))
        self._none_silent_before_ms = oldest_ms + expiry_ms
        self._swept_expiry_ms = expiry_ms

    def _check_groups(self, beat: Heartbeat, peer: Peer) -> str | None:
        """Return what is wrong with the client and the groups of a heartbeat, or None."""
        if len(beat.client_id) > CLIENT_ID_CHARS_MAX:
            return _client_id_too_long(beat.client_id)
        consumers = {data.group_name for data in beat.consumer_data_set}
        producers = {data.group_name for data in beat.producer_data_set}
        for kind, joined, groups in (
            ("consumer", self.consumers.joined(peer), consumers),
            ("producer", self.producers.joined(peer), producers),
        ):
            count = len(groups | joined)
            if count > GROUPS_MAX:
                return f"a client must be in at most {GROUPS_MAX} {kind} groups, got {count}"
        wrong = (
            *map(check_group_name, consumers),
            *map(check_producer_group_name, producers),
        )
        return next((text for text in wrong if text is not None), None)

    def _prepare(self, consumers: Iterable[ConsumerData], client: str) -> None:
        """Create the groups and their retry topics that do not exist yet."""
        queues: dict[bool, dict[str, int]] = {False: {}, True: {}}
        refusals: list[Exception] = []
        for data in consumers:
            try:
                group = self.groups.find(data.group_name, client)
            except RemoteError as error:
                refusals.append(error)
                continue
            if group is not None and group.retry_queue_nums > 0:
                queues[data.unit_mode][data.group_name] = group.retry_queue_nums
        try:
            self.topics.create_retries(queues[False])
            self.topics.create_retries(queues[True], sys_flag=_UNIT_RETRY_FLAG)
        except (WriteRefused, RemoteError) as error:
            refusals.append(error)
        if refusals:
            # Existing groups can consume all the same; a later heartbeat tries again.
            _log.warning(
                "cannot create retry topics for all groups of a heartbeat: %s", refusals[0]
            )

    def _group_changed(self, name: str, group: ConsumerGroup | None) -> None:
        if group is not None:
            self.notify(name)

    def to_notify(self, name: str) -> tuple[Peer, ...]:
        """Return the clients to notify of a group's changes; call it once for each notice.

        Clients that pull for absent members are notified the last time when these are dropped.
        """
        pullers = self.consumers.pullers(name)
        if not self.consumers.has_absent:
            self.consumers.forget_pullers(name)
        settings = self.groups.table.get(name)
        wanted = settings is None or settings.notify_consumer_ids_changed_enable
        if not wanted or not self.config.notify_changes:
            return ()
        members = self.consumers.members(name)
        present = (each.connection for each in members if not each.is_absent)
        return (*present, *pullers)

    def client_ids(self, group: str) -> list[str]:
        """List the members of a group, from which each computes its share of the queues."""
        return [member.client_id for member in self.consumers.members(group)]

    # --- locks for orderly consumption ------------------------------------------------------------

    async def lock(self, asked: LockQueues, client: str) -> list[MessageQueue]:
        """Lock queues for a client, or renew its locks; return those that it holds.

        No client gets a queue that this broker does not have, or one for an invalid group. New
        locks are on disk first: after a crash, no other client may get them while this one relies
        on them. Raises WriteFailed if none of the locks is on disk, and RemoteError on a slave or
        a replaced master: another broker may grant the same queues.
        """
        self.refuse_if_suspended()
        if len(asked.client_id) > CLIENT_ID_CHARS_MAX:
            raise RemoteError.system(_client_id_too_long(asked.client_id))
        if len(asked.queues) > LOCKS_MAX:
            remark = f"a request must lock at most {LOCKS_MAX} queues, got {len(asked.queues)}"
            raise RemoteError.system(remark)
        queues = [queue for queue in asked.queues if self.topics.has_queue(queue)]
        if not queues or self.groups.find(asked.consumer_group, client) is None:
            return []
        now_ms = self.clock.monotonic_ms()
        if (wait_ms := self.locks.withheld_ms(now_ms)) > 0:
            # An error, not an empty grant: owners keep consuming under the locks they have.
            remark = (
                f"this broker grants queue locks in {wait_ms} ms, when those that the last master"
                " granted, or that its damaged file had, have expired"
            )
            raise RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, remark)
        self.locks.expiry_ms = self.config.lock_expiry_ms
        granted = self.locks.lock(asked.consumer_group, asked.client_id, queues, now_ms)
        if len(self.locks.saved(asked.consumer_group, granted)) == len(granted):
            return granted
        try:
            await self.members.save_locks()
        except WriteFailed:
            granted = self.locks.saved(asked.consumer_group, granted)
            if not granted:
                raise
        self.refuse_if_suspended()  # Another master may have taken over while this one saved.
        return granted

    def unlock(self, asked: LockQueues) -> None:
        self.locks.unlock(asked.consumer_group, asked.client_id, asked.queues)
        self.members.save_soon()


def _client_id_too_long(client_id: str) -> str:
    return f"client id must be at most {CLIENT_ID_CHARS_MAX} characters, got {len(client_id)}"
