"""Whether anything happens in a cluster, observed from inside without requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from turbopump.broker.broker import Broker
from turbopump.client.push_consumer import PushConsumer
from turbopump.client.session import Session
from turbopump.testing.memory_net import MemoryNetwork


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
    return connections, queues, [_of(broker) for broker in brokers]


def _of(broker: Broker) -> object:
    return (
        id(broker),
        broker.store.written_end,
        broker.state.offsets.changes,
        broker.path.delays.changes,
        broker.state.topics.data_version,
        {name: len(group.members) for name, group in broker.state.consumers.groups.items()},
    )
