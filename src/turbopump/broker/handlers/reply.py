"""Requests that carry a reply, and the requests by which replies are pushed."""

from __future__ import annotations

from turbopump.broker.clients import Member
from turbopump.broker.durability import Late
from turbopump.broker.handlers.common import Requests, commands_to, serves
from turbopump.broker.handlers.send import send_of
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.replies import PushedReply, Replied, Replies
from turbopump.errors import NetworkError
from turbopump.net.connection import Connection
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.command import request as make_request
from turbopump.wire.headers import PushReply, SendMessage, SendMessageAnswer, SendMessageV2
from turbopump.wire.hosts import Host
from turbopump.wire.ids import offset_id

PUSH_TIMEOUT_MS = 10_000


class ReplyRequests(Requests):
    def __init__(self, config: LiveConfig, store_host: Host, replies: Replies) -> None:
        self._config = config
        self._store_host = store_host
        self._replies = replies

    @serves(RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2)
    async def reply(self, request: Command, peer: Connection) -> Command:
        """Serve a reply; in version 2, its fields have letters for names."""
        is_v2 = request.code == RequestCode.SEND_REPLY_MESSAGE_V2
        kind = SendMessageV2 if is_v2 else SendMessage
        send = send_of(request, kind.from_ext_fields(request.ext_fields))
        return self._answer(await self._replies.accept(send, peer.peer_address), request)

    def _answer(self, replied: Replied, request: Command) -> Command:
        """Answer with the result of the push."""
        kept, identity = replied.kept, self._config.current.identity
        appended = kept.appended if isinstance(kept, Late) else kept
        fields = SendMessageAnswer(
            region=identity.region,
            trace_on=identity.trace_on,
            msg_id=offset_id(self._store_host, appended.physical_offset),
            queue_id=replied.queue_id,
            queue_offset=appended.queue_offset,
        )
        if replied.push_failure is not None:
            code = ResponseCode.SYSTEM_ERROR
            return request.answer(code, fields, remark=replied.push_failure)
        if isinstance(kept, Late):
            return request.answer(kept.code, fields, remark=kept.remark)
        return request.answer(ResponseCode.SUCCESS, fields)


async def push_reply(asker: Member, pushed: PushedReply) -> str | None:
    """Push a reply to the requesting client; return why that failed, or None."""
    try:
        answer = await commands_to(asker.connection).request(_push_request(pushed), PUSH_TIMEOUT_MS)
    except NetworkError as error:
        return f"push reply message to {asker.client_id} fail: {error}"
    if answer.code != ResponseCode.SUCCESS:
        return f"push reply message to {asker.client_id} fail: {answer.remark}"
    return None


def _push_request(pushed: PushedReply) -> Command:
    reply = pushed.reply
    header = PushReply(
        producer_group=reply.producer_group,
        topic=reply.topic,
        default_topic=reply.default_topic,
        default_topic_queue_nums=reply.default_topic_queue_nums,
        queue_id=reply.queue_id,
        sys_flag=reply.sys_flag,
        born_timestamp=reply.born_timestamp,
        flag=reply.message_flag,
        properties=pushed.properties,
        reconsume_times=reply.reconsume_times,
        unit_mode=reply.unit_mode,
        born_host=pushed.client,
        store_host=str(pushed.store_host),
        store_timestamp=pushed.store_timestamp_ms,
    )
    return make_request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, header, bytes(reply.body))
