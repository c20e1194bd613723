"""Requests for the progress of groups: commits of consumers and queries of operators."""

from __future__ import annotations

from turbopump.broker.handlers.common import (
    Requests,
    answer_fast,
    answer_with,
    positions_of,
    serves,
)
from turbopump.broker.progress import Progress
from turbopump.errors import RemoteError
from turbopump.net.connection import Connection
from turbopump.net.router import Handler
from turbopump.wire import headers
from turbopump.wire.bodies import CorrectionOffsets, QueuePositions, RefusedOffsets
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command

_CHANGES_OFFSETS = (
    RequestCode.UPDATE_CONSUMER_OFFSET,
    RequestCode.UPDATE_CONSUMER_OFFSETS,
    RequestCode.CLONE_GROUP_OFFSET,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
)


class OffsetRequests(Requests):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @serves(RequestCode.QUERY_CONSUMER_OFFSET)
    def query(self, request: Command, _peer: Connection) -> Command:
        """Return a group's committed offset in a queue."""
        header = headers.QueryConsumerOffset.from_ext_fields(request.ext_fields)
        offset = self._progress.find(header.consumer_group, header.topic, header.queue_id)
        if offset is None:
            remark = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
            code = ResponseCode.QUERY_NOT_FOUND
            return request.answer(code, headers.NoFields(), remark=remark)
        return request.answer(ResponseCode.SUCCESS, headers.OffsetAnswer(offset=offset))

    @serves(RequestCode.UPDATE_CONSUMER_OFFSET)
    def update(self, request: Command, _peer: Connection) -> Command:
        """Commit a group's offset in a queue."""
        header = headers.UpdateConsumerOffset.from_ext_fields(request.ext_fields)
        self._progress.commit(
            header.consumer_group,
            header.topic,
            header.queue_id,
            header.commit_offset,
        )
        return request.answer(ResponseCode.SUCCESS, headers.NoFields())

    @serves(RequestCode.GET_CONSUMER_OFFSETS)
    def query_all(self, request: Command, _peer: Connection) -> Command:
        """Return a group's committed offsets in the queues of a topic where it has any."""
        header = headers.OffsetsOfGroup.from_ext_fields(request.ext_fields)
        found = self._progress.offsets.of_topic(header.consumer_group, header.topic)
        body = QueuePositions(queue_ids=list(found), offsets=list(found.values()))
        return answer_fast(request, body)

    @serves(RequestCode.UPDATE_CONSUMER_OFFSETS)
    def update_all(self, request: Command, _peer: Connection) -> Command:
        """Commit a group's offsets in several queues of a topic; return which were refused."""
        header = headers.OffsetsOfGroup.from_ext_fields(request.ext_fields)
        # The answer to a single refused commit says why.
        refused = self._progress.commit_all(
            header.consumer_group, header.topic, *positions_of(request)
        )
        return answer_fast(request, RefusedOffsets(queue_ids=refused))

    @serves(RequestCode.QUERY_CORRECTION_OFFSET)
    def correction(self, request: Command, _peer: Connection) -> Command:
        """Return the lowest committed offset of each queue, ignoring some groups."""
        header = headers.CorrectionOffsetOf.from_ext_fields(request.ext_fields)
        slowest = self._progress.slowest(header.topic, (header.filter_groups or "").split(","))
        return answer_with(request, CorrectionOffsets(correction_offsets=slowest))

    @serves(RequestCode.CLONE_GROUP_OFFSET)
    def clone(self, request: Command, _peer: Connection) -> Command:
        """Copy a group's progress to another, in one topic or in all of them."""
        header = headers.CloneGroupOffset.from_ext_fields(request.ext_fields)
        self._progress.clone(
            header.src_group,
            header.dest_group,
            header.topic or "",
            offline=bool(header.offline),
        )
        return request.answer(ResponseCode.SUCCESS)


def refusals() -> dict[int, Handler]:
    """Return the handlers of a slave, which copies offsets from its master."""
    return dict.fromkeys(_CHANGES_OFFSETS, _refuse_offsets)


def _refuse_offsets(_request: Command, _peer: Connection) -> Command:
    raise RemoteError.system(
        "this broker is a slave: offsets are committed and changed on its master"
    )
