"""Requests by which clients make themselves known, find each other and share queues."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from turbopump.broker.clients import ConsumerGroup, Consumers, Member, Peer, Producers
from turbopump.broker.config import GroupsConfig
from turbopump.broker.consumer_filters import ConsumerFilters
from turbopump.broker.group_members import GroupMembers
from turbopump.broker.groups import Groups, check_group_name, check_producer_group_name
from turbopump.broker.queue_locks import QueueLocks
from turbopump.broker.requests import answer_with, body_of
from turbopump.broker.subscription_conflicts import SubscriptionConflicts
from turbopump.broker.subscription_filters import SubscriptionFilters
from turbopump.broker.topics import Topics
from turbopump.clock import Clock
from turbopump.errors import NetworkError, RemoteError, WriteRefused
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.wire import headers
from turbopump.wire.bodies import (
    CheckClientConfig,
    ConsumerData,
    ConsumerIds,
    Heartbeat,
    LockedQueues,
    LockQueues,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.command import request as make_request

_log = logging.getLogger(__name__)

SWEEP_INTERVAL_MS = 10_000
"""How often clients are looked for that have fallen silent."""

GROUPS_MAX = 1000
"""Most consumer groups of one client, and most producer groups."""

LOCKS_MAX = 10_000
"""Most queues of one request for locks."""

CLIENT_ID_CHARS_MAX = 1000
"""Longest id of a client, which all members of its groups are told."""

_REMEMBERED_BYTES_MAX = 16 * 1024
"""Heartbeats above this are read each time they come: each connection may have one in memory."""

_UNIT_RETRY_FLAG = 2


class ClientRequests:
    """Serves heartbeats, leaving, member lists, locks and checks of subscriptions."""

    def __init__(
        self,
        *,
        config: GroupsConfig,
        consumers: Consumers,
        producers: Producers,
        locks: QueueLocks,
        members: GroupMembers,
        topics: Topics,
        groups: Groups,
        filters: SubscriptionFilters,
        consumer_filters: ConsumerFilters,
        conflicts: SubscriptionConflicts,
        clock: Clock,
    ) -> None:
        self.config = config
        self._consumers = consumers
        self._producers = producers
        self._locks = locks
        self._members = members
        self._topics = topics
        self._groups = groups
        self._clock = clock
        self._filters = filters
        self._consumer_filters = consumer_filters
        self._conflicts = conflicts
        self._beats: dict[Peer, tuple[bytes, Heartbeat]] = {}
        """The last heartbeat of each connection, as it came and as it was read, if it is small."""
        self._none_silent_before_ms = 0
        self._swept_expiry_ms = 0
        consumers.listen(self._group_changed)

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.HEART_BEAT: self.heartbeat,
            RequestCode.UNREGISTER_CLIENT: self.unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.consumer_ids,
            RequestCode.LOCK_BATCH_MQ: self.lock,
            RequestCode.UNLOCK_BATCH_MQ: self.unlock,
            RequestCode.CHECK_CLIENT_CONFIG: self.check,
        }

    # --- coming and going -------------------------------------------------------------------------

    def heartbeat(self, request: Command, peer: Connection) -> Command:
        """Put a client into its groups, or renew that it is there."""
        beat = self._beat_of(request, peer)
        wrong = self._check_groups(beat, peer)
        if wrong is not None:
            raise RemoteError(ResponseCode.SYSTEM_ERROR, wrong)
        member = Member(
            peer,
            beat.client_id,
            request.language,
            request.version,
            self._clock.monotonic_ms(),
            self._clock.now_ms(),
        )
        self._prepare(beat.consumer_data_set, peer.peer_address)
        for data in beat.consumer_data_set:
            self._consumers.heartbeat(member, data)
            self._consumer_filters.register(data.group_name, data.subscription_data_set)
            self._conflicts.heartbeat(peer, beat.client_id, data)
        for producer in beat.producer_data_set:
            self._producers.heartbeat(member, producer.group_name)
        self._members.save_soon()
        return request.answer(ResponseCode.SUCCESS)

    def _beat_of(self, request: Command, peer: Connection) -> Heartbeat:
        """Read a heartbeat; a client says the same nearly every time."""
        body = whole_body(request)
        known = self._beats.get(peer)
        if known is not None and known[0] == body:
            return known[1]
        beat = Heartbeat.decode(body)
        if len(body) <= _REMEMBERED_BYTES_MAX:
            self._beats[peer] = body, beat
        else:
            self._beats.pop(peer, None)
        return beat

    def unregister(self, request: Command, peer: Connection) -> Command:
        """Take a client out of a group."""
        header = headers.UnregisterClient.from_ext_fields(request.ext_fields)
        if header.producer_group is not None:
            self._producers.unregister(peer, header.producer_group)
        if header.consumer_group is not None:
            self._consumers.unregister(peer, header.consumer_group)
            self._members.unregister_absent(header.client_id, header.consumer_group)
            self._members.save_soon()
        return request.answer(ResponseCode.SUCCESS, headers.NoFields())

    def connection_closed(self, connection: Peer) -> None:
        """Take a client out of all its groups; to be called when a connection has closed."""
        self._beats.pop(connection, None)
        self._producers.connection_closed(connection)
        self._consumers.connection_closed(connection)
        self._members.save_soon()

    def forget_absent(self) -> None:
        """Drop members of before a restart that have not reconnected in time."""
        gone = self._members.forget_absent()
        if gone:
            names = ", ".join(f"{client_id} of {group}" for group, client_id in gone[:10])
            _log.warning(
                "%d members did not reconnect within %d ms of the start and are dropped: %s%s",
                len(gone),
                self.config.member_reconnect_ms,
                names,
                ", ..." if len(gone) > 10 else "",
            )

    def sweep(self) -> None:
        """Close the connections of silent clients; to be called every `SWEEP_INTERVAL_MS`."""
        now_ms, expiry_ms = self._clock.monotonic_ms(), self.config.client_expiry_ms
        # Heartbeats only make it later, and so do those who come.
        if now_ms >= self._none_silent_before_ms or expiry_ms != self._swept_expiry_ms:
            self._close_silent(now_ms, expiry_ms)
        self._locks.forget_expired(now_ms)
        self._consumer_filters.remove_expired()
        self._members.save_soon()

    def _close_silent(self, now_ms: int, expiry_ms: int) -> None:
        silent = self._consumers.expired(now_ms, expiry_ms)
        silent += self._producers.expired(now_ms, expiry_ms)
        for connection in dict.fromkeys(silent):
            _log.info("%s: closed, no heartbeat for %d ms", connection.peer_address, expiry_ms)
            connection.close(f"no heartbeat for {expiry_ms} ms")
        oldest_ms = min(self._consumers.oldest_ms(now_ms), self._producers.oldest_ms(now_ms))
        self._none_silent_before_ms = oldest_ms + expiry_ms
        self._swept_expiry_ms = expiry_ms

    def _check_groups(self, beat: Heartbeat, peer: Peer) -> str | None:
        """Return what is wrong with the client and the groups of a heartbeat, or None."""
        if len(beat.client_id) > CLIENT_ID_CHARS_MAX:
            return _client_id_too_long(beat.client_id)
        consumers = {data.group_name for data in beat.consumer_data_set}
        producers = {data.group_name for data in beat.producer_data_set}
        for kind, joined, groups in (
            ("consumer", self._consumers.joined(peer), consumers),
            ("producer", self._producers.joined(peer), producers),
        ):
            count = len(groups | joined)
            if count > GROUPS_MAX:
                return f"{count} {kind} groups of one client, at most {GROUPS_MAX} are allowed"
        wrong = (
            *map(check_group_name, consumers),
            *map(check_producer_group_name, producers),
        )
        return next((text for text in wrong if text is not None), None)

    def _prepare(self, consumers: Iterable[ConsumerData], client: str) -> None:
        """Make groups and their retry topics, if they are not there yet."""
        queues: dict[bool, dict[str, int]] = {False: {}, True: {}}
        refusals: list[Exception] = []
        for data in consumers:
            try:
                group = self._groups.find(data.group_name, client)
            except RemoteError as error:
                refusals.append(error)
                continue
            if group is not None and group.retry_queue_nums > 0:
                queues[data.unit_mode][data.group_name] = group.retry_queue_nums
        try:
            self._topics.create_retries(queues[False])
            self._topics.create_retries(queues[True], sys_flag=_UNIT_RETRY_FLAG)
        except (WriteRefused, RemoteError) as error:
            refusals.append(error)
        if refusals:
            # Those who are there can consume all the same; a later heartbeat tries again.
            _log.warning("a heartbeat's groups are not all prepared: %s", refusals[0])

    def _group_changed(self, name: str, group: ConsumerGroup | None) -> None:
        settings = self._groups.table.get(name)
        wanted = settings is None or settings.notify_consumer_ids_changed_enable
        if group is None or not wanted or not self.config.notify_changes:
            return
        notice = make_request(
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, headers.ConsumerGroup(consumer_group=name)
        )
        members = (each.connection for each in group.members.values() if not each.is_absent)
        for connection in (*members, *self._consumers.pullers(name)):
            try:
                connection.oneway(notice)
            except NetworkError as error:
                # It looks by itself every 20 s, or is about to be noticed as gone.
                _log.info(
                    "%s not notified that %s changed: %s", connection.peer_address, name, error
                )

    # --- who is there -----------------------------------------------------------------------------

    def consumer_ids(self, request: Command, _peer: Connection) -> Command:
        """List the members of a group, from which each works out its share of the queues."""
        group = headers.ConsumerGroup.from_ext_fields(request.ext_fields).consumer_group
        ids = [member.client_id for member in self._consumers.members(group)]
        if not ids:
            remark = f"no consumer for this group, {group}"
            return request.answer(ResponseCode.SYSTEM_ERROR, headers.NoFields(), remark=remark)
        body = ConsumerIds(consumer_id_list=ids).encode()
        return request.answer(ResponseCode.SUCCESS, headers.NoFields(), body=body)

    # --- who may consume a queue in order ---------------------------------------------------------

    def lock(self, request: Command, peer: Connection) -> Command:
        """Lock queues for a client, or renew its locks; tell which it has.

        Nobody gets a queue that this broker does not have, or one for a group that cannot be.
        """
        asked = body_of(request, LockQueues)
        if len(asked.client_id) > CLIENT_ID_CHARS_MAX:
            raise RemoteError(ResponseCode.SYSTEM_ERROR, _client_id_too_long(asked.client_id))
        if len(asked.queues) > LOCKS_MAX:
            remark = f"{len(asked.queues)} queues in one request, at most {LOCKS_MAX} are allowed"
            raise RemoteError(ResponseCode.SYSTEM_ERROR, remark)
        queues = [queue for queue in asked.queues if self._topics.has_queue(queue)]
        if not queues or self._groups.find(asked.consumer_group, peer.peer_address) is None:
            return answer_with(request, LockedQueues(queues=[]))
        self._locks.expiry_ms = self.config.lock_expiry_ms
        granted = self._locks.lock(
            asked.consumer_group, asked.client_id, queues, self._clock.monotonic_ms()
        )
        self._members.save_soon()
        return answer_with(request, LockedQueues(queues=granted))

    def unlock(self, request: Command, _peer: Connection) -> Command:
        """Give up a client's locks."""
        asked = body_of(request, LockQueues)
        self._locks.unlock(asked.consumer_group, asked.client_id, asked.queues)
        self._members.save_soon()
        return request.answer(ResponseCode.SUCCESS)

    # --- subscriptions ----------------------------------------------------------------------------

    def check(self, request: Command, _peer: Connection) -> Command:
        """Try out a subscription before a client relies on it."""
        self._filters.check(body_of(request, CheckClientConfig).subscription_data)
        return request.answer(ResponseCode.SUCCESS)


def _client_id_too_long(client_id: str) -> str:
    return f"client id must be at most {CLIENT_ID_CHARS_MAX} characters, got {len(client_id)}"
