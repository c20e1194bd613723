"""The state of running brokers, read without requests: messages, offsets, lag, activity."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from turbopump.broker.broker import Broker
from turbopump.client.push_consumer import PushConsumer
from turbopump.client.session import Session
from turbopump.message import QueueOffset
from turbopump.store.outcomes import Found
from turbopump.store.store import Store
from turbopump.testing.memory_net import MemoryNetwork
from turbopump.wire import properties
from turbopump.wire.names import DEAD_LETTER_PREFIX, RETRY_PREFIX, SCHEDULE_TOPIC
from turbopump.wire.record import MessageView, decode_records

T = TypeVar("T")

_COUNT_AT_ONCE = 1000


class ReadsState(ABC):
    """What tests ask about the brokers of a cluster."""

    @abstractmethod
    def _read(self, question: Callable[[Collection[Broker]], T]) -> T:
        """Return the answer of the brokers that run now."""

    def messages(self, topic: str) -> list[MessageView]:
        """Return all messages of a topic, in the order in which they were stored."""
        return self._read(lambda brokers: messages(brokers, topic))

    def dead_letters(self, group: str) -> list[MessageView]:
        """Return a group's dead letters."""
        return self.messages(DEAD_LETTER_PREFIX + group)

    def retrying(self, group: str) -> list[MessageView]:
        """Return a group's failed messages that wait for redelivery."""
        return self._read(lambda brokers: retrying(brokers, group))

    def lag(self, group: str) -> int:
        """Return how many messages a group could have consumed and has not committed yet.

        Consumers commit every 5 seconds. Messages that wait for a retry are not counted.
        """
        return self._read(lambda brokers: lag(brokers, group))


def messages(brokers: Iterable[Broker], topic: str) -> list[MessageView]:
    """Return all messages of a topic, in the order in which they were stored."""
    found = [
        message
        for broker in brokers
        for queue_id in _ranges(broker, topic)
        for message in queue_messages(broker.store, topic, queue_id)
    ]
    return sorted(found, key=lambda message: (message.store_timestamp_ms, message.physical_offset))


def lag(brokers: Iterable[Broker], group: str) -> int:
    """Return how many messages a group has not committed yet, of those that are not delayed.

    Covers the topics that the group subscribes to, or has committed in before.
    """
    return sum(_lag(broker, group, topic) for broker in brokers for topic in _topics(broker, group))


class Consumed:
    """Whether a group has no message left; cheap to check while the brokers are idle."""

    def __init__(self, brokers: Collection[Broker], group: str) -> None:
        self._brokers = brokers
        self._group = group
        self._seen: list[object] | None = None

    def __call__(self) -> bool:
        now = [_marks(broker, self._group) for broker in self._brokers]
        if now == self._seen:
            return False
        self._seen = now
        brokers, group = self._brokers, self._group
        return is_known(brokers, group) and not lag(brokers, group) and not retrying(brokers, group)


def _marks(broker: Broker, group: str) -> object:
    """Return a value that changes with everything that counts for a group."""
    joined = broker.state.consumers.find(group)
    return *_changes(broker), None if joined is None else set(joined.subscriptions)


def _changes(broker: Broker) -> tuple[object, ...]:
    """Return a value that changes with everything stored, committed and delivered after a delay."""
    offsets, delays = broker.state.offsets.saving, broker.path.delays
    return id(broker), broker.store.written_end, offsets.changes, delays.changes


def activity_marks(
    brokers: Sequence[Broker], clients: Iterable[Session], network: MemoryNetwork
) -> object | None:
    """Return a value that changes with every activity; None while something is in progress.

    That is so when the network is disturbed, when messages are not on disk yet, when a consumer is
    processing messages, and when the held pulls are not exactly those of push consumers: the
    programs of others may count what they do.
    """
    stores = [broker.store for broker in brokers]
    if network.is_disturbed or any(store.flushed_end < store.written_end for store in stores):
        return None
    consumers = [each for client in clients for each in client.members.consumers.values()]
    queues = 0
    for consumer in consumers:
        if not isinstance(consumer, PushConsumer) or not consumer.is_idle:
            return None
        queues += len(consumer.assignment())
    if sum(len(broker.path.arrivals) for broker in brokers) != queues:
        return None
    connections = network.connections_made, network.open_connections
    return connections, queues, [_activity(broker) for broker in brokers]


