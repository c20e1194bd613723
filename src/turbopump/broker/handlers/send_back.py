"""Requests that send a failed message back, and their answers."""

from __future__ import annotations

import logging

from turbopump.broker.handlers.common import Requests, retries_max_of, serves
from turbopump.broker.retries import Dropped, Retries, SendBack
from turbopump.net.connection import Connection
from turbopump.net.router import failure
from turbopump.store.outcomes import Appended
from turbopump.wire import headers
from turbopump.wire.codes import Language, RequestCode, ResponseCode
from turbopump.wire.command import Command

_log = logging.getLogger(__name__)


class SendBackRequests(Requests):
    """Serves the requests that send a message back."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries

    @serves(RequestCode.CONSUMER_SEND_MSG_BACK)
    def send_back(self, request: Command, peer: Connection) -> None:
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
            )
            self._retries.accept(failed, _answer, request, peer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the message is not stored
            _answer(error, request, peer)


def _answer(outcome: Appended | Dropped | Exception, request: Command, peer: Connection) -> None:
    """Answer a send-back: anything but success makes the consumer keep the message."""
    if not isinstance(outcome, Exception):
        peer.answer(request, request.answer(ResponseCode.SUCCESS))
    elif request.language != Language.GO:
        peer.answer(request, failure(request, peer, outcome))
    else:
        # The Go client takes every answer for success, and retries only without one.
        _log.warning("could not answer the send-back of %s: %r", peer.peer_address, outcome)
