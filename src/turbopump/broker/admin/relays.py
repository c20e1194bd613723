"""Requests that only a client can answer, relayed over its own connection."""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from turbopump.broker.clients import Consumers, Member
from turbopump.broker.handlers.common import Requests, answer_with, commands_to, serves
from turbopump.broker.resets import RESETTABLE_SINCE
from turbopump.broker.searches import Searches
from turbopump.errors import BodyError, InvalidArgument, NetworkError, RemoteError, RequestTimeout
from turbopump.message import MessageQueue
from turbopump.net.connection import Connection
from turbopump.store.store import Store
from turbopump.wire import headers
from turbopump.wire.bodies import ConsumerStatus
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.command import request as make_request
from turbopump.wire.ids import parse_offset_id

_log = logging.getLogger(__name__)

STATUS_TIMEOUT_MS = 5000
RELAY_TIMEOUT_MS = 10_000
RELAYABLE_SINCE = 62
"""Clients with a lower version can neither report their internals nor consume on request."""


class RelayRequests(Requests):
    """Relays requests that only a client can answer."""

    def __init__(
        self, *, broker_name: str, consumers: Consumers, store: Store, searches: Searches
    ) -> None:
        self._broker_name = broker_name
        self._consumers = consumers
        self._store = store
        self._searches = searches

    @serves(RequestCode.GET_CONSUMER_RUNNING_INFO)
    async def running_info(self, request: Command, _peer: Connection) -> Command:
        """Relay a request for a client's running info."""
        header = headers.RunningInfoOf.from_ext_fields(request.ext_fields)
        member = self._member(header.consumer_group, header.client_id)
        return await _relayed(request, member, make_request(request.code, header))

    @serves(RequestCode.CONSUME_MESSAGE_DIRECTLY)
    async def consume_directly(self, request: Command, _peer: Connection) -> Command:
        """Have a client consume a message now, and return the result."""
        header = headers.ConsumeDirectly.from_ext_fields(request.ext_fields)
        member = self._member(header.consumer_group, header.client_id or "")
        message = await self._message(header.msg_id or "")
        asked = make_request(request.code, replace(header, broker_name=self._broker_name), message)
        return await _relayed(request, member, asked)

    @serves(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS)
    async def status(self, request: Command, _peer: Connection) -> Command:
        """Ask the clients of a group, or one of them, for their offsets in memory."""
        header = headers.ConsumerStatusOf.from_ext_fields(request.ext_fields)
        members = self._consumers.members(header.group)
        if not members:
            remark = f"No Any Consumer online in the consumer group: [{header.group}]"
            raise RemoteError.system(remark)
        for member in members:
            _require_version(member, RESETTABLE_SINCE)
        asked = [m for m in members if header.client_addr in {None, "", m.client_id}]
        command = make_request(
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT,
            headers.TopicAndGroup(topic=header.topic, group=header.group),
        )
        tables = await asyncio.gather(*(_status_of(member, command) for member in asked))
        found = {m.client_id: t for m, t in zip(asked, tables, strict=True) if t is not None}
        return answer_with(request, ConsumerStatus(consumer_table=found))

    def _member(self, group: str, client_id: str) -> Member:
        member = self._consumers.member(group, client_id)
        if member is None:
            raise RemoteError.system(f"The Consumer <{group}> <{client_id}> not online")
        _require_version(member, RELAYABLE_SINCE)
        return member

    async def _message(self, msg_id: str) -> bytes:
        try:
            _, position = parse_offset_id(msg_id)
        except InvalidArgument as error:
            raise RemoteError.system(str(error)) from error
        message = await self._searches.result(self._store.find_message(position))
        if message is None:
            raise RemoteError.system(f"no message {msg_id} on this broker")
        # A copy: the log's memory must not be held while a client takes its time.
        return bytes(message)


def _require_version(member: Member, least: int) -> None:
    if member.version < least:
        remark = f"The Consumer <{member.client_id}> Version <{member.version}> too low to finish"
        raise RemoteError.system(f"{remark}, please upgrade it")


async def _relayed(request: Command, member: Member, asked: Command) -> Command:
    """Forward a request to a client and return its answer unchanged."""
    try:
        answer = await commands_to(member.connection).request(asked, RELAY_TIMEOUT_MS)
    except RequestTimeout as error:
        remark = f"consumer <{member.client_id}> did not answer: {error}"
        raise RemoteError(ResponseCode.CONSUME_MSG_TIMEOUT, remark) from error
    except NetworkError as error:
        remark = f"consumer <{member.client_id}> could not be asked: {error}"
        raise RemoteError.system(remark) from error
    return replace(answer, opaque=request.opaque, serialize=request.serialize)


async def _status_of(member: Member, command: Command) -> dict[MessageQueue, int] | None:
    """Ask one client; clients that do not answer are left out, as in Apache RocketMQ."""
    try:
        answer = await commands_to(member.connection).request(command, STATUS_TIMEOUT_MS)
        if answer.code == ResponseCode.SUCCESS:
            return ConsumerStatus.decode(whole_body(answer)).message_queue_table
        _log.info("no consumer status from %s: %s", member.address, answer.remark)
    except (NetworkError, BodyError) as error:
        _log.info("no consumer status from %s: %s", member.address, error)
    return None
