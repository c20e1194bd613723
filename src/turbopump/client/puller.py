"""The second stage: one task per owned queue, which keeps one pull in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from msgspec import structs

from turbopump.client import calls
from turbopump.client.calls import Found, NothingMatched, NothingNew, OffsetIllegal, PullOutcome
from turbopump.client.continuity import (
    Place,
    Source,
    caught_up,
    continued,
    last_pulled,
    last_pulled_at_start,
    offset_to_commit,
)
from turbopump.client.delivery.delivery import Delivery
from turbopump.client.filter_hooks import FilterHook, kept
from turbopump.client.offsets import Positions
from turbopump.client.owned_queue import OwnedQueue
from turbopump.client.push_config import USUAL_BATCH_SIZE, Pulling, QueueLimits
from turbopump.client.replicas import Replica, is_refused, lacks_offset
from turbopump.client.routes import MASTER_ID
from turbopump.client.session import Session
from turbopump.client.stats import ConsumerStats
from turbopump.client.subscriptions import matching, subscription
from turbopump.errors import DamagedMessage, RemoteError, TurbopumpError
from turbopump.filters.tags import EVERYTHING
from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire.bodies import Subscription
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Response
from turbopump.wire.headers import PullMessage
from turbopump.wire.prepared_requests import PullRequest
from turbopump.wire.record import MessageView
from turbopump.wire.sysflag import (
    PULL_CLASS_FILTER,
    PULL_COMMIT_OFFSET,
    PULL_SUBSCRIPTION,
    PULL_SUSPEND,
)

_log = logging.getLogger(__name__)

_PAUSED = "pulling %s for %s pauses: %s; logged once a minute for each queue"
_AFTER_ERROR_MS = 1000
_AFTER_FLOW_CONTROL_MS = 20
_NOT_LOCKED_MS = 1000
_DEAD_LETTER_PAUSE_MS = 5000
_DEAD_LETTER_ATTEMPTS_MAX = 3
_UNKNOWN = frozenset(
    {
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_NOT_LATEST,
        ResponseCode.FILTER_DATA_NOT_EXIST,
        ResponseCode.FILTER_DATA_NOT_LATEST,
    }
)


@dataclass(frozen=True, slots=True)
class PullContext:
    """The state shared by the pullers of one consumer."""

    session: Session
    group: str
    pulling: Pulling
    delivery: Delivery[Any]
    positions: Positions
    stats: ConsumerStats
    resumed: asyncio.Event
    committed_by_pulls: Positions | None
    """The offsets that pulls commit as well; None if brokers keep none."""
    is_broadcast: bool
    subscription: Callable[[str], Subscription | None]
    limits: Callable[[str], QueueLimits]
    prepared: Callable[[Sequence[MessageView]], list[MessageView]]
    """Converts pulled messages to what listeners see."""
    filters: Sequence[FilterHook]
    dead_letter_damaged: Callable[[MessageQueue, MessageView], Awaitable[bool]]
    """Has the broker dead-letter its own copy; returns whether that worked."""
    offset_illegal: Callable[[OwnedQueue, QueueOffset], None]
    unknown_to_broker: Callable[[], None]
    """Called when a broker does not know the group, or has an older subscription."""
    topic_missing: Callable[[OwnedQueue], Awaitable[None]]
    """Called when the queue's broker reports that the topic does not exist."""


