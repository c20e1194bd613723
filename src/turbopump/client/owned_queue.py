"""One queue that this client owns: the state shared by all stages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from turbopump.client.continuity import LastPulled, Source
from turbopump.client.process_queue import ProcessQueue
from turbopump.client.push_config import QueueLimits
from turbopump.client.routes import MASTER_ID
from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire.bodies import ProcessQueueInfo
from turbopump.wire.record import MessageView

LOCK_TRUST_MS = 30_000
"""How long a lock is trusted after its renewal; the broker keeps it for 60 s."""

_MEBIBYTE = 1024 * 1024


class OwnedQueue:
    """Progress of pulling and consuming one queue, until it is dropped."""

    def __init__(self, queue: MessageQueue, start: QueueOffset, now_ms: int) -> None:
        self.queue = queue
        self.cache: ProcessQueue[MessageView] = ProcessQueue()
        self.next_offset = start
        self.broker_id = MASTER_ID
        """The replica that the last response advised to pull from."""
        self.last_pulled: LastPulled | None = None
        self.compared_with: Source | None = None
        """The connection to the master over which its messages matched those pulled."""
        self.is_dropped = False
        self.is_leaving = False
        """Dropped for good, but a running orderly listener has to finish first."""
        # All times are from the monotonic clock.
        self.last_pull_ms = now_ms
        self.last_consume_ms = now_ms
        self.locked_ms: int | None = None
        """When the broker last confirmed the lock; None if it never did, or refused."""
        self.idle = asyncio.Event()
        """Whether no orderly listener runs on this queue."""
        self.idle.set()
        self._room: asyncio.Future[None] | None = None
        self._room_from = 0
        """Wake the waiting puller when at most this many messages are left."""
        self._waits = False

    def __repr__(self) -> str:
        return str(self.queue)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark pulling as paused on purpose: it has not died."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def pulled_ms(self, now_ms: int) -> int:
        """Return when pulling last showed progress."""
        return now_ms if self._waits or self.is_dropped else self.last_pull_ms

    def drop(self) -> None:
        """Stop all stages: another member owns the queue, or it is being restarted."""
        self.is_dropped = True
        self.note_room()

    def is_locked(self, now_ms: int) -> bool:
        """Whether the lock is recent enough to consume under it."""
        return self.locked_ms is not None and now_ms - self.locked_ms <= LOCK_TRUST_MS

    def room(self, limits: QueueLimits, *, is_orderly: bool) -> int:
        """Return how many more messages may be pulled; none unless positive."""
        cache = self.cache
        if cache.bytes > limits.bytes_max:
            return 0
        room = limits.messages_max + 1 - cache.count
        # Order itself keeps the span of an orderly queue short.
        return room if is_orderly else min(room, limits.span_max + 1 - self._reach)

    def excess(self, limits: QueueLimits) -> str:
        """Describe the limit that leaves no room, and what has reached it."""
        cache = self.cache
        if cache.bytes > limits.bytes_max:
            return f"{cache.bytes} unfinished bytes (limit {limits.bytes_max})"
        if cache.count > limits.messages_max:
            return f"{cache.count} unfinished messages (limit {limits.messages_max})"
        return (
            f"{self._reach} offsets after the oldest unfinished message (limit {limits.span_max})"
        )

    @property
    def _reach(self) -> int:
        """How far pulling is ahead of the oldest unfinished message.

        Messages finished above a stuck one count too, or nothing would limit them.
        """
        first = self.cache.first
        return 0 if first is None else self.next_offset - 1 - first.queue_offset

    async def wait_for_room(self, count: int) -> None:
        """Wait until ``count`` messages are finished; if only few are cached, until one is."""
        cached = self.cache.count
        self._room_from = cached - (count if cached >= 2 * count else 1)
        self._room = asyncio.get_running_loop().create_future()
        try:
            await self._room
        finally:
            self._room = None

    def note_room(self) -> None:
        """Wake the puller if it waits for room and there is enough, or the queue was dropped."""
        room, is_enough = self._room, self.is_dropped or self.cache.count <= self._room_from
        if room is not None and is_enough and not room.done():
            room.set_result(None)

    def finish(self, messages: list[MessageView]) -> QueueOffset:
        """Remove processed messages; return the offset to commit."""
        offset = self.cache.remove(messages)
        self.note_room()
        return offset

    def info(self, commit_offset: int, wall_ms: int) -> ProcessQueueInfo:
        """Return what operators can inspect; ``wall_ms`` is the wall-clock time at monotonic 0."""
        cached, taken = self.cache.cached_offsets, self.cache.taken_offsets
        return ProcessQueueInfo(
            cached_msg_count=len(cached),
            cached_msg_min_offset=cached[0] if cached else 0,
            cached_msg_max_offset=cached[-1] if cached else 0,
            cached_msg_size_in_mib=self.cache.bytes // _MEBIBYTE,
            commit_offset=commit_offset,
            dropped=self.is_dropped,
            last_consume_timestamp=wall_ms + self.last_consume_ms,
            last_lock_timestamp=0 if self.locked_ms is None else wall_ms + self.locked_ms,
            last_pull_timestamp=wall_ms + self.last_pull_ms,
            locked=self.locked_ms is not None,
            transaction_msg_count=len(taken),
            transaction_msg_min_offset=taken[0] if taken else 0,
            transaction_msg_max_offset=taken[-1] if taken else 0,
        )
