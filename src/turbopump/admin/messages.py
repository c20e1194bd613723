"""Messages: sending one by hand, watching a topic, and finding what was sent."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from turbopump.admin.positions import AtTime, Last, Latest, Start
from turbopump.admin.range_reader import OffsetRange, RangeReader, Span, merged
from turbopump.admin.servers import ANSWER_MS, BrokerNode, Servers, gathered, none_on
from turbopump.admin.topics import QueueLimits, Topics
from turbopump.client import calls
from turbopump.client.delivery.listener import is_being_cancelled
from turbopump.client.message_sender import To
from turbopump.client.producer import Producer
from turbopump.client.selectors import by_hash
from turbopump.client.send_hooks import SendReceipt
from turbopump.client.subscriptions import Expression
from turbopump.errors import InvalidArgument, NetworkError, NoRoute, NotThere, TurbopumpError
from turbopump.filters.tags import EVERYTHING
from turbopump.message import Message, MessageQueue, PhysicalOffset, QueueOffset
from turbopump.supervisor import Supervisor
from turbopump.wire.bodies import DirectConsumption
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import request, whole_body
from turbopump.wire.hashing import body_crc
from turbopump.wire.headers import ConsumeDirectly, QueryMessage
from turbopump.wire.ids import parse_offset_id
from turbopump.wire.record import MessageView

_log = logging.getLogger(__name__)

TOOLS_PRODUCER_GROUP = "TOOLS_PRODUCER"
_FAR_MS = 2**62
_INDEX_STEP_MS = 1000
"""Indexes keep whole seconds, rounded down: a message may seem up to this much older."""

DISCOVERY_INTERVAL_MS = 30_000
"""How often to look for new queues: as often as clients ask for routes."""

_AWAY_PAUSE_MS = 1000
_WAITING_MAX = 1000
"""Messages read ahead of the caller."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """What a member made of a message that it was given."""

    client_id: str
    result: str
    """In the words of the protocol: CR_SUCCESS, CR_LATER, CR_THROW_EXCEPTION and others."""

    spent_ms: int
    remark: str | None

    @property
    def is_success(self) -> bool:
        return self.result in {"CR_SUCCESS", "CR_COMMIT"}


class Messages:
    """What can be done with messages.

    ::

        receipt = await admin.messages.send(Message("orders", b"hello"))
        print((await admin.messages.find(receipt.message_id, "orders"))[0].body)
    """

    def __init__(self, servers: Servers, topics: Topics) -> None:
        self._servers = servers
        self._topics = topics
        self._reader = RangeReader(servers.session)

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        sharding_key: str | None = None,
        create_topic: bool = False,
    ) -> SendReceipt:
        """Send one message: to a queue, to that of a key, or to the next in turn.

        Raises NotThere for a topic that does not exist, unless ``create_topic`` leaves it to the
        broker to make it: a misspelled name would otherwise become a topic.
        """
        if queue is not None and sharding_key is not None:
            raise InvalidArgument("pass queue or sharding_key, not both")
        if not create_topic:
            await self._servers.route(message.topic)
        to: To = queue if sharding_key is None else by_hash(sharding_key)
        async with Producer(TOOLS_PRODUCER_GROUP, session=self._servers.session) as producer:
            return await producer.send(message, to=to)

    async def consume(self, message: MessageView, group: str, client_id: str) -> Consumed:
        """Give a message to a member of a group now, outside of any order; raises RemoteError.

        No committed offset changes; the listener's result is returned.
        """
        header = ConsumeDirectly(
            consumer_group=group, client_id=client_id, msg_id=message.offset_id
        )
        # The broker that has the message has to be one that the member is connected to.
        address = str(message.store_host)
        command = request(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)
        answer = await self._servers.ask_at(address, command)
        reported = DirectConsumption.decode(whole_body(answer))
        return Consumed(
            client_id,
            reported.consume_result or "unknown",
            reported.spent_time_millis,
            reported.remark,
        )

    # --- finding ----------------------------------------------------------------------------------

    async def find(self, message_id: str, topic: str | None = None) -> tuple[MessageView, ...]:
        """Find a message by any of its ids; raises NotThere.

        Without ``topic``, an id that a producer gave is looked up in all topics. Several
        are found when it was redelivered, or sent again by a retrying producer.
        """
        by_place = await self.by_offset_id(message_id)
        if by_place is not None:
            return (by_place,)
        if topic is None:
            return await self._in_any_topic(message_id)
        found = await self.by_unique_key(topic, message_id)
        if not found:
            raise NotThere(f"message of topic {topic!r} with id", message_id)
        return found

    async def _in_any_topic(self, message_id: str) -> tuple[MessageView, ...]:
        """Look an id up in one topic after the other: brokers index it by topic."""
        for topic in await self._servers.topic_names():
            try:
                found = await self.by_unique_key(topic, message_id)
            except NotThere:
                # Deleted meanwhile, or no broker has it.
                continue
            if found:
                return found
        raise NotThere("message", message_id)

    async def by_offset_id(self, offset_id: str) -> MessageView | None:
        """Read the message whose id says where it lies; None when it says nothing of the kind."""
        try:
            host, offset = parse_offset_id(offset_id)
        except InvalidArgument:
            return None
        nodes, owner = await self._servers.nodes(), str(host)
        failure: NetworkError | None = None
        for address in _holders(owner, nodes):
            try:
                message = await self._at(address, offset)
            except NetworkError as error:
                failure = failure or error
                continue
            if message is not None and (address == owner or message.store_host == host):
                return message
        if failure is not None and any(node.address == owner for node in nodes):
            raise failure
        return None

    async def _at(self, address: str, offset: PhysicalOffset) -> MessageView | None:
        """Read the message at a position of a broker's log."""
        asking = calls.view_message(self._servers.session, address, offset, ANSWER_MS)
        return await none_on(ResponseCode.SYSTEM_ERROR, asking)

    async def by_unique_key(
        self,
        topic: str,
        unique_key: str,
        *,
        begin: datetime | None = None,
        end: datetime | None = None,
    ) -> tuple[MessageView, ...]:
        """Find messages by the id that their producer gave them, oldest first.

        Only those stored from ``begin`` to before ``end``.
        """
        begin_ms, end_ms = _range_ms(begin, end)
        nodes = await self._topics.nodes_of(topic)
        return await self.by_unique_key_at(
            nodes, topic, unique_key, begin_ms=begin_ms, end_ms=end_ms
        )

    async def by_unique_key_at(
        self,
        nodes: Sequence[BrokerNode],
        topic: str,
        unique_key: str,
        *,
        begin_ms: int = 0,
        end_ms: int = _FAR_MS,
    ) -> tuple[MessageView, ...]:
        """Like `by_unique_key`, but ask only these brokers."""
        found = await self._found(nodes, topic, unique_key, 64, begin_ms, end_ms, is_unique=True)
        return tuple(each for each in found if each.unique_key == unique_key)

    async def by_key(
        self,
        topic: str,
        key: str,
        *,
        begin: datetime | None = None,
        end: datetime | None = None,
        count_max: int = 64,
    ) -> tuple[MessageView, ...]:
        """Find messages by one of their keys, stored from ``begin`` to before ``end``.

        They come oldest first; of more than ``count_max``, the newest.
        """
        begin_ms, end_ms = _range_ms(begin, end)
        nodes = await self._topics.nodes_of(topic)
        found = await self.by_key_at(nodes, topic, key, count_max, begin_ms, end_ms)
        return found[-count_max:]

    async def by_key_at(
        self,
        nodes: Sequence[BrokerNode],
        topic: str,
        key: str,
        count_max: int = 64,
        begin_ms: int = 0,
        end_ms: int = _FAR_MS,
    ) -> tuple[MessageView, ...]:
        """Like `by_key`, but ask only these brokers, and up to ``end_ms`` inclusive.

        Each broker returns up to ``count_max``.
        """
        found = await self._found(nodes, topic, key, count_max, begin_ms, end_ms, is_unique=False)
        return tuple(each for each in found if key in each.keys)

    async def at(self, queue: MessageQueue, offset: int) -> MessageView:
        """Read the message at an offset of a queue; raises NotThere."""
        if offset < 0:
            raise InvalidArgument(f"offset must be 0 or more, got {offset}")
        limits = _limits_of(queue, (await self._topics.status(queue.topic)).queues)
        place = f"{queue} at offset {offset}"
        if not limits.min_offset <= offset < limits.max_offset:
            raise NotThere("message in", f"{place} ({limits.min_offset} to {limits.max_offset})")
        messages, _ = await self._reader.page(queue, QueueOffset(offset), count_max=1)
        if not messages or messages[0].queue_offset != offset:
            raise NotThere("message in", place)
        return messages[0]

    async def span(self, topic: str, begin: datetime, end: datetime | None = None) -> Span:
        """Find the messages stored from one time until before another."""
        if end is not None and AtTime(end).epoch_ms < AtTime(begin).epoch_ms:
            raise InvalidArgument(f"end must not be before begin, got {begin} to {end}")
        limits = await self._topics.queues_to_read(topic)
        return await self._reader.span(
            limits, AtTime(begin), Latest() if end is None else AtTime(end)
        )

    def read(
        self, span: Span, *, tags: Expression = EVERYTHING
    ) -> AsyncGenerator[MessageView, None]:
        """Read the messages of a span, in the order in which they were stored."""
        return merged([self._reader.read(each, tags=tags) for each in span.ranges])

    # --- watching ---------------------------------------------------------------------------------

    async def tail(
        self,
        topic: str,
        *,
        tags: Expression = EVERYTHING,
        start: Start | None = None,
        follow: bool = True,
    ) -> AsyncGenerator[MessageView, None]:
        """Read a topic from a position on, and everything that comes later if it is followed.

        No committed offset changes. Messages already stored come first, in the order of storing.
        A broker that is away is waited for; queues that are added later are seen within half a
        minute, with all that was stored in them since.
        """
        now_s = self._servers.session.clock.now_ms() / 1000
        began = AtTime(datetime.fromtimestamp(now_s, UTC))
        limits = await self._topics.queues_to_read(topic)
        span = await self._before_now(limits, start or Latest())
        kept = start.count if isinstance(start, Last) else None
        history = self.read(span, tags=tags)
        if kept is not None:
            history = _last(history, kept)
        async with aclosing(history) as messages:
            async for message in messages:
                yield message
        if follow:
            ends = {each.queue: each.end for each in span.ranges}
            tail = TopicTail(self._reader, self._topics, topic, tags, began)
            async with aclosing(tail.messages(ends)) as coming:
                async for message in coming:
                    yield message

    async def _before_now(self, limits: Sequence[QueueLimits], start: Start) -> Span:
        if isinstance(start, Last):
            begins = [
                QueueOffset(max(each.min_offset, each.max_offset - start.count)) for each in limits
            ]
        else:
            begins = await gathered(self._reader.offset_of(each, start) for each in limits)
        return Span(
            tuple(
                OffsetRange(each.queue, begin, each.max_offset)
                for each, begin in zip(limits, begins, strict=True)
            )
        )

    async def _found(
        self,
        nodes: Sequence[BrokerNode],
        topic: str,
        key: str,
        count_max: int,
        begin_ms: int,
        end_ms: int,
        *,
        is_unique: bool,
    ) -> list[MessageView]:
        header = QueryMessage(
            topic=topic,
            key=key,
            max_num=count_max,
            begin_timestamp=max(0, begin_ms - _INDEX_STEP_MS),
            end_timestamp=end_ms,
            unique_key_query=is_unique,
        )
        query = partial(calls.query_messages, self._servers.session)
        found = await gathered(query(node.address, header, ANSWER_MS) for node in nodes)
        return sorted(
            (
                each
                for messages in found
                for each in messages
                if each.topic == topic
                and begin_ms <= each.store_timestamp_ms <= end_ms
                and _is_whole(each)
            ),
            key=lambda each: each.store_timestamp_ms,
        )