class Puller:
    """Pulls one queue until it is dropped; its task is cancelled from outside."""

    def __init__(self, owned: OwnedQueue, context: PullContext) -> None:
        self._owned = owned
        self._context = context
        self._replica = Replica(MASTER_ID, "")
        """The replica that it was sent to."""
        self._source = Source("", 0)
        """The connection that its response came from."""
        self._is_stalled = False
        """Whether it was logged that pulling waits for the master."""

    async def run(self) -> None:
        owned, context = self._owned, self._context
        while not owned.is_dropped:
            if not context.resumed.is_set() or self._room <= 0 or self._is_unlocked:
                await self._wait()
                continue
            wanted = context.subscription(owned.queue.topic)
            if wanted is None:
                await self._pause(_AFTER_ERROR_MS)
                continue
            try:
                start_ms = context.session.clock.monotonic_ms()
                owned.last_pull_ms = start_ms
                outcome = await self._pull(wanted)
            except DamagedMessage as error:
                if self._replica.is_master:
                    await self._pass_over(error)
                else:
                    await self._return_to_master(str(error))
                continue
            except TurbopumpError as error:
                # A slave may not know the topic or the group yet.
                owned.broker_id = MASTER_ID
                if isinstance(error, RemoteError) and error.code == ResponseCode.TOPIC_NOT_EXIST:
                    await context.topic_missing(owned)
                await self._pause(self._delay_ms(error))
                continue
            if not owned.is_dropped:
                spent_ms = context.session.clock.monotonic_ms() - start_ms
                await self._take(outcome, wanted, spent_ms)

    async def begin(self, replica: Replica) -> None:
        """Note where pulling starts, on the replica that reported the offset."""
        self._replica = replica
        everything = subscription(self._owned.queue.topic, EVERYTHING, 0)
        self._owned.last_pulled = await last_pulled_at_start(
            self._place(everything), self._owned.next_offset
        )

    async def offset_to_commit(self, replica: Replica, position: QueueOffset) -> QueueOffset | None:
        """Return what to commit to a replica, or None while that is unknown."""
        owned, last = self._owned, self._owned.last_pulled
        if not replica.is_master:
            # Only masters keep offsets; and a newly promoted one has not been compared yet.
            return None
        if last is None:
            return position
        self._replica = replica
        wanted = self._context.subscription(owned.queue.topic)
        if wanted is None:
            # Unsubscribed: which messages the filter skipped is no longer known.
            wanted = subscription(owned.queue.topic, EVERYTHING, 0)
            last = last.with_other_filter()
        owned.compared_with, offset = await offset_to_commit(
            self._place(wanted), last, owned.compared_with, position
        )
        return offset

    @property
    def _room(self) -> int:
        owned, context = self._owned, self._context
        is_orderly = context.delivery.is_orderly
        return owned.room(context.limits(owned.queue.topic), is_orderly=is_orderly)

    @property
    def _count_max(self) -> int:
        session, pulling = self._context.session, self._context.pulling
        return pulling.count_max(is_own_broker=session.is_own_broker(self._replica.address))

    @property
    def _is_unlocked(self) -> bool:
        is_locking = self._context.delivery.is_orderly and not self._context.is_broadcast
        return is_locking and self._owned.locked_ms is None

    async def _wait(self) -> None:
        """Wait until pulling may continue; the caller rechecks all conditions."""
        owned, context = self._owned, self._context
        if not context.resumed.is_set():
            with owned.waiting():
                await context.resumed.wait()
        elif self._room <= 0:
            limits = context.limits(owned.queue.topic)
            self._note_flow_control(f"{owned.excess(limits)} in this client")
            with owned.waiting():
                # Not for a few: each pull costs as much as many messages.
                await owned.wait_for_room(self._count_max // 2)
        else:
            await self._pause(_NOT_LOCKED_MS)

    def _note_flow_control(self, why: str) -> None:
        queue, group = self._owned.queue, self._context.group
        limit = self._context.session.log_limit
        limit.log(("flow control", group, queue), _log, logging.INFO, _PAUSED, queue, group, why)

    async def _pause(self, pause_ms: int) -> None:
        with self._owned.waiting():
            await asyncio.sleep(pause_ms / 1000)

    async def _pass_over(self, damaged: DamagedMessage) -> None:
        """Have a damaged message dead-lettered: listeners never see it.

        Retries would return the same bytes, and some brokers give the copies a new checksum.
        """
        owned, context = self._owned, self._context
        _log.error("damaged message, not consumed by %s: %s", context.group, damaged)
        context.stats.called(owned.queue.topic, 0, 1, 0)
        # If not even the header is readable, there is nothing to dead-letter.
        message = None if context.is_broadcast else damaged.message
        for attempt in range(_DEAD_LETTER_ATTEMPTS_MAX):
            if message is None or await context.dead_letter_damaged(owned.queue, message):
                break
            if attempt + 1 < _DEAD_LETTER_ATTEMPTS_MAX:
                await self._pause(_DEAD_LETTER_PAUSE_MS)
        else:
            _log.error("could not dead-letter it; the group continues: %s", damaged)
        if not owned.is_dropped:
            owned.next_offset = QueueOffset(damaged.next_offset)
            if owned.cache.is_empty:
                context.positions.advance(owned.queue, owned.next_offset)

    def _delay_ms(self, error: TurbopumpError) -> int:
        queue, group, session = self._owned.queue, self._context.group, self._context.session
        if isinstance(error, RemoteError) and error.code == ResponseCode.FLOW_CONTROL:
            self._note_flow_control(error.remark)
            return _AFTER_FLOW_CONTROL_MS
        session.warn(_log, queue.broker, error, "pulling %s for %s", queue, group)
        if isinstance(error, RemoteError) and error.code in _UNKNOWN:
            self._context.unknown_to_broker()
        return _AFTER_ERROR_MS

    async def _pull(self, wanted: Subscription) -> PullOutcome:
        owned, session = self._owned, self._context.session
        route = session.cached_route(owned.queue.topic)
        if route is None or route.is_borrowed:
            await session.route(owned.queue.topic)
        self._replica = session.replica_to_read(owned.queue.broker, owned.broker_id)
        pull = PullRequest(self._header(wanted))
        answer = await self._answer(wanted, pull, self._context.pulling.timeout_ms)
        self._source = session.source(self._replica.address)
        outcome = calls.decoded(calls.pulled(answer), owned.queue, owned.next_offset)
        last, asked = owned.last_pulled, owned.next_offset
        if last is None or last.source == self._source:
            return outcome
        return await continued(self._place(wanted), last, asked, outcome)

    async def _answer(self, wanted: Subscription, pull: PullRequest, timeout_ms: int) -> Response:
        session = self._context.session
        if not wanted.class_filter_mode:
            return await session.request(self._replica.address, pull, timeout_ms)
        group, broker = self._context.group, self._owned.queue.broker
        return await session.code_filters.request(group, wanted, broker, pull, timeout_ms)

    def _place(self, wanted: Subscription) -> Place:
        """Return the queue and replica to compare with earlier pulls."""
        session, queue = self._context.session, self._owned.queue
        timeout_ms = session.config.request_timeout_ms

        async def next_match(offset: QueueOffset) -> PullOutcome:
            header = self._header(wanted)
            header = structs.replace(
                header,
                queue_offset=offset,
                max_msg_nums=1,
                sys_flag=header.sys_flag & ~(PULL_SUSPEND | PULL_COMMIT_OFFSET),
                commit_offset=0,
                suspend_timeout_millis=0,
            )
            answer = await self._answer(wanted, PullRequest(header), timeout_ms)
            outcome = calls.decoded(calls.pulled(answer), queue, offset)
            if isinstance(outcome, Found):
                return replace(outcome, messages=tuple(matching(outcome.messages, wanted)))
            return outcome

        return Place(session, self._replica, self._context.group, queue, timeout_ms, next_match)

    def _header(self, wanted: Subscription) -> PullMessage:
        owned, context = self._owned, self._context
        sys_flag, commit_offset = PULL_SUSPEND, 0
        committed = context.committed_by_pulls
        position = None if committed is None else committed.of(owned.queue)
        last = owned.last_pulled
        source = context.session.source(self._replica.address)
        is_same = last is None or (source.connection > 0 and last.source == source)
        if position is not None and position > 0 and self._replica.is_master and is_same:
            # Only masters keep offsets; and this one may have other messages than the last replica.
            sys_flag, commit_offset = sys_flag | PULL_COMMIT_OFFSET, position
        carried = context.pulling.carries_subscription
        if wanted.class_filter_mode:
            # A pull from a filter server names the filter, and commits nothing.
            carried, sys_flag, commit_offset = True, PULL_SUSPEND | PULL_CLASS_FILTER, 0
        count = max(min(self._count_max, self._room), 1)
        return PullMessage(
            consumer_group=context.group,
            topic=owned.queue.topic,
            queue_id=owned.queue.queue_id,
            queue_offset=owned.next_offset,
            max_msg_nums=count,
            sys_flag=sys_flag | PULL_SUBSCRIPTION if carried else sys_flag,
            commit_offset=commit_offset,
            suspend_timeout_millis=context.pulling.hold_ms,
            subscription=wanted.sub_string if carried else None,
            sub_version=wanted.sub_version,
            expression_type=wanted.expression_type,
            bulk_pull=True if count > USUAL_BATCH_SIZE else None,
        )

    async def _take(self, outcome: PullOutcome, wanted: Subscription, spent_ms: int) -> None:
        owned, context, asked = self._owned, self._context, self._owned.next_offset
        is_slave = not self._replica.is_master or is_refused(outcome, asked)
        if is_slave and lacks_offset(outcome, asked, wanted):
            await self._return_to_master(
                f"it has offsets {outcome.min_offset} to {outcome.max_offset}, not {asked}"
            )
            return
        self._is_stalled = False
        owned.broker_id = outcome.broker_id
        if isinstance(outcome, Found):
            # Before the offset: if that fails, the same messages are pulled again.
            self._give(outcome, wanted)
        owned.last_pulled = last_pulled(owned.last_pulled, self._source, asked, outcome)
        if self._replica.is_master and not isinstance(outcome, OffsetIllegal):
            owned.compared_with = self._source
        owned.next_offset = outcome.next_offset
        match outcome:
            case Found():
                context.stats.pulled(owned.queue.topic, len(outcome.messages), spent_ms)
                # If the next pull will only wait, listeners are called before it is sent.
                has_more = outcome.next_offset < outcome.max_offset
                if context.pulling.interval_ms or not has_more:
                    await self._pause(context.pulling.interval_ms)
            case NothingNew() | NothingMatched():
                if owned.cache.is_empty:
                    context.positions.advance(owned.queue, outcome.next_offset)
                last = owned.last_pulled
                if last is not None and last.is_far_behind:
                    owned.last_pulled = await caught_up(self._place(wanted), last)
            case OffsetIllegal():
                _log.warning("offset of %s is out of range, resuming at %s", owned.queue, outcome)
                context.offset_illegal(owned, self._corrected(outcome.next_offset, asked))
            case never:
                assert_never(never)

    async def _return_to_master(self, why: str) -> None:
        """Pull the same from the master; without one, wait for it or for the slave to catch up."""
        owned, session = self._owned, self._context.session
        owned.broker_id = MASTER_ID
        if self._replica.is_master:
            # It was replaced, and is now a slave.
            await session.refresh_route(owned.queue.topic)
        if session.replica_to_read(owned.queue.broker).address != self._replica.address:
            return
        if not self._is_stalled:
            self._is_stalled = True
            text = "pulling %s for %s waits for the master; slave %s cannot serve it: %s"
            _log.warning(text, owned.queue, self._context.group, self._replica.address, why)
        await self._pause(_AFTER_ERROR_MS)

    def _corrected(self, offset: QueueOffset, asked: QueueOffset) -> QueueOffset:
        """Return where to continue if the broker names another offset than the requested one.

        A queue that ends before it has lost messages in a power failure. The unfinished messages
        below its end still exist and must not be skipped.
        """
        if offset >= asked:
            return offset
        position = self._context.positions.of(self._owned.queue)
        first = self._owned.cache.first
        unfinished = [first.queue_offset] if position is None and first is not None else []
        return min([offset, *unfinished] if position is None else [offset, position])

    def _give(self, found: Found, wanted: Subscription) -> None:
        owned, context = self._owned, self._context
        messages = context.prepared(matching(found.messages, wanted))
        if context.filters:
            messages = list(kept(context.filters, context.group, messages, owned.queue))
        if messages:
            begins = owned.cache.put(messages)
            context.delivery.deliver(owned, messages, begins=begins)
        elif owned.cache.is_empty:
            context.positions.advance(owned.queue, found.next_offset)
