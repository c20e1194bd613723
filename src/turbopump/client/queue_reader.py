"""Queue operations of both pull consumers: pulling, offsets and commits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from msgspec import structs

from turbopump.client import calls
from turbopump.client.calls import (
    Found,
    NothingMatched,
    NothingNew,
    OffsetIllegal,
    PullOutcome,
    RecordsOutcome,
)
from turbopump.client.continuity import (
    LastPulled,
    Place,
    Source,
    caught_up,
    continued,
    last_pulled,
    last_pulled_at_start,
    offset_to_commit,
)
from turbopump.client.names import with_namespace, without_namespace
from turbopump.client.offsets import start_offset
from turbopump.client.pull_config import PullTimes
from turbopump.client.replicas import Replica, first_slave_id, is_refused, lacks_offset
from turbopump.client.routes import MASTER_ID
from turbopump.client.session import Session
from turbopump.client.start_position import StartFrom
from turbopump.client.subscriptions import matching
from turbopump.durations import Duration
from turbopump.errors import (
    ConnectionLost,
    DamagedMessage,
    InvalidArgument,
    NoRoute,
    TurbopumpError,
)
from turbopump.filters.tags import TAG
from turbopump.message import MessageQueue, QueueOffset
from turbopump.wire.bodies import Subscription
from turbopump.wire.headers import PullMessage
from turbopump.wire.prepared_requests import PullRequest
from turbopump.wire.record import MessageView
from turbopump.wire.sysflag import PULL_CLASS_FILTER, PULL_LITE, PULL_SUBSCRIPTION, PULL_SUSPEND

_STALLED_MS = 1000
"""How long a held pull waits while no replica has its offset."""


class _How(NamedTuple):
    """How a pull waits."""

    is_held: bool = False
    is_lite: bool = False
    timeout: Duration | None = None

    @property
    def sys_flag(self) -> int:
        flag = PULL_SUBSCRIPTION | (PULL_SUSPEND if self.is_held else 0)
        return flag | PULL_LITE if self.is_lite else flag


class QueueReader:
    """Reads queues for a group; its interface uses the application's names.

    ``in_bulk`` requests larger responses from brokers that support them. With ``prefers_slave``, a
    slave is read as far as its copy reaches, whatever responses suggest.
    """

    def __init__(
        self,
        session: Session,
        group: str,
        times: PullTimes,
        *,
        in_bulk: bool = False,
        prefers_slave: bool = False,
    ) -> None:
        self._session = session
        self._group = group
        self._times = times
        self._in_bulk = in_bulk
        self._prefers_slave = prefers_slave
        self._broker_ids: dict[MessageQueue, int] = {}
        self._answered: dict[MessageQueue, Replica] = {}
        self._compared: dict[MessageQueue, Source] = {}
        """The connection to the master over which its messages matched those pulled."""

    @property
    def warn(self) -> Callable[..., None]:
        """Logs a failure, as `Session.warn` does."""
        return self._session.warn

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        found = (await self._session.route(self.wire_topic(topic))).readable
        return tuple(map(self.user_queue, found)) if self._session.config.namespace else found

    async def pull(
        self,
        queue: MessageQueue,
        offset: QueueOffset,
        wanted: Subscription,
        count_max: int,
        *,
        is_held: bool,
        is_lite: bool = False,
        timeout: Duration | None = None,
    ) -> PullOutcome:
        """Read messages of a queue from an offset on, filtered by tags.

        Raises DamagedMessage if the first message is damaged; stops before a later damaged one.
        ``timeout`` limits the response or, for a held pull, the broker's wait.
        """
        pull = (queue, offset, wanted, count_max)
        how = _How(is_held, is_lite, timeout)
        replica, answer = await self._pull(*pull, how)
        try:
            return self._decoded(answer, queue, offset, wanted)
        except DamagedMessage as error:
            if replica.is_master:
                raise
            self.back_to_master(queue)
            master, answer = await self._pull(*pull, how)
            if not master.is_master:
                # The copy there may be intact, so do not skip it.
                raise NoRoute(f"{error}; its master may have it but is away") from error
            return self._decoded(answer, queue, offset, wanted)

    async def pull_records(
        self,
        queue: MessageQueue,
        offset: QueueOffset,
        wanted: Subscription,
        count_max: int,
        *,
        is_held: bool,
        timeout: Duration | None = None,
    ) -> RecordsOutcome:
        """Read as `pull`, but leave the messages in their stored form, including other tags."""
        how = _How(is_held, timeout=timeout)
        return (await self._pull(queue, offset, wanted, count_max, how))[1]

    async def _pull(
        self,
        queue: MessageQueue,
        offset: QueueOffset,
        wanted: Subscription,
        count_max: int,
        how: _How,
    ) -> tuple[Replica, RecordsOutcome]:
        """Pull from the preferred replica, or else from the master."""
        on_wire = self.wire_queue(queue)
        if not self._session.has_broker(on_wire.broker):
            await self._session.refresh_route(on_wire.topic)
        times = self._times if how.timeout is None else self._times.of(how.timeout)
        pull = queue, offset, wanted, count_max
        header = self.header_to_pull(*pull, sys_flag=how.sys_flag, hold_ms=times.hold_ms)
        limit_ms = times.held_timeout_ms if how.is_held else times.timeout_ms
        replica = self._session.replica_to_read(on_wire.broker, self._broker_id(queue))
        try:
            outcome = await self._ask(replica, header, wanted, limit_ms)
            was_replaced = replica.is_master and is_refused(outcome, offset)
            if was_replaced:
                await self._session.refresh_route(on_wire.topic)
            is_slave = not replica.is_master
            if was_replaced or (is_slave and self._is_lacking(outcome, offset, wanted, how)):
                self.back_to_master(queue)
                refused, asked = replica, outcome
                replica = self._session.replica_to_read(on_wire.broker)
                if replica.address == refused.address:
                    await asyncio.sleep(how.is_held * min(_STALLED_MS, times.hold_ms) / 1000)
                    limits = asked.min_offset, asked.max_offset
                    return replica, NothingNew(offset, *limits, MASTER_ID)
                outcome = await self._ask(replica, header, wanted, limit_ms)
        except TurbopumpError:
            # A slave may be gone, or not know the topic yet.
            self.back_to_master(queue)
            raise
        self._answered[queue] = replica
        if not self._prefers_slave:
            self._broker_ids[queue] = outcome.broker_id
        return replica, outcome

    def _is_lacking(
        self, outcome: RecordsOutcome, offset: int, wanted: Subscription, how: _How
    ) -> bool:
        """Whether the master may have what a slave lacks; unless held, also the next message."""
        is_end = isinstance(outcome, NothingNew) and not how.is_held
        return is_end or lacks_offset(outcome, offset, wanted)

    async def _ask(
        self, replica: Replica, header: PullMessage, wanted: Subscription, timeout_ms: int
    ) -> RecordsOutcome:
        if not wanted.class_filter_mode:
            return await calls.pull_records(self._session, replica.address, header, timeout_ms)
        filtered = structs.replace(header, sys_flag=header.sys_flag | PULL_CLASS_FILTER)
        command, broker = PullRequest(filtered), header.broker_name
        assert broker is not None, "every pull names its broker"
        filters = self._session.code_filters
        return calls.pulled(await filters.request(self._group, wanted, broker, command, timeout_ms))

    def _broker_id(self, queue: MessageQueue) -> int:
        """Return the id of the replica to ask: by the last response, or as the reader prefers."""
        if self._prefers_slave and queue not in self._broker_ids:
            return first_slave_id(self._session.replicas(queue.broker))
        return self._broker_ids.get(queue, MASTER_ID)

    def header_to_pull(
        self,
        queue: MessageQueue,
        offset: QueueOffset,
        wanted: Subscription,
        count_max: int,
        *,
        sys_flag: int = PULL_SUBSCRIPTION,
        hold_ms: int | None = None,
    ) -> PullMessage:
        """Return the header of a pull, by default without hold."""
        return PullMessage(
            consumer_group=self._group,
            topic=self.wire_topic(queue.topic),
            queue_id=queue.queue_id,
            broker_name=queue.broker,
            queue_offset=offset,
            max_msg_nums=count_max,
            sys_flag=sys_flag,
            commit_offset=0,
            suspend_timeout_millis=self._times.hold_ms if hold_ms is None else hold_ms,
            subscription=wanted.sub_string,
            sub_version=0 if wanted.expression_type == TAG else wanted.sub_version,
            expression_type=wanted.expression_type,
            bulk_pull=True if self._in_bulk else None,
        )

    async def continued(
        self,
        queue: MessageQueue,
        wanted: Subscription,
        last: LastPulled | None,
        asked: QueueOffset,
        outcome: PullOutcome,
    ) -> tuple[LastPulled | None, PullOutcome]:
        """Compare the replica that answered the last pull with the one before.

        Return the last message and the outcome, which may be that the offset is illegal. Only for
        callers with one pull per queue at a time.
        """
        replica = self._answered.get(queue)
        if replica is None:
            return last, outcome
        source = self._session.source(replica.address)
        place = self._place(queue, replica, wanted)
        if last is not None and last.source != source:
            outcome = await continued(place, last, asked, outcome)
            if isinstance(outcome, OffsetIllegal) and not replica.is_master:
                self.back_to_master(queue)
                raise NoRoute(f"{queue}: slave {replica.address} has other messages")
            if outcome.max_offset < asked:
                # It lags, so there was nothing to compare yet.
                return last, outcome
        if replica.is_master and not isinstance(outcome, OffsetIllegal):
            self._compared[queue] = source
        last = last_pulled(last, source, asked, outcome)
        if last is not None and last.is_far_behind:
            last = await caught_up(place, last)
        return last, outcome

    async def source(self, queue: MessageQueue) -> Source:
        """Return the connection to the replica that a queue is read from."""
        replica = await self._session.replica_of(self.wire_queue(queue))
        return self._session.source(replica.address)

    async def last_pulled_at_start(
        self, queue: MessageQueue, wanted: Subscription, start: QueueOffset
    ) -> LastPulled:
        """Return what to compare if the connection is lost before the first response to a pull."""
        replica = await self._session.replica_of(self.wire_queue(queue))
        return await last_pulled_at_start(self._place(queue, replica, wanted), start)

    def _place(self, queue: MessageQueue, replica: Replica, wanted: Subscription) -> Place:
        """Return the queue and replica to compare with earlier pulls."""
        on_wire, timeout_ms = self.wire_queue(queue), self._timeout_ms

        async def next_match(offset: QueueOffset) -> PullOutcome:
            header = self.header_to_pull(queue, offset, wanted, 1)
            answer = await self._ask(replica, header, wanted, timeout_ms)
            return self._decoded(answer, queue, offset, wanted)

        return Place(self._session, replica, self._group, on_wire, timeout_ms, next_match)

    def back_to_master(self, queue: MessageQueue) -> bool:
        """Ask the master next time; return whether another replica was preferred."""
        was_master = self._broker_id(queue) == MASTER_ID
        self._broker_ids[queue] = MASTER_ID
        return not was_master

    def _decoded(
        self, answer: RecordsOutcome, queue: MessageQueue, offset: QueueOffset, wanted: Subscription
    ) -> PullOutcome:
        found = calls.decoded(answer, queue, offset)
        if not isinstance(found, Found):
            return found
        messages = tuple(map(self._delivered, matching(found.messages, wanted)))
        return found_or_none(found, messages)

    def _delivered(self, message: MessageView) -> MessageView:
        namespace = self._session.config.namespace
        if not namespace:
            return message
        return message.replaced(topic=without_namespace(namespace, message.topic))

    # --- positions --------------------------------------------------------------------------------

    async def committed(self, queue: MessageQueue) -> QueueOffset | None:
        """Return the group's committed offset, or None if there is none."""
        on_wire = self.wire_queue(queue)
        address = await self._session.address_of(on_wire)
        return await calls.committed_offset(
            self._session, address, self._group, on_wire, self._timeout_ms
        )

    async def commit_pulled(
        self,
        queue: MessageQueue,
        wanted: Subscription,
        last: LastPulled | None,
        position: QueueOffset,
        *,
        is_oneway: bool = False,
    ) -> None:
        """Commit the group's position, or a lower one if the master has other messages now."""
        replica = await self._session.replica_to_commit(self.wire_queue(queue))
        offset: QueueOffset | None = position
        if last is not None:
            place, compared = self._place(queue, replica, wanted), self._compared.get(queue)
            compared, offset = await offset_to_commit(place, last, compared, position)
            if compared is not None:
                self._compared[queue] = compared
        if offset is None:
            raise ConnectionLost(f"{replica.address} is not connected")
        # Not by the route again: by now it may name another master, which was not compared.
        await self._commit_to(replica, queue, offset, is_oneway=is_oneway)

    async def commit(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Commit the group's position; wait for the broker's response."""
        replica = await self._session.replica_to_commit(self.wire_queue(queue))
        await self._commit_to(replica, queue, offset, is_oneway=False)

    async def _commit_to(
        self, replica: Replica, queue: MessageQueue, offset: QueueOffset, *, is_oneway: bool
    ) -> None:
        await calls.commit_offset(
            self._session,
            replica.address,
            self._group,
            self.wire_queue(queue),
            offset,
            self._timeout_ms,
            is_oneway=is_oneway,
        )

    async def min_offset(self, queue: MessageQueue) -> QueueOffset:
        return await calls.min_offset(*await self._found(queue), self._timeout_ms)

    async def max_offset(self, queue: MessageQueue) -> QueueOffset:
        return await calls.max_offset(*await self._found(queue), self._timeout_ms)

    async def _found(self, queue: MessageQueue) -> tuple[Session, str, MessageQueue]:
        """Return where to ask about a queue, and its name there."""
        on_wire = self.wire_queue(queue)
        return self._session, await self._session.address_of(on_wire), on_wire

    async def offset_at(self, queue: MessageQueue, moment: datetime) -> QueueOffset:
        """Return the offset of the first message stored at or after a point in time."""
        return await self.offset_at_ms(queue, round(moment.timestamp() * 1000))

    async def start_offset(self, queue: MessageQueue, start_from: StartFrom) -> QueueOffset:
        """Return where to start: at the committed offset, or else at the configured position."""
        stored = await self.committed(queue)
        return await start_offset(self._session, self.wire_queue(queue), stored, start_from)

    async def offset_at_ms(self, queue: MessageQueue, timestamp_ms: int) -> QueueOffset:
        """Return the offset for a time in milliseconds, as `offset_at`."""
        return await calls.offset_at(*await self._found(queue), timestamp_ms, self._timeout_ms)

    @property
    def _timeout_ms(self) -> int:
        return self._session.config.request_timeout_ms

    # --- names ------------------------------------------------------------------------------------

    def wire_topic(self, topic: str) -> str:
        """Return a topic's name as brokers know it."""
        return with_namespace(self._session.config.namespace, topic)

    def wire_queue(self, queue: MessageQueue) -> MessageQueue:
        """Return a queue as brokers know it."""
        return MessageQueue(self.wire_topic(queue.topic), queue.broker, queue.queue_id)

    def user_queue(self, queue: MessageQueue) -> MessageQueue:
        """Return a queue as the application knows it."""
        topic = without_namespace(self._session.config.namespace, queue.topic)
        return MessageQueue(topic, queue.broker, queue.queue_id)


def found_or_none(found: Found, messages: tuple[MessageView, ...]) -> Found | NothingMatched:
    """Return the outcome of a pull of which the client keeps these messages."""
    if messages:
        return replace(found, messages=messages)
    return NothingMatched(found.next_offset, found.min_offset, found.max_offset, found.broker_id)


def require_offset(name: str, offset: int) -> QueueOffset:
    if offset < 0:
        raise InvalidArgument(f"{name} must be 0 or more, got {offset}")
    return QueueOffset(offset)
