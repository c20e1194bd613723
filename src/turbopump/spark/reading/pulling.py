"""Pulling a range of a queue: several requests ahead, answers in order, nothing twice.

Offsets of a queue have no gaps, so the second request need not wait for the first answer: it asks
where that answer will probably end. When it ends elsewhere, because messages are large or a filter
passed over many, the gap is asked for and the overlap is cut off.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from turbopump.client.calls import (
    FoundRecords,
    NothingMatched,
    NothingNew,
    OffsetIllegal,
    RecordsOutcome,
)
from turbopump.client.names import with_namespace
from turbopump.client.pull_config import PullTimes
from turbopump.client.reading import QueueReader
from turbopump.client.session import Session
from turbopump.client.subscriptions import subscription
from turbopump.errors import DataLost, NetworkError, NoRoute, RemoteError
from turbopump.message import QueueOffset
from turbopump.spark.reading.deletion import is_topic_deleted
from turbopump.spark.reading.options import Pulling
from turbopump.spark.reading.patience import patiently, pause_s
from turbopump.spark.reading.planning import QueueRange
from turbopump.wire.command import Buffer

_log = logging.getLogger(__name__)

CHUNK_ROWS = 8192
CHUNK_BYTES = 4 * 1024 * 1024
"""A chunk is decoded at once: large enough to be worth it, small enough for the cache."""

_MISSING_TRIES = 5
"""How often a message is asked for that was there when the read was planned: a slave may lag, and
a broker that has just started may not have read its log to the end."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of a queue from ``start`` to before ``end``; some at either side may not belong."""

    records: bytes | memoryview
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request on its way."""

    offset: int
    count: int
    answer: asyncio.Task[RecordsOutcome]


class RangePull:
    """Pulls one range; belongs to the event loop of its session."""

    def __init__(
        self,
        session: Session,
        of: QueueRange,
        group: str,
        pulling: Pulling,
        *,
        fail_on_data_loss: bool,
    ) -> None:
        self._session = session
        self._range = of
        self._pulling = pulling = pulling.of(of.topic)
        self._fail_on_data_loss = fail_on_data_loss
        times = PullTimes(timeout_ms=pulling.timeout_ms)
        name = with_namespace(session.config.namespace, group)
        self._reader = QueueReader(session, name, times)
        self._queue = of.queue
        self._wanted = subscription(
            self._reader.known_as(of.topic), pulling.expression, 0, pulling.expression_type
        )
        self._at = of.start
        self._ask_next = of.start
        self._step = 0
        self._asked: deque[_Asked] = deque()
        self._coming: asyncio.Task[Chunk | None] | None = None

    async def next_chunk(self) -> Chunk | None:
        """Return the next records, None at the end; the ones after them are fetched meanwhile."""
        coming = self._coming or asyncio.create_task(self._chunk())
        try:
            chunk = await coming
        except asyncio.CancelledError:
            coming.cancel()
            raise
        self._coming = None if chunk is None else asyncio.create_task(self._chunk())
        return chunk

    async def close(self) -> None:
        """Give up what is on its way."""
        tasks: list[asyncio.Task[Any]] = [each.answer for each in self._asked]
        if self._coming is not None:
            tasks.append(self._coming)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def lost(self, start: int, end: int, why: str) -> None:
        """Note that messages are gone: an error, or a warning if the user does not mind."""
        text = f"{self._queue}: messages {start} to {end - 1} are gone, {why}"
        if self._fail_on_data_loss:
            raise DataLost(f"{text}; failOnDataLoss=false goes on without them")
        _log.warning("%s; going on without them", text)

    # --- in order ---------------------------------------------------------------------------------

    async def _chunk(self) -> Chunk | None:
        """Gather answers that lie back to back until they are worth decoding."""
        parts: list[Buffer] = []
        start, size = self._at, 0
        while self._at < self._range.end and self._at - start < CHUNK_ROWS and size < CHUNK_BYTES:
            self._ask_ahead()
            head = self._asked[0]
            if parts and head.offset < self._at:
                # What it repeats can be cut off only where a chunk begins.
                break
            outcome = await self._answer(head, is_first=not parts)
            self._asked.popleft()
            if outcome is None:
                break
            if head.offset < self._at and outcome.next_offset <= self._at:
                continue
            before = self._at
            found = await self._take(head, outcome)
            if found is not None:
                parts.append(found)
                size += len(found)
            elif not parts and self._at > before:
                start = self._at
            elif self._at > before and not self._pulling.is_filtered:
                # Messages are missing here: the chunk ends before them.
                return Chunk(b"".join(parts), start, before)
        if not parts:
            return None
        return Chunk(memoryview(parts[0]) if len(parts) == 1 else b"".join(parts), start, self._at)

    async def _answer(self, asked: _Asked, *, is_first: bool) -> RecordsOutcome | None:
        """Wait for an answer, None if the topic was deleted: then everything that comes is lost.

        What was there before makes a chunk of its own, and the next one finds out the same.
        """
        try:
            return await asked.answer
        except (NoRoute, RemoteError) as error:
            if not await is_topic_deleted(self._session, self._queue.broker, error):
                raise
        if is_first:
            self.lost(self._at, self._range.end, "the topic was deleted")
            self._at = self._range.end
        return None

    async def _take(self, asked: _Asked, outcome: RecordsOutcome) -> Buffer | None:
        """Go on to where an answer leads; return its records if it has some."""
        match outcome:
            case FoundRecords(next_offset=next_offset, records=records):
                self._learn_step(asked, outcome)
                self._at = min(next_offset, self._range.end)
                return records
            case NothingMatched(next_offset=next_offset, min_offset=min_offset):
                self._learn_step(asked, outcome)
                if not self._pulling.is_filtered or min_offset > self._at:
                    self.lost(self._at, min(next_offset, self._range.end), "they were deleted")
                self._at = min(max(next_offset, self._at + 1), self._range.end)
            case OffsetIllegal(min_offset=min_offset) if min_offset > self._at:
                end = min(min_offset, self._range.end)
                self.lost(self._at, end, f"the queue begins at {min_offset}: they expired")
                self._at = end
            case OffsetIllegal() | NothingNew():
                await self._look_again(outcome)
        return None

    async def _look_again(self, outcome: OffsetIllegal | NothingNew) -> None:
        """Ask the master for what was there before, until it comes or is given up."""
        for attempt in range(_MISSING_TRIES):
            await asyncio.sleep(pause_s(attempt))
            self._reader.back_to_master(self._queue)
            answer = await self._pull(self._at, self._pulling.count_max)
            if not isinstance(answer, OffsetIllegal | NothingNew) or answer.min_offset > self._at:
                self._asked.appendleft(_Asked(self._at, 0, asyncio.create_task(_of(answer))))
                return
        end = self._range.end
        self.lost(
            self._at,
            end,
            f"the queue ends at {outcome.max_offset}: it was made anew, or "
            "its broker lost messages",
        )
        self._at = end

    # --- ahead ------------------------------------------------------------------------------------

    def _ask_ahead(self) -> None:
        """Ask for what comes at the front if nobody has, and for what comes behind all asked."""
        if not self._asked:
            self._ask_next = self._at
            if not self._step:
                # How many messages the broker returns at a time is up to it: see one answer first.
                self._ask_first()
                return
        elif self._asked[0].offset > self._at:
            self._fill(self._asked[0].offset)
        # More than one chunk ahead is of no use.
        most = min(self._pulling.in_flight_max, max(2, CHUNK_ROWS // max(1, self._step)))
        if len(self._asked) > most // 2:
            # Requests that leave together cost one write, and the broker one wake-up.
            return
        while len(self._asked) < most and self._ask_next < self._range.end:
            count = min(self._pulling.count_max, self._range.end - self._ask_next)
            self._asked.append(self._ask(self._ask_next, count))
            self._ask_next += self._step

    def _ask_first(self) -> None:
        count = min(self._pulling.count_max, self._range.end - self._at)
        self._asked.append(self._ask(self._at, count))

    def _fill(self, end: int) -> None:
        """Ask for the gap before ``end``, in as many requests as it probably takes."""
        offsets = range(self._at, end, self._step)[: self._pulling.in_flight_max]
        for offset in reversed(offsets):
            self._asked.appendleft(self._ask(offset, min(self._pulling.count_max, end - offset)))

    def _learn_step(self, asked: _Asked, outcome: RecordsOutcome) -> None:
        """Expect the next answers to reach as far as this one, if it was not cut short by us."""
        reached = outcome.next_offset - asked.offset
        if asked.count == self._pulling.count_max or reached < asked.count:
            self._step = max(1, reached)

    def _ask(self, offset: int, count: int) -> _Asked:
        return _Asked(offset, count, asyncio.create_task(self._pull(offset, count)))

    async def _pull(self, offset: int, count: int) -> RecordsOutcome:
        return await patiently(
            lambda: self._pull_once(offset, count),
            self._pulling.retries,
            self._range,
            between=lambda: self._session.refresh_route(self._reader.known_as(self._queue.topic)),
        )

    async def _pull_once(self, offset: int, count: int) -> RecordsOutcome:
        try:
            return await self._reader.pull_records(
                self._queue, QueueOffset(offset), self._wanted, count, is_held=False
            )
        except NetworkError:
            self._reader.back_to_master(self._queue)
            raise


async def _of(outcome: RecordsOutcome) -> RecordsOutcome:
    return outcome
