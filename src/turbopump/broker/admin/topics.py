"""Creating, changing, deleting and listing topics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from turbopump.broker.clients import Consumers
from turbopump.broker.config import IdentityConfig
from turbopump.broker.handlers.common import (
    Requests,
    answer_with,
    as_remote_error,
    refuse_on_slave,
    serves,
    topic_missing,
)
from turbopump.broker.offsets import Offsets
from turbopump.broker.stats import Stats
from turbopump.broker.topics import Topics, check_shape
from turbopump.errors import RemoteError
from turbopump.message import MessageQueue, QueueOffset
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
from turbopump.wire.names import HALF_OPERATIONS_TOPIC, SCHEDULE_TOPIC, check_name

_FILTER_TYPES = frozenset({"SINGLE_TAG", "MULTI_TAG"})

Announce = Callable[[TopicConfig], Awaitable[None]]
"""Announces a created or changed topic to name servers, and waits briefly until they know it."""


@dataclass(slots=True, eq=False, kw_only=True)
class TopicRequests(Requests):
    """Serves requests for topics."""

    identity: IdentityConfig
    topics: Topics
    offsets: Offsets
    consumers: Consumers
    stats: Stats
    store: Store
    announce: Announce

    @serves(RequestCode.UPDATE_AND_CREATE_TOPIC)
    async def update(self, request: Command, _peer: Connection) -> Command:
        """Create or change a topic; answer once reachable name servers know it."""
        header = headers.CreateTopic.from_ext_fields(request.ext_fields)
        self._require_changeable(header.topic)
        topic = TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
        )
        wrong = check_shape(topic)
        if topic.topic_filter_type not in _FILTER_TYPES:
            wrong = f"topicFilterType = [{topic.topic_filter_type}] value invalid"
        if wrong is not None:
            raise RemoteError.system(wrong)
        with as_remote_error():
            await self.topics.update(topic)
        await self.announce(topic)
        return request.answer(ResponseCode.SUCCESS)

    @serves(RequestCode.DELETE_TOPIC_IN_BROKER)
    async def delete(self, request: Command, _peer: Connection) -> Command:
        """Delete a topic, its queues and the progress of groups in it.

        Apache RocketMQ keeps the progress, so that a new topic of the same name, whose queues begin
        at 0, would not be read until it has grown past the old one.
        """
        name = headers.TopicName.from_ext_fields(request.ext_fields).topic
        self._require_changeable(name)
        with as_remote_error():
            await self.topics.delete(name)
        if self.topics.find(name) is not None:
            remark = f"topic[{name}] was re-created by a producer: stop it, then delete again"
            raise RemoteError.system(remark)
        self.store.remove_topic(name)
        self.stats.forget_topic(name)
        self.offsets.remove_topic(name)
        await self.offsets.saving.try_save()
        return request.answer(ResponseCode.SUCCESS)

    @serves(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    def system(self, request: Command, _peer: Connection) -> Command:
        """List the broker's own topics."""
        return answer_with(request, TopicList(topic_list=sorted(self.topics.system_names)))

    @serves(RequestCode.GET_TOPIC_STATS_INFO)
    def limits(self, request: Command, _peer: Connection) -> Command:
        """Return the first and last offset of each queue, and its last store time."""
        name = headers.TopicName.from_ext_fields(request.ext_fields).topic
        topic = self.topics.find(name)
        if topic is None:
            raise topic_missing(name)
        table = {
            MessageQueue(name, self.identity.broker_name, queue_id): self._limits(name, queue_id)
            for queue_id in range(topic.write_queue_nums)
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
        """Delete the queues of topics that do not exist."""
        kept = {SCHEDULE_TOPIC, HALF_OPERATIONS_TOPIC}
        for name in {topic for topic, _ in self.store.queue_ids()} - kept:
            if self.topics.find(name) is None:
                self.store.remove_topic(name)
        return request.answer(ResponseCode.SUCCESS)

    def _limits(self, topic: str, queue_id: int) -> TopicQueueStats:
        low, high = self.store.queue_range(topic, queue_id)
        last_ms = self.store.store_timestamp_ms(topic, queue_id, QueueOffset(high - 1))
        return TopicQueueStats(min_offset=low, max_offset=high, last_update_timestamp=last_ms or 0)

    def _require_changeable(self, name: str) -> None:
        refuse_on_slave(self.identity)
        wrong = check_name(name)
        if wrong is None and self.topics.is_system(name):
            wrong = f"The topic[{name}] is conflict with system topic."
        if wrong is not None:
            raise RemoteError.system(wrong)
