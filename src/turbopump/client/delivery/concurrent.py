"""Concurrent delivery: batches in no order; each failed message is sent back individually."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from turbopump.client.delivery.delivery import Delivery
from turbopump.client.delivery.listener import Call
from turbopump.client.delivery.results import (
    ConsumeContext,
    ConsumeResult,
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


class Batch(Call, eq=False, kw_only=True):
    """Messages of one queue for one call of the listener, and its outcome."""

    owned: OwnedQueue


class ConcurrentDelivery(Delivery[Batch]):
    """Calls the listener with every batch as soon as a worker is free."""

    is_orderly = False

    def deliver(self, owned: OwnedQueue, messages: list[MessageView], *, begins: bool) -> None:  # noqa: ARG002 - for orderly delivery
        size, group, queue = self._settings.batch_size, self._group, owned.queue
        self._workers.submit(
            [
                Batch(messages[at : at + size], ConsumeContext(group, queue), owned=owned)
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

    def _calls(self, jobs: Iterator[Batch]) -> Iterator[Call]:
        return (batch for batch in jobs if not batch.owned.is_dropped)

    # --- what follows -----------------------------------------------------------------------------

    def _settle(self, batches: Sequence[Batch]) -> None:
        ended = defaultdict[OwnedQueue, list[Batch]](list)
        for batch in batches:
            ended[batch.owned].append(batch)
        for owned, calls in ended.items():
            # Otherwise another member owns the queue now, and gets these messages again.
            if not owned.is_dropped:
                self._settle_calls(owned, calls)

    def _settle_calls(self, owned: OwnedQueue, calls: list[Batch]) -> None:
        done: list[MessageView] = []
        count = failed = spent_ms = 0
        for call in calls:
            verdict, messages, wanted = call.verdict, call.messages, call.context.acknowledged
            if verdict is None:
                # It was not made.
                continue
            count += 1
            spent_ms += verdict.spent_ms
            if verdict.result is not _SUCCESS or wanted is not None:
                accepted = acknowledged_count(verdict.result, wanted, len(messages))
                failed += len(messages) - accepted
                messages = self._accept(call, accepted)
            done += messages
        self._stats.called(owned.queue.topic, len(done), failed, spent_ms, count)
        self._finish(owned, done)

    def _accept(self, batch: Batch, count: int) -> list[MessageView]:
        """Send back all messages of a batch except the first ``count``, and return those."""
        failed = batch.messages[count:]
        if failed:
            what, send_back = f"send-back of {batch.owned.queue}", self._send_back
            self._tasks.keep(what, functools.partial(send_back, batch, failed))
        return batch.messages[:count]

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
        expired = [batch for batch in self._workers.running if batch.start_ms < start_ms]
        held = (each for batch in expired if batch.owned is owned for each in batch.messages)
        if all(each.queue_offset != message.queue_offset for each in held):
            return False
        _log.warning("%s takes too long in %s, sent back", message.message_id, owned.queue)
        if not await self._retry_sender.send_back(owned.queue, message, _EXPIRED_DELAY_LEVEL):
            return False
        if owned.cache.first is message:
            self._finish(owned, [message])
        return True
