"""Results of a listener and their effects. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from enum import Enum
from typing import Any

from msgspec import Struct

from turbopump.durations import Duration, as_milliseconds, milliseconds
from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue
from turbopump.wire.delay_levels import DELAY_LEVELS, parse_delay_levels
from turbopump.wire.record import MessageView

DEAD_LETTER_LEVEL = -1
"""The delay level that makes brokers dead-letter a message immediately."""

_LEVEL_MAX = 2**31 - 1
_LEVELS_MS = parse_delay_levels(DELAY_LEVELS)
"""The brokers' delay levels, unless they are configured otherwise."""

SUSPEND_MS_MIN = 10
SUSPEND_MS_MAX = 30_000


class ConsumeResult(Enum):
    """A listener's result for the messages of a call; raising means `RETRY_LATER`.

    `RetryLater` and `GiveUp` say more about what is to happen to failed messages.

    ::

        def handle(messages, context):
            return ConsumeResult.SUCCESS if paid(messages) else ConsumeResult.RETRY_LATER
    """

    SUCCESS = "success"
    """The messages are processed."""

    RETRY_LATER = "retry later"
    """The messages failed. Concurrent: each is sent back and redelivered after a delay.
    Orderly: the queue pauses, then the same messages are redelivered."""

    COMMIT = "commit"
    """Orderly with ``context.auto_commit`` off: commit all messages since the last commit."""

    ROLLBACK = "rollback"
    """Orderly with ``context.auto_commit`` off: redeliver all messages since the last commit."""


class ConsumeOutcome(Enum):
    """How a call of the listener ended, for hooks.

    ::

        def after_consume(self, messages, context, result):
            self.counts[context.outcome] += len(messages)
    """

    SUCCESS = "success"
    """`ConsumeResult.SUCCESS` or `COMMIT`."""

    EXCEPTION = "exception"
    """The listener raised; `sys.exception` returns what."""

    NONE_RETURNED = "none returned"
    """It returned no `ConsumeResult`."""

    TIMED_OUT = "timed out"
    """It took longer than the timeout of `Listening`, whatever it returned."""

    FAILED = "failed"
    """`ConsumeResult.RETRY_LATER` or `ROLLBACK`."""


def outcome_of(result: ConsumeResult, *, is_late: bool) -> ConsumeOutcome:
    """Return how a call ended whose listener returned a result."""
    if is_late:
        return ConsumeOutcome.TIMED_OUT
    is_success = result in (ConsumeResult.SUCCESS, ConsumeResult.COMMIT)
    return ConsumeOutcome.SUCCESS if is_success else ConsumeOutcome.FAILED


class RetryLater(Exception):
    """Returned or raised: the messages failed and are to be redelivered, after a delay if given.

    ::

        raise RetryLater(30)                # in half a minute
        return RetryLater(delay_level=5)    # by a level of the broker

    Messages sent back by a concurrent consumer are delayed by a level of the broker: the first one
    that is at least as long, of the default levels. A delay of more than two hours, the longest of
    them, raises InvalidArgument. An orderly consumer pauses the queue, for at most 30 seconds.
    """

    # Subclasses may not call this constructor, as those of other exceptions need not.
    delay: Duration | None = None
    delay_level: int = 0
    """The broker's delay level, from 1 on; 0 lets the delay grow with each attempt."""

    def __init__(self, delay: Duration | None = None, *, delay_level: int = 0) -> None:
        super().__init__()
        _require_level(delay_level)
        if delay is not None:
            if delay_level:
                raise InvalidArgument("delay and delay_level are mutually exclusive; pass one")
            delay_level = _level_of(milliseconds("delay", delay, 0, _LEVELS_MS[-1]))
        self.delay = delay
        self.delay_level = delay_level

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RetryLater) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        level = 0 if self.delay is not None else self.delay_level
        return _retry_later, (self.delay, level)

    def __repr__(self) -> str:
        if self.delay is not None:
            return f"RetryLater({self.delay!r})"
        return f"RetryLater(delay_level={self.delay_level})"

    __str__ = __repr__

    @property
    def _key(self) -> tuple[Duration | None, int]:
        return self.delay, self.delay_level


def _retry_later(delay: Duration | None, delay_level: int) -> RetryLater:
    return RetryLater(delay, delay_level=delay_level)


