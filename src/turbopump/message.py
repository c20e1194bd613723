"""What users and all layers speak of: queues and positions in them."""

from __future__ import annotations

from typing import NewType

from msgspec import Struct, field

QueueOffset = NewType("QueueOffset", int)
"""Position in a queue, counting messages."""

PhysicalOffset = NewType("PhysicalOffset", int)
"""Position in the commit log, counting bytes."""


class MessageQueue(Struct, frozen=True, order=True):
    """One queue of a topic on one broker; sorts as every member of a consumer group sorts it."""

    topic: str
    broker: str = field(name="brokerName")
    queue_id: int = field(name="queueId")

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker}:{self.queue_id}"
