"""When which rows are sent: pure functions."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import InvalidArgument
from turbopump.spark.pipelines.pacing import SLICE_MS, SPEED_MIN, Pace, Pacer, Slice, slices


def times(*ms: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(ms, np.int64)


def test_without_a_pace_rows_go_in_large_slices() -> None:
    found = list(slices(np.zeros(2500, np.int64), 0, Pace(), rows_max=1000))
    assert found == [Slice(0, 1000, 0.0), Slice(1000, 2000, 0.0), Slice(2000, 2500, 0.0)]


def test_original_spacing_is_preserved() -> None:
    found = list(slices(times(1000, 1010, 1100, 3000), 1000, Pace(speed=1.0)))
    assert found == [Slice(0, 2, 0.0), Slice(2, 3, 0.1), Slice(3, 4, 2.0)]


def test_original_spacing_is_sped_up() -> None:
    found = list(slices(times(1000, 2000, 3000), 1000, Pace(speed=10.0)))
    assert [each.offset_s for each in found] == [0.0, 0.1, 0.2]


def test_earliest_time_is_that_of_all_tasks() -> None:
    (found,) = slices(times(5000), 1000, Pace(speed=1.0))
    assert found.offset_s == 4.0


def test_rows_without_a_time_are_due_first() -> None:
    found = list(slices(times(0, 1000, 2000), 1000, Pace(speed=1.0)))
    assert found == [Slice(0, 2, 0.0), Slice(2, 3, 1.0)]


def test_rate_makes_slices_small() -> None:
    assert [each.end - each.start for each in slices(times(*[0] * 5), 0, Pace(40.0))] == [2, 2, 1]
    assert [each.end - each.start for each in slices(times(0, 0), 0, Pace(0.5))] == [1, 1]


def test_no_rows_make_no_slices() -> None:
    assert list(slices(times(), 0, Pace(speed=1.0))) == []
    assert list(slices(times(), 0, Pace())) == []


@given(
    st.lists(st.integers(0, 100_000), max_size=50),
    st.none() | st.floats(0.1, 1000),
    st.none() | st.floats(0.1, 1000),
)
def test_slices_cover_all_rows_in_order(
    stored: list[int], rate: float | None, speed: float | None
) -> None:
    found = list(slices(times(*sorted(stored)), 0, Pace(rate, speed)))
    assert [row for each in found for row in range(each.start, each.end)] == list(
        range(len(stored))
    )
    offsets = [each.offset_s for each in found]
    assert offsets == sorted(offsets)


def test_rows_wait_for_their_time() -> None:
    pacer = Pacer(Pace(speed=1.0), start_s=100.0)
    assert pacer.wait_s(Slice(0, 1, 2.5), 100.0) == 2.5
    assert pacer.wait_s(Slice(0, 1, 2.5), 200.0) == 0.0


def test_rate_is_never_exceeded_even_after_a_pause() -> None:
    pacer = Pacer(Pace(10.0), start_s=0.0)
    now_s, sent = 0.0, []
    for backoff_s in (0.0, 0.0, 5.0, 0.0, 0.0):
        now_s += backoff_s
        now_s += pacer.wait_s(Slice(0, 2, 0.0), now_s)
        pacer.sent(2, now_s)
        sent.append(now_s)
    assert sent == pytest.approx([0.0, 0.2, 5.2, 5.4, 5.6])


def test_tasks_share_the_rate_by_their_rows() -> None:
    assert Pace(100.0, 2.0).shared(0.25) == Pace(25.0, 2.0)
    assert Pace().shared(0.25) == Pace()


def test_duration_is_the_longer_one() -> None:
    assert Pace(10.0).duration_s(100, 3000) == 10.0
    assert Pace(10.0, 0.1).duration_s(100, 3000) == 30.0
    assert Pace().duration_s(100, 3000) == 0.0
    assert SLICE_MS > 0


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_pace_is_named(value: float) -> None:
    with pytest.raises(InvalidArgument, match=f"rate_per_s must be a number above 0, got {value}"):
        Pace(value)
    with pytest.raises(
        InvalidArgument, match=f"speed must be a number, 0.001 or more, got {value}"
    ):
        Pace(speed=value)


@pytest.mark.parametrize("value", [1e-300, 0.0009, "3"])
def test_bad_speed_is_named(value: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=f"speed must be a number, 0.001 or more, got {value!r}"
    ):
        Pace(speed=value)


def test_bad_rate_is_named() -> None:
    rate: Any = "3"
    with pytest.raises(InvalidArgument, match="rate_per_s must be a number above 0, got '3'"):
        Pace(rate)


def test_least_speed_and_rate_wait_for_what_is_far_away() -> None:
    """Times beyond the range of the platform would come out as none at all."""
    pace = Pace(1e-300, SPEED_MIN)
    (near, far) = slices(times(0, 10_000 * 365 * 86_400_000), 0, pace)
    assert (near.offset_s, far.offset_s) == (0.0, 10_000 * 365 * 86_400 / SPEED_MIN)
    pacer = Pacer(pace, 0.0)
    assert pacer.wait_s(near, 0.0) == 0.0
    for due in (far, near):
        pacer.sent(1, 0.0)
        assert 30 * 365 * 86_400 < pacer.wait_s(due, 0.0) < threading.TIMEOUT_MAX