class TopicTail:
    """Reads the queues of one topic, each by a task of its own."""

    def __init__(
        self, reader: RangeReader, topics: Topics, topic: str, tags: Expression, since: AtTime
    ) -> None:
        self._reader = reader
        self._topics = topics
        self._topic = topic
        self._tags = tags
        self._since = since
        self._found: asyncio.Queue[MessageView | BaseException] = asyncio.Queue(_WAITING_MAX)
        self._queues: set[MessageQueue] = set()
        self._work = Supervisor()

    async def messages(
        self, begins: Mapping[MessageQueue, QueueOffset]
    ) -> AsyncGenerator[MessageView, None]:
        """Yield what arrives: from these offsets on, and in queues that are found later."""
        for queue, begin in begins.items():
            self._start(queue, begin)
        self._work.start(self._reported(self._discover_queues))
        try:
            while True:
                found = await self._found.get()
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            await self._work.stop()

    async def _reported(self, read: Callable[[], Awaitable[None]]) -> None:
        """Pass what ends a reader to the caller, after the messages before it."""
        try:
            await read()
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            await self._found.put(error)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            await self._found.put(error)

    def _start(self, queue: MessageQueue, begin: QueueOffset) -> None:
        self._queues.add(queue)
        self._work.start(self._reported(partial(self._follow, queue, begin)))

    async def _follow(self, queue: MessageQueue, at: QueueOffset) -> None:
        is_away = False
        while True:
            try:
                messages, at = await self._reader.page(queue, at, tags=self._tags, is_held=True)
            except (NetworkError, NoRoute) as error:
                if not is_away:
                    _log.warning("%s cannot be read now: %s", queue, error)
                is_away = True
                await asyncio.sleep(_AWAY_PAUSE_MS / 1000)
                continue
            is_away = False
            for message in messages:
                await self._found.put(message)

    async def _start_at_first(self, limits: QueueLimits) -> None:
        """Follow a queue from the first message that was stored since this began.

        It need not be new: its broker may have been away, with messages from long before.
        """
        try:
            begin = await self._reader.offset_of(limits, self._since)
        except TurbopumpError as error:
            _log.debug("%s cannot be read yet: %s", limits.queue, error)
            return
        self._start(limits.queue, begin)

    async def _discover_queues(self) -> None:
        while True:
            await asyncio.sleep(DISCOVERY_INTERVAL_MS / 1000)
            try:
                limits = await self._topics.queues_to_read(self._topic)
            except TurbopumpError as error:
                # The readers of the queues report a broker that is away.
                _log.debug("%s: queue discovery failed: %s", self._topic, error)
                continue
            for each in limits:
                if each.queue not in self._queues:
                    await self._start_at_first(each)


