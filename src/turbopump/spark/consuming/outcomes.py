"""What a function on the executors answers for messages, and what follows from it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from turbopump.client.delivery.results import ConsumeResult
from turbopump.errors import InvalidArgument

_LEVEL_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The message failed and is to come again.

    ::

        return RetryLater(delay_level=5)      # in a minute, with the broker's default delays
    """

    delay_level: int = 0
    """Which of the broker's delays, from 1 on; 0 lets the delay grow with each attempt."""

    def __post_init__(self) -> None:
        level: object = self.delay_level
        if not isinstance(level, int) or isinstance(level, bool) or not 0 <= level <= _LEVEL_MAX:
            raise InvalidArgument(
                f"delay_level must be 1 or more, or 0 for a delay that grows with each attempt, "
                f"got {level!r}"
            )


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The message failed and always will: it becomes a dead letter at once."""


SUCCESS: Final = ConsumeResult.SUCCESS

Outcome: TypeAlias = Literal[ConsumeResult.SUCCESS] | RetryLater | GiveUp
"""What became of one message."""

Answer: TypeAlias = ConsumeResult | RetryLater | GiveUp | bool
"""What a function may say of a message: True is success, False is to be tried again later."""

_RETRY_LATER = RetryLater()
_ALLOWED = (
    "ConsumeResult.SUCCESS, ConsumeResult.RETRY_LATER, RetryLater(delay_level), GiveUp(), True or "
    "False"
)


def outcome_of(answer: object) -> Outcome:
    """Read the answer for one message; raises InvalidArgument for anything that is none."""
    if isinstance(answer, RetryLater | GiveUp):
        return answer
    if answer is SUCCESS:
        return SUCCESS
    if answer is ConsumeResult.RETRY_LATER:
        return _RETRY_LATER
    if isinstance(answer, bool | np.bool_):
        return SUCCESS if answer else _RETRY_LATER
    raise InvalidArgument(f"handler must return {_ALLOWED}, got {_short(answer)}")


def outcomes_of(answers: object, count: int) -> list[Outcome]:
    """Read what a function answered for several messages: once for all, or once for each.

    Answers for each may be a list, or an array or column of booleans as NumPy, pandas and Arrow
    have them. Raises InvalidArgument if they are none, or not as many as the messages.
    """
    listed = _listed(answers)
    if listed is None:
        return [outcome_of(answers)] * count
    if len(listed) != count:
        raise InvalidArgument(
            f"handler must return one result, or one per message: got {len(listed)} results for "
            f"{count} messages"
        )
    return [outcome_of(answer) for answer in listed]


def _listed(answers: object) -> Sequence[object] | None:
    """Return answers for each message as a list, None if it is one for all."""
    if isinstance(answers, list | tuple):
        return answers
    if isinstance(answers, np.generic):
        return None
    # Arrow's way comes first: older versions of its columns have only that.
    for name in ("to_pylist", "tolist"):
        listed = getattr(answers, name, None)
        if callable(listed):
            found = listed()
            return found if isinstance(found, list) else None
    return None


def _short(answer: object) -> str:
    text = repr(answer)
    return text if len(text) <= 100 else f"{text[:100]}…"


@dataclass(frozen=True, slots=True)
class OrderedStep:
    """What to do after a call with messages of one queue, whose order is to be kept."""

    done: tuple[int, ...]
    given_up: tuple[int, ...]
    exhausted: tuple[int, ...]
    """Rows that were tried often enough."""

    rest: int
    """From this row on, all come again; the number of rows if none does."""


def ordered_step(
    outcomes: Sequence[Outcome], reconsume_times: Sequence[int], attempts_max: int
) -> OrderedStep:
    """Decide from the first message on; one that is to be tried again holds up all behind it.

    What stands behind it comes again with it even if it was answered with success, as the function
    has seen it too early.
    """
    done: list[int] = []
    given_up: list[int] = []
    exhausted: list[int] = []
    for row, outcome in enumerate(outcomes):
        if outcome is SUCCESS:
            done.append(row)
        elif isinstance(outcome, GiveUp):
            given_up.append(row)
        elif reconsume_times[row] >= attempts_max:
            exhausted.append(row)
        else:
            return OrderedStep(tuple(done), tuple(given_up), tuple(exhausted), row)
    return OrderedStep(tuple(done), tuple(given_up), tuple(exhausted), len(outcomes))
