"""What a listener answers, and what follows from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from turbopump.message import MessageQueue
from turbopump.wire.record import MessageView

SUSPEND_MS_MIN = 10
SUSPEND_MS_MAX = 30_000
ATTEMPTS_MAX_CONCURRENT = 16
ATTEMPTS_MAX_ORDERLY = 2**31 - 1


class ConsumeResult(Enum):
    """What a listener says of the messages it was given; raising means `RETRY_LATER`.

    ::

        def handle(messages, context):
            return ConsumeResult.SUCCESS if paid(messages) else ConsumeResult.RETRY_LATER
    """

    SUCCESS = "success"
    """They are done."""

    RETRY_LATER = "retry later"
    """They are not. Concurrent: each goes back to the broker and comes again after a delay.
    Orderly: the queue pauses for a moment, then the same messages come again."""

    COMMIT = "commit"
    """Orderly with ``context.auto_commit`` off: all messages since the last commit are done."""

    ROLLBACK = "rollback"
    """Orderly with ``context.auto_commit`` off: all messages since the last commit come again."""


class ConsumeContext(Struct, gc=False):
    """Where messages come from, and how the listener wants its answer to be understood.

    ::

        def handle(messages, context):
            context.delay_level = 5            # if they fail: come again in a minute
            ...
    """

    group: str
    queue: MessageQueue

    acknowledged: int | None = None
    """Concurrent: how many of the messages, from the first on, a SUCCESS means; None means all."""

    delay_level: int = 0
    """Concurrent: the delay of messages that failed; 0 lets it grow with each attempt. -1, also
    when orderly, makes dead letters of them immediately."""

    auto_commit: bool = True
    """Orderly: whether a SUCCESS commits, or only a COMMIT does."""

    suspend_ms: int | None = None
    """Orderly: how long the queue pauses after RETRY_LATER; None takes the consumer's setting."""


class Verdict(Struct, frozen=True):
    """How a call of the listener ended."""

    result: ConsumeResult
    spent_ms: int = 0
    error: BaseException | None = None
    is_none: bool = False
    """Whether the listener answered nothing, which counts as `ConsumeResult.RETRY_LATER`."""


# --- concurrent -----------------------------------------------------------------------------------


def acknowledged_count(result: ConsumeResult, wanted: int | None, count: int) -> int:
    """Return how many of a batch's messages, from the first on, are done."""
    if result in (ConsumeResult.RETRY_LATER, ConsumeResult.ROLLBACK):
        return 0
    return count if wanted is None else max(0, min(wanted, count))


# --- orderly --------------------------------------------------------------------------------------


class OrderlyStep(Enum):
    """What to do with the messages an orderly listener was given."""

    COMMIT = "commit"
    KEEP = "keep"
    ROLLBACK = "rollback"
    SUSPEND = "suspend"

    @property
    def continues(self) -> bool:
        """Whether the next messages follow at once."""
        return self in (OrderlyStep.COMMIT, OrderlyStep.KEEP)


def orderly_step(result: ConsumeResult, *, auto_commit: bool) -> OrderlyStep:
    """Decide what an answer means; committing by hand is only for those who asked for it."""
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
    """Return how long a queue pauses."""
    return min(max(default_ms if wanted is None else wanted, SUSPEND_MS_MIN), SUSPEND_MS_MAX)


@dataclass(frozen=True, slots=True)
class Attempts:
    """Messages that may be tried again, counted up, and those that were tried often enough."""

    again: list[MessageView]
    exhausted: list[MessageView]


def attempts(messages: Iterable[MessageView], attempts_max: int) -> Attempts:
    """Tell which messages may be tried once more."""
    again, exhausted = [], []
    for message in messages:
        if message.reconsume_times < attempts_max:
            again.append(with_next_attempt(message))
        else:
            exhausted.append(message)
    return Attempts(again, exhausted)


def with_next_attempt(message: MessageView) -> MessageView:
    """Return the message as its listener sees it the next time."""
    return replace(message, reconsume_times=message.reconsume_times + 1)
