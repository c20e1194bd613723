"""Replies: an answer to a message, pushed to the client that asked, and kept."""

from __future__ import annotations

import asyncio

from turbopump.broker.clients import Producers
from turbopump.broker.durability import Late, Outcome, Promise
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.put import Draft, Put, waits_for_disk
from turbopump.broker.send import Sends, host_of
from turbopump.clock import Clock
from turbopump.errors import NetworkError, RemoteError
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.store.outcomes import Appended
from turbopump.wire import properties as names
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, whole_body
from turbopump.wire.command import request as make_request
from turbopump.wire.headers import PushReply, SendMessage, SendMessageAnswer, SendMessageV2
from turbopump.wire.hosts import Host
from turbopump.wire.ids import offset_id

PUSH_TIMEOUT_MS = 10_000


class Replies:
    """Serves the requests that carry a reply."""

    def __init__(
        self,
        *,
        config: LiveConfig,
        store_host: Host,
        sends: Sends,
        put: Put,
        producers: Producers,
        clock: Clock,
    ) -> None:
        self._config = config
        self._store_host = store_host
        self._sends = sends
        self._put = put
        self._producers = producers
        self._clock = clock

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.SEND_REPLY_MESSAGE: self.reply,
            RequestCode.SEND_REPLY_MESSAGE_V2: self.reply_v2,
        }

    async def reply(self, request: Command, peer: Connection) -> Command:
        """Serve a reply whose fields have long names."""
        return await self._serve(request, peer, SendMessage.from_ext_fields(request.ext_fields))

    async def reply_v2(self, request: Command, peer: Connection) -> Command:
        """Serve a reply whose fields have letters for names."""
        return await self._serve(request, peer, SendMessageV2.from_ext_fields(request.ext_fields))

    async def _serve(self, request: Command, peer: Connection, header: SendMessage) -> Command:
        """Push the reply and keep it; the answer tells how the pushing went."""
        self._sends.admit(header, peer.peer_address)
        properties = names.decode(header.properties or "")
        failure = await self._push(request, peer, header, properties)
        kept = await self._keep(request, peer, header, properties)
        if isinstance(kept, RemoteError):
            raise kept
        appended = kept.appended if isinstance(kept, Late) else kept
        answer = self._answer(header, appended)
        if failure is not None:
            return request.answer(ResponseCode.SYSTEM_ERROR, answer, remark=failure)
        if isinstance(kept, Late):
            return request.answer(kept.code, answer, remark=kept.remark)
        return request.answer(ResponseCode.SUCCESS, answer)

    async def _push(
        self, request: Command, peer: Connection, header: SendMessage, properties: dict[str, str]
    ) -> str | None:
        """Return why the reply did not reach the client that asked; None when it did."""
        client_id = properties.get(names.REPLY_TO_CLIENT)
        if client_id is None:
            return f"reply message properties[{names.REPLY_TO_CLIENT}] is null"
        asker = self._producers.by_client_id(client_id)
        if asker is None:
            return f"push reply message fail, channel of <{client_id}> not found."
        push = self._push_request(request, peer, header, properties)
        try:
            answer = await asker.connection.request(push, PUSH_TIMEOUT_MS)
        except NetworkError as error:
            return f"push reply message to {client_id} fail: {error}"
        if answer.code != ResponseCode.SUCCESS:
            return f"push reply message to {client_id} fail: {answer.remark}"
        return None

    def _push_request(
        self, request: Command, peer: Connection, header: SendMessage, properties: dict[str, str]
    ) -> Command:
        now_ms = self._clock.now_ms()
        timed = {**properties, names.PUSH_REPLY_TIME: str(now_ms)}
        pushed = PushReply(
            producer_group=header.producer_group,
            topic=header.topic,
            default_topic=header.default_topic,
            default_topic_queue_nums=header.default_topic_queue_nums,
            queue_id=header.queue_id,
            sys_flag=header.sys_flag,
            born_timestamp=header.born_timestamp,
            flag=header.flag,
            properties=names.encode(timed),
            reconsume_times=header.reconsume_times,
            unit_mode=header.unit_mode,
            born_host=peer.peer_address,
            store_host=str(self._store_host),
            store_timestamp=now_ms,
        )
        return make_request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, pushed, whole_body(request))

    async def _keep(
        self, request: Command, peer: Connection, header: SendMessage, properties: dict[str, str]
    ) -> Outcome:
        draft = Draft(
            topic=header.topic,
            queue_id=_queue_id(header),
            properties=properties,
            body=whole_body(request),
            flag=header.flag,
            born_timestamp_ms=header.born_timestamp,
            born_host=host_of(peer.peer_address),
            store_host=self._store_host,
            reconsume_times=header.reconsume_times or 0,
        )
        kept: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        promise = Promise.DURABLE if waits_for_disk(properties) else Promise.WRITTEN
        self._put.now([self._put.record(draft)], promise, _finish, kept)
        return await kept

    def _answer(self, header: SendMessage, kept: Appended) -> SendMessageAnswer:
        identity = self._config.current.identity
        return SendMessageAnswer(
            region=identity.region,
            trace_on=identity.trace_on,
            msg_id=offset_id(self._store_host, kept.physical_offset),
            queue_id=_queue_id(header),
            queue_offset=kept.queue_offset,
        )


def _queue_id(header: SendMessage) -> int:
    return max(header.queue_id, 0)


def _finish(outcome: Outcome, kept: asyncio.Future[Outcome]) -> None:
    # It is cancelled when the connection closes meanwhile.
    if not kept.done():
        kept.set_result(outcome)
