"""Follow a topic: what comes into its queues, also into those that are added later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping

from turbopump.admin.positions import AtTime
from turbopump.admin.range_reader import RangeReader
from turbopump.admin.topics import QueueLimits, Topics
from turbopump.client.subscriptions import Expression
from turbopump.errors import NetworkError, NoRoute, TurbopumpError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.supervisor import Supervisor
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

DISCOVERY_INTERVAL_MS = 30_000
"""How often to look for new queues: as often as clients ask for routes."""

_AWAY_PAUSE_MS = 1000
_WAITING_MAX = 1000
"""Messages read ahead of the caller."""


class TopicTail:
    """Reads the queues of one topic, each by a task of its own."""

    def __init__(
        self, reader: RangeReader, topics: Topics, topic: str, tags: Expression, since: AtTime
    ) -> None:
        self._reader = reader
        self._topics = topics
        self._topic = topic
        self._tags = tags
        self._since = since
        self._found: asyncio.Queue[MessageView] = asyncio.Queue(_WAITING_MAX)
        self._queues: set[MessageQueue] = set()
        self._work = Supervisor()
        self._tasks: set[asyncio.Task[None]] = set()

    async def messages(
        self, begins: Mapping[MessageQueue, QueueOffset]
    ) -> AsyncGenerator[MessageView, None]:
        """Give what comes: from these offsets on, and of queues that are found later, too."""
        for queue, begin in begins.items():
            self._start(queue, begin)
        self._tasks.add(self._work.start(self._discover_queues()))
        try:
            while True:
                yield await self._next()
        finally:
            await self._work.stop()

    async def _next(self) -> MessageView:
        taking = self._work.start(self._found.get())
        try:
            while not taking.done():
                # In each round, since tasks are added while it waits.
                done, _ = await asyncio.wait(
                    {taking, *self._tasks},
                    return_when=asyncio.FIRST_COMPLETED,
                    timeout=DISCOVERY_INTERVAL_MS / 1000,
                )
                for failed in done & self._tasks:
                    failed.result()
            return taking.result()
        finally:
            taking.cancel()

    def _start(self, queue: MessageQueue, begin: QueueOffset) -> None:
        self._queues.add(queue)
        self._tasks.add(self._work.start(self._follow(queue, begin)))

    async def _follow(self, queue: MessageQueue, at: QueueOffset) -> None:
        is_away = False
        while True:
            try:
                messages, at = await self._reader.page(queue, at, tags=self._tags, is_held=True)
            except (NetworkError, NoRoute) as error:
                if not is_away:
                    _log.warning("%s cannot be read now: %s", queue, error)
                is_away = True
                await asyncio.sleep(_AWAY_PAUSE_MS / 1000)
                continue
            is_away = False
            for message in messages:
                await self._found.put(message)

    async def _start_at_first(self, limits: QueueLimits) -> None:
        """Follow a queue from the first message that was stored since this began.

        It need not be new: its broker may have been away, with messages from long before.
        """
        try:
            begin = await self._reader.offset_of(limits, self._since)
        except TurbopumpError as error:
            _log.debug("%s cannot be read yet: %s", limits.queue, error)
            return
        self._start(limits.queue, begin)

    async def _discover_queues(self) -> None:
        while True:
            await asyncio.sleep(DISCOVERY_INTERVAL_MS / 1000)
            try:
                limits = await self._topics.queues_to_read(self._topic)
            except TurbopumpError as error:
                # The readers of the queues report a broker that is away.
                _log.debug("%s: queue discovery failed: %s", self._topic, error)
                continue
            for each in limits:
                if each.queue not in self._queues:
                    await self._start_at_first(each)
