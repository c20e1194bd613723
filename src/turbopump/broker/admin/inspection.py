"""Inspecting statistics, queues and delays, and running clean-up on request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turbopump.broker.clients import Consumers
from turbopump.broker.handlers.common import Requests, answer_with, serves
from turbopump.broker.stats import Stats
from turbopump.errors import RemoteError
from turbopump.message import QueueOffset
from turbopump.net.connection import Connection
from turbopump.store.outcomes import Filter, Units
from turbopump.store.store import Store
from turbopump.wire import headers
from turbopump.wire.bodies import ConsumeQueuePage, QueueUnit
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command

UNITS_MAX = 800
"""Most queue units in one answer."""


@dataclass(slots=True, eq=False, kw_only=True)
class InspectionRequests(Requests):
    """Serves statistics, queue entries and clean-up requests."""

    stats: Stats
    consumers: Consumers
    store: Store

    @serves(RequestCode.VIEW_BROKER_STATS_DATA)
    def statistic(self, request: Command, _peer: Connection) -> Command:
        """Return one statistic over a minute, an hour and a day."""
        header = headers.StatsItem.from_ext_fields(request.ext_fields)
        found = self.stats.view(header.stats_name, header.stats_key)
        if found is None:
            remark = f"The stats <{header.stats_name}> <{header.stats_key}> not exist"
            raise RemoteError.system(remark)
        return answer_with(request, found)

    @serves(RequestCode.QUERY_CONSUME_QUEUE)
    def queue_units(self, request: Command, _peer: Connection) -> Command:
        """Show the entries of a queue: where each message lies, and its tag's hash."""
        header = headers.ConsumeQueuePart.from_ext_fields(request.ext_fields)
        if (header.topic, header.queue_id) not in self.store.queue_ids():
            raise RemoteError.system(f"{header.queue_id}@{header.topic} is not exist!")
        low, high = self.store.queue_range(header.topic, header.queue_id)
        if not low <= header.index < high or header.count < 1:
            remark = f"Index {header.index} of {header.queue_id}@{header.topic} is not exist!"
            return request.answer(ResponseCode.SUCCESS, remark=remark)
        page = ConsumeQueuePage(
            min_queue_index=low,
            max_queue_index=high,
            queue_data=self._units(header, min(header.count, UNITS_MAX)),
            subscription_data=self.consumers.subscription(
                header.consumer_group or "", header.topic
            ),
            filter_data=self._filter_text(header),
        )
        return answer_with(request, page)

    @serves(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, RequestCode.DELETE_EXPIRED_COMMITLOG)
    def clean(self, request: Command, _peer: Connection) -> Command:
        """Apply retention now, on request of the log regardless of the hour."""
        self.store.retain(at_any_hour=request.code == RequestCode.DELETE_EXPIRED_COMMITLOG)
        return request.answer(ResponseCode.SUCCESS)

    def _units(self, header: headers.ConsumeQueuePart, count: int) -> list[QueueUnit]:
        found: list[QueueUnit] = []

        def collect(units: Units) -> NDArray[np.bool_]:
            found.extend(
                QueueUnit(physic_offset=position, physic_size=size, tags_code=code)
                for position, size, code in units[:count].tolist()
            )
            # Only the entries are needed: no message is read.
            return np.zeros(len(units), np.bool_)

        offset = QueueOffset(header.index)
        self.store.read(header.topic, header.queue_id, offset, count, Filter(units=collect))
        return found

    def _filter_text(self, header: headers.ConsumeQueuePart) -> str | None:
        if not header.consumer_group:
            return None
        if self.consumers.subscription(header.consumer_group, header.topic) is None:
            return f"{header.consumer_group}@{header.topic} is not online!"
        return "null"