class GiveUp(Exception):
    """Returned or raised: the messages failed permanently, and are dead-lettered immediately.

    ::

        raise GiveUp("no such customer")
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GiveUp) and self.args == other.args

    def __hash__(self) -> int:
        return hash(self.args)


Answer = ConsumeResult | RetryLater | GiveUp
"""What a listener returns."""


def is_failure(answer: object) -> bool:
    """Whether a result says that the messages failed; also true for the classes `raise` takes."""
    if isinstance(answer, ConsumeResult):
        return answer in (ConsumeResult.RETRY_LATER, ConsumeResult.ROLLBACK)
    kind = answer if isinstance(answer, type) else type(answer)
    return issubclass(kind, RetryLater | GiveUp)


def _require_level(level: object) -> None:
    if not isinstance(level, int) or isinstance(level, bool) or not 0 <= level <= _LEVEL_MAX:
        raise InvalidArgument(
            f"delay_level must be 1 or more, or 0 for a delay that grows with each attempt, "
            f"got {level!r}"
        )


def _level_of(delay_ms: int) -> int:
    """Return the first default level that is at least as long as a delay."""
    return bisect_left(_LEVELS_MS, delay_ms) + 1


class ConsumeContext(Struct, gc=False):
    """The source of the messages, and how to interpret the listener's result.

    ::

        def handle(messages, context):
            context.delay_level = 5            # if they fail: redeliver in a minute
            ...
    """

    group: str
    queue: MessageQueue

    acknowledged: int | None = None
    """Concurrent: how many messages, from the first on, SUCCESS covers; None means all."""

    delay_level: int = 0
    """Concurrent: the delay level of failed messages; 0 lets the delay grow with each attempt.
    -1, also when orderly, dead-letters them immediately."""

    auto_commit: bool = True
    """Orderly: whether SUCCESS commits, or only COMMIT does."""

    suspend: Duration | None = None
    """Orderly: how long the queue pauses after RETRY_LATER; None uses the consumer's setting."""

    outcome: ConsumeOutcome | None = None
    """For hooks: how the call ended; None before."""

    def accept(self, answer: RetryLater | GiveUp) -> None:
        """Take over how failed messages are to be treated."""
        if isinstance(answer, GiveUp):
            self.delay_level = DEAD_LETTER_LEVEL
        else:
            self.delay_level = answer.delay_level or self.delay_level
            self.suspend = self.suspend if answer.delay is None else answer.delay


class Verdict(Struct, frozen=True):
    """The outcome of a call of the listener."""

    result: ConsumeResult
    spent_ms: int = 0
    error: BaseException | None = None
    is_none: bool = False
    """Whether the listener returned None, which counts as `ConsumeResult.RETRY_LATER`."""


# --- concurrent -----------------------------------------------------------------------------------


def acknowledged_count(result: ConsumeResult, wanted: int | None, count: int) -> int:
    """Return how many messages of a batch, from the first on, are processed."""
    if result in (ConsumeResult.RETRY_LATER, ConsumeResult.ROLLBACK):
        return 0
    return count if wanted is None else max(0, min(wanted, count))


# --- orderly --------------------------------------------------------------------------------------


class OrderlyStep(Enum):
    """What to do with the messages of an orderly call."""

    COMMIT = "commit"
    KEEP = "keep"
    ROLLBACK = "rollback"
    SUSPEND = "suspend"

    @property
    def continues(self) -> bool:
        return self in (OrderlyStep.COMMIT, OrderlyStep.KEEP)


def orderly_step(result: ConsumeResult, *, auto_commit: bool) -> OrderlyStep:
    """Interpret a result; manual commits require ``auto_commit`` off."""
    match result:
        case ConsumeResult.RETRY_LATER:
            return OrderlyStep.SUSPEND
        case ConsumeResult.SUCCESS:
            return OrderlyStep.COMMIT if auto_commit else OrderlyStep.KEEP
        case ConsumeResult.COMMIT:
            return OrderlyStep.COMMIT
        case ConsumeResult.ROLLBACK:
            return OrderlyStep.COMMIT if auto_commit else OrderlyStep.ROLLBACK


def suspend_time_ms(wanted: Duration | None, default_ms: int) -> int:
    wanted_ms = default_ms if wanted is None else as_milliseconds(wanted)
    return round(min(max(SUSPEND_MS_MIN, wanted_ms), SUSPEND_MS_MAX))


def attempts(
    messages: Iterable[MessageView], max_attempts: int
) -> tuple[list[MessageView], list[MessageView]]:
    """Return messages to retry, with their attempts counted up, and those without any left."""
    again, exhausted = [], []
    for message in messages:
        if message.reconsume_times < max_attempts:
            again.append(with_next_attempt(message))
        else:
            exhausted.append(message)
    return again, exhausted


def with_next_attempt(message: MessageView) -> MessageView:
    """Return the message as the listener sees it on the next attempt."""
    return message.replaced(reconsume_times=message.reconsume_times + 1)
