"""Settings of a push consumer, by concern."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from turbopump.client.allocation import Strategy
from turbopump.client.start_position import StartFrom
from turbopump.errors import InvalidArgument

_MEBIBYTE = 1024 * 1024
_INT_MAX = 2**31 - 1


def _require_within(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidArgument(f"{name} must be {least}–{most}, got {value!r}")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much of one queue may be pulled and unfinished."""

    messages_max: int
    bytes_max: int
    span_max: int


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """How much may be pulled and unfinished; beyond it, pulling pauses.

    ::

        FlowLimits(messages_per_queue=100, mebibytes_per_topic=64)
    """

    messages_per_queue: int = 1000
    mebibytes_per_queue: int = 100
    span: int = 2000
    """Concurrent: how far a queue's newest message may be ahead of its oldest unfinished one."""

    messages_per_topic: int | None = None
    """Divided among the topic's queues that this client owns; None means no limit."""

    mebibytes_per_topic: int | None = None

    def __post_init__(self) -> None:
        _require_within("messages_per_queue", self.messages_per_queue, 1, 65_535)
        _require_within("mebibytes_per_queue", self.mebibytes_per_queue, 1, 1024)
        _require_within("span", self.span, 1, 65_535)
        if self.messages_per_topic is not None:
            _require_within("messages_per_topic", self.messages_per_topic, 1, 6_553_500)
        if self.mebibytes_per_topic is not None:
            _require_within("mebibytes_per_topic", self.mebibytes_per_topic, 1, 102_400)

    def of_queue(self, queues_owned: int) -> QueueLimits:
        """Return the limits of each of n queues of a topic."""
        messages, mebibytes = self.messages_per_queue, self.mebibytes_per_queue
        if self.messages_per_topic is not None:
            messages = max(1, self.messages_per_topic // max(1, queues_owned))
        if self.mebibytes_per_topic is not None:
            mebibytes = max(1, self.mebibytes_per_topic // max(1, queues_owned))
        return QueueLimits(messages, mebibytes * _MEBIBYTE, self.span)


@dataclass(frozen=True, slots=True)
class Pulling:
    """Settings of pulling.

    ::

        Pulling(batch_max=64, interval_ms=100)
    """

    batch_max: int = 256
    """Maximum messages per pull, fewer if the flow limits leave less room; Apache RocketMQ brokers
    return up to 32."""

    interval_ms: int = 0
    """Pause after a pull that returned messages."""

    hold_ms: int = 15_000
    """How long a broker may wait for messages before it responds that there are none."""

    timeout_ms: int = 30_000
    """How long to wait for a response; brokers respond up to 5 s later than requested."""

    carries_subscription: bool = False
    """Whether each pull carries the subscription, so that no heartbeat has to precede it."""

    def __post_init__(self) -> None:
        _require_within("batch_max", self.batch_max, 1, 1024)
        _require_within("interval_ms", self.interval_ms, 0, 65_535)
        _require_within("hold_ms", self.hold_ms, 1, _INT_MAX)
        _require_within("timeout_ms", self.timeout_ms, self.hold_ms + 1, _INT_MAX)
        if not isinstance(self.carries_subscription, bool):
            raise InvalidArgument(
                f"carries_subscription must be a bool, got {self.carries_subscription!r}"
            )


@dataclass(frozen=True, slots=True)
class Listening:
    """Settings of calling the listener.

    ::

        Listening(threads=4, batch_max=32)
    """

    threads: int = 20
    """How many calls run concurrently: threads for a function, tasks for an ``async def``."""

    batch_max: int = 1
    """Maximum messages per call."""

    timeout_minutes: int = 15
    """Concurrent: a message that takes longer is sent back and redelivered elsewhere."""

    close_wait_ms: int = 10_000
    """How long closing waits for running calls; 0 does not wait: their messages are redelivered."""

    def __post_init__(self) -> None:
        _require_within("threads", self.threads, 1, 1000)
        _require_within("batch_max", self.batch_max, 1, 1024)
        _require_within("timeout_minutes", self.timeout_minutes, 1, 180)
        _require_within("close_wait_ms", self.close_wait_ms, 0, _INT_MAX)

    @property
    def timeout_ms(self) -> int:
        return self.timeout_minutes * 60_000


@dataclass(frozen=True, slots=True)
class Retries:
    """What happens to failed messages.

    ::

        Retries(attempts_max=3)
    """

    attempts_max: int | None = None
    """How often a message is redelivered before it is dead-lettered; None means the limit of the
    group (``retryMaxTimes``, 16 unless changed) when concurrent and no limit when orderly."""

    suspend_ms: int = 1000
    """Orderly: how long a queue pauses before its messages are redelivered."""

    def __post_init__(self) -> None:
        if self.attempts_max is not None:
            _require_within("attempts_max", self.attempts_max, 0, _INT_MAX)
        _require_within("suspend_ms", self.suspend_ms, 10, 30_000)

    @property
    def orderly_attempts_max(self) -> int:
        """How often an orderly consumer, which retries by itself, redelivers a message."""
        return _INT_MAX if self.attempts_max is None else self.attempts_max


@dataclass(frozen=True, slots=True)
class PushSettings:
    """All settings of one consumer, as its stages read them."""

    start_from: StartFrom
    strategy: Strategy
    is_orderly: bool
    is_broadcast: bool
    flow: FlowLimits
    pulling: Pulling
    listening: Listening
    retries: Retries
    offsets_directory: Path | None

    @property
    def is_locking(self) -> bool:
        """Whether queues are locked on their brokers; when broadcasting, every member has all."""
        return self.is_orderly and not self.is_broadcast
