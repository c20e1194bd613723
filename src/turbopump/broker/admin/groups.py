"""Requests to create, change, delete and list groups and their members."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from turbopump.broker.clients import Consumers, Member, Producers
from turbopump.broker.handlers.common import (
    Requests,
    answer_with,
    as_remote_error,
    body_of,
    serves,
)
from turbopump.broker.operations import Operations
from turbopump.broker.subscription_conflicts import SubscriptionConflicts
from turbopump.errors import RemoteError
from turbopump.net.connection import Connection
from turbopump.wire import headers
from turbopump.wire.bodies import (
    ClientConnection,
    ConsumerConnections,
    GroupConfig,
    ProducerConnections,
    ProducerInfo,
    ProducerTable,
)
from turbopump.wire.codes import Language, RequestCode, ResponseCode
from turbopump.wire.command import Command

_LANGUAGE_NAMES = {language.value: language.name for language in Language}


@dataclass(slots=True, eq=False, kw_only=True)
class GroupRequests(Requests):
    operations: Operations
    consumers: Consumers
    producers: Producers
    conflicts: SubscriptionConflicts

    @serves(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)
    async def update(self, request: Command, _peer: Connection) -> Command:
        group = body_of(request, GroupConfig)
        with as_remote_error():
            await self.operations.update_group(group)
        return request.answer(ResponseCode.SUCCESS)

    @serves(RequestCode.DELETE_SUBSCRIPTIONGROUP)
    async def delete(self, request: Command, _peer: Connection) -> Command:
        header = headers.DeleteGroup.from_ext_fields(request.ext_fields)
        with as_remote_error():
            await self.operations.delete_group(
                header.group_name, with_offsets=bool(header.remove_offset)
            )
        return request.answer(ResponseCode.SUCCESS)

    @serves(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    def consumers_of(self, request: Command, _peer: Connection) -> Command:
        """Return the members and subscriptions of a consumer group."""
        name = headers.ConsumerGroup.from_ext_fields(request.ext_fields).consumer_group
        group = self.consumers.find(name)
        if group is None:
            remark = f"the consumer group[{name}] not online"
            raise RemoteError(ResponseCode.CONSUMER_NOT_ONLINE, remark)
        body = ConsumerConnections(
            connection_set=_connections(group.members.values()),
            consume_from_where=group.consume_from,
            consume_type=group.consume_type,
            inconsistent_subscriptions=self.conflicts.of_group(name) or None,
            message_model=group.message_model,
            subscription_table=dict(group.subscriptions),
        )
        return answer_with(request, body)

    @serves(RequestCode.GET_PRODUCER_CONNECTION_LIST)
    def producers_of(self, request: Command, _peer: Connection) -> Command:
        name = headers.ProducerGroup.from_ext_fields(request.ext_fields).producer_group
        members = self.producers.members(name)
        if not members:
            raise RemoteError.system(f"the producer group[{name}] not exist")
        return answer_with(request, ProducerConnections(connection_set=_connections(members)))

    @serves(RequestCode.GET_ALL_PRODUCER_INFO)
    def all_producers(self, request: Command, _peer: Connection) -> Command:
        table = {
            name: [_producer_info(member) for member in members.values()]
            for name, members in self.producers.groups.items()
        }
        return answer_with(request, ProducerTable(data=table))


def _connections(members: Iterable[Member]) -> list[ClientConnection]:
    return [
        ClientConnection(
            client_addr=member.address,
            client_id=member.client_id,
            language=_language(member),
            version=member.version,
        )
        for member in members
    ]


def _producer_info(member: Member) -> ProducerInfo:
    return ProducerInfo(
        client_id=member.client_id,
        language=_language(member),
        last_update_timestamp=member.heartbeat_epoch_ms,
        remote_ip=f"/{member.address}",
        version=member.version,
    )


def _language(member: Member) -> str | None:
    return None if member.language is None else _LANGUAGE_NAMES.get(member.language)
