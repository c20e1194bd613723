"""Orderly delivery: one batch of a queue at a time, across retries, under the broker's lock.

The listener gets a run of batches in one call to a worker, which avoids a thread switch after each.
The results are then applied in the same order, as if each batch had been taken separately.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import assert_never

from msgspec import Struct

from turbopump.client.delivery.delivery import Delivery
from turbopump.client.delivery.listener import Call, Listener
from turbopump.client.delivery.results import (
    DEAD_LETTER_LEVEL,
    ConsumeContext,
    ConsumeResult,
    OrderlyStep,
    attempts,
    orderly_step,
    suspend_time_ms,
)
from turbopump.client.offsets import Positions
from turbopump.client.owned_queue import OwnedQueue
from turbopump.client.push_config import PushSettings
from turbopump.client.retry_sender import RetrySender
from turbopump.client.stats import ConsumerStats
from turbopump.clock import Clock
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

_BATCHES_PER_RUN = 64
_RUN_MS_MAX = 100
"""The time limit of a run: then its progress is committed and other queues get their turn."""
_ASK_LOCK_AFTER_MS = 100
_GO_ON_AFTER_LOCK_MS = 10
_LOCK_REFUSED_MS = 3000
Lock = Callable[[OwnedQueue], Awaitable[bool]]
"""Requests the lock of a queue from its broker; returns whether it is held."""


class OrderlyCall(Call, eq=False):
    """One batch given to the listener, its result and the resulting step."""

    @property
    def step(self) -> OrderlyStep:
        return orderly_step(self.done.result, auto_commit=self.context.auto_commit)


class Run(Struct, eq=False):
    """The next batches of one queue, and the calls made for them."""

    owned: OwnedQueue
    batches: list[list[MessageView]]
    calls: list[OrderlyCall] = []


class OrderlyDelivery(Delivery[Run]):
    """Calls the listener for one batch of a queue at a time; queues run concurrently."""

    is_orderly = True

    def __init__(
        self,
        group: str,
        listener: Listener,
        settings: PushSettings,
        positions: Positions,
        retry_sender: RetrySender | None,
        stats: ConsumerStats,
        clock: Clock,
        *,
        lock: Lock | None,
    ) -> None:
        super().__init__(group, listener, settings, positions, retry_sender, stats, clock)
        self._lock = lock
        """None when broadcasting: every member has every queue, and no queue is locked."""
        self._is_rollback_logged = False

    def deliver(self, owned: OwnedQueue, messages: list[MessageView], *, begins: bool) -> None:  # noqa: ARG002 - taken from the cache, in order
        """Start consuming a queue, unless that is already under way."""
        if begins:
            self._next(owned)

    async def close(self, timeout_ms: int) -> None:
        """Wait for running calls; paused queues do not continue."""
        await self._workers.close(timeout_ms)
        await self._tasks.stop()

    # --- successive runs --------------------------------------------------------------------------

    def _next(self, owned: OwnedQueue) -> None:
        if owned.is_dropped:
            return
        if self._lock is not None and not owned.is_locked(self._clock.monotonic_ms()):
            self._keep("wait for the lock", owned, self._wait_for_lock)
            return
        messages = owned.cache.peek(self._settings.batch_size * _BATCHES_PER_RUN)
        if not messages:
            owned.cache.take(1)  # Taking nothing ends the run; the next messages start another.
            return
        size = self._settings.batch_size
        batches = [messages[at : at + size] for at in range(0, len(messages), size)]
        owned.idle.clear()
        self._workers.submit([Run(owned, batches)])

    async def _wait_for_lock(self, owned: OwnedQueue) -> None:
        assert self._lock is not None
        await asyncio.sleep(_ASK_LOCK_AFTER_MS / 1000)
        while not owned.is_dropped and not await self._lock(owned):  # noqa: ASYNC110 - brokers do not notify
            await asyncio.sleep(_LOCK_REFUSED_MS / 1000)
        await asyncio.sleep(_GO_ON_AFTER_LOCK_MS / 1000)
        self._next(owned)

    def _keep(
        self, what: str, owned: OwnedQueue, work: Callable[[OwnedQueue], Awaitable[None]]
    ) -> None:
        """Keep a task running, restarting it after errors: a queue depends on it to continue."""
        self._tasks.keep(f"{what} of {owned.queue}", functools.partial(work, owned))

    async def _continue_after(self, owned: OwnedQueue, pause_ms: int) -> None:
        await asyncio.sleep(pause_ms / 1000)
        self._next(owned)

    # --- calling ----------------------------------------------------------------------------------

    def _calls(self, jobs: Iterator[Run]) -> Iterator[Call]:
        for run in jobs:
            run.calls.clear()
            start_ms = now_ms = self._clock.monotonic_ms()
            for messages in run.batches:
                if not self._continues(run, start_ms, now_ms):
                    break
                call = OrderlyCall(messages, ConsumeContext(self._group, run.owned.queue))
                yield call
                run.calls.append(call)
                now_ms += call.done.spent_ms

    def _continues(self, run: Run, start_ms: int, now_ms: int) -> bool:
        """Whether the next batch may follow; called where the listener runs."""
        owned = run.owned
        if owned.is_dropped or (self._lock is not None and not owned.is_locked(now_ms)):
            return False
        is_over = now_ms - start_ms >= _RUN_MS_MAX
        return not run.calls or (run.calls[-1].step.continues and not is_over)

    # --- what follows -----------------------------------------------------------------------------

    def _settle(self, runs: Sequence[Run]) -> None:
        for run in runs:
            run.owned.idle.set()
            if not run.owned.is_dropped:
                self._settle_one(run)

    def _settle_one(self, run: Run) -> None:
        owned, last = run.owned, run.calls[-1] if run.calls else None
        self._count(run)
        for step, calls in groupby(run.calls, attrgetter("step")):
            # Calls with the same result are applied as one: the outcome is the same for all except
            # suspending, which ends a run and so occurs once.
            owned.cache.take(sum(len(call.messages) for call in calls))
            self._act(owned, step)
        owned.note_room()
        if last is None or last.step.continues:
            self._next(owned)
        elif last.step is OrderlyStep.SUSPEND:
            self._keep("pause", owned, functools.partial(self._suspend, call=last))
        else:
            pause_ms = self._pause_ms(last)
            self._keep("pause", owned, functools.partial(self._continue_after, pause_ms=pause_ms))

    def _act(self, owned: OwnedQueue, step: OrderlyStep) -> None:
        match step:
            case OrderlyStep.COMMIT:
                self._commit(owned)
            case OrderlyStep.ROLLBACK:
                owned.cache.rollback()
            case OrderlyStep.KEEP | OrderlyStep.SUSPEND:
                pass
            case never:
                assert_never(never)

    def _commit(self, owned: OwnedQueue) -> None:
        position = owned.cache.commit()
        if position is not None:
            self._positions.replace(owned.queue, position)

    async def _suspend(self, owned: OwnedQueue, call: OrderlyCall) -> None:
        """Redeliver the messages after a pause, except those without attempts left."""
        is_rejected = call.context.delay_level < 0
        limit = 0 if is_rejected else self._settings.orderly_max_attempts
        again, exhausted = attempts(call.messages, limit)
        for message in exhausted:
            if not await self._dead_letter(owned, message, is_rejected=is_rejected):
                again.append(message)
        if owned.is_dropped:
            return
        if again:
            # Dead letters stay taken, and are committed with the messages after them.
            owned.cache.again(again)
            await asyncio.sleep(self._pause_ms(call) / 1000)
        elif call.context.auto_commit:
            self._commit(owned)
            owned.note_room()
        self._next(owned)

    async def _dead_letter(
        self, owned: OwnedQueue, message: MessageView, *, is_rejected: bool
    ) -> bool:
        if self._retry_sender is None:
            _log.warning("broadcast message %s failed too often", message.message_id)
            return True
        if is_rejected:
            return await self._retry_sender.send_back(owned.queue, message, DEAD_LETTER_LEVEL)
        return await self._retry_sender.dead_letter(message)

    def _pause_ms(self, call: OrderlyCall) -> int:
        return suspend_time_ms(call.context.suspend, self._settings.listening.suspend_ms)

    def _count(self, run: Run) -> None:
        run.owned.last_consume_ms = self._clock.monotonic_ms()
        consumed = failed = spent_ms = 0
        for call in run.calls:
            spent_ms += call.done.spent_ms
            if call.step in (OrderlyStep.SUSPEND, OrderlyStep.ROLLBACK):
                failed += len(call.messages)
            else:
                consumed += len(call.messages)
            if call.done.result is ConsumeResult.ROLLBACK and call.step is OrderlyStep.COMMIT:
                self._log_ignored_rollback(run.owned)
        topic = run.owned.queue.topic
        self._stats.called(topic, consumed, failed, spent_ms, calls=len(run.calls))

    def _log_ignored_rollback(self, owned: OwnedQueue) -> None:
        if not self._is_rollback_logged:
            self._is_rollback_logged = True
            _log.warning(
                "the listener of %s returned ROLLBACK for %s, which acknowledges messages unless"
                " it sets context.auto_commit = False; logged once",
                self._group,
                owned.queue,
            )
