"""Pull requests and their answers."""

from __future__ import annotations

from functools import lru_cache

from msgspec.structs import replace

from turbopump.broker.handlers.common import Requests, serves
from turbopump.broker.pull import Expression, Held, Pull, Pulls
from turbopump.broker.pull_status import MASTER_ID, STATUS, Status
from turbopump.errors import RemoteError
from turbopump.net.connection import Connection
from turbopump.net.router import failure
from turbopump.store import outcomes
from turbopump.store.outcomes import ReadOutcome
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, Serialize
from turbopump.wire.headers import NoFields, PullMessage, PullMessageAnswer
from turbopump.wire.prepared_frames import PullResponseFrames
from turbopump.wire.sysflag import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND


class PullRequests(Requests):
    def __init__(self, pulls: Pulls) -> None:
        self._pulls = pulls

    @serves(RequestCode.PULL_MESSAGE)
    def pull(self, request: Command, peer: Connection) -> None:
        """Answer with messages, or hold the pull."""
        pull = _pull_of(peer, PullMessage.from_ext_fields(request.ext_fields))
        outcome = self._pulls.read(pull, self._pulls.admit(pull))
        if isinstance(outcome, Held):
            # Tens of thousands may be held: drop what was decoded of the request.
            slim = replace(request, ext_fields=None, body=b"")
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

    def _answer(self, outcome: ReadOutcome, request: Command, peer: Connection, pull: Pull) -> None:
        """Answer with messages, or with why there are none; with a prepared frame if possible."""
        broker_id = self._pulls.suggested_broker_id(pull, outcome)
        found = outcome if isinstance(outcome, outcomes.Found) else None
        is_plain = request.serialize is Serialize.JSON and not peer.is_observed
        if found is not None and is_plain:
            frame = _found_answers(broker_id).frame(
                request.opaque, found.next_offset, found.min_offset, found.max_offset, found.size
            )
            peer.answer_encoded(request, frame, *found.pieces)
            return
        status = self._pulls.status_of(pull, outcome)
        if status is Status.NOT_FOUND and broker_id == MASTER_ID and is_plain:
            # The answer that idle consumers get all the time.
            frame = _NOTHING_NEW[type(outcome)].frame(
                request.opaque, outcome.next_offset, outcome.min_offset, outcome.max_offset
            )
            peer.answer_encoded(request, frame)
            return
        fields = PullMessageAnswer(
            suggest_which_broker_id=broker_id,
            next_begin_offset=outcome.next_offset,
            min_offset=outcome.min_offset,
            max_offset=outcome.max_offset,
        )
        body = b"" if found is None else tuple(found.pieces)
        remark = _REMARKS[type(outcome)]
        peer.answer(request, request.answer(_CODES[status], fields, remark=remark, body=body))


def _pull_of(peer: Connection, header: PullMessage) -> Pull:
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


@lru_cache(maxsize=64)
def _found_answers(broker_id: int) -> PullResponseFrames:
    """Return the answers that suggest a broker; operators use few ids."""
    return PullResponseFrames(ResponseCode.SUCCESS, broker_id, _REMARKS[outcomes.Found])


_NOTHING_NEW = {
    kind: PullResponseFrames(ResponseCode.PULL_NOT_FOUND, MASTER_ID, _REMARKS[kind])
    for kind, status in STATUS.items()
    if status is Status.NOT_FOUND
}
