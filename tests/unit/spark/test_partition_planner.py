"""Which task reads what: everything once, in order, and the same each time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_counts import at_most
from turbopump.message import MessageQueue
from turbopump.spark.reading.partition_planner import (
    PACKED_ROWS_MAX,
    SKEW_ROWS_MIN,
    Partition,
    PlanLimits,
    QueueRange,
    plan,
    ranges_between,
)

QUICKLY = settings(max_examples=at_most(50), deadline=None)


def of(queue_id: int, start: int, end: int) -> QueueRange:
    return QueueRange("t", "a", queue_id, start, end)


RANGES = st.dictionaries(
    st.integers(0, 20), st.tuples(st.integers(0, 1000), st.integers(1, 400)), max_size=10
).map(lambda made: [of(number, start, start + rows) for number, (start, rows) in made.items()])
LIMITS = st.builds(
    PlanLimits,
    st.none() | st.integers(1, 40),
    st.none() | st.integers(20, 500),
)


@given(RANGES, LIMITS)
@QUICKLY
def test_everything_is_read_once_and_in_order(ranges: list[QueueRange], limits: PlanLimits) -> None:
    planned = plan(ranges, limits)
    pieces = [piece for partition in planned for piece in partition]
    by_queue: dict[MessageQueue, list[QueueRange]] = {}
    for piece in pieces:
        assert piece.rows > 0
        by_queue.setdefault(piece.queue, []).append(piece)
    assert len(by_queue) == len(ranges)
    for whole in ranges:
        parts = by_queue[whole.queue]
        assert parts[0].start == whole.start
        assert parts[-1].end == whole.end
        assert all(one.end == other.start for one, other in pairwise(parts))
    assert plan(list(reversed(ranges)), limits) == planned


@given(RANGES, LIMITS)
@QUICKLY
def test_limits_are_respected(ranges: list[QueueRange], limits: PlanLimits) -> None:
    planned = plan(ranges, limits)
    rows_max = limits.rows_per_partition_max
    if rows_max is not None:
        assert all(sum(piece.rows for piece in partition) <= rows_max for partition in planned)
    assert all(
        len(partition) == 1 or sum(piece.rows for piece in partition) <= PACKED_ROWS_MAX
        for partition in planned
    )


def test_large_ranges_are_split_in_proportion() -> None:
    planned = plan([of(0, 0, 3000), of(1, 0, 1000)], PlanLimits(partitions_min=4))
    assert [[str(piece) for piece in partition] for partition in planned] == [
        ["t@a:0[0, 1000)"],
        ["t@a:0[1000, 2000)"],
        ["t@a:0[2000, 3000)"],
        ["t@a:1[0, 1000)"],
    ]


@pytest.mark.parametrize("partitions_min", range(1, 12))
@pytest.mark.parametrize("rows", [[100_000] * 3, [7, 100_000, 3], [5, 5], [1, 2, 40]])
def test_there_are_at_least_as_many_tasks_as_requested(
    partitions_min: int, rows: list[int]
) -> None:
    ranges = [of(number, 0, count) for number, count in enumerate(rows)]
    planned = plan(ranges, PlanLimits(partitions_min))
    assert len(planned) >= min(partitions_min, sum(rows))
    assert len(planned) <= max(partitions_min, len(ranges)) + len(ranges)


def test_small_ranges_share_a_task() -> None:
    many = [of(number, 0, 10) for number in range(100)]
    assert plan(many) == [tuple(many)]
    assert len(plan(many, PlanLimits(partitions_min=100))) == 100
    assert len(plan([of(0, 0, PACKED_ROWS_MAX), of(1, 0, 1)])) == 2


@pytest.mark.parametrize("partitions_min", [4, 8])
def test_many_small_ranges_share_tasks_however_many_are_requested(partitions_min: int) -> None:
    planned = plan([of(number, 0, 10) for number in range(2000)], PlanLimits(partitions_min))
    assert partitions_min <= len(planned) <= 2 * partitions_min


def test_what_lies_between_two_offsets() -> None:
    queues = [MessageQueue("t", "a", number) for number in range(4)]
    start = {queues[0]: 5, queues[1]: 5, queues[2]: 7}
    end = {queues[0]: 9, queues[1]: 5, queues[2]: 2, queues[3]: 100}
    # Nothing of a queue that has no new messages, was re-created, or was unknown before.
    assert ranges_between(start, end) == [of(0, 5, 9)]
    assert ranges_between({}, end) == []
    assert plan([]) == []


def sizes(planned: list[Partition]) -> list[list[int]]:
    return [[piece.rows for piece in partition] for partition in planned]


def test_a_queue_that_dwarfs_the_others_is_split_as_if_messages_were_spread_evenly() -> None:
    million = 1_000_000
    others = [of(number, 0, 1000) for number in (1, 2, 3)]
    split = sizes(plan([of(0, 7, million + 7), *others]))
    assert split == [[million // 4]] * 4 + [[1000] * 3]
    assert sizes(plan([of(0, 0, million), of(1, 0, 1)])) == [[million // 2]] * 2 + [[1]]
    assert sizes(plan([of(0, 0, million)], queues=8)) == [[million // 8]] * 8, "others are empty"


@pytest.mark.parametrize(
    ("rows", "queues"),
    [
        ([1_000_000], 1),
        ([1_000_000, 250_000, 200_000, 200_000], 4),
        ([SKEW_ROWS_MIN * 7 // 5, 10, 10, 10], 4),
    ],
    ids=["only one queue", "within five times the average", "small"],
)
def test_other_queues_stay_whole(rows: list[int], queues: int) -> None:
    planned = plan([of(number, 0, each) for number, each in enumerate(rows)], queues=queues)
    assert planned[0][0] == of(0, 0, rows[0])


def test_a_task_per_queue_is_never_split() -> None:
    many = of(0, 0, 10_000_000)
    assert plan([many, of(1, 0, 1)], PlanLimits(is_per_queue=True), queues=9)[0] == (many,)
