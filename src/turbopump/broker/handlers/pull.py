"""Pull requests and their answers."""

from __future__ import annotations

from functools import lru_cache

from turbopump.broker.handlers.common import Requests, serves, serves_frames
from turbopump.broker.pull import Expression, Held, Pull, Pulls
from turbopump.broker.pull_status import Status
from turbopump.core import PullFrame, PullResponses
from turbopump.errors import RemoteError
from turbopump.net.connection import Connection
from turbopump.net.router import failure
from turbopump.store import outcomes
from turbopump.store.outcomes import ReadOutcome
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, Request, Serialize, answer_to
from turbopump.wire.headers import NoFields, PullMessage, PullMessageAnswer
from turbopump.wire.sysflag import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND


class PullRequests(Requests):
    def __init__(self, pulls: Pulls) -> None:
        self._pulls = pulls

    @serves_frames(PullFrame)
    def pull(self, request: PullFrame, peer: Connection) -> None:
        """Answer with messages, or hold the pull; nearly all pulls come this way."""
        self._serve(request, peer, _pull_of(peer, request))

    @serves(RequestCode.PULL_MESSAGE)
    def pull_observed(self, request: Command, peer: Connection) -> None:
        """Do the same for a pull that hooks see, or that is unusual."""
        self._serve(request, peer, _pull_of(peer, PullMessage.from_ext_fields(request.ext_fields)))

    def _serve(self, request: Request, peer: Connection, pull: Pull) -> None:
        outcome = self._pulls.read(pull, self._pulls.admit(pull))
        if isinstance(outcome, Held):
            # Tens of thousands may be held: drop what was received of the request.
            slim = Command(
                request.code,
                flag=request.flag,
                opaque=request.opaque,
                language=request.language,
                version=request.version,
                serialize=Serialize(request.serialize),
            )
            outcome.then(self._resume, slim, peer, pull)
        else:
            self._answer(outcome, request, peer, pull)

    def _resume(
        self, outcome: ReadOutcome | Exception, request: Command, peer: Connection, pull: Pull
    ) -> None:
        """Answer a pull that was held."""
        if isinstance(outcome, RemoteError):
            peer.answer(request, request.answer(outcome.code, NoFields(), remark=outcome.remark))
        elif isinstance(outcome, Exception):
            peer.answer(request, failure(request, peer, outcome))
        else:
            self._answer(outcome, request, peer, pull)

    def _answer(self, outcome: ReadOutcome, request: Request, peer: Connection, pull: Pull) -> None:
        """Answer with messages, or with why there are none."""
        broker_id = self._pulls.suggested_broker_id(pull, outcome)
        status = self._pulls.status_of(pull, outcome)
        pieces = outcome.pieces if isinstance(outcome, outcomes.Found) else ()
        if not peer.is_observed:
            frame = _answers(status, type(outcome), broker_id).frame(
                request.opaque,
                outcome.next_offset,
                outcome.min_offset,
                outcome.max_offset,
                outcome.size if isinstance(outcome, outcomes.Found) else 0,
                request.serialize,
            )
            peer.answer_encoded(request, frame, *pieces)
            return
        fields = PullMessageAnswer(
            suggest_which_broker_id=broker_id,
            next_begin_offset=outcome.next_offset,
            min_offset=outcome.min_offset,
            max_offset=outcome.max_offset,
        )
        remark, body = _REMARKS[type(outcome)], tuple(pieces) or b""
        peer.answer(request, answer_to(request, _CODES[status], fields, remark=remark, body=body))


def _pull_of(peer: Connection, header: PullFrame | PullMessage) -> Pull:
    flags, expression = header.sys_flag, None
    if flags & PULL_SUBSCRIPTION:
        expression = Expression(header.subscription, header.expression_type)
    return Pull(
        client=peer,
        group=header.consumer_group,
        topic=header.topic,
        queue_id=header.queue_id,
        offset=header.queue_offset,
        count_max=header.max_msg_nums,
        expression=expression,
        sub_version=header.sub_version,
        commit_offset=header.commit_offset if flags & PULL_COMMIT_OFFSET else None,
        hold_ms=header.suspend_timeout_millis if flags & PULL_SUSPEND else None,
        is_bulk=header.bulk_pull or False,
    )


_CODES: dict[Status, ResponseCode] = {
    Status.FOUND: ResponseCode.SUCCESS,
    Status.RETRY: ResponseCode.PULL_RETRY_IMMEDIATELY,
    Status.NOT_FOUND: ResponseCode.PULL_NOT_FOUND,
    Status.MOVED: ResponseCode.PULL_OFFSET_MOVED,
}

_REMARKS: dict[type[ReadOutcome], str] = {
    outcomes.Found: "FOUND",
    outcomes.NoMatch: "NO_MATCHED_MESSAGE",
    outcomes.MessagesRemoved: "MESSAGE_WAS_REMOVING",
    outcomes.MessageDamaged: "MESSAGE_DAMAGED",
    outcomes.QueueUnknown: "NO_MATCHED_LOGIC_QUEUE",
    outcomes.QueueEmpty: "NO_MESSAGE_IN_QUEUE",
    outcomes.OffsetTooSmall: "OFFSET_TOO_SMALL",
    outcomes.UpToDate: "OFFSET_OVERFLOW_ONE",
    outcomes.OffsetTooLarge: "OFFSET_OVERFLOW_BADLY",
    outcomes.UnitsMissing: "OFFSET_FOUND_NULL",
}
"""Apache RocketMQ's names of the outcomes; clients see them as the remark."""


@lru_cache(maxsize=1024)
def _answers(status: Status, outcome: type[ReadOutcome], broker_id: int) -> PullResponses:
    """Return the answers that differ in offsets only; operators use few ids of brokers."""
    return PullResponses(_CODES[status], broker_id, _REMARKS[outcome])
