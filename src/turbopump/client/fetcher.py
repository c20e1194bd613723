"""Prefetch queues for a lite pull consumer: one task for each queue."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence

from turbopump.client.calls import Found
from turbopump.client.continuity import LastPulled
from turbopump.client.fetch_buffer import FetchBuffer
from turbopump.client.filter_hooks import FilterHook, kept
from turbopump.client.queue_reader import QueueReader
from turbopump.client.start_position import StartFrom
from turbopump.errors import ConnectionLost, DamagedMessage, RemoteError, TurbopumpError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.supervisor import Supervisor
from turbopump.wire.bodies import Subscription
from turbopump.wire.codes import ResponseCode

_log = logging.getLogger(__name__)

START_UNKNOWN_PAUSE_S = 3.0
ERROR_PAUSE_S = 1.0
FLOW_CONTROL_PAUSE_S = 0.02


class Fetcher:
    """Keeps the buffer filled; `changed` is set whenever there may be more to take."""

    def __init__(
        self,
        reader: QueueReader,
        buffer: FetchBuffer,
        subscription_of: Callable[[str], Subscription],
        start_from: StartFrom,
        count_max: int,
        *,
        group: str,
        filters: Sequence[FilterHook],
    ) -> None:
        self.changed = asyncio.Event()
        self._reader = reader
        self._buffer = buffer
        self._subscription_of = subscription_of
        self._start_from = start_from
        self._count_max = count_max
        self._group = group
        self._filters = filters
        self.work = Supervisor()
        self._by_queue: dict[MessageQueue, asyncio.Task[None]] = {}
        self._room = asyncio.Event()
        self._last: dict[MessageQueue, LastPulled | None] = {}

    def start(self, queue: MessageQueue) -> None:
        """Start or restart fetching a queue: a waiting long poll would delay a seek."""
        self.stop(queue)
        self._last.pop(queue, None)
        self._by_queue[queue] = self.work.keep(
            f"fetching {queue}", functools.partial(self._fetch, queue)
        )

    def filter_changed(self, topic: str) -> None:
        """Note that messages of a topic that were skipped may match from now on."""
        for queue, last in self._last.items():
            if queue.topic == topic and last is not None:
                self._last[queue] = last.with_other_filter()

    def stop(self, queue: MessageQueue) -> None:
        """Stop fetching a queue; drop messages in flight."""
        task = self._by_queue.pop(queue, None)
        if task is not None:
            task.cancel()

    async def commit(
        self, queue: MessageQueue, offset: QueueOffset, *, is_oneway: bool = False
    ) -> None:
        """Commit the group's position in a queue that is or was fetched."""
        wanted, last = self._subscription_of(queue.topic), self._last.get(queue)
        await self._reader.commit_pulled(queue, wanted, last, offset, is_oneway=is_oneway)

    async def close(self) -> None:
        self._by_queue.clear()
        await self.work.stop()

    def wake(self) -> None:
        """Wake the fetches waiting for room or for a resume."""
        self._room.set()
        self._room = asyncio.Event()

    async def _fetch(self, queue: MessageQueue) -> None:
        while self._buffer[queue].fetch_offset is None:
            await self._find_start(queue)
        while True:
            while self._buffer[queue].is_paused or not self._buffer.has_room(queue):
                await self._room.wait()
            await self._fetch_once(queue)

    async def _find_start(self, queue: MessageQueue) -> None:
        try:
            offset = await self._reader.start_offset(queue, self._start_from)
            source = await self._reader.source(queue)
            wanted = self._subscription_of(queue.topic)
            last = await self._reader.last_pulled_at_start(queue, wanted, offset)
            if offset > 0 and last.source != source:
                # The broker may have lost messages before the offset in between.
                raise ConnectionLost(f"{source.address} was reconnected in the meantime")
            self._last[queue] = last
        except TurbopumpError as error:
            what = "where to start in %s is not known yet"
            self._reader.warn(_log, queue.broker, error, what, queue)
            await asyncio.sleep(START_UNKNOWN_PAUSE_S)
        else:
            self._buffer.restart(queue, offset)

    async def _fetch_once(self, queue: MessageQueue) -> None:
        offset = self._buffer[queue].fetch_offset
        assert offset is not None, "the start was found before"
        wanted = self._subscription_of(queue.topic)
        try:
            outcome = await self._reader.pull(
                queue, offset, wanted, self._count_max, is_held=True, is_lite=True
            )
            last, outcome = await self._reader.continued(
                queue, wanted, self._last.get(queue), offset, outcome
            )
        except DamagedMessage as error:
            # `poll` raises it when its turn comes.
            self._buffer.put(queue, (error,), QueueOffset(error.next_offset))
            self.changed.set()
            return
        except TurbopumpError as error:
            is_limited = isinstance(error, RemoteError) and error.code == ResponseCode.FLOW_CONTROL
            pause_s = FLOW_CONTROL_PAUSE_S if is_limited else ERROR_PAUSE_S
            self._reader.warn(_log, queue.broker, error, "%s was not read", queue)
            await asyncio.sleep(pause_s)
            return
        if outcome.next_offset < offset:
            # The broker has lost messages, possibly including some buffered here.
            self._last[queue] = None
            self._buffer.go_back(queue, outcome.next_offset)
            return
        self._last[queue] = last
        if not isinstance(outcome, Found):
            self._buffer.put(queue, (), QueueOffset(outcome.next_offset))
            return
        messages = kept(self._filters, self._group, outcome.messages, queue)
        self._buffer.put(queue, messages, outcome.next_offset)
        self.changed.set()
