"""Dead letters: list the messages that a group failed to consume, and redrive them.

A letter stays in its queue until retention deletes it. To send none twice, a copy carries the id of
its letter as a property and as a key, and copies are looked up by that key before a letter is sent.
The copy is the only record, so no record can be lost or exist without its copy. The message id
would not do: all retries of a message share it, and brokers find only the newest of many.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from turbopump.admin.messages import TOOLS_PRODUCER_GROUP, Messages
from turbopump.admin.positions import Earliest, Latest, Position
from turbopump.admin.range_reader import RangeReader, Span
from turbopump.admin.servers import ANSWER_MS, BrokerNode, Servers, gathered
from turbopump.admin.topics import Topics
from turbopump.client.message_sender import LoopIO, MessageSender
from turbopump.client.names import check_topic_for_sending
from turbopump.client.outgoing import MessageRules, Outgoing
from turbopump.client.producer_config import ProducerConfig
from turbopump.errors import InvalidArgument, NotThere
from turbopump.filters.tags import EVERYTHING
from turbopump.message import MessageQueue
from turbopump.wire import properties
from turbopump.wire.names import DEAD_LETTER_PREFIX, RETRY_PREFIX, dead_letter_topic, retry_topic
from turbopump.wire.record import MessageView
from turbopump.wire.sysflag import compression_of, with_compression

REDRIVEN_FROM = "REDRIVEN_FROM"
"""The property of a copy that holds the offset id of the letter it was made of."""

_CLOCKS_DIFFER_MS = 3_600_000
"""A copy is younger than its letter, but the clock of its broker may be slow."""

_SENDING = ProducerConfig(
    send_timeout=ANSWER_MS / 1000, retries_max=0, messages=MessageRules(new_topic_queues=1)
)
"""A copy that may be stored is not sent again; a busy or restarting broker is waited for."""
_AT_ONCE = 32
"""Letters that are worked on at the same time."""

_BYTES_AT_ONCE = 8_000_000
"""The same in bytes of bodies, as copies that are found come with theirs."""

_COPIES_MAX = 2
"""Of one letter in one topic: one will do, another may be there by a key with the same hash."""

_NOT_COPIED = properties.RESERVED - {
    properties.KEYS,
    properties.TAGS,
    properties.UNIQUE_KEY,
    properties.INSTANCE_ID,
    properties.BUYER_ID,
}
"""Properties that brokers and clients add in transit; a copy is sent without them."""

_NodesByTopic = dict[str, Sequence[BrokerNode]]


class Destination(Enum):
    """Where letters go; any other topic can be named."""

    ORIGIN = "origin"
    """The topic that the message was sent to at first: all of its groups get it again."""

    RETRY = "retry"
    """The retry topic of the group, which no other group reads."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group failed to process, after all its retries."""

    message: MessageView
    queue: MessageQueue

    @property
    def letter_id(self) -> str:
        """The id that says where the letter lies."""
        return self.message.offset_id

    @property
    def origin_topic(self) -> str | None:
        """The topic that the message was sent to at first, as far as it is known."""
        return self.message.properties.get(properties.RETRY_TOPIC)

    @property
    def attempts(self) -> int:
        """How often consumers tried."""
        return self.message.reconsume_times


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Which letters are meant; what is not given does not count."""

    tags: str = EVERYTHING
    key: str | None = None
    origin_topic: str | None = None
    ids: Collection[str] = ()
    """Letter ids or message ids."""

    def matches(self, letter: DeadLetter) -> bool:
        """Whether a letter is meant; tags are compared while reading."""
        message = letter.message
        return (
            (self.key is None or self.key in message.keys)
            and self.origin_topic in (None, letter.origin_topic)
            and (not self.ids or message.message_id in self.ids or letter.letter_id in self.ids)
        )


class Outcome(Enum):
    """What became of a letter."""

    SENT = "sent"
    WOULD_BE_SENT = "would be sent"
    SENT_BEFORE = "sent before"
    ORIGIN_UNKNOWN = "origin unknown"
    ORIGIN_GONE = "origin gone"
    """Its topic was deleted; it is re-created only on request."""

    @property
    def is_left(self) -> bool:
        """Whether the letter did not go anywhere, now or before."""
        return self in {Outcome.ORIGIN_UNKNOWN, Outcome.ORIGIN_GONE}


@dataclass(frozen=True, slots=True)
class Redriven:
    """One letter, where it went and what became of it."""

    letter: DeadLetter
    outcome: Outcome
    topic: str | None


class DeadLetters:
    """What can be done with the dead letters of a group.

    ::

        async for done in admin.dead_letters.redrive("billing", dry_run=True):
            print(done.letter.message.body, done.outcome)
    """

    def __init__(self, servers: Servers, topics: Topics, messages: Messages) -> None:
        self._servers = servers
        self._topics = topics
        self._messages = messages
        self._reader = RangeReader(servers.session)

    async def span(
        self, group: str, begin: Position | None = None, end: Position | None = None
    ) -> Span:
        """Work out where the letters of a group lie; of nothing when it never had any."""
        topic = dead_letter_topic(group)
        if not await self._servers.has_topic(topic):
            return Span(())
        limits = await self._topics.queues_to_read(topic)
        return await self._reader.span(limits, begin or Earliest(), end or Latest())

    async def list(
        self,
        group: str,
        *,
        wanted: LetterFilter | None = None,
        span: Span | None = None,
        on_read: Callable[[], None] | None = None,
    ) -> AsyncGenerator[DeadLetter, None]:
        """Read the letters of a group, oldest first; ``span`` limits them to some.

        ``on_read`` is called for each letter read, to show progress.
        """
        chosen = wanted or LetterFilter()
        where = await self.span(group) if span is None else span
        queues = {each.queue for each in where.ranges}
        by_host = {node.address: node.broker for node in await self._servers.nodes()}
        only = next(iter(queues)).broker if len({queue.broker for queue in queues}) == 1 else None
        async with aclosing(self._messages.read(where, tags=chosen.tags)) as messages:
            async for message in messages:
                if on_read is not None:
                    on_read()
                broker = only or by_host.get(str(message.store_host), "")
                letter = DeadLetter(message, MessageQueue(message.topic, broker, message.queue_id))
                if chosen.matches(letter):
                    yield letter

    async def show(self, group: str, letter_id: str) -> DeadLetter:
        """Return one letter by its own id or its message's; raises NotThere."""
        wanted = LetterFilter(ids=(letter_id,))
        async with aclosing(self.list(group, wanted=wanted)) as letters:
            async for letter in letters:
                return letter
        raise NotThere(f"dead letter of group {group!r} with id", letter_id)

    async def redrive(
        self,
        group: str,
        *,
        to: Destination | str = Destination.ORIGIN,
        wanted: LetterFilter | None = None,
        span: Span | None = None,
        again: bool = False,
        create_topic: bool = False,
        dry_run: bool = False,
        on_read: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Redriven, None]:
        """Redrive letters, and return the outcome of each.

        A letter whose copy is in the topic it came from, in the group's retry topic or in the
        topic it is to go to, is not sent once more, unless ``again`` is set. A copy keeps body,
        tags, keys, properties and message id, has the letter's id as one more key, and is tried
        as often as a new message. A letter whose origin was deleted is left, unless
        ``create_topic`` lets the broker make the topic again.
        """
        if isinstance(to, str):
            _check_destination(to)
            await self._servers.route(to)
        job = _Job(group, to, again=again, create_topic=create_topic, dry_run=dry_run)
        batch: list[DeadLetter] = []
        size = 0
        listed = self.list(group, wanted=wanted, span=span, on_read=on_read)
        async with aclosing(listed) as letters:
            async for letter in letters:
                batch.append(letter)
                size += len(letter.message.stored_body)
                if len(batch) >= _AT_ONCE or size >= _BYTES_AT_ONCE:
                    for done in await gathered(self._one(job, each) for each in batch):
                        yield done
                    batch.clear()
                    size = 0
        for done in await gathered(self._one(job, each) for each in batch):
            yield done

    async def delete(self, group: str) -> None:
        """Delete all letters of a group; brokers re-create their topic for the next one."""
        topic = dead_letter_topic(group)
        if await self._servers.has_topic(topic):
            await self._topics.delete(topic)

    async def is_redriven(self, letter: DeadLetter, topics: Collection[str]) -> bool:
        """Whether a copy of a letter is in any of the topics."""
        return await self._has_copy(letter, topics, {})

    async def _one(self, job: _Job, letter: DeadLetter) -> Redriven:
        topic = job.topic_for(letter)
        if topic is None:
            return Redriven(letter, Outcome.ORIGIN_UNKNOWN, None)
        may_be_gone = job.to is Destination.ORIGIN and not job.create_topic
        if may_be_gone and not await self._nodes(topic, job.nodes):
            # A broker would re-create it, but a topic that was deleted is not wanted.
            return Redriven(letter, Outcome.ORIGIN_GONE, topic)
        if not job.again and await self._has_copy(letter, job.places(letter), job.nodes):
            return Redriven(letter, Outcome.SENT_BEFORE, topic)
        if job.dry_run:
            return Redriven(letter, Outcome.WOULD_BE_SENT, topic)
        await self._sender.send_ready(LoopIO(self._servers.session), copy_of(letter, topic))
        return Redriven(letter, Outcome.SENT, topic)

    async def _has_copy(
        self, letter: DeadLetter, topics: Collection[str], nodes: _NodesByTopic
    ) -> bool:
        begin_ms = max(0, letter.message.store_timestamp_ms - _CLOCKS_DIFFER_MS)
        for topic in topics:
            copies = await self._messages.by_key_at(
                await self._nodes(topic, nodes), topic, letter.letter_id, _COPIES_MAX, begin_ms
            )
            if any(copy.properties.get(REDRIVEN_FROM) == letter.letter_id for copy in copies):
                return True
        return False

    async def _nodes(self, topic: str, known: _NodesByTopic) -> Sequence[BrokerNode]:
        """Return the brokers of a topic, none if it does not exist; asks once for each topic."""
        if topic not in known:
            try:
                known[topic] = await self._topics.nodes_of(topic)
            except NotThere:
                known[topic] = ()
        return known[topic]

    @cached_property
    def _sender(self) -> MessageSender:
        return MessageSender(TOOLS_PRODUCER_GROUP, self._servers.session, _SENDING, ())