def _is_whole(message: MessageView) -> bool:
    """Whether the body matches its checksum; logs an error if not."""
    is_whole = body_crc(message.stored_body) == message.body_crc
    if not is_whole:
        _log.error(
            "damaged message, left out: %s, queue %d, offset %d: body does not match its checksum",
            message.topic,
            message.queue_id,
            message.queue_offset,
        )
    return is_whole


def _range_ms(begin: datetime | None, end: datetime | None) -> tuple[int, int]:
    """Return the first and the last store time of a range, whose end is excluded."""
    return (
        0 if begin is None else AtTime(begin).epoch_ms,
        _FAR_MS if end is None else AtTime(end).epoch_ms - 1,
    )


def _limits_of(queue: MessageQueue, limits: Iterable[QueueLimits]) -> QueueLimits:
    for each in limits:
        if each.queue == queue:
            return each
    raise NotThere("queue", str(queue))


async def _last(
    messages: AsyncGenerator[MessageView, None], count: int
) -> AsyncGenerator[MessageView, None]:
    kept: deque[MessageView] = deque(maxlen=count)
    async with aclosing(messages):
        async for message in messages:
            kept.append(message)
    for message in kept:
        yield message


def _holders(address: str, nodes: Sequence[BrokerNode]) -> list[str]:
    """Return the brokers to ask for a message that was stored at an address, in this order.

    Its slaves have it at the same position. If no broker has the address, it may be that of a
    master which is gone, or the id is one of a producer, which looks the same: then all are asked.
    """
    names = {node.broker for node in nodes if node.address == address}
    found = [node.address for node in nodes if not names or node.broker in names]
    return sorted(found, key=lambda each: each != address)
