"""The messages in topics, read with the plain client."""

from __future__ import annotations

from turbopump import PullConsumer
from turbopump.client.calls import Found
from turbopump.wire.record import MessageView


def stored(nameserver: str, topic: str) -> list[MessageView]:
    """Return all messages of a topic, queue by queue, in order."""
    found: list[MessageView] = []
    with PullConsumer("reader-of-tests", nameserver=nameserver) as consumer:
        for queue in consumer.queues(topic):
            offset, end = consumer.min_offset(queue), consumer.max_offset(queue)
            while offset < end:
                pulled = consumer.pull(queue, offset, count_max=32)
                assert isinstance(pulled, Found)
                found += pulled.messages
                offset = pulled.next_offset
    return found
