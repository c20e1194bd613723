"""Requests from brokers to clients, over the clients' connections."""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec.structs import replace

from turbopump.client.members import ConsumerMember, Members
from turbopump.errors import RemoteError
from turbopump.message import QueueOffset
from turbopump.net.connection import Connection
from turbopump.net.router import Router
from turbopump.supervisor import Supervisor, summary
from turbopump.wire import properties
from turbopump.wire.bodies import ConsumerStatus, QueueOffsets
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.headers import (
    CheckTransactionState,
    ConsumeDirectly,
    ConsumerGroup,
    PushReply,
    ResetOffset,
    RunningInfoOf,
    TopicAndGroup,
)
from turbopump.wire.record import decode_record

_log = logging.getLogger(__name__)

OnReply = Callable[[PushReply, bytes], None]


class BrokerRequests:
    """Dispatches a broker's requests to the members that they address."""

    def __init__(self, members: Members, on_reply: OnReply, work: Supervisor) -> None:
        self._members = members
        self._on_reply = on_reply
        self._work = work

    def router(self) -> Router:
        return Router(
            {
                RequestCode.CHECK_TRANSACTION_STATE: self._check_transaction,
                RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._members_changed,
                RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._reset_offsets,
                RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._progress,
                RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
                RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
                RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: self._reply,
            }
        )

    def _check_transaction(self, request: Command, peer: Connection) -> None:
        asked = CheckTransactionState.from_ext_fields(request.ext_fields)
        message = decode_record(whole_body(request))
        group = message.properties.get(properties.PRODUCER_GROUP, "")
        producer = self._members.producers.get(group)
        if producer is None:
            _log.warning("%s asks for a transaction of %r: not here", peer.peer_address, group)
        else:
            producer.check_transaction(peer.peer_address, asked, message)

    def _members_changed(self, request: Command, _: Connection) -> None:
        group = ConsumerGroup.from_ext_fields(request.ext_fields).consumer_group
        consumer = self._members.consumers.get(group)
        if consumer is not None:
            consumer.members_changed()

    async def _reset_offsets(self, request: Command, _: Connection) -> None:
        asked = ResetOffset.from_ext_fields(request.ext_fields)
        table = QueueOffsets.decode(whole_body(request)).offset_table
        offsets = {queue: QueueOffset(offset) for queue, offset in table.items()}
        await self._consumer(asked.group).reset_offsets(asked.topic, offsets)

    def _progress(self, request: Command, _: Connection) -> Command:
        asked = TopicAndGroup.from_ext_fields(request.ext_fields)
        table = dict(self._consumer(asked.group).progress(asked.topic))
        body = ConsumerStatus(message_queue_table=table).encode(bare_keys=True)
        return request.answer(ResponseCode.SUCCESS, body=body)

    async def _running_info(self, request: Command, _: Connection) -> Command:
        asked = RunningInfoOf.from_ext_fields(request.ext_fields)
        consumer = self._consumer(asked.consumer_group)
        info = await consumer.running_info(with_stacks=bool(asked.jstack_enable))
        work = summary((*self._work.watches, *consumer.watches))
        info = replace(info, properties={**info.properties, **work})
        return request.answer(ResponseCode.SUCCESS, body=info.encode(bare_keys=True))

    async def _consume_directly(self, request: Command, _: Connection) -> Command:
        asked = ConsumeDirectly.from_ext_fields(request.ext_fields)
        message = decode_record(whole_body(request), check_crc=True)
        consumer = self._consumer(asked.consumer_group)
        result = await consumer.consume_directly(message, asked.broker_name)
        return request.answer(ResponseCode.SUCCESS, body=result.encode())

    def _reply(self, request: Command, _: Connection) -> Command:
        self._on_reply(PushReply.from_ext_fields(request.ext_fields), whole_body(request))
        return request.answer(ResponseCode.SUCCESS)

    def _consumer(self, group: str) -> ConsumerMember:
        consumer = self._members.consumers.get(group)
        if consumer is None:
            # In Apache RocketMQ's words, which tools show to users.
            remark = f"The Consumer Group <{group}> not exist in this consumer"
            raise RemoteError(ResponseCode.SYSTEM_ERROR, remark)
        return consumer
