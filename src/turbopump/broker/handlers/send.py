"""Requests that bring messages, new ones and failed ones sent back, and their answers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable
from functools import partial

from msgspec.structs import replace

from turbopump.broker.config import BrokerConfig
from turbopump.broker.durability import Late, Outcome
from turbopump.broker.handlers.common import Requests, serves, serves_frames
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.retries import Dropped, Retries, SendBack
from turbopump.broker.send import PendingSend, Sends, retries_max_of
from turbopump.clock import Clock
from turbopump.core import FrameDecoder, SendFrame, SendResponses
from turbopump.errors import RemoteError
from turbopump.net.connection import Connection
from turbopump.net.router import failure
from turbopump.store.outcomes import Appended
from turbopump.wire import headers
from turbopump.wire.codes import Language, RequestCode, ResponseCode
from turbopump.wire.command import FLAG_ONEWAY, Command, Request, answer_to
from turbopump.wire.framing import encode_parts
from turbopump.wire.headers import BrokerTraits, SendMessage, SendMessageAnswer, SendMessageV2
from turbopump.wire.hosts import Host
from turbopump.wire.ids import offset_ids
from turbopump.wire.schema import ExtFields

_log = logging.getLogger(__name__)

_LOG_DROPPED_MS = 10_000


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
        self._answers = SendResponses(self._traits, self._store_host.ip, self._store_host.port)

    @serves_frames(SendFrame)
    def send(self, request: SendFrame, peer: Connection) -> None:
        """Serve a send; nearly all come this way."""
        self._sends.accept(request, peer.peer_address, peer, self._answer)

    @serves(RequestCode.SEND_MESSAGE)
    def send_long(self, request: Command, peer: Connection) -> None:
        """Serve a send whose fields have long names."""
        header = SendMessage.from_ext_fields(request.ext_fields)
        observed = partial(self._answer_observed, request)
        self._sends.accept(send_of(request, header), peer.peer_address, peer, observed)

    @serves(RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
    def send_short(self, request: Command, peer: Connection) -> None:
        """Serve a send whose fields have letters for names, if hooks see it or it is unusual."""
        header = SendMessageV2.from_ext_fields(request.ext_fields)
        observed = partial(self._answer_observed, request)
        self._sends.accept(send_of(request, header), peer.peer_address, peer, observed)

    def _answer(self, pending: PendingSend, outcome: Outcome) -> None:
        request, peer = pending.send, pending.sender
        if isinstance(outcome, Appended):
            frame = self._answers.batch_frame(
                request.opaque,
                outcome.physical_offsets,
                pending.queue_id,
                outcome.queue_offset,
                request.serialize,
            )
            peer.answer_encoded(request, frame)
        else:
            self._answer_command(request, pending, outcome)

    def _answer_observed(self, request: Command, pending: PendingSend, outcome: Outcome) -> None:
        """Answer with a command, for hooks."""
        if isinstance(outcome, Appended):
            fields = self._fields(outcome, pending.queue_id)
            pending.sender.answer(request, answer_to(request, ResponseCode.SUCCESS, fields))
        else:
            self._answer_command(request, pending, outcome)

    def _answer_command(
        self, request: Request, pending: PendingSend, outcome: Late | RemoteError
    ) -> None:
        fields = self._traits
        if isinstance(outcome, Late):
            fields = self._fields(outcome.appended, pending.queue_id)
        elif request.flag & FLAG_ONEWAY:
            self._note_dropped(outcome)
        answer = answer_to(request, outcome.code, fields, remark=outcome.remark)
        pending.sender.answer(request, answer)

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


def send_of(request: Command, header: SendMessage) -> SendFrame:
    """Return the send that a request describes, as if its header had the ordinary form."""
    short = SendMessageV2(
        **{name: getattr(header, name) for name in SendMessageV2.__struct_fields__}
    )
    code = RequestCode.SEND_BATCH_MESSAGE if header.batch else RequestCode.SEND_MESSAGE_V2
    usual = replace(request, code=code, ext_fields=short.to_ext_fields(), remark=None)
    decoder = FrameDecoder(sys.maxsize, typed_requests=True)
    (frame,) = decoder.feed(b"".join(encode_parts(usual, sys.maxsize)))
    assert isinstance(frame, SendFrame), "encoded in the ordinary form"
    return frame


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
                retries_max=retries_max_of(request.version, header.max_reconsume_times),
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