@dataclass(frozen=True, slots=True)
class _Job:
    group: str
    to: Destination | str
    again: bool
    create_topic: bool
    dry_run: bool
    nodes: _NodesByTopic = field(default_factory=dict)

    def topic_for(self, letter: DeadLetter) -> str | None:
        if self.to is Destination.ORIGIN:
            return letter.origin_topic
        return self.to if isinstance(self.to, str) else retry_topic(self.group)

    def places(self, letter: DeadLetter) -> list[str]:
        """Return where a copy may be."""
        every = (letter.origin_topic, retry_topic(self.group), self.topic_for(letter))
        return list(dict.fromkeys(topic for topic in every if topic is not None))


def copy_of(letter: DeadLetter, topic: str) -> Outgoing:
    """Make the message that a letter becomes: as its producer sent it, and marked."""
    message = letter.message
    named = {n: v for n, v in message.properties.items() if n not in _NOT_COPIED}
    named[properties.UNIQUE_KEY] = _unique_key(message)
    named[properties.WAIT] = "true"
    # The id of a letter before this one would have this copy found for that one's.
    keys = [key for key in message.keys if key != named.get(REDRIVEN_FROM)]
    named[properties.KEYS] = " ".join([*keys, letter.letter_id])
    named[REDRIVEN_FROM] = letter.letter_id
    if topic.startswith(RETRY_PREFIX) and letter.origin_topic is not None:
        # By it a consumer gives the message the name of the topic that it subscribed to.
        named[properties.RETRY_TOPIC] = letter.origin_topic
    compression = compression_of(message.sys_flag)
    return Outgoing(
        topic,
        message.message_id,
        message.stored_body,
        properties.encode(named),
        message.flag,
        0 if compression is None else with_compression(0, compression),
    )


def _unique_key(message: MessageView) -> str:
    """Return the id to find copies by: the producer's, else where the message lay at first."""
    origin = message.properties.get(properties.ORIGIN_MESSAGE_ID)
    return message.unique_key or origin or message.offset_id


def _check_destination(topic: str) -> None:
    check_topic_for_sending(topic)
    if topic.startswith(DEAD_LETTER_PREFIX):
        raise InvalidArgument(
            f"destination must be origin, retry or a topic that is consumed, got {topic!r}, which "
            "holds dead letters"
        )
