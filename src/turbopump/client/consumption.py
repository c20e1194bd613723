"""The stages of a running push consumer: rebalance, pull, cache, deliver, commit."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from turbopump.client.concurrent_calls import gather_by_key
from turbopump.client.delivery.concurrent import ConcurrentDelivery
from turbopump.client.delivery.delivery import Delivery
from turbopump.client.filter_hooks import FilterHook
from turbopump.client.names import without_namespace
from turbopump.client.offsets import Offsets, start_offset
from turbopump.client.owned_queue import OwnedQueue
from turbopump.client.puller import PullContext, Puller
from turbopump.client.push_config import PushSettings, QueueLimits
from turbopump.client.queue_locks import (
    RENEW_FIRST_MS,
    RENEW_INTERVAL_MS,
    UNLOCK_LATER_MS,
    QueueLocks,
)
from turbopump.client.rebalance import Rebalancer
from turbopump.client.replicas import Replica
from turbopump.client.retry_sender import RetrySender
from turbopump.client.session import Session
from turbopump.client.stats import SAMPLE_INTERVAL_MS, ConsumerStats
from turbopump.errors import ConnectionLost, TurbopumpError
from turbopump.message import MessageQueue, QueueOffset
from turbopump.supervisor import Supervisor, Watch
from turbopump.timeouts import timeout
from turbopump.wire import properties
from turbopump.wire.bodies import Subscription
from turbopump.wire.names import retry_topic
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

_PERSIST_FIRST_MS = 10_000
_BEFORE_OTHER_OFFSET_MS = 10_000
"""Between dropping a queue and seeking in it: running listeners may still finish."""
_LISTENER_WAIT_MS = 1000
_STORE_AGAIN_MS = 1000
_EXPIRY_CHECK_MS = 60_000


class Consumption:
    """Owns the queues of one consumer and the tasks that work on them."""

    def __init__(
        self,
        session: Session,
        group: str,
        *,
        settings: PushSettings,
        subscriptions: Mapping[str, Subscription],
        refresh_subscription: Callable[[str], None],
        delivery: Delivery[Any],
        offsets: Offsets,
        locks: QueueLocks | None,
        stats: ConsumerStats,
        filters: Sequence[FilterHook] = (),
    ) -> None:
        self.owned: dict[MessageQueue, OwnedQueue] = {}
        self.delivery = delivery
        self.offsets = offsets
        self.stats = stats
        self.resumed = asyncio.Event()
        self.resumed.set()
        strategy = None if settings.is_broadcast else settings.strategy
        self.rebalancer = Rebalancer(session, group, strategy, subscriptions.keys, owner=self)
        self._session = session
        self._group = group
        self._settings = settings
        self._refresh_subscription = refresh_subscription
        self._locks = locks
        self._tasks = Supervisor()
        self._pullers: dict[OwnedQueue, asyncio.Task[None]] = {}
        self._limits: dict[str, QueueLimits] = {}
        self._beating: asyncio.Task[None] | None = None
        self._is_suspended = False
        self._resets = 0
        """How many resets are in progress."""
        self._targets: dict[MessageQueue, QueueOffset] = {}
        """The targets of resets in progress, the latest for each queue."""
        self._to_unlock: dict[MessageQueue, None] = {}
        """Lost queues whose locks are held a while longer."""
        retry_sender = RetrySender(session, group, settings.max_attempts)
        self._filters = tuple(filters)
        self._pull_context = self._new_pull_context(subscriptions, retry_sender)
        if offsets.on_brokers is not None:
            offsets.on_brokers.offset_to_commit = self._offset_to_commit

    def _new_pull_context(
        self, subscriptions: Mapping[str, Subscription], retry_sender: RetrySender
    ) -> PullContext:
        on_brokers = self.offsets.on_brokers
        return PullContext(
            session=self._session,
            group=self._group,
            pulling=self._settings.pulling,
            delivery=self.delivery,
            positions=self.offsets.positions,
            stats=self.stats,
            resumed=self.resumed,
            committed_by_pulls=None if on_brokers is None else on_brokers.positions,
            is_broadcast=self._settings.is_broadcast,
            subscription=subscriptions.get,
            limits=self._limits_of,
            prepared=self.prepared,
            filters=self._filters,
            dead_letter_damaged=retry_sender.dead_letter_damaged,
            offset_illegal=self._offset_illegal,
            unknown_to_broker=self._send_heartbeat,
            topic_missing=self._topic_missing,
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        """The background tasks of this consumer, and their failures."""
        return (*self._tasks.watches, *self.delivery.watches)

    # --- life cycle -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Acquire this client's share of the queues and keep it balanced."""
        tasks, interval_ms = self._tasks, self._session.config.persist_interval_ms
        tasks.every(
            "offset commits", interval_ms, self._persist_changes, first_ms=_PERSIST_FIRST_MS
        )
        self._sample()
        tasks.every("statistics", SAMPLE_INTERVAL_MS, self._sample)
        locks, delivery, queues = self._locks, self.delivery, self.owned.values()
        if locks is not None:
            tasks.every(
                "lock renewal",
                RENEW_INTERVAL_MS,
                lambda: locks.renew(list(queues)),
                first_ms=RENEW_FIRST_MS,
            )
        if isinstance(delivery, ConcurrentDelivery):
            tasks.every(
                "send-back of expired messages",
                _EXPIRY_CHECK_MS,
                lambda: delivery.send_expired_back(list(queues)),
            )
        await self.rebalancer.balance()
        tasks.keep("rebalance", self.rebalancer.run)

    async def stop(self, wait_ms: int) -> None:
        """Stop pulling, let listeners finish, and commit their progress."""
        for puller in self._pullers.values():
            puller.cancel()
        await self._tasks.stop()
        await self.delivery.close(wait_ms)
        await self.persist()
        self.offsets.close()
        if self._locks is not None:
            await self._locks.unlock({**self._to_unlock, **self.owned}, is_oneway=False)
        for owned in self.owned.values():
            owned.drop()
        self.owned.clear()

    async def persist(self) -> None:
        """Commit the position of every owned queue."""
        await self.offsets.persist(list(self.owned))

    async def _offset_to_commit(
        self, queue: MessageQueue, replica: Replica, position: QueueOffset
    ) -> QueueOffset | None:
        owned = self.owned.get(queue)
        if owned is None:
            return position
        return await Puller(owned, self._pull_context).offset_to_commit(replica, position)

    def _persist_changes(self) -> Awaitable[None] | None:
        if not self.offsets.has_uncommitted(self.owned):
            return None
        return self.offsets.persist(list(self.owned), is_routine=True)

    def _sample(self) -> None:
        self.stats.sample(self._session.clock.monotonic_ms())

    def _send_heartbeat(self) -> None:
        """Send a heartbeat now: a broker has restarted, or a connection is new."""
        if self._beating is None or self._beating.done():
            self._beating = self._tasks.start(self._session.heartbeat())

    # --- gaining and losing queues ----------------------------------------------------------------

    async def lose(self, owned: OwnedQueue) -> bool:
        """Drop a queue; return False while an orderly listener still processes it."""
        self._drop(owned)
        owned.is_leaving = True
        if self._locks is not None:
            try:
                async with timeout(_LISTENER_WAIT_MS / 1000):
                    await owned.idle.wait()
            except TimeoutError:
                return False
        await self.offsets.persist([owned.queue])
        self.offsets.forget(owned.queue)
        self.owned.pop(owned.queue, None)
        if self._locks is not None:
            self._to_unlock[owned.queue] = None
            self._tasks.keep(f"unlock of {owned.queue}", functools.partial(self._unlock, owned))
        return True

    async def gain(self, queues: Sequence[MessageQueue]) -> list[OwnedQueue]:
        """Lock if needed and find the start offset; retry failures at the next rebalance."""
        locked = queues if self._locks is None else await self._locks.lock(queues)
        for queue in queues:
            if queue not in locked:
                _log.info("%s is not locked for this client yet", queue)
        found = await gather_by_key([each for each in queues if each in locked], self._gain_one)
        return [owned for owned in found.values() if owned is not None]

    async def begin(self, changed: Iterable[str]) -> None:
        """Announce subscriptions of topics that have changed, then pull the queues gained.

        Brokers must know the version of a subscription first.
        """
        gained = self._unpulled()
        topics = {*changed, *(owned.queue.topic for owned in gained)}
        for topic in topics:
            self._refresh_subscription(topic)
            count = sum(queue.topic == topic for queue in self.owned)
            self._limits[topic] = self._settings.flow.of_queue(count)
        try:
            if topics:
                await self._session.heartbeat()
        finally:
            # Whatever happened: no other member pulls the queues owned here.
            for owned in self._unpulled():
                self._pull(owned)

    def begin_soon(self, changed: Iterable[str]) -> None:
        """Do as `begin` without waiting for it: the caller is cancelled."""
        self._tasks.start(self.begin(set(changed)))

    def _unpulled(self) -> list[OwnedQueue]:
        return [
            owned
            for owned in self.owned.values()
            if not owned.is_dropped and owned not in self._pullers
        ]

    def restart_pulls(self, topic: str) -> None:
        """Pull with the current subscription; cancel pulls held with the old one."""
        for owned, puller in list(self._pullers.items()):
            if owned.queue.topic == topic:
                puller.cancel()
                if owned.last_pulled is not None:
                    owned.last_pulled = owned.last_pulled.with_other_filter()
                self._pull(owned)

    def _pull(self, owned: OwnedQueue) -> None:
        self._pullers[owned] = self._tasks.keep(
            f"pull of {owned.queue}", lambda: Puller(owned, self._pull_context).run()
        )

    async def _gain_one(self, queue: MessageQueue) -> OwnedQueue | None:
        self.offsets.forget(queue)
        session = self._session
        try:
            stored = await self.offsets.stored(queue)
            start = await start_offset(session, queue, stored, self._settings.start_from)
            replica = await session.replica_of(queue)
            source = session.source(replica.address)
            owned = OwnedQueue(queue, start, session.clock.monotonic_ms())
            await Puller(owned, self._pull_context).begin(replica)
            is_same = start == 0 or session.source(replica.address) == source
            if not is_same and not self._settings.is_broadcast:
                raise ConnectionLost(f"{replica.address} was connected to again meanwhile")
        except TurbopumpError as error:
            what = "no start position in %s for %s"
            session.warn(_log, queue.broker, error, what, queue, self._group)
            return None
        now_ms = owned.last_pull_ms
        self.owned[queue] = owned
        if self._locks is not None:
            owned.locked_ms = now_ms
        return owned

    async def _topic_missing(self, owned: OwnedQueue) -> None:
        """Remove a queue's offset if its topic was deleted: it may be created again."""
        queue = owned.queue
        if not self.offsets.outlives_topic(queue):
            return
        try:
            # Without its name servers, it may be a broker that has lost its topics.
            is_known = await self._session.refresh_route(queue.topic)
        except TurbopumpError:
            return
        if is_known or owned.is_dropped or not await self.offsets.remove(queue):
            return
        _log.warning("topic %s was deleted: removed the offset of %s", queue.topic, queue)
        if not owned.is_dropped:
            owned.drop()
            self._pullers.pop(owned, None)
            self.owned.pop(queue, None)
            self.offsets.forget(queue)

    def _drop(self, owned: OwnedQueue) -> None:
        owned.drop()
        puller = self._pullers.pop(owned, None)
        if puller is not None:
            puller.cancel()

    async def _unlock(self, owned: OwnedQueue) -> None:
        assert self._locks is not None
        if not owned.cache.is_empty:
            await asyncio.sleep(UNLOCK_LATER_MS / 1000)
        self._to_unlock.pop(owned.queue, None)
        if owned.queue not in self.owned:
            await self._locks.unlock([owned.queue])

    def _limits_of(self, topic: str) -> QueueLimits:
        return self._limits.get(topic) or self._settings.flow.of_queue(1)

    # --- other offsets ----------------------------------------------------------------------------

    def suspend(self) -> None:
        """Stop pulling until `resume`."""
        self._is_suspended = True
        self._update_pause()

    def resume(self) -> None:
        """Resume pulling once no reset is in progress."""
        self._is_suspended = False
        self._update_pause()
        self.rebalancer.wake()

    def _update_pause(self) -> None:
        if self._is_suspended or self._resets:
            self.resumed.clear()
        else:
            self.resumed.set()

    def _offset_illegal(self, owned: OwnedQueue, offset: QueueOffset) -> None:
        owned.drop()
        # Immediately: the next owner of the queue must not start beyond it.
        owned.last_pulled = None
        self.offsets.reset(owned.queue, offset)

        async def correct() -> None:
            await asyncio.sleep(_BEFORE_OTHER_OFFSET_MS / 1000)
            await self._seek(owned, offset)

        self._tasks.keep(f"correction of {owned.queue}", correct)

    async def reset(self, topic: str, offsets: Mapping[MessageQueue, QueueOffset]) -> None:
        """Continue at other offsets, possibly backwards, in those queues that are owned by then."""
        # In a separate task: the caller may be gone before it is done.
        await asyncio.shield(self._tasks.start(self._reset(topic, offsets)))

    async def _reset(self, topic: str, offsets: Mapping[MessageQueue, QueueOffset]) -> None:
        # Also queues not owned now: another reset may be about to gain them again.
        chosen = [queue for queue in offsets if queue.topic == topic]
        self._targets.update((queue, offsets[queue]) for queue in chosen)
        self._resets += 1
        self._update_pause()
        try:
            for owned in [self.owned[queue] for queue in chosen if queue in self.owned]:
                self._drop(owned)
                owned.cache.clear()
            await asyncio.sleep(_BEFORE_OTHER_OFFSET_MS / 1000)
        finally:
            self._resets -= 1
            self._update_pause()
        async with asyncio.TaskGroup() as group:
            for queue in chosen:
                group.create_task(self._seek_to_target(queue))

    async def _seek_to_target(self, queue: MessageQueue) -> None:
        """Seek to the latest reset's target; an overlapping reset may have done so already."""
        while queue in self._targets:
            owned = self.owned.get(queue)
            if owned is None:
                # Another member owns it by now.
                del self._targets[queue]
                break
            self._drop(owned)
            await owned.idle.wait()
            target = self._targets.get(queue)
            if target is None or self.owned.get(queue) is not owned:
                continue
            # It applies to the messages stored now, whichever were pulled.
            owned.last_pulled = None
            self.offsets.reset(queue, target)
            del self._targets[queue]
            await self._seek(owned, target)
        self.rebalancer.wake()

    async def _seek(self, owned: OwnedQueue, offset: QueueOffset) -> None:
        """Continue a dropped queue at another offset."""
        # A running orderly listener must finish first, or two would run on one queue.
        await owned.idle.wait()
        if await self._is_reset_stored(owned, offset):
            # Not at the committed offset: the commit of this one may be lost.
            self._drop(owned)
            again = OwnedQueue(owned.queue, offset, self._session.clock.monotonic_ms())
            again.locked_ms = owned.locked_ms
            self.owned[owned.queue] = again
            self._pull(again)
            await self.offsets.persist([owned.queue])
        self.rebalancer.wake()

    async def _is_reset_stored(self, owned: OwnedQueue, offset: QueueOffset) -> bool:
        """Retry storing a reset; return False if the queue was lost or reset again meanwhile."""
        is_stored = False
        while self._awaits(owned, offset):
            if is_stored:
                return True
            is_stored = await self.offsets.store_reset(owned.queue)
            if not is_stored:
                await asyncio.sleep(_STORE_AGAIN_MS / 1000)
        return False

    def _awaits(self, owned: OwnedQueue, offset: QueueOffset) -> bool:
        is_owned = self.owned.get(owned.queue) is owned and not owned.is_leaving
        return is_owned and self.offsets.positions.of(owned.queue) == offset

    # --- messages ---------------------------------------------------------------------------------

    def prepared(self, messages: Sequence[MessageView]) -> list[MessageView]:
        """Return messages as listeners see them: with their original topic."""
        namespace = self._session.config.namespace
        if not namespace and (not messages or messages[0].topic != retry_topic(self._group)):
            return list(messages)
        return [self._shown(message, namespace) for message in messages]

    def _shown(self, message: MessageView, namespace: str) -> MessageView:
        topic = message.topic
        if topic == retry_topic(self._group):
            topic = message.properties.get(properties.RETRY_TOPIC, topic)
        return message.replaced(topic=without_namespace(namespace, topic))
