"""Marks of idempotent writes: which tasks have started to send, and which writes are complete.

They are messages in a separate topic: as durable as the rows, and found without an index, on Apache
brokers too. On each broker, queue 0 has the marks, and queue 1 the beats of running tasks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from turbopump.client import calls
from turbopump.client.calls import Found
from turbopump.client.names import with_namespace
from turbopump.client.producer import Producer
from turbopump.client.pull_config import PullTimes
from turbopump.client.queue_reader import QueueReader
from turbopump.client.routes import PERM_READ, PERM_WRITE
from turbopump.client.session import Session
from turbopump.client.subscriptions import subscription
from turbopump.errors import DamagedMessage, RemoteError, SparkError
from turbopump.message import Message, MessageQueue, QueueOffset
from turbopump.spark.reading.options import READER_GROUP
from turbopump.spark.reading.retry import with_retries
from turbopump.spark.writing.options import SinkOptions
from turbopump.wire import headers
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import request
from turbopump.wire.names import TEMPLATE_TOPIC
from turbopump.wire.record import MessageView

MARKS_TOPIC = "SPARK_WRITES"
_QUEUES = 2
_BEATS_QUEUE = 1
_PULLED_MAX = 1000
_VISIBLE_WITHIN_MS = 30_000
_HELD_MS = 1000

_Ask = Callable[[calls.Caller, str, MessageQueue, int], Awaitable[QueueOffset]]


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task may have sent from now on; without a partition: all rows of the write are stored."""

    write: str
    batch: str
    topic: str
    partition: int | None = None
    attempt: str = ""
    starts: dict[str, dict[int, int]] = {}
    """By broker and queue: the task's rows are at or after this offset."""


class PlacedMark(NamedTuple):
    broker: str
    offset: int
    mark: Mark


@dataclass(frozen=True, slots=True)
class MarkSurvey:
    """The marks that the driver has read, so that the tasks of a batch write need not."""

    ends: dict[str, int]
    """By broker: where tasks continue."""
    marks: tuple[PlacedMark, ...]
    """The marks of the write."""


class Messages:
    """Reads queues of the cluster from an offset on, with the retries of the sink."""

    def __init__(self, session: Session, options: SinkOptions, group: str = READER_GROUP) -> None:
        self._session = session
        self._retries = options.retries
        timeout_ms = options.send_timeout_ms
        times = PullTimes(timeout_ms / 1000, _HELD_MS / 1000, (timeout_ms + _HELD_MS) / 1000)
        self.queues = QueueReader(session, with_namespace(options.namespace, group), times)

    async def start(self, queue: MessageQueue) -> int:
        """Return the offset of the oldest message of a queue."""
        return await self._limit(calls.min_offset, queue)

    async def end(self, queue: MessageQueue) -> int:
        """Return the offset behind the newest message of a queue."""
        return await self._limit(calls.max_offset, queue)

    async def _limit(self, ask: _Ask, queue: MessageQueue) -> int:
        session, on_wire = self._session, self.queues.wire_queue(queue)

        async def asked() -> int:
            # Not of a slave, which may not have everything yet.
            address = session.address_to_write(queue.broker)
            return await ask(session, address, on_wire, session.config.request_timeout_ms)

        return await with_retries(asked, self._retries, queue)

    async def read(self, queue: MessageQueue, start: int, end: int) -> Sequence[MessageView]:
        """Return the messages from an offset to before another, which exists or soon will."""
        found: list[MessageView] = []
        everything = subscription(self.queues.wire_topic(queue.topic), "*", 0)
        at, waits_left = QueueOffset(start), _VISIBLE_WITHIN_MS // _HELD_MS
        while at < end:
            pull = partial(self.queues.pull, queue, at, everything, _PULLED_MAX, is_held=True)
            try:
                outcome = await with_retries(pull, self._retries, queue)
            except DamagedMessage as error:
                if error.message is None:
                    raise
                # Its properties are known, and identify its row.
                found.append(error.message)
                at = QueueOffset(error.next_offset)
                continue
            if isinstance(outcome, Found):
                found += [each for each in outcome.messages if each.queue_offset < end]
            waits_left -= outcome.next_offset == at
            if not waits_left:
                raise SparkError(
                    f"{queue} shows no message at offset {at} within {_VISIBLE_WITHIN_MS} ms, "
                    f"but has stored up to {end}"
                )
            at = outcome.next_offset
        return found


