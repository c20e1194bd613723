"""Queries about single messages of queues: when, where and in what size they were stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turbopump.client.calls import Found
from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.queue_reader import QueueReader
from turbopump.client.subscriptions import subscription
from turbopump.errors import DamagedMessage, RemoteError, SparkError, TurbopumpError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.spark.reading.offsets import Limits, Mark, Offsets, by_place, values_by_place
from turbopump.spark.reading.retry import gather_all, gather_available, with_retries
from turbopump.spark.reading.topic_queries import TopicQueries
from turbopump.spark.reading.unreadable_queues import first_of

_SAMPLE_ROWS = 32
SAMPLED_QUEUES = 64
"""The sample size for estimating message sizes if a topic has more queues on a broker."""


class MessageProbes:
    """Queries messages in bulk, or pulls them if a broker does not support such requests."""

    def __init__(self, reader: QueueReader, topics: TopicQueries, retries: int) -> None:
        self._reader = reader
        self._topics = topics
        self._retries = retries
        self._samples = 0
        self._averages: dict[object, int] = {}
        """The latest sizes, by topic and broker."""

    # --- marks ------------------------------------------------------------------------------------

    async def marks(
        self, offsets: Offsets
    ) -> tuple[dict[MessageQueue, Mark | None], dict[MessageQueue, TurbopumpError]]:
        """Return the marks of messages, None where there are none, and where brokers fail."""
        places = values_by_place(offsets)
        answers, unanswered = await gather_available(
            places, lambda place: self._marks(places[place])
        )
        found: dict[MessageQueue, Mark | None] = {}
        failed = {queue: error for place, error in unanswered.items() for queue in places[place]}
        for marks, errors in answers.values():
            found.update(marks)
            failed.update(errors)
        return found, failed

    async def all_marks(self, offsets: Offsets) -> dict[MessageQueue, Mark | None]:
        """Return the marks of messages, None where there are none.

        Raises SparkError if a broker does not respond after all retries.
        """

        async def whole(part: Offsets) -> Mapping[MessageQueue, Mark | None]:
            found, failed = await self._marks(part)
            for error in failed.values():
                raise error
            return found

        async def ask(part: Offsets) -> Mapping[MessageQueue, Mark | None]:
            queues = first_of(tuple(part))
            try:
                return await with_retries(lambda: whole(part), self._retries, queues)
            except TurbopumpError as error:
                raise SparkError(
                    f"{queues}: cannot look up the last message, by which a re-created topic is "
                    f"recognized: {error}"
                ) from error

        return await gather_all(values_by_place(offsets).values(), ask)

    async def _marks(
        self, offsets: Offsets
    ) -> tuple[Mapping[MessageQueue, Mark | None], Mapping[MessageQueue, TurbopumpError]]:
        """Return the marks of messages of one topic on one broker, and what failed."""
        found = await self._topics.marks(offsets)
        if found is not None:
            return found, {}
        return await gather_available(offsets, lambda queue: self._mark(queue, offsets[queue]))

    async def _mark(self, queue: MessageQueue, offset: int) -> Mark | None:
        if offset < 0:
            return None
        try:
            found = await self._messages(queue, offset, 1, retries=1)
        except RemoteError as error:
            if error.retriable:
                raise
            return None
        if found is None or found.messages[0].queue_offset != offset:
            return None
        return found.messages[0].store_timestamp_ms, found.messages[0].physical_offset

    # --- times ------------------------------------------------------------------------------------

    async def since(
        self, timestamp_ms: int, limits: Mapping[MessageQueue, Limits]
    ) -> dict[MessageQueue, int]:
        """Return the first offset of each queue that was stored at or after a time."""
        return await gather_all(
            values_by_place(limits).values(), lambda each: self._all_since(timestamp_ms, each)
        )

    async def _all_since(
        self, timestamp_ms: int, limits: Mapping[MessageQueue, Limits]
    ) -> dict[MessageQueue, int]:
        """Search all queues of a topic on a broker together: one request per bisection step.

        A queue without a known message time at the broker is searched alone.
        """
        open_ = {queue: (ends.low - 1, ends.high) for queue, ends in limits.items()}
        found: dict[MessageQueue, int] = {}
        while open_:
            found |= {queue: high for queue, (low, high) in open_.items() if low + 1 == high}
            middle = {q: (low + high) // 2 for q, (low, high) in open_.items() if low + 1 < high}
            marks = await self._timed(middle) if middle else {}
            if marks is None:
                break
            open_ = {
                queue: (open_[queue][0], at) if mark[0] >= timestamp_ms else (at, open_[queue][1])
                for queue, at in middle.items()
                if (mark := marks[queue]) is not None
            }
        alone = [queue for queue in limits if queue not in found]
        return found | await gather_by_key(
            alone, lambda queue: self._first_since(queue, timestamp_ms, limits[queue])
        )

    async def _timed(self, offsets: Offsets) -> Mapping[MessageQueue, Mark | None] | None:
        return await with_retries(
            lambda: self._topics.marks(offsets), self._retries, first_of(tuple(offsets))
        )

    async def _first_since(self, queue: MessageQueue, timestamp_ms: int, ends: Limits) -> int:
        """Search around the broker's hint, which is near the time but not always the first.

        ``low`` is always before the result, ``high`` never.
        """
        low, high = ends.low - 1, ends.high
        if ends.low == ends.high:
            return ends.high
        hint = await with_retries(
            lambda: self._reader.offset_at_ms(queue, timestamp_ms), self._retries, str(queue)
        )
        step, at = 1, min(max(hint, ends.low), ends.high - 1)
        while low + 1 < high:
            if await self._stored_ms(queue, at) >= timestamp_ms:
                high, aim = at, at - step
            else:
                low, aim = at, at + step
            # Move away from the hint in growing steps until it is enclosed, then bisect.
            step *= 2
            at = aim if low < aim < high else (low + high) // 2
        return high

    async def _stored_ms(self, queue: MessageQueue, offset: int) -> int:
        found = await self._messages(queue, offset, 1)
        if found is None:
            # Expired, hence older than all others.
            return -1
        return found.messages[0].store_timestamp_ms

    # --- sizes ------------------------------------------------------------------------------------

    async def bytes_per_row(
        self, offsets: Offsets
    ) -> tuple[dict[MessageQueue, int], dict[MessageQueue, RemoteError]]:
        """Return the average size of the next messages of each queue, and where brokers refuse.

        Of many queues a sample is queried; the others get its average.
        """
        places = by_place(offsets)
        sampled = [queue for queues in places.values() for queue in self._sample(queues)]
        self._samples += 1
        answers = await gather_by_key(sampled, lambda queue: self._size(queue, offsets[queue]))
        known = {queue: size for queue, size in answers.items() if isinstance(size, int)}
        sizes: dict[MessageQueue, int] = {}
        for place, queues in places.items():
            own = [known[queue] for queue in queues if queue in known]
            if own:
                self._averages[place] = sum(own) // len(own)
            average = self._averages.get(place, 1)
            sizes |= {queue: known.get(queue, average) for queue in queues}
        return sizes, {queue: e for queue, e in answers.items() if isinstance(e, RemoteError)}

    def _sample(self, queues: Sequence[MessageQueue]) -> Sequence[MessageQueue]:
        """Return a sample of many queues, evenly spread; others each time."""
        step = -(-len(queues) // SAMPLED_QUEUES)
        return queues[self._samples % step :: step]

    async def _size(self, queue: MessageQueue, offset: int) -> int | RemoteError | None:
        """Return the average size of messages, None if there are none."""
        try:
            found = await self._messages(queue, offset, _SAMPLE_ROWS)
        except RemoteError as error:
            return error
        if found is None:
            return None
        return sum(message.size for message in found.messages) // len(found.messages)

    # --- internals --------------------------------------------------------------------------------

    async def _messages(
        self, queue: MessageQueue, offset: int, count: int, retries: int | None = None
    ) -> Found | None:
        everything = subscription(self._reader.wire_topic(queue.topic), "*", 0)
        at = QueueOffset(offset)
        try:
            outcome = await with_retries(
                lambda: self._reader.pull(queue, at, everything, count, is_held=False),
                self._retries if retries is None else retries,
                queue,
            )
        except DamagedMessage as error:
            # Its size and time are known; reading it fails.
            view = error.message
            return view and Found(QueueOffset(error.next_offset), at, at, 0, messages=(view,))
        return outcome if isinstance(outcome, Found) and outcome.messages else None
