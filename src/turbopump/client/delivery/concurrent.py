"""Concurrent delivery: batches in no order; each failed message is sent back individually."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence

from msgspec import Struct

from turbopump.client.delivery.delivery import Delivery
from turbopump.client.delivery.results import (
    ConsumeContext,
    ConsumeResult,
    Verdict,
    acknowledged_count,
    with_next_attempt,
)
from turbopump.client.owned_queue import OwnedQueue
from turbopump.timeouts import timeout
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

# Looking up a member of an enumeration takes as long as a call.
_SUCCESS = ConsumeResult.SUCCESS
_TRY_AGAIN_MS = 5000
_EXPIRED_PER_SWEEP_MAX = 16
_EXPIRED_DELAY_LEVEL = 3


class Batch(Struct, eq=False):
    """Messages for one call of the listener, and its outcome."""

    owned: OwnedQueue
    messages: list[MessageView]
    context: ConsumeContext
    start_ms: int = 0
    """When the listener got them, by the monotonic clock."""
    verdict: Verdict | None = None


class Settled(Struct, eq=False):
    """The combined results of calls that ended together, for one queue."""

    messages: list[MessageView] = []
    failed: int = 0
    calls: int = 0
    spent_ms: int = 0


class ConcurrentDelivery(Delivery[Batch]):
    """Calls the listener with every batch as soon as a worker is free."""

    is_orderly = False

    def deliver(self, owned: OwnedQueue, messages: list[MessageView], *, begins: bool) -> None:  # noqa: ARG002 - for orderly delivery
        size, group, queue = self._settings.batch_size, self._group, owned.queue
        self._workers.submit(
            [
                Batch(owned, messages[at : at + size], ConsumeContext(group, queue))
                for at in range(0, len(messages), size)
            ]
        )

    async def close(self, timeout_ms: int) -> None:
        """Wait for running calls, and for messages being sent back."""
        await self._workers.close(timeout_ms)
        with contextlib.suppress(TimeoutError):
            async with timeout(timeout_ms / 1000):
                await self._tasks.wait()
        await self._tasks.stop()

    # --- calling ----------------------------------------------------------------------------------

    def _call(self, batch: Batch) -> None:
        if batch.owned.is_dropped:
            return
        batch.start_ms = now_ms = self._clock.monotonic_ms()
        self._running.add(batch)
        batch.verdict = self._listener.call(batch.messages, batch.context, now_ms)
        self._running.discard(batch)

    async def _acall(self, batch: Batch) -> None:
        if batch.owned.is_dropped:
            return
        batch.start_ms = now_ms = self._clock.monotonic_ms()
        self._running.add(batch)
        batch.verdict = await self._listener.acall(batch.messages, batch.context, now_ms)
        self._running.discard(batch)

    # --- what follows -----------------------------------------------------------------------------

    def _settle(self, batches: Sequence[Batch]) -> None:
        done: dict[OwnedQueue, Settled] = {}
        for batch in batches:
            verdict, owned, messages = batch.verdict, batch.owned, batch.messages
            if verdict is None or owned.is_dropped:
                # Another member owns the queue now, and gets these messages again.
                continue
            wanted, count = batch.context.acknowledged, len(messages)
            if verdict.result is not _SUCCESS or wanted is not None:
                count = acknowledged_count(verdict.result, wanted, count)
            settled = done.get(owned)
            if settled is None:
                settled = done[owned] = Settled()
            settled.calls += 1
            settled.spent_ms += verdict.spent_ms
            if count < len(messages):
                settled.failed += len(messages) - count
                self._tasks.keep(
                    f"send-back of {owned.queue}",
                    functools.partial(self._send_back, batch, messages[count:]),
                )
                messages = messages[:count]
            settled.messages += messages
        for owned, settled in done.items():
            consumed, failed = len(settled.messages), settled.failed
            topic, spent_ms, calls = owned.queue.topic, settled.spent_ms, settled.calls
            self._stats.called(topic, consumed, failed, spent_ms, calls)
            self._finish(owned, settled.messages)

    def _finish(self, owned: OwnedQueue, messages: list[MessageView]) -> None:
        if not messages or owned.is_dropped:
            return
        owned.last_consume_ms = self._clock.monotonic_ms()
        offset = owned.finish(messages)
        if offset >= 0:
            self._positions.advance(owned.queue, offset)

    async def _send_back(self, batch: Batch, failed: list[MessageView]) -> None:
        owned = batch.owned
        if self._retry_sender is None:
            ids = ", ".join(message.message_id for message in failed)
            _log.warning("broadcast messages that failed are not tried again: %s", ids)
            self._finish(owned, failed)
            return
        given: list[MessageView] = []
        kept: list[MessageView] = []
        for message in failed:
            if owned.is_dropped:
                return
            if message not in owned.cache:
                # It took too long, and was sent back before its listener ended.
                continue
            level = batch.context.delay_level
            worked = await self._retry_sender.send_back(owned.queue, message, level)
            (given if worked else kept).append(message)
        self._finish(owned, given)
        if kept:
            # Retry locally what no broker takes back; until then it holds up the commit.
            await asyncio.sleep(_TRY_AGAIN_MS / 1000)
            if not owned.is_dropped:
                self.deliver(owned, [with_next_attempt(message) for message in kept], begins=True)

    async def send_expired_back(self, queues: Iterable[OwnedQueue]) -> None:
        """Send back messages that their listener has held too long: they would block the queue."""
        if self._retry_sender is None:
            return
        for owned in queues:
            for _ in range(_EXPIRED_PER_SWEEP_MAX):
                if not await self._send_first_back(owned):
                    break

    async def _send_first_back(self, owned: OwnedQueue) -> bool:
        message = owned.cache.first
        if message is None or owned.is_dropped or self._retry_sender is None:
            return False
        start_ms = self._clock.monotonic_ms() - self._settings.listening.timeout_ms
        # A copy: threads modify it.
        expired = [batch for batch in tuple(self._running) if batch.start_ms < start_ms]
        held = (each for batch in expired if batch.owned is owned for each in batch.messages)
        if all(each.queue_offset != message.queue_offset for each in held):
            return False
        _log.warning("%s takes too long in %s, sent back", message.message_id, owned.queue)
        if not await self._retry_sender.send_back(owned.queue, message, _EXPIRED_DELAY_LEVEL):
            return False
        if owned.cache.first is message:
            self._finish(owned, [message])
        return True
