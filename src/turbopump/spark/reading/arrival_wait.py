"""Waits until a message arrives in one of many queues."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from turbopump.client.queue_reader import QueueReader
from turbopump.client.session import Session
from turbopump.client.subscriptions import subscription
from turbopump.errors import RemoteError, TurbopumpError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.spark.reading.offsets import Offsets, Place, values_by_place
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.topic_queries import TopicQueries
from turbopump.spark.reading.unreadable_queues import QueueChecks, Unreadable, unreadable_reason
from turbopump.wire.codes import ResponseCode

_HELD_MAX = 256
"""Queues of a topic that are worth a long poll each, on a broker that cannot wait for a topic."""
_AGAIN_S = 0.02
"""Between long polls of a topic whose other queues are busy."""


class ArrivalWait:
    """Waits in long polls: one for each topic and broker, or else for each queue."""

    def __init__(
        self,
        session: Session,
        options: SourceOptions,
        reader: QueueReader,
        topics: TopicQueries,
        checks: QueueChecks,
    ) -> None:
        self._session = session
        self._options = options
        self._reader = reader
        self._topics = topics
        self._checks = checks
        self._refusals: dict[MessageQueue, tuple[Unreadable, str]] = {}
        """Why queues cannot be waited for, found during a wait."""

    async def wait(self, at: Offsets, wait_ms: int) -> bool:
        """Return True when a message arrives at one of the offsets, False after the timeout.

        A queue that its broker says is gone does not count: `unreadable` checks it. Other refusals
        are raised.
        """
        waits = [
            wait for each in values_by_place(at).values() for wait in self._waits(each, wait_ms)
        ]
        held = [asyncio.ensure_future(wait) for wait in waits]
        sleeping = asyncio.ensure_future(asyncio.sleep(wait_ms / 1000))
        try:
            pending = {sleeping, *held}
            while sleeping in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(task.result() for task in done if task is not sleeping):
                    return True
            return False
        finally:
            for task in (sleeping, *held):
                task.cancel()
            await asyncio.gather(sleeping, *held, return_exceptions=True)
            self._checks.refuse(self._refusals)
            self._refusals.clear()

    def _waits(self, at: Offsets, wait_ms: int) -> Iterable[Coroutine[Any, Any, bool]]:
        """Return the long polls for queues of one topic on one broker."""
        first, is_many = next(iter(at)), len(at) > _HELD_MAX
        place = first.topic, first.broker
        # The broker applies the filter, and only a match ends a long poll of a queue.
        is_filtered = self._options.pulling.of(first.topic).is_filtered
        if self._topics.can_wait(place) and (is_many or not is_filtered):
            return [self._held_topic(place, at, wait_ms)]
        if is_many:
            # The next look finds new messages: cheaper than a long poll for each queue.
            return ()
        return [self._held(queue, offset, wait_ms) for queue, offset in at.items()]

    async def _held_topic(self, place: Place, at: Offsets, wait_ms: int) -> bool:
        """Wait for a message of a topic; ignore those of queues that are not read."""
        clock = self._session.clock
        end_ms = clock.monotonic_ms() + wait_ms
        is_again = False
        while True:
            has_news, closed = self._topics.news(place, at)
            self._refuse(closed, Unreadable.CLOSED, Unreadable.CLOSED.value)
            left_ms = end_ms - clock.monotonic_ms()
            if has_news or left_ms <= 0:
                return has_news
            await asyncio.sleep(is_again * _AGAIN_S)
            try:
                await self._topics.wait(place, left_ms)
            except TurbopumpError as error:
                if isinstance(error, RemoteError) and error.code == ResponseCode.TOPIC_NOT_EXIST:
                    self._refuse(at, Unreadable.DELETED, str(error))
                elif not error.retriable:
                    raise
                return False
            is_again = True

    async def _held(self, queue: MessageQueue, offset: int, wait_ms: int) -> bool:
        pulling = self._options.pulling.of(queue.topic)
        wanted = subscription(self._reader.wire_topic(queue.topic), pulling.expression, 0)
        try:
            outcome = await self._reader.pull_records(
                queue, QueueOffset(offset), wanted, 1, is_held=True, timeout=wait_ms / 1000
            )
        except TurbopumpError as error:
            why = unreadable_reason(queue, error) if isinstance(error, RemoteError) else None
            if why is not None:
                self._refuse([queue], why, str(error))
            elif not error.retriable:
                raise
            return False
        return outcome.max_offset > offset

    def _refuse(self, queues: Iterable[MessageQueue], why: Unreadable, text: str) -> None:
        self._refusals.update(dict.fromkeys(queues, (why, text)))
