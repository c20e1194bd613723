"""Results of a listener and their effects. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from turbopump.message import MessageQueue
from turbopump.wire.record import MessageView

SUSPEND_MS_MIN = 10
SUSPEND_MS_MAX = 30_000


class ConsumeResult(Enum):
    """A listener's result for the messages of a call; raising means `RETRY_LATER`.

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

    suspend_ms: int | None = None
    """Orderly: how long the queue pauses after RETRY_LATER; None uses the consumer's setting."""

    outcome: ConsumeOutcome | None = None
    """For hooks: how the call ended; None before."""


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


def suspend_time_ms(wanted: int | None, default_ms: int) -> int:
    return min(max(default_ms if wanted is None else wanted, SUSPEND_MS_MIN), SUSPEND_MS_MAX)


def attempts(
    messages: Iterable[MessageView], attempts_max: int
) -> tuple[list[MessageView], list[MessageView]]:
    """Return messages to retry, with their attempts counted up, and those without any left."""
    again, exhausted = [], []
    for message in messages:
        if message.reconsume_times < attempts_max:
            again.append(with_next_attempt(message))
        else:
            exhausted.append(message)
    return again, exhausted


def with_next_attempt(message: MessageView) -> MessageView:
    """Return the message as the listener sees it on the next attempt."""
    return replace(message, reconsume_times=message.reconsume_times + 1)
