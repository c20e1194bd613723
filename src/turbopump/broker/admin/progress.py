"""Requests for the progress and lag of groups, and to reset the offsets of a running group."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from turbopump.broker.clients import Member
from turbopump.broker.handlers.common import Requests, answer_with, body_of, commands_to, serves
from turbopump.broker.lag import Lag
from turbopump.broker.resets import Reset, Resets
from turbopump.errors import NetworkError
from turbopump.message import MessageQueue
from turbopump.net.connection import Connection
from turbopump.wire import headers
from turbopump.wire.bodies import ConsumeTimeSpans, QueueAndOffset, QueueOffsetRows, QueueOffsets
from turbopump.wire.codes import Language, RequestCode
from turbopump.wire.command import Command
from turbopump.wire.command import request as make_request

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ProgressRequests(Requests):
    lag: Lag

    @serves(RequestCode.GET_CONSUME_STATS)
    async def of_group(self, request: Command, _peer: Connection) -> Command:
        header = headers.ConsumeStatsOf.from_ext_fields(request.ext_fields)
        return answer_with(request, await self.lag.of_group(header.consumer_group, header.topic))

    @serves(RequestCode.GET_BROKER_CONSUME_STATS)
    async def of_all_groups(self, request: Command, _peer: Connection) -> Command:
        header = headers.BrokerConsumeStatsOf.from_ext_fields(request.ext_fields)
        return answer_with(request, await self.lag.of_all_groups(ordered_only=header.is_order))

    @serves(RequestCode.QUERY_CONSUME_TIME_SPAN)
    async def time_spans(self, request: Command, _peer: Connection) -> Command:
        header = headers.TopicAndGroup.from_ext_fields(request.ext_fields)
        spans = await self.lag.time_spans(header.group, header.topic)
        return answer_with(request, ConsumeTimeSpans(consume_time_span_set=spans))


@dataclass(slots=True, eq=False)
class ResetRequests(Requests):
    """Serves resets: sends the new offsets to the members of the group, and answers with them."""

    resets: Resets

    @serves(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET)
    async def reset(self, request: Command, _peer: Connection) -> Command:
        header = headers.ResetOffset.from_ext_fields(request.ext_fields)
        given = body_of(request, QueueOffsets) if request.body_length else QueueOffsets()
        planned = await self.resets.plan(
            Reset(
                group=header.group,
                topic=header.topic,
                timestamp_ms=header.timestamp,
                is_forced=header.is_force,
                offsets=given.offset_table,
            )
        )
        body = QueueOffsets(offset_table=planned.targets)
        as_rows = request.language == Language.CPP
        notice = _notice(header, _rows(planned.targets) if as_rows else body)
        for member in planned.members:
            _push(member, notice)
        return answer_with(request, body)


def _notice(header: headers.ResetOffset, body: QueueOffsets | QueueOffsetRows) -> Command:
    return make_request(
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
        headers.ResetOffset(
            topic=header.topic, group=header.group, timestamp=header.timestamp, is_force=False
        ),
        body.encode(bare_keys=True),
    )


def _rows(targets: dict[MessageQueue, int]) -> QueueOffsetRows:
    return QueueOffsetRows(
        offset_table=[
            QueueAndOffset(
                broker_name=queue.broker, offset=offset, queue_id=queue.queue_id, topic=queue.topic
            )
            for queue, offset in targets.items()
        ]
    )


def _push(member: Member, notice: Command) -> None:
    try:
        commands_to(member.connection).oneway(notice)
    except NetworkError as error:
        # The answer has the offsets; a client that is gone starts from the committed ones.
        _log.warning("%s was not notified of its offset reset: %s", member.address, error)
