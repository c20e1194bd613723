"""Requests that bring messages, new ones and failed ones sent back, and their answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from turbopump.broker.config import BrokerConfig
from turbopump.broker.durability import Late, Outcome
from turbopump.broker.handlers.common import Requests, retries_max_of, serves
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.retries import Dropped, Retries, SendBack
from turbopump.broker.send import Send, Sends
from turbopump.clock import Clock
from turbopump.errors import RemoteError
from turbopump.net.connection import Connection
from turbopump.net.router import failure
from turbopump.store.outcomes import Appended
from turbopump.wire import headers
from turbopump.wire.codes import Language, RequestCode, ResponseCode
from turbopump.wire.command import FLAG_ONEWAY, Command, Serialize, whole_body
from turbopump.wire.headers import BrokerTraits, SendMessage, SendMessageAnswer, SendMessageV2
from turbopump.wire.hosts import Host
from turbopump.wire.ids import offset_ids
from turbopump.wire.prepared_frames import SendResponseFrames
from turbopump.wire.schema import ExtFields, Header

_log = logging.getLogger(__name__)

_LOG_DROPPED_MS = 10_000
_JSON = Serialize.JSON

HEADER_TYPES: dict[int, type[Header]] = {
    RequestCode.SEND_MESSAGE_V2: SendMessageV2,
    RequestCode.SEND_BATCH_MESSAGE: SendMessageV2,
}
"""Headers so frequent that their fields are typed while they are decoded."""


class SendRequests(Requests):
    def __init__(self, *, config: LiveConfig, store_host: Host, sends: Sends, clock: Clock) -> None:
        self._store_host = store_host
        self._sends = sends
        self._clock = clock
        self._dropped = 0
        self._log_dropped_from_ms = 0
        self._take_over(config.current)
        config.listen(lambda _, changed: self._take_over(changed))

    def _take_over(self, config: BrokerConfig) -> None:
        """Prepare the parts common to all answers."""
        identity = config.identity
        traits = BrokerTraits(region=identity.region, trace_on=identity.trace_on)
        self._traits = traits.to_ext_fields()
        self._answers = SendResponseFrames(self._traits, self._store_host)

    @serves(RequestCode.SEND_MESSAGE)
    def send(self, request: Command, peer: Connection) -> None:
        """Serve a send whose fields have long names."""
        header = SendMessage.from_ext_fields(request.ext_fields)
        self._sends.accept(send_of(request, peer, header), self._answer, request, peer)

    @serves(RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
    def send_v2(self, request: Command, peer: Connection) -> None:
        """Serve a send whose fields have letters for names."""
        header = request.header
        if not isinstance(header, SendMessage):
            header = SendMessageV2.from_ext_fields(request.ext_fields)
        self._sends.accept(send_of(request, peer, header), self._answer, request, peer)

    def _answer(self, outcome: Outcome, queue_id: int, request: Command, peer: Connection) -> None:
        if isinstance(outcome, Appended):
            if request.serialize is _JSON and not peer.is_observed:
                opaque, at, offset = request.opaque, outcome.physical_offsets, outcome.queue_offset
                frame = (
                    self._answers.frame(opaque, at[0], queue_id, offset)
                    if len(at) == 1
                    else self._answers.batch_frame(opaque, at, queue_id, offset)
                )
                peer.answer_encoded(request, frame)
                return
            fields = self._fields(outcome, queue_id)
            answer = request.answer(ResponseCode.SUCCESS, fields)
        elif isinstance(outcome, Late):
            fields = self._fields(outcome.appended, queue_id)
            answer = request.answer(outcome.code, fields, remark=outcome.remark)
        else:
            if request.flag & FLAG_ONEWAY:
                self._note_dropped(outcome)
            answer = request.answer(outcome.code, self._traits, remark=outcome.remark)
        peer.answer(request, answer)

    def _note_dropped(self, error: RemoteError) -> None:
        """Log dropped one-way sends, of which no client learns: at most once in 10 s."""
        self._dropped += 1
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._log_dropped_from_ms:
            _log.warning("%d one-way sends dropped, the last one with %s", self._dropped, error)
            self._dropped, self._log_dropped_from_ms = 0, now_ms + _LOG_DROPPED_MS

    def _fields(self, appended: Appended, queue_id: int) -> ExtFields:
        ids = offset_ids(self._store_host, appended.physical_offsets)
        return SendMessageAnswer.fields_of(self._traits, ids, queue_id, appended.queue_offset)


def send_of(request: Command, peer: Connection, header: SendMessage) -> Send:
    """Return the send that a request describes."""
    sent, is_batch, limit = request.body, header.batch or False, header.max_reconsume_times
    return Send(
        client=peer.peer_address,
        producer_group=header.producer_group,
        topic=header.topic,
        queue_id=header.queue_id,
        # A batch is parsed in place: it need not be copied as a whole.
        body=(
            sent
            if type(sent) is bytes or (is_batch and isinstance(sent, memoryview))
            else whole_body(request)
        ),
        properties=header.properties or "",
        flag=header.flag,
        sys_flag=header.sys_flag,
        born_timestamp_ms=header.born_timestamp,
        default_topic=header.default_topic,
        default_topic_queue_nums=header.default_topic_queue_nums,
        unit_mode=header.unit_mode or False,
        reconsume_times=header.reconsume_times or 0,
        # Only retried messages have a limit: all others need no call.
        retries_max=None if limit is None else retries_max_of(request, limit),
        is_batch=is_batch,
    )


class SendBackRequests(Requests):
    def __init__(self, retries: Retries) -> None:
        self._retries = retries

    @serves(RequestCode.CONSUMER_SEND_MSG_BACK)
    def send_back(self, request: Command, peer: Connection) -> Awaitable[None] | None:
        """Store a failed message again; answer when it is stored."""
        try:
            header = headers.SendBack.from_ext_fields(request.ext_fields)
            failed = SendBack(
                client=peer.peer_address,
                group=header.group,
                position=header.offset,
                message_id=header.origin_msg_id,
                delay_level=header.delay_level,
                retries_max=retries_max_of(request, header.max_reconsume_times),
                unit_mode=bool(header.unit_mode),
                origin_topic=header.origin_topic or "",
            )
            later = self._retries.accept(failed, _answer_send_back, request, peer)
            return None if later is None else _answer_later(later, request, peer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the message is not stored
            _answer_send_back(error, request, peer)
            return None


async def _answer_later(later: Awaitable[None], request: Command, peer: Connection) -> None:
    try:
        await later
    except Exception as error:  # noqa: BLE001 - as in `send_back`
        _answer_send_back(error, request, peer)


def _answer_send_back(
    outcome: Appended | Dropped | Exception, request: Command, peer: Connection
) -> None:
    """Answer a send-back: anything but success makes the consumer keep the message."""
    if not isinstance(outcome, Exception):
        peer.answer(request, request.answer(ResponseCode.SUCCESS))
    elif request.language != Language.GO:
        peer.answer(request, failure(request, peer, outcome))
    else:
        # The Go client takes every answer for success, and retries only without one.
        _log.warning("could not answer the send-back of %s: %r", peer.peer_address, outcome)
