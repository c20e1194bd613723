"""How far consumer groups are behind, in messages and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from msgspec import Struct

from turbopump.broker.clients import Consumers
from turbopump.broker.groups import Groups
from turbopump.broker.offsets import Offsets
from turbopump.broker.searches import Searches
from turbopump.broker.stats import Stats
from turbopump.broker.topics import Topics
from turbopump.clock import Clock
from turbopump.message import MessageQueue, QueueOffset
from turbopump.store.store import Store
from turbopump.wire.bodies import (
    BrokerConsumeStats,
    ConsumeQueueStats,
    ConsumeStats,
    MessageModel,
    QueueTimeSpan,
    TopicConfig,
)
from turbopump.wire.names import retry_topic

_NO_TIME = -1

Times: TypeAlias = Mapping[tuple[int, int], int]
"""Store times by queue and offset."""


class _Position(Struct, frozen=True):
    """A group's committed offset in a queue, and the queue's range."""

    queue_id: int
    committed: QueueOffset
    low: QueueOffset
    high: QueueOffset

    @property
    def next(self) -> QueueOffset:
        """The oldest message that the group can still consume."""
        return max(self.committed, self.low)


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
    searches: Searches
    clock: Clock

    async def of_group(self, group: str, topic: str | None) -> ConsumeStats:
        """Return a group's committed offset, 0 for none, in each queue of one topic, or of all.

        All are those with commits, those the members subscribe to, and the group's retry topic:
        without commits, a group lags by all that they hold. Apache brokers leave those out.
        """
        table: dict[MessageQueue, ConsumeQueueStats] = {}
        tps = 0.0
        for each in self._counted(group, {topic} if topic else self._topics_of(group)):
            table |= await self._queues(group, each.topic_name, each.read_queue_nums)
            tps += self.stats.consume_tps(group, each.topic_name)
        return ConsumeStats(consume_tps=tps, offset_table=table)

    async def of_all_groups(self, *, ordered_only: bool) -> BrokerConsumeStats:
        """Return the committed offsets of all groups; optionally of ordered topics only."""
        groups: list[dict[str, list[ConsumeStats]]] = []
        behind = 0
        for group in sorted(self.groups.table):
            found = [
                await self._of_topic(group, topic)
                for topic in self._counted(group, self._topics_of(group))
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

    async def time_spans(self, group: str, topic: str) -> list[QueueTimeSpan]:
        """Return the store times of each queue's messages, and of a group's committed offset."""
        queues = range(self.topics.required(topic).write_queue_nums)
        positions = [self._position(group, topic, queue_id) for queue_id in queues]
        offsets = {
            (each.queue_id, offset)
            for each in positions
            for offset in (each.low, each.high - 1, each.committed - 1, each.next)
        }
        times_ms = await self._times_ms(topic, offsets)
        return [self._time_span(topic, each, times_ms) for each in positions]

    def _topics_of(self, group: str) -> set[str]:
        found = {*self.offsets.topics_of(group), retry_topic(group)}
        online = self.consumers.find(group)
        # Broadcasting members keep their offsets themselves.
        if online is not None and online.message_model is not MessageModel.BROADCASTING:
            found.update(online.subscriptions)
        return found

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

    async def _of_topic(self, group: str, topic: TopicConfig) -> ConsumeStats:
        return ConsumeStats(
            consume_tps=self.stats.consume_tps(group, topic.topic_name),
            offset_table=await self._queues(group, topic.topic_name, topic.write_queue_nums),
        )

    async def _queues(
        self, group: str, topic: str, queues: int
    ) -> dict[MessageQueue, ConsumeQueueStats]:
        positions = [self._position(group, topic, queue_id) for queue_id in range(queues)]
        offsets = {(each.queue_id, each.committed - 1) for each in positions}
        times_ms = await self._times_ms(topic, offsets)
        return {
            MessageQueue(topic, self.broker_name, each.queue_id): ConsumeQueueStats(
                broker_offset=each.high,
                consumer_offset=each.committed,
                last_timestamp=times_ms.get((each.queue_id, each.committed - 1), 0),
            )
            for each in positions
        }

    def _time_span(self, topic: str, at: _Position, times_ms: Times) -> QueueTimeSpan:
        oldest_ms = times_ms.get((at.queue_id, at.low), _NO_TIME)
        newest_ms = times_ms.get((at.queue_id, at.high - 1), _NO_TIME)
        reached_ms = oldest_ms
        if at.committed > 0:
            reached_ms = times_ms.get((at.queue_id, at.committed - 1), _NO_TIME)
        next_ms = times_ms.get((at.queue_id, at.next))
        return QueueTimeSpan(
            message_queue=MessageQueue(topic, self.broker_name, at.queue_id),
            min_time_stamp=oldest_ms,
            min_time_stamp_str=_date(oldest_ms),
            max_time_stamp=newest_ms,
            max_time_stamp_str=_date(newest_ms),
            consume_time_stamp=reached_ms,
            consume_time_stamp_str=_date(reached_ms),
            delay_time=0 if next_ms is None else self.clock.now_ms() - next_ms,
        )

    def _position(self, group: str, topic: str, queue_id: int) -> _Position:
        committed = self.offsets.find(group, topic, queue_id) or QueueOffset(0)
        return _Position(queue_id, committed, *self.store.queue_range(topic, queue_id))

    async def _times_ms(self, topic: str, places: Collection[tuple[int, int]]) -> Times:
        """Return when messages were stored, by queue and offset, without those that are gone."""
        queue_ids, offsets = [queue_id for queue_id, _ in places], [offset for _, offset in places]
        search = self.store.find_marks(topic, queue_ids, offsets)
        times_ms, _ = await self.searches.found(search)
        return {at: ms for at, ms in zip(places, times_ms, strict=True) if ms >= 0}


def _date(epoch_ms: int) -> str:
    """Format a timestamp in local time, as Apache RocketMQ does."""
    moment = datetime.fromtimestamp(epoch_ms / 1000).astimezone()
    return f"{moment:%Y-%m-%d#%H:%M:%S}:{epoch_ms % 1000:03d}"
