"""Filters as hints: what they leave of ranges, never less than what passes them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from turbopump.message import MessageQueue
from turbopump.spark.reading.filter_pushdown import (
    Bounds,
    cut,
    ranges_at_offsets,
    scan_bounds,
    with_tags,
)
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import QueueRange

T0 = datetime(2026, 1, 31, 8, tzinfo=UTC)
T0_MS = round(T0.timestamp() * 1000)


def of(queue_id: int, start: int, end: int, topic: str = "t") -> QueueRange:
    return QueueRange(topic, "a", queue_id, start, end)


WHOLE = [of(0, 0, 100), of(1, 50, 80), of(2, 0, 10, "u")]


def left(*filters: Filter) -> list[str]:
    return [str(each) for each in cut(WHOLE, scan_bounds(filters), {})]


def test_without_filters_all_is_left() -> None:
    assert cut(WHOLE, scan_bounds([]), {}) == WHOLE


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([EqualTo(("queueId",), 1)], ["t@a:1[50, 80)"]),
        ([In(("queueId",), (2, 3))], ["u@a:2[0, 10)"]),
        ([GreaterThan(("queueId",), 0), LessThan(("queueId",), 2)], ["t@a:1[50, 80)"]),
        ([EqualTo(("topic",), "u")], ["u@a:2[0, 10)"]),
        ([EqualTo(("topic",), "u"), EqualTo(("topic",), "t")], []),
        ([EqualTo(("broker",), "b")], []),
        (
            [EqualNullSafe(("broker",), "a"), EqualTo(("queueOffset",), 60)],
            ["t@a:0[60, 61)", "t@a:1[60, 61)"],
        ),
        ([GreaterThanOrEqual(("queueOffset",), 70)], ["t@a:0[70, 100)", "t@a:1[70, 80)"]),
        ([GreaterThan(("queueOffset",), 98)], ["t@a:0[99, 100)"]),
        ([LessThanOrEqual(("queueOffset",), 0)], ["t@a:0[0, 1)", "u@a:2[0, 1)"]),
        ([LessThan(("queueOffset",), 0)], []),
        ([In(("queueOffset",), (3, 5))], ["t@a:0[3, 6)", "u@a:2[3, 6)"]),
    ],
)
def test_filters_narrow(filters: list[Filter], expected: list[str]) -> None:
    assert left(*filters) == expected


@pytest.mark.parametrize(
    "filters",
    [
        [Not(EqualTo(("queueId",), 1))],
        [EqualTo(("queueId",), None)],
        [EqualNullSafe(("topic",), None)],
        [In(("topic",), ("t", None))],
        [EqualTo(("queueOffset", "x"), 3)],
        [EqualTo(("queueOffset",), "3")],
        [IsNotNull(("queueId",))],
        [StringStartsWith(("topic",), "u")],
        [GreaterThan(("size",), 3)],
        [EqualTo(("storeTimestamp",), datetime(2026, 1, 1))],  # noqa: DTZ001 - of no known zone
    ],
)
def test_what_is_not_understood_narrows_nothing(filters: list[Filter]) -> None:
    found = scan_bounds(filters)
    assert cut(WHOLE, found, {}) == WHOLE
    assert found.stored_ms == Bounds()


@pytest.mark.parametrize("micros", [-1, 0, 1])
@pytest.mark.parametrize("kind", [GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual])
def test_times_are_bounded_to_the_millisecond(kind: Any, micros: int) -> None:
    value = T0 + timedelta(microseconds=micros)
    bounds = scan_bounds([kind(("storeTimestamp",), value)]).stored_ms
    passing: dict[Any, Callable[[datetime], bool]] = {
        GreaterThan: lambda stored: stored > value,
        GreaterThanOrEqual: lambda stored: stored >= value,
        LessThan: lambda stored: stored < value,
        LessThanOrEqual: lambda stored: stored <= value,
    }
    for stored_ms in range(T0_MS - 3, T0_MS + 4):
        stored = T0 + timedelta(milliseconds=stored_ms - T0_MS)
        assert bounds.has(stored_ms) == passing[kind](stored)


def test_times_are_cut_where_the_broker_found_them() -> None:
    found = scan_bounds([EqualTo(("storeTimestamp",), T0)])
    assert found.stored_ms == Bounds(T0_MS, T0_MS + 1)
    stored = {MessageQueue("t", "a", 0): (10, 20), MessageQueue("t", "a", 1): (0, 50)}
    assert [str(each) for each in cut(WHOLE, found, stored)] == ["t@a:0[10, 20)", "u@a:2[0, 10)"]


FILTERS = st.lists(
    st.builds(
        lambda kind, value: kind(("queueOffset",), value),
        st.sampled_from([EqualTo, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]),
        st.integers(-2, 12),
    )
    | st.builds(
        lambda values: In(("queueOffset",), tuple(values)),
        st.lists(st.integers(-2, 12), min_size=1, max_size=3),
    ),
    max_size=3,
)


def passes(offset: int, by: Any) -> bool:
    match by:
        case EqualTo(value=value):
            return bool(offset == value)
        case GreaterThan(value=value):
            return bool(offset > value)
        case GreaterThanOrEqual(value=value):
            return bool(offset >= value)
        case LessThan(value=value):
            return bool(offset < value)
        case LessThanOrEqual(value=value):
            return bool(offset <= value)
        case In(value=values):
            return offset in values
    raise AssertionError(by)


@given(FILTERS)
@settings(max_examples=50, deadline=None)
def test_nothing_that_passes_is_cut_off(filters: list[Filter]) -> None:
    kept = {
        offset
        for each in cut([of(0, 0, 10)], scan_bounds(filters), {})
        for offset in range(each.start, each.end)
    }
    assert {offset for offset in range(10) if all(passes(offset, by) for by in filters)} <= kept


def test_places_become_ranges() -> None:
    q0, q1 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1)
    places = [(q0, 4), (q0, 3), (q0, 9), (q1, 60), (q1, 200), (MessageQueue("v", "a", 0), 1)]
    assert [str(each) for each in ranges_at_offsets(WHOLE, places)] == [
        "t@a:0[3, 5)",
        "t@a:0[9, 10)",
        "t@a:1[60, 61)",
    ]


def options(**given: str) -> SourceOptions:
    return SourceOptions.for_batch({"nameserver": "127.0.0.1:1", "topic": "t", **given})


def tags_after(filters: list[Filter], **given: str) -> frozenset[str] | None:
    return with_tags(options(**given), filters).pulling.tags


def test_the_broker_filters_by_tags() -> None:
    wanted: list[Filter] = [In(("tags",), ("a", "b"))]
    assert tags_after(wanted) == frozenset({"a", "b"})
    assert tags_after(wanted, tags="b || c") == frozenset({"b"})
    assert tags_after([*wanted, EqualTo(("tags",), "a")]) == frozenset({"a"})
    assert tags_after([EqualTo(("tags",), "a || b")]) is None
    assert tags_after([EqualTo(("tags",), "*")]) is None
    assert tags_after([EqualTo(("tags",), None)]) is None
    assert tags_after(wanted, sql="a > 1") is None
    # What contradicts is left to Spark.
    assert tags_after(wanted, tags="c") == frozenset({"c"})
