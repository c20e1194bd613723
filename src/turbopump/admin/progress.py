"""How far groups have come: their position and lag in each queue, committed or not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from turbopump.admin.servers import ANSWER_MS, BrokerNode, Servers, gathered, none_on
from turbopump.client import calls
from turbopump.errors import RemoteError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire import headers
from turbopump.wire.bodies import (
    BrokerStats,
    ConsumeFrom,
    ConsumeQueueStats,
    ConsumerConnections,
    ConsumeStats,
    ConsumeTimeSpans,
    MessageModel,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.names import RETRY_PREFIX, retry_topic


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """How far a group has come in one queue."""

    queue: MessageQueue
    committed: QueueOffset | None
    """The next message for the group: its committed offset or, where it has none, the offset at
    which its members would start; None if only they know."""

    max_offset: QueueOffset
    last_consumed_ms: int | None
    """When the last message was stored that the group has consumed."""

    delay_ms: int | None
    """How long the next message has been waiting; 0 if there is none, None as for ``committed``."""

    client_id: str | None = None
    """The member that owns the queue, if it reported that."""

    @property
    def lag(self) -> int | None:
        """How many messages the group has not consumed; None as for ``committed``."""
        return None if self.committed is None else max(0, self.max_offset - self.committed)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a group has come in all of its queues, its retry topic included.

    These are the queues of the topics that it subscribes to, or has committed offsets of.
    """

    group: str
    queues: tuple[QueueProgress, ...]
    consumed_per_s: float
    failed_per_s: float
    """How many messages its members sent back, over the last minute as well."""
    is_running: bool

    @property
    def lag(self) -> int | None:
        """The lag of all queues; None if that of any is unknown, or no queue is known."""
        return self.known_lag if self.queues and not self.unknown_queues else None

    @property
    def known_lag(self) -> int:
        """The lag of the queues where it is known, so the group is at least this far behind."""
        return sum(each.lag or 0 for each in self.queues)

    @property
    def unknown_queues(self) -> tuple[MessageQueue, ...]:
        """The queues in which only members know where the group starts."""
        return tuple(each.queue for each in self.queues if each.committed is None)

    @property
    def delay_ms(self) -> int | None:
        """How long the oldest unconsumed message has been waiting; None as for ``lag``."""
        if self.lag is None:
            return None
        return max((each.delay_ms or 0 for each in self.queues), default=0)


class PositionReader:
    """Reads the positions of one group, whose members are ``online``, from brokers."""

    def __init__(self, servers: Servers, group: str, online: Sequence[ConsumerConnections]) -> None:
        self._servers = servers
        self._group = group
        self._subscribed = {topic for body in online for topic in body.subscription_table}
        self._is_broadcast = any(body.message_model is MessageModel.BROADCASTING for body in online)
        self._start_from = {body.consume_from_where for body in online}

    async def read(
        self, node: BrokerNode, topic: str | None
    ) -> tuple[float, float, tuple[QueueProgress, ...]]:
        """Return how many messages a second are consumed and fail, and the positions in queues."""
        found = [await self._stats(node, topic)]
        if topic is None:
            # Apache brokers leave out topics without a committed offset.
            named = {queue.topic for queue in found[0].offset_table}
            missing = {*self._subscribed, retry_topic(self._group)} - named
            found += await gathered(self._stats(node, name) for name in sorted(missing))
        table = {queue: each for stats in found for queue, each in stats.offset_table.items()}
        topics = sorted({queue.topic for queue in table})
        delays = await self._delays(node, topics)
        failed = await gathered(self._failed_per_s(node, name) for name in topics)
        queues = await gathered(
            self._position(node, queue, each, delays.get(queue, 0)) for queue, each in table.items()
        )
        return sum(stats.consume_tps for stats in found), sum(failed), tuple(queues)

    async def _stats(self, node: BrokerNode, topic: str | None) -> ConsumeStats:
        header = headers.ConsumeStatsOf(consumer_group=self._group, topic=topic)
        return await self._servers.read(ConsumeStats, node, RequestCode.GET_CONSUME_STATS, header)

    async def _failed_per_s(self, node: BrokerNode, topic: str) -> float:
        name, key = "SNDBCK_PUT_NUMS", f"{topic}@{self._group}"
        header = headers.StatsItem(stats_name=name, stats_key=key)
        asking = self._servers.read(BrokerStats, node, RequestCode.VIEW_BROKER_STATS_DATA, header)
        # Nothing of it was counted.
        found = await none_on(ResponseCode.SYSTEM_ERROR, asking)
        return 0.0 if found is None else found.stats_minute.tps

    async def _delays(self, node: BrokerNode, topics: Sequence[str]) -> dict[MessageQueue, int]:
        found: dict[MessageQueue, int] = {}
        code = RequestCode.QUERY_CONSUME_TIME_SPAN
        for topic in topics:
            header = headers.TopicAndGroup(topic=topic, group=self._group)
            # A topic may have gone away meanwhile: there is nothing to be late with.
            with suppress(RemoteError):
                spans = await self._servers.read(ConsumeTimeSpans, node, code, header)
                for span in spans.consume_time_span_set:
                    found[span.message_queue] = max(0, span.delay_time)
        return found

    async def _position(
        self, node: BrokerNode, queue: MessageQueue, stats: ConsumeQueueStats, delay_ms: int
    ) -> QueueProgress:
        end = QueueOffset(max(0, stats.broker_offset))
        reached: QueueOffset | None = QueueOffset(max(0, stats.consumer_offset))
        if end and (reached == 0 or self._is_broadcast):
            # Brokers report 0 for queues without a committed offset, too. Those of members that
            # broadcast are of earlier members that did not.
            reached = await self._start(node, queue)
        if reached is not None and reached >= end:
            delay_ms = 0
        late_ms = None if reached is None else delay_ms
        return QueueProgress(queue, reached, end, stats.last_timestamp or None, late_ms)

    async def _start(self, node: BrokerNode, queue: MessageQueue) -> QueueOffset | None:
        """Return where a member that gets the queue starts in it, None if brokers do not know."""
        if self._is_broadcast:
            # Each member has its own offsets, in a local file.
            return None
        session, address = self._servers.session, node.address
        found = await calls.committed_offset(session, address, self._group, queue, ANSWER_MS)
        if found is None and self._starts_at_first(queue.topic):
            return await calls.min_offset(session, address, queue, ANSWER_MS)
        return found

    def _starts_at_first(self, topic: str) -> bool:
        """Whether members without a committed offset start at the first message of a queue."""
        at_first: set[ConsumeFrom | None] = {ConsumeFrom.FIRST_OFFSET}
        if topic.startswith(RETRY_PREFIX):
            # Its messages have failed before, so those who start at the end start here, too.
            at_first.add(ConsumeFrom.LAST_OFFSET)
        return bool(self._start_from) and self._start_from <= at_first
