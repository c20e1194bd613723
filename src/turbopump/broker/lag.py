"""How far consumer groups are behind, in messages and in time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime

from turbopump.broker.clients import Consumers
from turbopump.broker.groups import Groups
from turbopump.broker.offsets import Offsets
from turbopump.broker.stats import Stats
from turbopump.broker.topics import Topics
from turbopump.clock import Clock
from turbopump.message import MessageQueue, QueueOffset
from turbopump.store.store import Store
from turbopump.wire.bodies import (
    BrokerConsumeStats,
    ConsumeQueueStats,
    ConsumeStats,
    QueueTimeSpan,
    TopicConfig,
)

_NO_TIME = -1


@dataclass(slots=True, eq=False, kw_only=True)
class Lag:
    """Compares committed offsets with the queues."""

    broker_name: str
    address: str
    topics: Topics
    groups: Groups
    offsets: Offsets
    consumers: Consumers
    stats: Stats
    store: Store
    clock: Clock

    def of_group(self, group: str, topic: str | None) -> ConsumeStats:
        """Return a group's committed offset in each queue of one topic, or of all."""
        table: dict[MessageQueue, ConsumeQueueStats] = {}
        tps = 0.0
        for each in self._counted(group, {topic} if topic else self.offsets.topics_of(group)):
            table |= self._queues(group, each.topic_name, each.read_queue_nums)
            tps += self.stats.consume_tps(group, each.topic_name)
        return ConsumeStats(consume_tps=tps, offset_table=table)

    async def of_all_groups(self, *, ordered_only: bool) -> BrokerConsumeStats:
        """Return the committed offsets of all groups; optionally of ordered topics only."""
        groups: list[dict[str, list[ConsumeStats]]] = []
        behind = 0
        for group in sorted(self.groups.table):
            found = [
                self._of_topic(group, topic)
                for topic in self._counted(group, self.offsets.topics_of(group))
                if topic.order or not ordered_only
            ]
            groups.append({group: found})
            # There may be many: let other requests run between two of them.
            await asyncio.sleep(0)
            behind += sum(
                queue.broker_offset - queue.consumer_offset
                for stats in found
                for queue in stats.offset_table.values()
            )
        return BrokerConsumeStats(
            broker_addr=self.address, consume_stats_list=groups, total_diff=behind
        )

    def time_spans(self, group: str, topic: str) -> list[QueueTimeSpan]:
        """Return the store times of each queue's messages, and of a group's committed offset."""
        queues = range(self.topics.required(topic).write_queue_nums)
        return [self._time_span(topic, group, queue_id) for queue_id in queues]

    def _counted(self, group: str, names: set[str]) -> list[TopicConfig]:
        """Return the existing topics that the group, if it has members, subscribes to."""
        online = self.consumers.find(group)
        wants_some = online is not None and bool(online.subscriptions)
        found = (self.topics.find(name) for name in sorted(names))
        return [
            topic
            for topic in found
            if topic is not None
            and not (wants_some and self.consumers.subscription(group, topic.topic_name) is None)
        ]

    def _of_topic(self, group: str, topic: TopicConfig) -> ConsumeStats:
        return ConsumeStats(
            consume_tps=self.stats.consume_tps(group, topic.topic_name),
            offset_table=self._queues(group, topic.topic_name, topic.write_queue_nums),
        )

    def _queues(self, group: str, topic: str, queues: int) -> dict[MessageQueue, ConsumeQueueStats]:
        return {
            MessageQueue(topic, self.broker_name, queue_id): self._queue(group, topic, queue_id)
            for queue_id in range(queues)
        }

    def _queue(self, group: str, topic: str, queue_id: int) -> ConsumeQueueStats:
        _, high = self.store.queue_range(topic, queue_id)
        offset = self.offsets.find(group, topic, queue_id) or QueueOffset(0)
        last_ms = self._stored_ms(topic, queue_id, offset - 1)
        return ConsumeQueueStats(
            broker_offset=high, consumer_offset=offset, last_timestamp=last_ms or 0
        )

    def _time_span(self, topic: str, group: str, queue_id: int) -> QueueTimeSpan:
        low, high = self.store.queue_range(topic, queue_id)
        offset = self.offsets.find(group, topic, queue_id) or 0
        oldest_ms = self._stored_ms(topic, queue_id, low) or _NO_TIME
        newest_ms = self._stored_ms(topic, queue_id, high - 1) or _NO_TIME
        reached_ms = oldest_ms
        if offset > 0:
            reached_ms = self._stored_ms(topic, queue_id, offset - 1) or _NO_TIME
        next_ms = self._stored_ms(topic, queue_id, offset)
        return QueueTimeSpan(
            message_queue=MessageQueue(topic, self.broker_name, queue_id),
            min_time_stamp=oldest_ms,
            min_time_stamp_str=_date(oldest_ms),
            max_time_stamp=newest_ms,
            max_time_stamp_str=_date(newest_ms),
            consume_time_stamp=reached_ms,
            consume_time_stamp_str=_date(reached_ms),
            delay_time=0 if next_ms is None else self.clock.now_ms() - next_ms,
        )

    def _stored_ms(self, topic: str, queue_id: int, offset: int) -> int | None:
        if offset < 0:
            return None
        return self.store.store_timestamp_ms(topic, queue_id, QueueOffset(offset))


def _date(epoch_ms: int) -> str:
    """Format a timestamp in local time, as Apache RocketMQ does."""
    moment = datetime.fromtimestamp(epoch_ms / 1000).astimezone()
    return f"{moment:%Y-%m-%d#%H:%M:%S}:{epoch_ms % 1000:03d}"