class MarkLog:
    """Writes marks and reads them back."""

    def __init__(self, session: Session, producer: Producer, options: SinkOptions) -> None:
        self._session = session
        self._producer = producer
        self._options = options
        self._messages = Messages(session, options)

    async def put(self, broker: str, mark: Mark) -> int:
        """Store a mark on a broker; return its offset."""
        queue = marks_queue(broker)
        await self._require_topic(broker)
        message = Message(MARKS_TOPIC, msgspec.json.encode(mark))
        receipt = await with_retries(
            lambda: self._producer.send(message, to=queue), self._options.retries, queue
        )
        return receipt.queue_offset

    async def read(self, broker: str, start: int, end: int) -> list[PlacedMark]:
        """Return the marks of a broker from an offset to before ``end``."""
        # Beyond the end: the topic was re-created since, so everything is new.
        first = start if start <= end else 0
        views = await self._messages.read(marks_queue(broker), first, end)
        found = ((view.queue_offset, _decoded(view.body)) for view in views)
        return [PlacedMark(broker, offset, mark) for offset, mark in found if mark is not None]

    async def beat(self, broker: str, attempt: str) -> int:
        """Store a beat of an attempt; return its offset."""
        queue = MessageQueue(MARKS_TOPIC, broker, _BEATS_QUEUE)
        await self._require_topic(broker)
        receipt = await self._producer.send(Message(MARKS_TOPIC, attempt.encode()), to=queue)
        return receipt.queue_offset

    async def beats(self, broker: str, start: int, end: int) -> set[str]:
        """Return which attempts stored beats between two of its own."""
        queue = MessageQueue(MARKS_TOPIC, broker, _BEATS_QUEUE)
        return {each.body.decode() for each in await self._messages.read(queue, start, end)}

    async def survey(self, write: str, topic: str, brokers: Sequence[str]) -> MarkSurvey:
        """Read all marks that brokers have; return those of a batch write."""
        ends: dict[str, int] = {}
        marks: list[PlacedMark] = []
        for broker in brokers:
            await self._require_topic(broker)
            queue = marks_queue(broker)
            low, high = await self._messages.start(queue), await self._messages.end(queue)
            found = await self.read(broker, low, high)
            marks += [
                each for each in found if (each.mark.write, each.mark.topic) == (write, topic)
            ]
            ends[broker] = high
        return MarkSurvey(ends, tuple(marks))

    async def _require_topic(self, broker: str) -> None:
        """Create the topic on a broker that lacks it: brokers may not create it themselves."""
        topic = with_namespace(self._options.namespace, MARKS_TOPIC)
        route = self._session.cached_route(topic)
        if route is None or route.is_borrowed or broker not in route.brokers:
            await self._session.refresh_route(topic)
            route = self._session.cached_route(topic)
        if route is not None and not route.is_borrowed and broker in route.brokers:
            return
        # In one request, as a lease waits for it: `Topics.create` asks first whether it exists.
        header = headers.CreateTopic(
            topic=topic,
            default_topic=TEMPLATE_TOPIC,
            read_queue_nums=_QUEUES,
            write_queue_nums=_QUEUES,
            perm=PERM_READ | PERM_WRITE,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=0,
            order=False,
        )
        answer = await self._session.request(
            self._session.address_to_write(broker),
            request(RequestCode.UPDATE_AND_CREATE_TOPIC, header),
            self._session.config.request_timeout_ms,
        )
        try:
            calls.require_success(answer)
        except RemoteError as error:
            raise SparkError(
                f"broker {broker} refuses to create topic {topic}, which idempotent writes need "
                f"({_QUEUES} queues): {error}"
            ) from error


def marks_queue(broker: str) -> MessageQueue:
    return MessageQueue(MARKS_TOPIC, broker, 0)


def _decoded(body: bytes) -> Mark | None:
    try:
        return msgspec.json.decode(body, type=Mark)
    except msgspec.MsgspecError:
        # Another client has sent to the topic.
        return None
