"""Pulling a range of a queue through the session, with retries, where `BlockingPull` stopped.

It handles unavailable brokers, slaves, and messages that are gone. One request is pending at a
time, also while records are decoded.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from turbopump.client.calls import (
    FoundRecords,
    NothingMatched,
    NothingNew,
    OffsetIllegal,
    RecordsOutcome,
)
from turbopump.client.names import with_namespace
from turbopump.client.pull_config import PullTimes
from turbopump.client.queue_reader import QueueReader
from turbopump.client.session import Session
from turbopump.client.subscriptions import subscription
from turbopump.errors import DataLost, NoRoute, RemoteError, TurbopumpError
from turbopump.message import QueueOffset
from turbopump.spark.reading.blocking_pull import CHUNK_BYTES, CHUNK_ROWS
from turbopump.spark.reading.options import Pulling
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.reading.retry import backoff_s, with_retries
from turbopump.spark.reading.unreadable_queues import Unreadable, ask_master, unreadable_reason
from turbopump.wire.command import Buffer

_log = logging.getLogger(__name__)

_MISSING_TRIES = 5
"""How often to request a message that existed when the read was planned: a slave may lag, and a
broker that has just started may not have recovered its whole log."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of a queue from ``start`` to before ``end``; some at either side may not belong."""

    records: bytes | memoryview
    start: int
    end: int


class RetryingPull:
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
        times = PullTimes(timeout=pulling.timeout_ms / 1000)
        name = with_namespace(session.config.namespace, group)
        self._reader = QueueReader(
            session, name, times, in_bulk=True, prefers_slave=pulling.prefers_slave
        )
        self._queue = of.queue
        self._wanted = subscription(self._reader.wire_topic(of.topic), pulling.expression, 0)
        self._at = of.start
        """Up to where everything has arrived."""
        self._coming: asyncio.Task[Chunk | None] | None = None

    async def next_chunk(self) -> Chunk | None:
        """Return the next records, or None at the end; later ones are fetched meanwhile."""
        coming = self._coming or asyncio.create_task(self._chunk())
        try:
            chunk = await coming
        except asyncio.CancelledError:
            coming.cancel()
            raise
        self._coming = None if chunk is None else asyncio.create_task(self._chunk())
        return chunk

    async def pull_one(self, offset: int) -> tuple[bytes, int] | None:
        """Return the first record from an offset on, alone, and its offset."""
        outcome = await self._pull(offset, 1)
        if not isinstance(outcome, FoundRecords):
            return None
        return bytes(outcome.records), outcome.next_offset - 1

    async def close(self) -> None:
        """Abandon the request in flight."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.gather(self._coming, return_exceptions=True)

    def lost(self, start: int, end: int, why: str) -> None:
        """Report that messages are gone: an error, or a warning if losses are ignored."""
        text = f"{self._queue}: messages {start} to {end - 1} are lost: {why}"
        if self._fail_on_data_loss:
            raise DataLost(f"{text}; failOnDataLoss=false continues without them")
        _log.warning("%s; continuing without them", text)

    # --- in order ---------------------------------------------------------------------------------

    async def _chunk(self) -> Chunk | None:
        """Collect adjacent responses until they are worth decoding."""
        parts: list[Buffer] = []
        start, size = self._at, 0
        while self._at < self._range.end and self._at - start < CHUNK_ROWS and size < CHUNK_BYTES:
            outcome = await self._answer(is_first=not parts)
            if outcome is None:
                break
            before = self._at
            found = await self._take(outcome)
            if found is not None:
                parts.append(found)
                size += len(found)
            elif not parts:
                start = self._at
            elif not self._pulling.is_filtered:
                # Messages are missing here: the chunk ends before them.
                return Chunk(b"".join(parts), start, before)
        if not parts:
            return None
        return Chunk(memoryview(parts[0]) if len(parts) == 1 else b"".join(parts), start, self._at)

    async def _answer(self, *, is_first: bool) -> RecordsOutcome | None:
        """Pull what is next, None if the queue is gone: then the rest is lost.

        Earlier records form a separate chunk, and the next one finds out the same.
        """
        try:
            return await self._pull(self._at, self._pulling.count_max)
        except (NoRoute, RemoteError) as error:
            why = await self._why_gone(error)
        if why is None:
            self._reader.back_to_master(self._queue)
            return await self._pull(self._at, self._pulling.count_max)
        if is_first:
            self.lost(self._at, self._range.end, why.value)
            self._at = self._range.end
        return None

    async def _why_gone(self, error: NoRoute | RemoteError) -> Unreadable | None:
        """Return why the queue cannot be read, or None if its master has it; else re-raise."""
        if isinstance(error, RemoteError) and unreadable_reason(self._queue, error) is None:
            raise error
        try:
            return await ask_master(self._session, self._reader, self._queue)
        except TurbopumpError as failure:
            raise error from failure

    async def _take(self, outcome: RecordsOutcome) -> Buffer | None:
        """Continue to where a response leads; return its records if it has any."""
        at, end = self._at, self._range.end
        match outcome:
            case FoundRecords(next_offset=next_offset, records=records):
                self._at = min(next_offset, end)
                return records
            case NothingMatched(next_offset=next_offset, min_offset=min_offset):
                self._at = min(max(next_offset, at + 1), end)
                if outcome.has_gap or min_offset > at or not self._pulling.is_filtered:
                    self.lost(at, self._at, "they were deleted or damaged")
            case OffsetIllegal(min_offset=min_offset) if min_offset > at:
                self._at = min(min_offset, end)
                self.lost(at, self._at, f"they expired, the queue starts at {min_offset}")
            case OffsetIllegal() | NothingNew():
                found = await self._look_again(outcome)
                return None if found is None else await self._take(found)
        return None

    async def _look_again(self, outcome: OffsetIllegal | NothingNew) -> RecordsOutcome | None:
        """Ask the master for a message that existed, until it arrives or is abandoned."""
        at, end = self._at, self._range.end
        for attempt in range(_MISSING_TRIES):
            await asyncio.sleep(backoff_s(attempt))
            self._reader.back_to_master(self._queue)
            answer = await self._pull(at, self._pulling.count_max)
            if not isinstance(answer, OffsetIllegal | NothingNew) or answer.min_offset > at:
                return answer
        if not self._session.replica_to_read(self._queue.broker).is_master:
            raise NoRoute(
                f"{self._queue}: only the master can have message {at}, and it is away; the slave "
                f"has messages {outcome.min_offset} to {outcome.max_offset - 1}"
            )
        self._at = end
        self.lost(
            at,
            end,
            f"the queue ends at {outcome.max_offset}, so the topic was re-created, or its broker "
            "lost messages",
        )
        return None

    # --- requests ---------------------------------------------------------------------------------

    async def _pull(self, offset: int, count: int) -> RecordsOutcome:
        at, count = QueueOffset(offset), min(count, self._range.end - offset)
        return await with_retries(
            lambda: self._reader.pull_records(self._queue, at, self._wanted, count, is_held=False),
            self._pulling.retries,
            self._range,
            between=lambda: self._session.refresh_route(self._reader.wire_topic(self._queue.topic)),
        )
