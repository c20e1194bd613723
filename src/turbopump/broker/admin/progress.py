"""Requests for the progress and lag of groups."""

from __future__ import annotations

from dataclasses import dataclass

from turbopump.broker.handlers.common import Requests, answer_with, serves
from turbopump.broker.lag import Lag
from turbopump.net.connection import Connection
from turbopump.wire import headers
from turbopump.wire.bodies import ConsumeTimeSpans
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command


@dataclass(slots=True, eq=False)
class ProgressRequests(Requests):
    """Serves queries about the progress of groups."""

    lag: Lag

    @serves(RequestCode.GET_CONSUME_STATS)
    def of_group(self, request: Command, _peer: Connection) -> Command:
        header = headers.ConsumeStatsOf.from_ext_fields(request.ext_fields)
        return answer_with(request, self.lag.of_group(header.consumer_group, header.topic))

    @serves(RequestCode.GET_BROKER_CONSUME_STATS)
    async def of_all_groups(self, request: Command, _peer: Connection) -> Command:
        header = headers.BrokerConsumeStatsOf.from_ext_fields(request.ext_fields)
        return answer_with(request, await self.lag.of_all_groups(ordered_only=header.is_order))

    @serves(RequestCode.QUERY_CONSUME_TIME_SPAN)
    def time_spans(self, request: Command, _peer: Connection) -> Command:
        header = headers.TopicAndGroup.from_ext_fields(request.ext_fields)
        spans = self.lag.time_spans(header.group, header.topic)
        return answer_with(request, ConsumeTimeSpans(consume_time_span_set=spans))
