"""Settings of a push consumer, by concern."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from turbopump.client.allocation import Strategy
from turbopump.client.start_position import StartFrom
from turbopump.durations import Duration, set_duration
from turbopump.errors import InvalidArgument

_MEBIBYTE = 1024 * 1024
_INT_MAX = 2**31 - 1
BATCH_SIZE_MAX = 1024
USUAL_BATCH_SIZE = 32
"""Brokers return at most this many messages unless the pull requests a large response."""
_BATCH_SIZE_OWN = 256
_CONCURRENCY_MAX = 1000

Concurrency = int | tuple[int, int]
"""How many calls run at once: a fixed number, or a minimum and a maximum."""

CONCURRENCY = (20, 64)


def _require_within(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidArgument(f"{name} must be {least}–{most}, got {value!r}")


def concurrency_limits(concurrency: Concurrency) -> tuple[int, int]:
    """Return how many calls run at once, at least and at most; refuse invalid numbers."""
    if isinstance(concurrency, int):
        _require_within("concurrency", concurrency, 1, _CONCURRENCY_MAX)
        return concurrency, concurrency
    match concurrency:
        case (least, most):
            _require_within("minimum of concurrency", least, 1, _CONCURRENCY_MAX)
            _require_within("maximum of concurrency", most, least, _CONCURRENCY_MAX)
            return least, most
        case _:
            raise InvalidArgument(
                f"concurrency must be a number, or a minimum and a maximum, got {concurrency!r}"
            )


def check_calls(concurrency: Concurrency, batch_size: int, max_attempts: int | None) -> None:
    """Refuse settings of calls of the listener that are out of range."""
    concurrency_limits(concurrency)
    _require_within("batch_size", batch_size, 1, BATCH_SIZE_MAX)
    if max_attempts is not None:
        _require_within("max_attempts", max_attempts, 0, _INT_MAX)


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

        Pulling(batch_size=64, interval=0.1)
    """

    batch_size: int | None = None
    """Maximum messages per pull, fewer if the flow limits leave less room; None means 256, and 32
    from brokers of Apache RocketMQ."""

    interval: Duration = 0
    """Pause after a pull that returned messages."""

    hold: Duration = 15
    """How long a broker may wait for messages before it responds that there are none."""

    timeout: Duration = 30
    """How long to wait for a response; brokers respond up to 5 s later than requested."""

    carries_subscription: bool = False
    """Whether each pull carries the subscription, so that no heartbeat has to precede it."""

    interval_ms: int = field(init=False, repr=False, compare=False)
    hold_ms: int = field(init=False, repr=False, compare=False)
    timeout_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            _require_within("batch_size", self.batch_size, 1, BATCH_SIZE_MAX)
        set_duration(self, "interval", 0, 65_535)
        set_duration(self, "timeout", set_duration(self, "hold") + 1)
        if not isinstance(self.carries_subscription, bool):
            raise InvalidArgument(
                f"carries_subscription must be a bool, got {self.carries_subscription!r}"
            )

    def count_max(self, *, is_own_broker: bool) -> int:
        """Return the maximum of messages per pull from a broker, which may be Turbopump's."""
        if self.batch_size is not None:
            return self.batch_size
        return _BATCH_SIZE_OWN if is_own_broker else USUAL_BATCH_SIZE


@dataclass(frozen=True, slots=True)
class Listening:
    """Times of calling the listener.

    ::

        Listening(timeout=timedelta(minutes=30), close_wait=60)
    """

    timeout: Duration = 900
    """Concurrent: a message that takes longer is sent back and redelivered elsewhere."""

    close_wait: Duration = 10
    """How long closing waits for running calls; 0 does not wait: their messages are redelivered."""

    suspend: Duration = 1
    """Orderly: how long a queue pauses before its messages are redelivered."""

    timeout_ms: int = field(init=False, repr=False, compare=False)
    close_wait_ms: int = field(init=False, repr=False, compare=False)
    suspend_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_duration(self, "timeout", 60_000, 3 * 3_600_000)
        set_duration(self, "close_wait", 0)
        set_duration(self, "suspend", 10, 30_000)


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
    concurrency: Concurrency
    batch_size: int
    max_attempts: int | None
    offsets_directory: Path | None

    def __post_init__(self) -> None:
        check_calls(self.concurrency, self.batch_size, self.max_attempts)

    @property
    def concurrency_limits(self) -> tuple[int, int]:
        return concurrency_limits(self.concurrency)

    @property
    def orderly_max_attempts(self) -> int:
        """How often an orderly consumer, which retries by itself, redelivers a message."""
        return _INT_MAX if self.max_attempts is None else self.max_attempts

    @property
    def is_locking(self) -> bool:
        """Whether queues are locked on their brokers; when broadcasting, every member has all."""
        return self.is_orderly and not self.is_broadcast
