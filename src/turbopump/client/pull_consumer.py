"""Reading queues manually: the classic pull consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from turbopump.client.arguments import checked, checked_hooks
from turbopump.client.calls import Found, PullOutcome
from turbopump.client.config import ClientConfig
from turbopump.client.filter_hooks import FilterHook, kept
from turbopump.client.life_cycle import LifeCycle, leave, require_running, started
from turbopump.client.members import ConsumerMember
from turbopump.client.names import check_group, check_topic, with_namespace
from turbopump.client.pull_config import PullConfig
from turbopump.client.queue_reader import QueueReader, found_or_none, require_offset
from turbopump.client.retry_sender import RetrySender
from turbopump.client.session import Session
from turbopump.client.shared_sessions import client_config, shared_session
from turbopump.client.subscriptions import Expression, subscription
from turbopump.durations import Duration
from turbopump.errors import ClientError, InvalidArgument
from turbopump.filters.tags import EVERYTHING
from turbopump.message import MessageQueue, QueueOffset
from turbopump.net.limits import require_at_least
from turbopump.wire.bodies import ConsumeFrom, ConsumerData, ConsumeType, MessageModel
from turbopump.wire.record import MessageView

OnQueues = Callable[[str, Sequence[MessageQueue]], None]
"""Receives the current queues of a topic."""


class PullConsumer(LifeCycle, ConsumerMember):
    """Reads queues at offsets that the application chooses; can store offsets on the broker.

    ::

        async with PullConsumer("audit", nameserver="127.0.0.1:9876") as consumer:
            for queue in await consumer.queues("orders"):
                outcome = await consumer.pull(queue, await consumer.committed(queue) or 0)
                if isinstance(outcome, Found):
                    print(outcome.messages)
                await consumer.commit(queue, outcome.next_offset)

    Members of the group do not share queues: the application decides which member reads what.
    ``on_queues`` receives the queues of each of ``topics``, at the start and when they change.
    """

    def __init__(
        self,
        group: str,
        *,
        nameserver: str | Sequence[str] = "",
        namespace: str = "",
        topics: Iterable[str] = (),
        on_queues: OnQueues | None = None,
        config: PullConfig | None = None,
        hooks: Sequence[FilterHook] = (),
        client: ClientConfig | None = None,
        session: Session | None = None,
    ) -> None:
        check_group(group)
        self._client = client_config(nameserver, namespace, client, session)
        self.group = with_namespace(self._client.namespace, group)
        if isinstance(topics, str):
            raise InvalidArgument(f"topics must be a list of names, got {topics!r}")
        self._topics = tuple(dict.fromkeys(topics))
        for topic in self._topics:
            check_topic(topic)
        self._on_queues = on_queues
        self._config = checked("config", config, PullConfig)
        self._filters = checked_hooks("hooks", hooks, "keeps")
        self._given_session = session
        self._running: _Running | None = None

    # --- life cycle -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the group and start watching the queues of ``topics``."""
        if self._running is not None:
            return
        session = self._given_session or shared_session(self._client, self)
        async with started(session, self):
            running = _Running(session, self.group, self._config)
            for topic in self._topics:
                await session.refresh_route(running.reader.wire_topic(topic))
            await session.join(self)
        self._running = running
        for topic in self._topics:
            self.route_changed(running.reader.wire_topic(topic))

    async def close(self) -> None:
        """Leave the group."""
        running, self._running = self._running, None
        if running is not None:
            await leave(running.session, self)

    # --- reading ----------------------------------------------------------------------------------

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the queues of a topic."""
        return await self._require_running().reader.queues(topic)

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        tags: Expression = EVERYTHING,
        count_max: int | None = None,
        timeout: Duration | None = None,
    ) -> PullOutcome:
        """Read messages from an offset on; return immediately if there are none yet.

        ::

            outcome = await consumer.pull(queue, 0, tags="created || paid")
        """
        return await self._pull(queue, offset, tags, count_max, timeout, is_held=False)

    async def pull_when_found(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        tags: Expression = EVERYTHING,
        count_max: int | None = None,
        timeout: Duration | None = None,
    ) -> PullOutcome:
        """Read messages from an offset on; wait at the broker (long poll) if there are none yet.

        ::

            outcome = await consumer.pull_when_found(queue, outcome.next_offset)
        """
        return await self._pull(queue, offset, tags, count_max, timeout, is_held=True)

    async def send_back(
        self, message: MessageView, queue: MessageQueue, *, delay_level: int = 0
    ) -> None:
        """Have a message redelivered to the group later; level -1 dead-letters it immediately.

        Level 0 lets the broker choose a delay that grows with each attempt. The message is
        redelivered through the group's retry topic, ``%RETRY%`` followed by its name.
        """
        sending = self._require_running().retry_sender
        if not await sending.send_back(queue, message, delay_level):
            raise ClientError(f"message {message.message_id} could not be sent back; see the log")

    # --- positions --------------------------------------------------------------------------------

    async def committed(self, queue: MessageQueue) -> QueueOffset | None:
        """Return the group's committed offset, or None if the broker has none."""
        return await self._require_running().reader.committed(queue)

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Commit the offset at which the group resumes."""
        reader = self._require_running().reader
        await reader.commit(queue, require_offset("offset", offset))

    async def min_offset(self, queue: MessageQueue) -> QueueOffset:
        """Return the offset of the oldest message."""
        return await self._require_running().reader.min_offset(queue)

    async def max_offset(self, queue: MessageQueue) -> QueueOffset:
        """Return the offset of the next message to be stored."""
        return await self._require_running().reader.max_offset(queue)

    async def offset_at(self, queue: MessageQueue, moment: datetime) -> QueueOffset:
        """Return the offset of the first message stored at or after a point in time.

        ::

            offset = await consumer.offset_at(queue, datetime.now() - timedelta(hours=1))
        """
        return await self._require_running().reader.offset_at(queue, moment)

    # --- called by the session --------------------------------------------------------------------

    def heartbeat_data(self) -> ConsumerData:
        namespace = self._client.namespace
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.PULL,
            message_model=MessageModel.CLUSTERING,
            consume_from_where=ConsumeFrom.LAST_OFFSET,
            subscription_data_set=[
                subscription(with_namespace(namespace, topic), EVERYTHING, 0)
                for topic in self._topics
            ],
            unit_mode=self._client.unit_mode,
        )

    def route_changed(self, topic: str) -> None:
        running = self._running
        if running is None or self._on_queues is None:
            return
        route = running.session.cached_route(topic)
        if route is not None:
            queues = [running.reader.user_queue(queue) for queue in route.readable]
            name = queues[0].topic if queues else topic
            self._on_queues(name, queues)

    async def _pull(
        self,
        queue: MessageQueue,
        offset: int,
        tags: Expression,
        count_max: int | None,
        timeout: Duration | None,
        *,
        is_held: bool,
    ) -> PullOutcome:
        reader = self._require_running().reader
        count = self._config.count_max if count_max is None else count_max
        require_at_least("count_max", count, 1)
        wanted = subscription(reader.wire_topic(queue.topic), tags, 0)
        outcome = await reader.pull(
            queue,
            require_offset("offset", offset),
            wanted,
            count,
            is_held=is_held,
            timeout=timeout,
        )
        if not self._filters or not isinstance(outcome, Found):
            return outcome
        return found_or_none(
            outcome, tuple(kept(self._filters, self.group, outcome.messages, queue))
        )

    def _require_running(self) -> _Running:
        return require_running(self._running, "consumer", self.group)


class _Running:
    """The state of a pull consumer between start and close."""

    def __init__(self, session: Session, group: str, config: PullConfig) -> None:
        self.session = session
        self.reader = QueueReader(session, group, config.times)
        self.retry_sender = RetrySender(session, group, config.max_attempts)
