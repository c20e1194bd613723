"""Reading topics by polling: the lite pull consumer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain

from turbopump.client.allocation import Strategy, allocated, average
from turbopump.client.arguments import (
    check_callable,
    check_subscriptions,
    checked,
    checked_hooks,
)
from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.config import ClientConfig
from turbopump.client.fetch_buffer import FetchBuffer
from turbopump.client.fetcher import Fetcher
from turbopump.client.filter_hooks import FilterHook
from turbopump.client.life_cycle import LifeCycle, leave, require_running, started
from turbopump.client.members import ConsumerMember
from turbopump.client.names import check_group, check_topic_to_subscribe, with_namespace
from turbopump.client.pull_config import LitePullConfig
from turbopump.client.queue_reader import QueueReader, require_offset
from turbopump.client.rebalance import group_members
from turbopump.client.session import Session
from turbopump.client.shared_sessions import client_config, shared_session
from turbopump.client.start_position import StartFrom, consume_from
from turbopump.client.subscriptions import Expression, check_subscription, subscription
from turbopump.durations import Duration, milliseconds
from turbopump.errors import InvalidArgument, NetworkError, NotRunning, TurbopumpError
from turbopump.filters.tags import EVERYTHING
from turbopump.message import MessageQueue, QueueOffset
from turbopump.net.limits import require_at_least
from turbopump.supervisor import Supervisor, Watch
from turbopump.timeouts import timeout as time_limit
from turbopump.wire.bodies import ConsumerData, ConsumeType, MessageModel, Subscription
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

_BALANCE_INTERVAL_MS = 20_000


class LitePullConsumer(LifeCycle, ConsumerMember):
    """Reads topics by polling, sharing queues with its group, or reads manually assigned queues.

    ::

        async with LitePullConsumer(
            "audit", nameserver="127.0.0.1:9876", subscriptions={"orders": "*"}
        ) as consumer:
            async for message in consumer:
                print(message.body)

    A message counts as processed when the caller requests the next one or polls again. With
    automatic commits, the group resumes after the processed messages; after a crash, some of them
    are redelivered.
    """

    def __init__(
        self,
        group: str,
        *,
        nameserver: str | Sequence[str] = "",
        namespace: str = "",
        subscriptions: Mapping[str, Expression] | None = None,
        start_from: StartFrom = "last",
        strategy: Strategy = average,
        config: LitePullConfig | None = None,
        hooks: Sequence[FilterHook] = (),
        client: ClientConfig | None = None,
        session: Session | None = None,
    ) -> None:
        check_group(group)
        consume_from(start_from)
        check_subscriptions(subscriptions)
        check_callable("strategy", strategy, "(queues, members, me)")
        self._client = client_config(nameserver, namespace, client, session)
        self.group = with_namespace(self._client.namespace, group)
        self._config = checked("config", config, LitePullConfig)
        self._filters = checked_hooks("hooks", hooks, "keeps")
        self._start_from: StartFrom = start_from
        self._strategy = strategy
        self._given_session = session
        self._subscriptions: dict[str, Subscription] = {}
        self._expressions = dict(subscriptions or {})
        for topic, expression in self._expressions.items():
            check_topic_to_subscribe(topic)
            subscription(topic, expression, 0)
        self._running: _Running | None = None

    # --- life cycle -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the group and start fetching the queues assigned to this member."""
        if self._running is not None:
            return
        session = self._given_session or shared_session(self._client, self)
        async with started(session, self):
            running = self._new_running(session)
            expressions = dict(self._expressions)
            await gather_by_key(
                expressions, lambda topic: self._look_up(running, topic, expressions[topic])
            )
            await session.join(self)
        self._running = running
        running.tasks.keep("rebalance", functools.partial(self._keep_balanced, running))

    async def close(self) -> None:
        """Commit delivered messages, if commits are automatic, and leave the group."""
        await self._close(is_finished=True)

    async def __aexit__(self, kind: object = None, *_: object) -> None:
        # After an error, the latest messages do not count as processed.
        await self._close(is_finished=kind is None)

    # --- queue assignment -------------------------------------------------------------------------

    async def subscribe(self, topic: str, tags: Expression = EVERYTHING) -> None:
        """Subscribe to a topic, sharing its queues with the group; excludes `assign`.

        ::

            await consumer.subscribe("orders", "created || paid")
            await consumer.subscribe("prices", Sql("amount > 100"))
        """
        check_topic_to_subscribe(topic)
        running = self._require_running()
        if running.is_assigned_by_hand:
            raise InvalidArgument(f"cannot subscribe to {topic!r}: queues are assigned by assign()")
        await self._look_up(running, topic, tags)
        running.fetcher.filter_changed(topic)
        self._expressions[topic] = tags
        await running.session.heartbeat()
        running.balance_wanted.set()

    async def unsubscribe(self, topic: str) -> None:
        """Unsubscribe from a topic."""
        running = self._require_running()
        self._expressions.pop(topic, None)
        self._subscriptions.pop(topic, None)
        await self._own(running, [queue for queue in running.buffer.queues if queue.topic != topic])
        await running.session.heartbeat()

    async def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Read exactly these queues, even if other members read them; excludes `subscribe`.

        ::

            await consumer.assign(await consumer.queues("orders"))
        """
        running = self._require_running()
        if self._expressions:
            raise InvalidArgument(
                f"cannot assign queues: topics {sorted(self._expressions)} are subscribed; use "
                "subscribe or assign, not both"
            )
        running.is_assigned_by_hand = True
        await self._own(running, list(queues))

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the queues of a topic."""
        return await self._require_running().reader.queues(topic)

    def assignment(self) -> frozenset[MessageQueue]:
        """Return the queues being read."""
        return frozenset(self._require_running().buffer.queues)

    def pause(self, *queues: MessageQueue) -> None:
        """Stop reading queues until `resume`; already fetched messages stay buffered."""
        running = self._require_running()
        for queue in queues:
            running.buffer[queue].is_paused = True

    def resume(self, *queues: MessageQueue) -> None:
        """Resume reading paused queues."""
        running = self._require_running()
        for queue in queues:
            running.buffer[queue].is_paused = False
        running.fetcher.wake()
        running.fetcher.changed.set()

    # --- messages ---------------------------------------------------------------------------------

    async def poll(
        self, *, timeout: Duration | None = None, count_max: int | None = None
    ) -> list[MessageView]:
        """Return messages as soon as any are available, or none on timeout.

        Raises InvalidArgument while no topic is subscribed and no queue assigned.

        ::

            for message in await consumer.poll():
                print(message.body)
        """
        running = self._require_source()
        limit_ms = self._config.poll_timeout_ms
        if timeout is not None:
            limit_ms = milliseconds("timeout", timeout, 0)
        count = self._config.poll_count_max if count_max is None else count_max
        require_at_least("count_max", count, 1)
        await self._finish(running)
        with contextlib.suppress(TimeoutError):
            async with time_limit(limit_ms / 1000):
                return await self._take(running, count)
        return []

    async def __anext__(self) -> MessageView:
        running = self._require_source()
        await self._finish(running)
        try:
            return (await self._take(running, 1))[0]
        except NotRunning:
            raise StopAsyncIteration from None

    def __aiter__(self) -> AsyncIterator[MessageView]:
        return self

    async def _finish(self, running: _Running) -> None:
        """Mark messages delivered earlier as processed, and commit them when a commit is due."""
        running.buffer.finish()
        now_ms = running.session.clock.monotonic_ms()
        due_ms = running.committed_ms + self._config.commit_interval_ms
        if self._config.auto_commit and now_ms >= due_ms:
            running.committed_ms = now_ms
            await self._commit_soon(running, running.buffer.positions())

    async def _take(self, running: _Running, count_max: int) -> list[MessageView]:
        while True:
            taken = running.buffer.take(count_max)
            if taken:
                running.fetcher.wake()
                return taken
            running.fetcher.changed.clear()
            await running.fetcher.changed.wait()
            if running.is_closed:
                raise NotRunning(f"consumer {self.group!r} was closed")

    # --- positions --------------------------------------------------------------------------------

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue reading a queue at another offset."""
        running = self._require_running()
        running.buffer.restart(queue, require_offset("offset", offset))
        running.fetcher.start(queue)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Continue reading a queue at its oldest message."""
        await self.seek(queue, await self._require_running().reader.min_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Continue reading a queue at its end: skip to messages that arrive from now on."""
        await self.seek(queue, await self._require_running().reader.max_offset(queue))

    async def commit(self) -> None:
        """Commit all messages delivered so far."""
        running = self._require_running()
        running.buffer.finish()
        positions = running.buffer.positions().items()
        await asyncio.gather(*(running.fetcher.commit(*position) for position in positions))

    async def committed(self, queue: MessageQueue) -> QueueOffset | None:
        """Return the group's committed offset, or None if the broker has none."""
        return await self._require_running().reader.committed(queue)

    async def offset_at(self, queue: MessageQueue, moment: datetime) -> QueueOffset:
        """Return the offset of the first message stored at or after a point in time.

        ::

            await consumer.seek(queue, await consumer.offset_at(queue, timestamp))
        """
        return await self._require_running().reader.offset_at(queue, moment)

    # --- called by the session --------------------------------------------------------------------

    def heartbeat_data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.PULL,
            message_model=MessageModel.CLUSTERING,
            consume_from_where=consume_from(self._start_from),
            subscription_data_set=list(self._subscriptions.values()),
            unit_mode=self._client.unit_mode,
        )

    @property
    def watches(self) -> Iterable[Watch]:
        running = self._running
        return () if running is None else (*running.tasks.watches, *running.fetcher.work.watches)

    def members_changed(self) -> None:
        if self._running is not None:
            self._running.balance_wanted.set()

    def route_changed(self, topic: str) -> None:  # noqa: ARG002 - all topics are rebalanced
        self.members_changed()

    def progress(self, topic: str) -> Mapping[MessageQueue, int]:
        if self._running is None:
            return {}
        wire_queue = self._running.reader.wire_queue
        positions = self._running.buffer.positions().items()
        found = {wire_queue(queue): int(offset) for queue, offset in positions}
        return {queue: offset for queue, offset in found.items() if queue.topic == topic}

    async def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, QueueOffset]) -> None:
        running = self._require_running()
        for on_wire, offset in offsets.items():
            queue = running.reader.user_queue(on_wire)
            if on_wire.topic == topic and queue in running.buffer:
                await self.seek(queue, offset)

    def _new_running(self, session: Session) -> _Running:
        reader = QueueReader(session, self.group, self._config.times)
        buffer = FetchBuffer(self._config.ahead)
        fetcher = Fetcher(
            reader,
            buffer,
            self._subscription_of,
            self._start_from,
            self._config.fetch_count_max,
            group=self.group,
            filters=self._filters,
        )
        return _Running(session, reader, buffer, fetcher, session.clock.monotonic_ms())

    async def _look_up(self, running: _Running, topic: str, expression: Expression) -> None:
        """Look up a topic, and subscribe to it if brokers accept the expression."""
        known = running.reader.wire_topic(topic)
        await running.session.refresh_route(known)
        wanted = subscription(known, expression, running.session.clock.now_ms())
        await check_subscription(running.session, self.group, wanted)
        self._subscriptions[topic] = wanted

    def _subscription_of(self, topic: str) -> Subscription:
        return self._subscriptions.get(topic) or subscription(topic, EVERYTHING, 0)

    async def _keep_balanced(self, running: _Running) -> None:
        while True:
            running.balance_wanted.clear()
            if self._expressions:
                await self._balance(running)
            with contextlib.suppress(TimeoutError):
                async with time_limit(_BALANCE_INTERVAL_MS / 1000):
                    await running.balance_wanted.wait()

    async def _balance(self, running: _Running) -> None:
        """Own the allocated queues; keep a topic unchanged if its queues or members are unknown."""

        async def share(topic: str) -> list[MessageQueue]:
            try:
                return await self._share(running, topic)
            except Exception as error:  # noqa: BLE001 - the strategy may be the user's
                known = isinstance(error, TurbopumpError)
                _log.warning(
                    "queues of %s for %s not balanced: %s",
                    topic,
                    self.group,
                    error,
                    exc_info=None if known else error,
                )
                return [queue for queue in running.buffer.queues if queue.topic == topic]

        wanted = chain.from_iterable((await gather_by_key(self._expressions, share)).values())
        # The topic may have been unsubscribed in the meantime.
        await self._own(running, [queue for queue in wanted if queue.topic in self._expressions])

    async def _share(self, running: _Running, topic: str) -> list[MessageQueue]:
        session = running.session
        route = await session.route(running.reader.wire_topic(topic))
        address = session.any_address(route)
        members = await group_members(session, address, self.group)
        share = allocated(self._strategy, route.readable, members, session.client_id)
        return list(map(running.reader.user_queue, share))

    async def _own(self, running: _Running, queues: list[MessageQueue]) -> None:
        wanted = set(queues)
        lost = [queue for queue in running.buffer.queues if queue not in wanted]
        gained = [queue for queue in queues if queue not in running.buffer]
        if lost or gained:
            _log.info("%s: gained %s, lost %s", self.group, gained, lost)
        positions = running.buffer.positions()
        for queue in lost:
            running.fetcher.stop(queue)
            running.buffer.remove(queue)
        for queue in gained:
            running.buffer.add(queue)
            running.fetcher.start(queue)
        if self._config.auto_commit:
            await self._commit_soon(running, {q: positions[q] for q in lost if q in positions})

    async def _commit_soon(
        self, running: _Running, positions: Mapping[MessageQueue, QueueOffset]
    ) -> None:
        """Commit one-way: a slow broker must not delay a poll."""
        unreachable: set[str] = set()
        for queue, position in positions.items():
            if queue.broker in unreachable:
                continue
            # While others were committed, this queue may have gone back.
            offset = min(position, running.buffer.positions().get(queue, position))
            try:
                await running.fetcher.commit(queue, offset, is_oneway=True)
            except TurbopumpError as error:
                what = "offset %d of %s not committed"
                running.session.warn(_log, queue.broker, error, what, offset, queue)
                if isinstance(error, NetworkError):
                    # Its other queues would wait just as long without result.
                    unreachable.add(queue.broker)

    async def _close(self, *, is_finished: bool) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        running.session.require_own_process()
        running.is_closed = True
        running.fetcher.changed.set()
        try:
            await running.tasks.stop()
            await running.fetcher.close()
            if is_finished:
                running.buffer.finish()
            if self._config.auto_commit:
                await self._commit_soon(running, running.buffer.positions())
        finally:
            await leave(running.session, self)

    def _require_source(self) -> _Running:
        """Return the running state; refuse to poll when there is nothing to read."""
        running = self._require_running()
        if not self._expressions and not running.is_assigned_by_hand:
            raise InvalidArgument(
                f"consumer {self.group!r} has no subscriptions and no assigned queues; pass "
                'subscriptions={"orders": "*"}, or call subscribe() or assign() first'
            )
        return running

    def _require_running(self) -> _Running:
        return require_running(self._running, "consumer", self.group)


@dataclass(slots=True)
class _Running:
    """The state of a lite pull consumer between start and close."""

    session: Session
    reader: QueueReader
    buffer: FetchBuffer
    fetcher: Fetcher
    committed_ms: int
    tasks: Supervisor = field(default_factory=Supervisor)
    balance_wanted: asyncio.Event = field(default_factory=asyncio.Event)
    is_assigned_by_hand: bool = False
    is_closed: bool = False