def _activity(broker: Broker) -> object:
    groups = {name: len(group.members) for name, group in broker.state.consumers.groups.items()}
    return *_changes(broker), broker.state.topics.data_version, groups


def is_known(brokers: Iterable[Broker], group: str) -> bool:
    """Whether a group has a consumer, or has had one that committed."""
    return any(
        broker.state.consumers.find(group) is not None or broker.state.offsets.topics_of(group)
        for broker in brokers
    )


def retrying(brokers: Iterable[Broker], group: str) -> list[MessageView]:
    """Return a group's messages that wait for redelivery."""
    topic = RETRY_PREFIX + group
    return [
        message
        for broker in brokers
        for queue_id, start in _delayed(broker).items()
        for message in queue_messages(broker.store, SCHEDULE_TOPIC, queue_id, start)
        if message.properties.get(properties.REAL_TOPIC) == topic
    ]


def summary(brokers: Iterable[Broker]) -> list[str]:
    """Describe all topics and groups, a line each, for timeout messages."""
    running = list(brokers)
    topics = {name for broker in running for name, _ in broker.store.queue_ids()}
    groups = {name for broker in running for name in _groups(broker)}
    return [
        *(f"topic {topic}: {_count(running, topic)} messages" for topic in sorted(topics)),
        *(
            f"group {group}: lag {lag(running, group)}, "
            f"{len(retrying(running, group))} wait to be tried again, "
            f"{len(messages(running, DEAD_LETTER_PREFIX + group))} dead letters"
            for group in sorted(groups)
        ),
    ]


def queue_messages(
    store: Store, topic: str, queue_id: int, start: QueueOffset | None = None
) -> Iterator[MessageView]:
    """Read a queue from an offset on, or from its start."""
    offset = store.queue_range(topic, queue_id)[0] if start is None else start
    while isinstance(outcome := store.read(topic, queue_id, offset, _COUNT_AT_ONCE), Found):
        for data in outcome.messages:
            # Copied: a view would keep the log's file mapped when the broker is closed.
            yield from decode_records(bytes(data))
        offset = outcome.next_offset


def _lag(broker: Broker, group: str, topic: str) -> int:
    done, ranges = broker.state.offsets.of_topic(group, topic), _ranges(broker, topic)
    return sum(end - max(begin, done.get(each, begin)) for each, (begin, end) in ranges.items())


def _ranges(broker: Broker, topic: str) -> dict[int, tuple[QueueOffset, QueueOffset]]:
    """Return where the queues of a topic begin and end."""
    store = broker.store
    return {
        each: store.queue_range(topic, each) for name, each in store.queue_ids() if name == topic
    }


def _delayed(broker: Broker) -> dict[int, QueueOffset]:
    """Return the queues with messages that are not due yet, and where those begin."""
    delivered = broker.path.delays.progress.offset_table
    # A level counts from 1, its queue from 0.
    starts = {
        level: delivered.get(level + 1, 0) for level in range(len(broker.config.store.delay_levels))
    }
    return {
        queue_id: QueueOffset(start)
        for queue_id, start in starts.items()
        if broker.store.queue_range(SCHEDULE_TOPIC, queue_id)[1] > start
    }


def _topics(broker: Broker, group: str) -> set[str]:
    joined = broker.state.consumers.find(group)
    subscribed = set() if joined is None else set(joined.subscriptions)
    return subscribed | broker.state.offsets.topics_of(group)


def _groups(broker: Broker) -> set[str]:
    committed = (key.partition("@")[2] for key in broker.state.offsets.snapshot.offset_table)
    return {*broker.state.consumers.groups, *committed}


def _count(brokers: Iterable[Broker], topic: str) -> int:
    ranges = (_ranges(broker, topic).values() for broker in brokers)
    return sum(end - begin for each in ranges for begin, end in each)
