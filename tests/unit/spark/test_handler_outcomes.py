"""What the results of a function mean, and how a queue continues after them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump import ConsumeResult, GiveUp, RetryLater
from turbopump.errors import InvalidArgument
from turbopump.spark.consuming.outcomes import (
    SUCCESS,
    Outcome,
    ordered_step,
    outcome_of,
    outcomes_of,
)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (ConsumeResult.SUCCESS, SUCCESS),
        (ConsumeResult.RETRY_LATER, RetryLater()),
        (RetryLater(delay_level=5), RetryLater(delay_level=5)),
        (RetryLater(60), RetryLater(60)),
        (GiveUp(), GiveUp()),
        (True, SUCCESS),
        (False, RetryLater()),
        (np.bool_(True), SUCCESS),
        (np.bool_(False), RetryLater()),
    ],
)
def test_answer_for_one_message(answer: object, outcome: Outcome) -> None:
    assert outcome_of(answer) == outcome


@pytest.mark.parametrize("answer", [None, 1, "success", ConsumeResult.COMMIT, b"x" * 1000])
def test_an_invalid_answer_is_reported(answer: object) -> None:
    with pytest.raises(
        InvalidArgument, match=r"handler must return .*True or False, got"
    ) as raised:
        outcome_of(answer)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    "answers",
    [
        [True, False, ConsumeResult.SUCCESS],
        (SUCCESS, RetryLater(), True),
        np.array([True, False, True]),
        pa.array([True, False, True]),
        pa.chunked_array([[True], [False, True]]),
    ],
)
def test_answers_for_each_message(answers: object) -> None:
    assert outcomes_of(answers, 3) == [SUCCESS, RetryLater(), SUCCESS]


@pytest.mark.parametrize("answer", [True, np.bool_(True), ConsumeResult.SUCCESS])
def test_one_answer_is_for_all(answer: object) -> None:
    assert outcomes_of(answer, 3) == [SUCCESS] * 3
    assert outcomes_of(GiveUp(), 2) == [GiveUp(), GiveUp()]


def test_answers_must_be_as_many_as_messages() -> None:
    with pytest.raises(InvalidArgument, match="got 2 results for 3 messages"):
        outcomes_of([True, True], 3)
    with pytest.raises(InvalidArgument, match="got None"):
        outcomes_of(pa.array([True, None]), 2)
    with pytest.raises(InvalidArgument, match="got None"):
        outcomes_of(None, 2)


@pytest.mark.parametrize("level", [-1, 1.5, True, "3", 2**31])
def test_delay_level_must_be_one(level: object) -> None:
    with pytest.raises(InvalidArgument, match="delay_level must be "):
        RetryLater(delay_level=level)  # type: ignore[arg-type]


# --- order ----------------------------------------------------------------------------------------

OUTCOMES: st.SearchStrategy[Outcome] = st.sampled_from([SUCCESS, RetryLater(), GiveUp()])


@given(st.lists(st.tuples(OUTCOMES, st.integers(0, 4))))
def test_order_is_preserved_up_to_the_first_redelivered_message(
    rows: list[tuple[Outcome, int]],
) -> None:
    outcomes, times = [outcome for outcome, _ in rows], [count for _, count in rows]
    step = ordered_step(outcomes, times, 2)
    find_unreadable = sorted((*step.done, *step.given_up, *step.exhausted))
    assert find_unreadable == list(range(step.rest))
    for row in range(step.rest):
        may_come_again = outcomes[row] == RetryLater() and times[row] < 2
        assert not may_come_again
    if step.rest < len(rows):
        assert outcomes[step.rest] == RetryLater()
        assert times[step.rest] < 2
    assert all(outcomes[row] is SUCCESS for row in step.done)
    assert all(outcomes[row] == GiveUp() for row in step.given_up)
    assert all(times[row] >= 2 for row in step.exhausted)
