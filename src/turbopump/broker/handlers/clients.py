"""Requests by which clients register, find each other and share queues."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from turbopump.broker.clients import Peer
from turbopump.broker.handlers.common import Requests, answer_with, body_of, commands_to, serves
from turbopump.broker.membership import Membership
from turbopump.broker.subscription_filters import SubscriptionFilters
from turbopump.errors import NetworkError
from turbopump.net.connection import Connection
from turbopump.wire import headers
from turbopump.wire.bodies import (
    CheckClientConfig,
    ConsumerIds,
    Heartbeat,
    LockedQueues,
    LockQueues,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.command import request as make_request

_log = logging.getLogger(__name__)

_REMEMBERED_BYTES_MAX = 16 * 1024
"""Larger heartbeats are decoded each time: each connection may keep one in memory."""


class ClientRequests(Requests):
    """Serves heartbeats, leaving, member lists, locks and checks of subscriptions."""

    def __init__(self, membership: Membership, filters: SubscriptionFilters) -> None:
        self._membership = membership
        self._filters = filters
        self._beats: dict[Peer, tuple[bytes, Heartbeat]] = {}
        """The last heartbeat of each connection, raw and decoded, if it is small."""

    @serves(RequestCode.HEART_BEAT)
    def heartbeat(self, request: Command, peer: Connection) -> Command:
        """Register a client in its groups, or renew its registration."""
        beat = self._beat_of(request, peer)
        self._membership.heartbeat(peer, beat, request.language, request.version)
        return request.answer(ResponseCode.SUCCESS)

    def _beat_of(self, request: Command, peer: Connection) -> Heartbeat:
        """Decode a heartbeat; a client repeats the same one nearly every time."""
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

    @serves(RequestCode.UNREGISTER_CLIENT)
    def unregister(self, request: Command, peer: Connection) -> Command:
        header = headers.UnregisterClient.from_ext_fields(request.ext_fields)
        self._membership.leave(peer, header.client_id, header.producer_group, header.consumer_group)
        return request.answer(ResponseCode.SUCCESS, headers.NoFields())

    def connection_closed(self, connection: Peer) -> None:
        """Remove a client from all its groups; call it when a connection has closed."""
        self._beats.pop(connection, None)
        self._membership.connection_closed(connection)

    @serves(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
    def consumer_ids(self, request: Command, _peer: Connection) -> Command:
        group = headers.ConsumerGroup.from_ext_fields(request.ext_fields).consumer_group
        ids = self._membership.client_ids(group)
        if not ids:
            remark = f"no consumer for this group, {group}"
            return request.answer(ResponseCode.SYSTEM_ERROR, headers.NoFields(), remark=remark)
        body = ConsumerIds(consumer_id_list=ids).encode()
        return request.answer(ResponseCode.SUCCESS, headers.NoFields(), body=body)

    @serves(RequestCode.LOCK_BATCH_MQ)
    async def lock(self, request: Command, peer: Connection) -> Command:
        """Lock queues for a client, or renew its locks; answer with those it holds."""
        granted = await self._membership.lock(body_of(request, LockQueues), peer.peer_address)
        return answer_with(request, LockedQueues(queues=granted))

    @serves(RequestCode.UNLOCK_BATCH_MQ)
    def unlock(self, request: Command, _peer: Connection) -> Command:
        self._membership.unlock(body_of(request, LockQueues))
        return request.answer(ResponseCode.SUCCESS)

    @serves(RequestCode.CHECK_CLIENT_CONFIG)
    def check(self, request: Command, _peer: Connection) -> Command:
        """Check a subscription before a client relies on it."""
        self._filters.check(body_of(request, CheckClientConfig).subscription_data)
        return request.answer(ResponseCode.SUCCESS)


def notify_clients(group: str, peers: Iterable[Peer]) -> None:
    """Notify clients that the members or topics of a group have changed."""
    notice = make_request(
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, headers.ConsumerGroup(consumer_group=group)
    )
    for peer in peers:
        try:
            commands_to(peer).oneway(notice)
        except NetworkError as error:
            # It refreshes every 20 s itself, or is about to be noticed as gone.
            _log.info(
                "%s was not notified that group %s changed: %s", peer.peer_address, group, error
            )
