"""Requests to create, change, delete and list topics."""

from __future__ import annotations

from dataclasses import dataclass

from turbopump.broker.clients import Consumers
from turbopump.broker.handlers.common import Requests, answer_with, as_remote_error, serves
from turbopump.broker.offsets import Offsets
from turbopump.broker.operations import Operations
from turbopump.broker.searches import Searches
from turbopump.broker.topics import Topics
from turbopump.message import MessageQueue
from turbopump.net.connection import Connection
from turbopump.store.store import Store
from turbopump.wire import headers
from turbopump.wire.bodies import (
    GroupList,
    TopicConfig,
    TopicList,
    TopicQueueStats,
    TopicStats,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command


@dataclass(slots=True, eq=False, kw_only=True)
class TopicRequests(Requests):
    broker_name: str
    operations: Operations
    topics: Topics
    offsets: Offsets
    consumers: Consumers
    store: Store
    searches: Searches

    @serves(RequestCode.UPDATE_AND_CREATE_TOPIC)
    async def update(self, request: Command, _peer: Connection) -> Command:
        """Create or change a topic; answer once reachable name servers know it."""
        header = headers.CreateTopic.from_ext_fields(request.ext_fields)
        topic = TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
        )
        with as_remote_error():
            await self.operations.update_topic(topic)
        return request.answer(ResponseCode.SUCCESS)

    @serves(RequestCode.DELETE_TOPIC_IN_BROKER)
    async def delete(self, request: Command, _peer: Connection) -> Command:
        name = headers.TopicName.from_ext_fields(request.ext_fields).topic
        with as_remote_error():
            await self.operations.delete_topic(name)
        return request.answer(ResponseCode.SUCCESS)

    @serves(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    def system(self, request: Command, _peer: Connection) -> Command:
        """List the broker's own topics."""
        return answer_with(request, TopicList(topic_list=sorted(self.topics.system_names)))

    @serves(RequestCode.GET_TOPIC_STATS_INFO)
    async def limits(self, request: Command, _peer: Connection) -> Command:
        """Return the first and last offset of each queue, and its last store time."""
        name = headers.TopicName.from_ext_fields(request.ext_fields).topic
        queue_ids = range(self.topics.required(name).write_queue_nums)
        ranges = [self.store.queue_range(name, queue_id) for queue_id in queue_ids]
        search = self.store.find_marks(name, queue_ids, [high - 1 for _, high in ranges])
        times_ms, _ = await self.searches.found(search)
        table = {
            MessageQueue(name, self.broker_name, queue_id): TopicQueueStats(
                min_offset=low, max_offset=high, last_update_timestamp=max(last_ms, 0)
            )
            for queue_id, (low, high), last_ms in zip(queue_ids, ranges, times_ms, strict=True)
        }
        return answer_with(request, TopicStats(offset_table=table))

    @serves(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO)
    def consumed_by(self, request: Command, _peer: Connection) -> Command:
        """List the groups that subscribe to a topic or have committed offsets in it."""
        name = headers.TopicName.from_ext_fields(request.ext_fields).topic
        groups = self.consumers.groups_of_topic(name) | self.offsets.groups_of(name)
        return answer_with(request, GroupList(group_list=sorted(groups)))

    @serves(RequestCode.CLEAN_UNUSED_TOPIC)
    def clean_unused(self, request: Command, _peer: Connection) -> Command:
        self.operations.delete_unused_queues()
        return request.answer(ResponseCode.SUCCESS)
