"""What users and all layers speak of: messages to send, queues and positions in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NewType, Self, TypedDict, Unpack

from msgspec import Struct, field

from turbopump.durations import Duration
from turbopump.json_bodies import json_body, shortened

QueueOffset = NewType("QueueOffset", int)
"""Position in a queue, counting messages."""

PhysicalOffset = NewType("PhysicalOffset", int)
"""Position in the commit log, counting bytes."""


class MessageQueue(Struct, frozen=True, order=True, cache_hash=True):
    """One queue of a topic on one broker; sorts as every member of a consumer group sorts it.

    ::

        MessageQueue("orders", "broker-a", 0)
    """

    topic: str
    broker: str = field(name="brokerName")
    queue_id: int = field(name="queueId")

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker}:{self.queue_id}"


class MessageFields(TypedDict, total=False):
    """The fields of a `Message` besides topic and body."""

    tags: str | None
    keys: Sequence[str]
    properties: Mapping[str, str]
    delay_level: int
    delay: Duration | None
    flag: int
    wait_stored: bool


class _TopicAndBody(Struct, frozen=True):
    """What every message has, by place."""

    topic: str
    body: bytes


class Message(_TopicAndBody, frozen=True, kw_only=True):
    """A message to send; it is checked when it is sent.

    ::

        Message("orders", b'{"order": 42}', tags="created", keys=["42"])
        Message("reminders", b"pay", delay=300)
    """

    tags: str | None = None
    """One tag, which consumers filter by."""

    keys: Sequence[str] = ()
    """What the message can be found by; a key has no blanks."""

    properties: Mapping[str, str] = field(default_factory=dict)
    """The sender's own, by name; names of the protocol are reserved."""

    delay_level: int = 0
    """Which of the broker's delays to deliver after, from 1 on; 0 delivers immediately."""

    delay: Duration | None = None
    """Delivers after the shortest of the broker's delays that is not earlier; in seconds, or a
    timedelta."""

    flag: int = 0
    """A number for the application, carried along."""

    wait_stored: bool = True
    """Whether a broker that flushes or copies before it answers is to do so for this message."""

    @classmethod
    def with_json(cls, topic: str, value: object, **fields: Unpack[MessageFields]) -> Self:
        """Return a message whose body is a value in JSON; raises InvalidArgument if it has none.

        ::

            Message.with_json("orders", Order(42, 10.0), keys=["42"])
        """
        return cls(topic, json_body(value), **fields)

    def __repr__(self) -> str:
        """Show what differs from the defaults; long bodies are cut."""
        given = [
            f"{name}={shortened(getattr(self, name))}"
            for name, default in _DEFAULTS.items()
            if getattr(self, name) != default
        ]
        return f"Message({', '.join([repr(self.topic), shortened(self.body), *given])})"


_DEFAULTS = {name: getattr(Message("", b""), name) for name in MessageFields.__annotations__}
