"""Read queues page by page, without committing anything."""

from __future__ import annotations

import heapq
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from turbopump.admin.positions import AtOffset, AtTime, Earliest, Latest, Position
from turbopump.admin.servers import TOOLS_GROUP, gathered
from turbopump.admin.topics import QueueLimits
from turbopump.client.calls import Found, OffsetIllegal
from turbopump.client.pull_config import PullTimes
from turbopump.client.queue_reader import QueueReader
from turbopump.client.session import Session
from turbopump.client.subscriptions import Expression, subscription
from turbopump.errors import DamagedMessage
from turbopump.filters.tags import EVERYTHING
from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

PAGE_MESSAGES = 32
"""What brokers return in one response unless configured for more."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Messages of one queue, from ``begin`` to before ``end``."""

    queue: MessageQueue
    begin: QueueOffset
    end: QueueOffset

    @property
    def messages(self) -> int:
        return max(0, self.end - self.begin)


@dataclass(frozen=True, slots=True)
class Span:
    """Messages of a topic, and how many there are to read."""

    ranges: tuple[OffsetRange, ...]

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self.ranges)


class RangeReader:
    """Reads queues wherever wanted."""

    def __init__(self, session: Session) -> None:
        self._reader = QueueReader(session, TOOLS_GROUP, PullTimes())

    async def page(
        self,
        queue: MessageQueue,
        offset: QueueOffset,
        *,
        tags: Expression = EVERYTHING,
        count_max: int = PAGE_MESSAGES,
        is_held: bool = False,
    ) -> tuple[Sequence[MessageView], QueueOffset]:
        """Return the next messages and the next offset; ``is_held`` waits a while for some."""
        wanted = subscription(queue.topic, tags, 0)
        try:
            outcome = await self._reader.pull(queue, offset, wanted, count_max, is_held=is_held)
        except DamagedMessage as error:
            _log.error("damaged message, left out: %s", error)
            return (), QueueOffset(error.next_offset)
        match outcome:
            case Found(messages=messages, next_offset=after):
                return messages, after
            case OffsetIllegal(next_offset=after) if after < offset:
                # The queue was re-created, and is shorter now.
                return (), after
            case _:
                return (), QueueOffset(max(offset, outcome.next_offset))

    async def read(
        self, span: OffsetRange, *, tags: Expression = EVERYTHING
    ) -> AsyncGenerator[MessageView, None]:
        """Read all messages of a range that is still there."""
        at = span.begin
        while at < span.end:
            messages, after = await self.page(span.queue, at, tags=tags)
            for message in messages:
                if message.queue_offset < span.end:
                    yield message
            if after <= at:
                return
            at = after

    async def span(self, limits: Sequence[QueueLimits], begin: Position, end: Position) -> Span:
        """Return the messages of queues from one position to before another."""
        begins = await gathered(self.offset_of(each, begin) for each in limits)
        ends = await gathered(self.offset_of(each, end) for each in limits)
        return Span(tuple(map(OffsetRange, (each.queue for each in limits), begins, ends)))

    async def offset_of(self, limits: QueueLimits, to: Position) -> QueueOffset:
        """Return where a position is in a queue."""
        match to:
            case Earliest():
                return limits.min_offset
            case Latest():
                return limits.max_offset
            case AtOffset(offset):
                return QueueOffset(min(max(offset, limits.min_offset), limits.max_offset))
            case AtTime():
                return await self._offset_at(limits, to)

    async def _offset_at(self, limits: QueueLimits, to: AtTime) -> QueueOffset:
        """Return the first offset stored at or after a time.

        Brokers answer with the message nearest to the time, which may lie on either side of it
        and among others of the same millisecond; so its neighbors are looked at.
        """
        if limits.last_stored_ms is None or limits.last_stored_ms < to.epoch_ms:
            return limits.max_offset
        found = await self._reader.offset_at(limits.queue, to.moment)
        at = QueueOffset(min(max(found, limits.min_offset), limits.max_offset))
        while at > limits.min_offset and not await self._is_older(limits, at, to):
            at = QueueOffset(max(limits.min_offset, at - PAGE_MESSAGES))
        begin = OffsetRange(limits.queue, at, limits.max_offset)
        async with aclosing(self.read(begin)) as messages:
            async for message in messages:
                if message.store_timestamp_ms >= to.epoch_ms:
                    return message.queue_offset
        return limits.max_offset

    async def _is_older(self, limits: QueueLimits, at: QueueOffset, to: AtTime) -> bool:
        if at >= limits.max_offset:
            return False
        messages, _ = await self.page(limits.queue, at, count_max=1)
        return bool(messages) and messages[0].store_timestamp_ms < to.epoch_ms


async def merged(
    sources: Sequence[AsyncGenerator[MessageView, None]],
) -> AsyncGenerator[MessageView, None]:
    """Give the messages of several queues in the order in which they were stored."""
    waiting: list[tuple[int, int, MessageView]] = []

    async def take(number: int) -> None:
        message = await anext(sources[number], None)
        if message is not None:
            heapq.heappush(waiting, (message.store_timestamp_ms, number, message))

    async with AsyncExitStack() as stack:
        for number, source in enumerate(sources):
            await stack.enter_async_context(aclosing(source))
            await take(number)
        while waiting:
            _, number, message = heapq.heappop(waiting)
            yield message
            await take(number)
