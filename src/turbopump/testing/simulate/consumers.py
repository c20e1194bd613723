"""The members of consumer groups: they record every call, and do what the plan says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.pull_config import LitePullConfig
from turbopump.client.push_config import Listening
from turbopump.client.push_consumer import PushConsumer
from turbopump.errors import DamagedMessage, TurbopumpError
from turbopump.message import MessageQueue
from turbopump.testing.listeners import InjectedFailure
from turbopump.testing.simulate.bodies import key_of
from turbopump.testing.simulate.events import (
    DAMAGED,
    ConsumeBegan,
    Joined,
    Left,
    Result,
    Unexpected,
)
from turbopump.testing.simulate.plan import CONSUME_TIMEOUT_S, Fate, FateKind, Group, GroupKind
from turbopump.testing.simulate.world import World
from turbopump.wire.record import MessageView

_ORDERLY_WORK_S_MAX = 2.0
"""Far below the 20 s that a queue's lock is held for a call that runs when the queue moves."""
_RETRY_START_S = 1.0
_POLL_MS = 10_000


class Member:
    """One process of a group."""

    def __init__(self, world: World, group: Group, number: int) -> None:
        self.group = group
        self.name = f"{group.name}.{number}"
        self.session = world.client(group.name)
        self.is_dead = False
        self.is_started = False
        self.is_leaving = False
        self._world = world
        self._calls: dict[int, list[ConsumeBegan]] = {}
        self._next_call = 0
        self._polling: asyncio.Task[None] | None = None
        self._consumer: PushConsumer | LitePullConsumer | None = None

    # --- life cycle -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the group, as soon as that is possible."""
        consumer = self._consumer = self._new_consumer()
        while not self.is_dead and not self.is_leaving:
            try:
                await consumer.start()
            except TurbopumpError:
                await asyncio.sleep(_RETRY_START_S)
            else:
                break
        self.is_started = True
        self._world.history.add(Joined(self._world.now_us, self.group.name, self.name))
        if isinstance(consumer, LitePullConsumer):
            self._polling = asyncio.create_task(self._poll(consumer))

    def _new_consumer(self) -> PushConsumer | LitePullConsumer:
        group, subscriptions = self.group, dict.fromkeys(self.group.topics, "*")
        if group.kind is GroupKind.PULL:
            return LitePullConsumer(
                group.name,
                subscriptions=subscriptions,
                start_from="first",
                config=LitePullConfig(auto_commit=False, poll_count_max=group.batch_max * 4),
                session=self.session,
            )
        return PushConsumer(
            group.name,
            self._listen,
            subscriptions=subscriptions,
            start_from="first",
            orderly=group.kind is GroupKind.ORDERLY,
            concurrency=group.threads,
            batch_size=group.batch_max,
            max_attempts=group.max_attempts,
            listening=Listening(timeout=CONSUME_TIMEOUT_S),
            session=self.session,
        )

    async def leave(self) -> None:
        """Leave the group cleanly."""
        self.is_leaving = True
        world = self._world
        world.history.add(Left(world.now_us, self.group.name, self.name, is_crash=False))
        await self._close()
        world.forget_client(self.session)

    async def crash(self) -> None:
        """Die: whatever it does from now on has no effect."""
        world = self._world
        world.kill_client(self.session)
        world.history.add(Left(world.now_us, self.group.name, self.name, is_crash=True))
        self.is_dead = True
        for call in tuple(self._calls):
            self._end(call, Result.CUT)
        await self._close()

    async def _close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])
        if self._consumer is not None:
            await self._consumer.close()

    def assignment(self) -> tuple[MessageQueue, ...]:
        """Return the queues that it owns now, including those of retry topics."""
        is_over = self.is_dead or self.is_leaving or not self.session.is_running
        if is_over or not self.is_started or self._consumer is None:
            return ()
        return tuple(sorted(self._consumer.assignment()))

    # --- consuming --------------------------------------------------------------------------------

    async def _listen(
        self, messages: Sequence[MessageView], context: ConsumeContext
    ) -> ConsumeResult:
        if self._world.history.is_closed:
            # What ends the run cancels only one call.
            return ConsumeResult.RETRY_LATER
        call = self._begin(messages, context.queue)
        outcome: Result = Result.CUT
        try:
            fates = [self._fate(message) for message in messages]
            await asyncio.sleep(self._work_s(fates, messages))
            failed = [
                fate.kind
                for fate, message in zip(fates, messages, strict=True)
                if fate.fails(message.reconsume_times)
            ]
            outcome = Result.FAILURE if failed else Result.SUCCESS
            if FateKind.RAISES in failed:
                raise InjectedFailure("planned")
            return ConsumeResult.RETRY_LATER if failed else ConsumeResult.SUCCESS
        finally:
            self._end(call, outcome)

    async def _poll(self, consumer: LitePullConsumer) -> None:
        try:
            await self._poll_all(consumer)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is unexpected
            text = f"{self.name} fails to poll: {error!r}"
            self._world.history.add(Unexpected(self._world.now_us, text))

    async def _poll_all(self, consumer: LitePullConsumer) -> None:
        is_uncommitted = False
        while not self.is_dead:
            try:
                messages = await consumer.poll(timeout=_POLL_MS / 1000)
            except DamagedMessage:
                # Skipped; the next poll continues behind it.
                continue
            is_uncommitted = is_uncommitted or bool(messages)
            for message in messages:
                # The broker is that of the queue's only owner of this address.
                call, result = self._begin([message], self._queue_of(message)), Result.CUT
                try:
                    await asyncio.sleep(self._fate(message).work_s)
                    result = Result.SUCCESS
                finally:
                    self._end(call, result)
            try:
                if is_uncommitted:
                    await consumer.commit()
                    is_uncommitted = False
            except TurbopumpError:
                await asyncio.sleep(_RETRY_START_S)

    def _queue_of(self, message: MessageView) -> MessageQueue:
        broker = self._world.broker_at(message.store_host.address)
        return MessageQueue(message.topic, broker, message.queue_id)

    def _fate(self, message: MessageView) -> Fate:
        found = self.group.fates.get(key_of(message.body) or "")
        return found or Fate(FateKind.SUCCEEDS, 0)

    def _work_s(self, fates: Sequence[Fate], messages: Sequence[MessageView]) -> float:
        """Return how long a call takes: a message hangs only the first time."""
        work_s = sum(
            fate.work_s
            for fate, message in zip(fates, messages, strict=True)
            if fate.kind is not FateKind.HANGS or message.reconsume_times == 0
        )
        is_orderly = self.group.kind is GroupKind.ORDERLY
        return min(work_s, _ORDERLY_WORK_S_MAX) if is_orderly else work_s

    # --- recording --------------------------------------------------------------------------------

    def _begin(self, messages: Sequence[MessageView], queue: MessageQueue) -> int:
        self._next_call += 1
        if self.is_dead:
            return 0
        now_us = self._world.now_us
        self._calls[self._next_call] = began = [
            ConsumeBegan(
                now_us,
                self.group.name,
                self.name,
                queue,
                message.queue_offset,
                key_of(message.body) or DAMAGED,
                message.reconsume_times,
                self._next_call,
            )
            for message in messages
        ]
        for event in began:
            self._world.history.add(event)
        return self._next_call

    def _end(self, call: int, result: Result) -> None:
        """Record the end of a call; one of a dead process has ended with it."""
        for began in self._calls.pop(call, ()):
            self._world.history.add(began.ended(self._world.now_us, result))
