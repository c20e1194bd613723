"""Consuming by push: messages reach a listener as soon as brokers have them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from turbopump.client.allocation import Strategy, average
from turbopump.client.arguments import (
    check_callable,
    check_listener,
    check_subscriptions,
    checked,
    checked_hooks,
    checked_path,
    hooks_with,
)
from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.config import ClientConfig
from turbopump.client.consumption import Consumption
from turbopump.client.delivery.concurrent import ConcurrentDelivery
from turbopump.client.delivery.delivery import Delivery
from turbopump.client.delivery.listener import ConsumeHook, Listen, Listener
from turbopump.client.delivery.orderly import OrderlyDelivery
from turbopump.client.delivery.results import ConsumeContext
from turbopump.client.filter_hooks import FilterHook
from turbopump.client.inspection import direct_consumption, running_info
from turbopump.client.life_cycle import ServingLifeCycle, leave, require_running
from turbopump.client.members import ConsumerMember
from turbopump.client.names import check_group, check_topic_to_subscribe, with_namespace
from turbopump.client.offset_store import OffsetStore, StoredOffsets, check_offset_store
from turbopump.client.offsets import LocalOffsets, Offsets, RemoteOffsets, offsets_path
from turbopump.client.push_config import (
    CONCURRENCY,
    Concurrency,
    FlowLimits,
    Listening,
    Pulling,
    PushSettings,
)
from turbopump.client.queue_locks import QueueLocks
from turbopump.client.retry_sender import RetrySender
from turbopump.client.session import Session
from turbopump.client.shared_sessions import client_config, shared_session
from turbopump.client.start_position import StartFrom, consume_from
from turbopump.client.stats import ConsumerStats
from turbopump.client.subscriptions import Expression, check_subscription, subscription
from turbopump.errors import InvalidArgument
from turbopump.filters.sql92 import Sql
from turbopump.filters.tags import EVERYTHING, SQL92, TAG
from turbopump.message import MessageQueue, QueueOffset
from turbopump.supervisor import Watch
from turbopump.wire.bodies import (
    ConsumerData,
    ConsumeType,
    DirectConsumption,
    MessageModel,
    RunningInfo,
    Subscription,
)
from turbopump.wire.names import retry_topic
from turbopump.wire.record import MessageView

_BROADCAST_INSTANCE = "DEFAULT"
"""A broadcasting consumer stores offsets under its client id, which must survive a restart."""


class PushConsumer(ServingLifeCycle, ConsumerMember):
    """Delivers every message of its topics to a listener, at least once.

    ::

        async def handle(messages, context):
            print(messages[0].body)
            return ConsumeResult.SUCCESS

        async with PushConsumer("billing", handle, nameserver="127.0.0.1:9876",
                                subscriptions={"orders": "created || paid"}) as consumer:
            await consumer.wait()

    Members of one group share the queues of a topic. A plain function is called in threads, an
    ``async def`` on the loop. Failed messages are redelivered, see `ConsumeResult`.

    ``concurrency`` is how many calls run at once, in threads or as tasks: a fixed number, or a
    minimum and a maximum, to which it grows while messages wait. ``batch_size`` is the maximum of
    messages per call. ``max_attempts`` is how often a message is redelivered before it
    is dead-lettered: by default the limit of the group (``retryMaxTimes``, 16 unless changed), and
    without end if ``orderly``.

    ``offset_store`` keeps the offsets instead of the brokers, such as in the database of the
    listener's results, see `OffsetStore`.
    """

    def __init__(
        self,
        group: str,
        listener: Listen,
        *,
        subscriptions: Mapping[str, Expression] | None = None,
        nameserver: str | Sequence[str] = "",
        namespace: str = "",
        start_from: StartFrom = "last",
        orderly: bool = False,
        broadcast: bool = False,
        strategy: Strategy = average,
        flow: FlowLimits | None = None,
        concurrency: Concurrency = CONCURRENCY,
        batch_size: int = 1,
        max_attempts: int | None = None,
        pulling: Pulling | None = None,
        listening: Listening | None = None,
        hooks: Sequence[ConsumeHook | FilterHook] = (),
        offsets_directory: Path | str | None = None,
        offset_store: OffsetStore | None = None,
        client: ClientConfig | None = None,
        session: Session | None = None,
    ) -> None:
        super().__init__()
        check_group(group)
        check_listener(listener)
        check_subscriptions(subscriptions)
        check_callable("strategy", strategy, "(queues, members, me)")
        self._client = client_config(nameserver, namespace, client, session)
        if broadcast and session is None and not self._client.instance:
            self._client = replace(self._client, instance=_BROADCAST_INSTANCE)
        self.group = with_namespace(self._client.namespace, group)
        self._consume_from = consume_from(start_from)
        if offsets_directory is not None and not broadcast:
            raise InvalidArgument(
                "offsets_directory is for broadcasting: pass broadcast=True too, or leave it out; "
                "brokers keep the offsets of other consumers"
            )
        if offset_store is not None:
            check_offset_store(offset_store)
            if offsets_directory is not None:
                raise InvalidArgument("pass offset_store or offsets_directory, not both")
        self._offset_store = offset_store
        self._listen = listener
        self._settings = PushSettings(
            start_from=start_from,
            strategy=strategy,
            is_orderly=orderly,
            is_broadcast=broadcast,
            flow=checked("flow", flow, FlowLimits, "FlowLimits(messages_per_queue=100)"),
            pulling=checked("pulling", pulling, Pulling, "Pulling(batch_size=64)"),
            listening=checked("listening", listening, Listening, "Listening(close_wait=60)"),
            concurrency=concurrency,
            batch_size=batch_size,
            max_attempts=max_attempts,
            offsets_directory=checked_path("offsets_directory", offsets_directory),
        )
        self._hooks = checked_hooks(
            "hooks", hooks, "before_consume", "after_consume", instead="keeps"
        )
        self._given_session = session
        self._expressions: dict[str, Expression] = {}
        for topic, expression in (subscriptions or {}).items():
            self._expressions[self._checked(topic, expression)] = expression
        self._subscriptions: dict[str, Subscription] = {}
        self._session: Session | None = None
        self._running: Consumption | None = None
        self._listener: Listener | None = None
        self._started_ms = 0

    # --- life cycle -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the group and start consuming; no message sent after this returns is missed."""
        if self._running is not None:
            return
        if not self._expressions:
            raise InvalidArgument(
                f"consumer {self.group!r} has no subscriptions; pass subscriptions="
                '{"orders": "*"}, or call subscribe() before it starts'
            )
        if self._closing is not None:
            # The caller of close() got its outcome.
            await asyncio.wait([self._closing])
            self._closing = None
        session = self._given_session or shared_session(self._client, self)
        await session.start()
        try:
            self._running = await self._begin(session)
            self._session = session
            await self._running.start()
        except BaseException:
            running, self._running, self._session = self._running, None, None
            closed, self._closed = self._closed, None
            if closed is not None:
                closed.set()
            if running is not None:
                await running.stop(0)
            await leave(session, self)
            raise

    def begin_closing(self) -> asyncio.Task[None] | None:
        running, session = self._running, self._session
        if running is not None and session is not None:
            session.require_own_process()
            self._running = self._session = None
            self._closing = asyncio.create_task(self._close(running, session))
        return self._closing

    async def _close(self, running: Consumption, session: Session) -> None:
        assert self._closed is not None, "created by start"
        try:
            await running.stop(self._settings.listening.close_wait_ms)
        finally:
            try:
                await leave(session, self)
            finally:
                self._closed.set()

    @property
    def is_calling(self) -> bool:
        return self._listener is not None and self._listener.is_calling

    # --- while running ----------------------------------------------------------------------------

    async def subscribe(
        self, topic: str, expression: Expression = EVERYTHING, kind: str = TAG
    ) -> None:
        """Subscribe to a topic, or change its expression; may be called before the start.

        ``kind`` is the type of a string expression: ``TAG`` or ``SQL92``.

        ::

            await consumer.subscribe("orders", "created || paid")
            await consumer.subscribe("prices", Sql("amount > 100"))
        """
        if kind not in (TAG, SQL92):
            raise InvalidArgument(f"kind must be {TAG} or {SQL92}, got {kind!r}")
        if kind == SQL92 and isinstance(expression, str):
            expression = Sql(expression)
        name = self._checked(topic, expression)
        running, session = self._running, self._session
        if running is not None and session is not None:
            wanted = subscription(name, expression, session.clock.now_ms())
            await check_subscription(session, self.group, wanted)
            self._subscriptions[name] = wanted
            await session.refresh_route(name)
            await session.heartbeat()
            # Not if it was closed in the meantime: then the next start subscribes.
            if self._running is running:
                running.restart_pulls(name)
                running.rebalancer.wake()
        self._expressions[name] = expression

    async def unsubscribe(self, topic: str) -> None:
        """Unsubscribe from a topic and release its queues."""
        name = with_namespace(self._client.namespace, topic)
        self._expressions.pop(name, None)
        running, session = self._running, self._session
        if running is not None and session is not None:
            self._subscriptions.pop(name, None)
            await session.heartbeat()
            if self._running is running:
                await running.rebalancer.balance()

    def suspend(self) -> None:
        """Stop pulling until `resume`; messages already pulled are still delivered."""
        self._require_running().suspend()

    def resume(self) -> None:
        """Resume pulling."""
        self._require_running().resume()

    def resize(self, concurrency: Concurrency) -> None:
        """Change how many calls of the listener run at once: a number, or a minimum and a maximum.

        ::

            consumer.resize(8)
            consumer.resize((8, 32))
        """
        settings = replace(self._settings, concurrency=concurrency)
        self._require_running().delivery.resize(settings.concurrency_limits)
        self._settings = settings

    @property
    def is_idle(self) -> bool:
        """Whether it is running and has finished all messages pulled so far."""
        return self._running is not None and all(
            each.cache.is_empty for each in self._running.owned.values()
        )

    def assignment(self) -> list[MessageQueue]:
        """Return the queues that this client consumes now."""
        running = self._require_running()
        return sorted(each.queue for each in running.owned.values() if not each.is_dropped)

    async def commit(self) -> None:
        """Commit the position of each queue now instead of at the next interval."""
        await self._require_running().persist()

    # --- called by the session --------------------------------------------------------------------

    def heartbeat_data(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.PUSH,
            message_model=(
                MessageModel.BROADCASTING
                if self._settings.is_broadcast
                else MessageModel.CLUSTERING
            ),
            consume_from_where=self._consume_from,
            subscription_data_set=list(self._subscriptions.values()),
            unit_mode=self._client.unit_mode,
        )

    @property
    def watches(self) -> Iterable[Watch]:
        return () if self._running is None else self._running.watches

    def members_changed(self) -> None:
        if self._running is not None:
            self._running.rebalancer.wake()

    def route_changed(self, topic: str) -> None:  # noqa: ARG002 - all topics are rebalanced
        self.members_changed()

    async def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, QueueOffset]) -> None:
        if self._running is not None:
            await self._running.reset(topic, offsets)

    def progress(self, topic: str) -> Mapping[MessageQueue, int]:
        return {} if self._running is None else self._running.offsets.positions.all_of(topic)

    async def running_info(self, *, with_stacks: bool) -> RunningInfo:
        """Return the state that operators can inspect."""
        running = self._require_running()
        assert self._session is not None
        return running_info(
            running,
            self._session,
            list(self._subscriptions.values()),
            self._settings,
            started_ms=self._started_ms,
            with_stacks=with_stacks,
        )

    async def consume_directly(
        self, message: MessageView, broker_name: str | None
    ) -> DirectConsumption:
        """Deliver one message to the listener now, independent of its queue."""
        running = self._require_running()
        assert self._listener is not None
        queue = MessageQueue(message.topic, broker_name or "", message.queue_id)
        context = ConsumeContext(self.group, queue)
        messages = running.prepared([message])
        return await direct_consumption(
            self._listener, messages, context, is_orderly=self._settings.is_orderly
        )

    async def _begin(self, session: Session) -> Consumption:
        self._closed = asyncio.Event()
        self._started_ms = session.clock.now_ms()
        expressions = dict(self._expressions)
        if not self._settings.is_broadcast:
            expressions[retry_topic(self.group)] = EVERYTHING
        self._subscriptions.clear()
        for topic, expression in expressions.items():
            version_ms = session.clock.now_ms()
            self._subscriptions[topic] = subscription(topic, expression, version_ms)

        async def check(topic: str) -> None:
            await session.refresh_route(topic)
            await check_subscription(session, self.group, self._subscriptions[topic])

        await gather_by_key(list(self._subscriptions), check)
        hooks = hooks_with(self._hooks, "before_consume", "after_consume")
        timeout_ms = self._settings.listening.timeout_ms
        self._listener = Listener(self._listen, hooks, session.clock, timeout_ms)
        running = self._consumption(session, self._listener)
        await running.offsets.open()
        try:
            await session.join(self)
        except BaseException:
            running.offsets.close()
            raise
        return running

    def _consumption(self, session: Session, listener: Listener) -> Consumption:
        own, offsets, stats = self._settings, self._offsets(session), ConsumerStats()
        locks = QueueLocks(session, self.group) if own.is_locking else None
        back = None if own.is_broadcast else RetrySender(session, self.group, own.max_attempts)
        common = self.group, listener, own, offsets.positions, back, stats, session.clock
        delivery: Delivery[Any]
        if own.is_orderly:
            lock = None if locks is None else locks.renew_one
            delivery = OrderlyDelivery(*common, lock=lock)
        else:
            delivery = ConcurrentDelivery(*common)
        return Consumption(
            session,
            self.group,
            settings=own,
            subscriptions=self._subscriptions,
            refresh_subscription=self._refresh_version,
            delivery=delivery,
            offsets=offsets,
            locks=locks,
            stats=stats,
            filters=hooks_with(self._hooks, "keeps"),
        )

    def _offsets(self, session: Session) -> Offsets:
        is_broadcast = self._settings.is_broadcast
        if self._offset_store is not None:
            store = self._offset_store
            return StoredOffsets(store, session, self.group, is_broadcast=is_broadcast)
        if not is_broadcast:
            return RemoteOffsets(session, self.group)
        directory = self._settings.offsets_directory
        path = offsets_path(directory, session.client_id, self.group)
        return LocalOffsets(path, session.machine)

    def _checked(self, topic: str, expression: Expression) -> str:
        """Return a topic's name as brokers know it; refuse invalid topics and expressions."""
        check_topic_to_subscribe(topic)
        name = with_namespace(self._client.namespace, topic)
        subscription(name, expression, 0)
        return name

    def _refresh_version(self, topic: str) -> None:
        """Renew the subscription's version, so that other members' older ones do not replace it."""
        wanted = self._subscriptions.get(topic)
        if wanted is not None and self._session is not None:
            version_ms = self._session.clock.now_ms()
            self._subscriptions[topic] = msgspec.structs.replace(wanted, sub_version=version_ms)

    def _require_running(self) -> Consumption:
        return require_running(self._running, "consumer", self.group)
