"""Results of a function on the executors and their effects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from turbopump.client.delivery.results import ConsumeResult, GiveUp, RetryLater
from turbopump.errors import InvalidArgument

SUCCESS: Final = ConsumeResult.SUCCESS

Outcome: TypeAlias = Literal[ConsumeResult.SUCCESS] | RetryLater | GiveUp
"""The outcome of one message."""

RETRY_LATER = RetryLater()
_ALLOWED = (
    "ConsumeResult.SUCCESS, ConsumeResult.RETRY_LATER, RetryLater(delay), GiveUp(), True or False"
)


def outcome_of(answer: object) -> Outcome:
    """Interpret the result for one message; raises InvalidArgument for an invalid one."""
    if isinstance(answer, RetryLater | GiveUp):
        return answer
    if answer is SUCCESS:
        return SUCCESS
    if answer is ConsumeResult.RETRY_LATER:
        return RETRY_LATER
    if isinstance(answer, bool | np.bool_):
        return SUCCESS if answer else RETRY_LATER
    raise InvalidArgument(f"handler must return {_ALLOWED}, got {_short(answer)}")


def outcomes_of(answers: object, count: int) -> list[Outcome]:
    """Interpret the results for several messages: one for all, or one for each.

    Results for each may be a list, or a boolean array or column of NumPy, pandas or Arrow. Raises
    InvalidArgument if they are none of these, or if their number differs from the messages'.
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
    """Return results for each message as a list, or None if there is one for all."""
    if isinstance(answers, list | tuple):
        return answers
    if isinstance(answers, np.generic):
        return None
    # Arrow's method first: older versions of its columns have only that.
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
    """What to do after a call with messages of one queue, keeping their order."""

    done: tuple[int, ...]
    given_up: tuple[int, ...]
    exhausted: tuple[int, ...]
    """Rows without attempts left."""

    rest: int
    """All rows from this one on are redelivered; the number of rows if none is."""


def ordered_step(
    outcomes: Sequence[Outcome], reconsume_times: Sequence[int], max_attempts: int
) -> OrderedStep:
    """Decide in message order; a message to retry holds up all those behind it.

    Messages behind it are redelivered with it even if they succeeded, since the function saw them
    too early.
    """
    done: list[int] = []
    given_up: list[int] = []
    exhausted: list[int] = []
    for row, outcome in enumerate(outcomes):
        if outcome is SUCCESS:
            done.append(row)
        elif isinstance(outcome, GiveUp):
            given_up.append(row)
        elif reconsume_times[row] >= max_attempts:
            exhausted.append(row)
        else:
            return OrderedStep(tuple(done), tuple(given_up), tuple(exhausted), row)
    return OrderedStep(tuple(done), tuple(given_up), tuple(exhausted), len(outcomes))
