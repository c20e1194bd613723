"""What the source offers to a consumer: tags by topic, a task per queue, a start position."""

from __future__ import annotations

import re

import pytest

from turbopump.errors import InvalidArgument
from turbopump.filters.sql92 import Sql
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import PlanLimits, QueueRange, plan
from turbopump.spark.reading.positions import AtTime, Earliest, Latest, OfGroup, parse_position


def parsed(**options: str) -> SourceOptions:
    given = {"nameserver": "127.0.0.1:9876", "topics": "orders,refunds", "group": "billing"}
    return SourceOptions.for_stream(given | options)


def test_tags_can_differ_by_topic() -> None:
    pulling = parsed(tags='{"orders": "a || b", "refunds": "*"}').pulling
    assert pulling.of("orders").tags == frozenset({"a", "b"})
    assert pulling.of("orders").is_filtered
    assert pulling.of("refunds") is pulling
    assert not pulling.is_filtered


@pytest.mark.parametrize(
    ("tags", "told"),
    [
        ("{", "option tags must be JSON"),
        ('{"orders": 7}', "option tags: the tag expression of topic 'orders' is 7"),
        ('{"order": "a"}', "option tags names order, which is not read"),
        ('{"orders": " || "}', "the tag expression of topic 'orders' is ' || ', which has no tag"),
        ('{"orders": "a | b"}', "asks for a tag named 'a | b': write 'a || b'"),
        ("a, b", "option tags is 'a, b', which asks for a tag named 'a, b': write 'a || b'"),
        ('{"orders": false}', "the tag expression of topic 'orders' is False"),
    ],
)
def test_invalid_tags_by_topic_are_reported(tags: str, told: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parsed(tags=tags)
    assert told in str(raised.value)


def test_expressions_can_differ_by_topic() -> None:
    pulling = parsed(sql='{"orders": "a > 1"}', tags='{"refunds": "x"}').pulling
    assert pulling.of("orders").expression == Sql("a > 1")
    assert pulling.of("orders").is_filtered
    assert pulling.of("refunds").tags == frozenset({"x"})
    assert pulling.of("others") is pulling
    assert not pulling.is_filtered


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sql": "{"}, "option sql must be JSON"),
        (
            {"sql": '{"orders": 7}'},
            "option sql: the expression of topic 'orders' must be an SQL92 expression, got 7",
        ),
        ({"sql": '{"orders": "a >"}'}, "is 'a >': expected a property name, a constant or ("),
        ({"sql": '{"order": "a = 1"}'}, "option sql names order, which is not read"),
        (
            {"sql": '{"orders": "a = 1"}', "tags": '{"orders": "x"}'},
            "options tags and sql both name orders",
        ),
        (
            {"sql": '{"orders": "a = 1"}', "tags": "x"},
            "tags and sql are mutually exclusive, unless both are JSON by topic",
        ),
    ],
)
def test_invalid_expressions_by_topic_are_reported(options: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parsed(**options)
    assert told in str(raised.value)


@pytest.mark.parametrize("tags", [" ", "|| ||"])
def test_empty_tags_are_reported(tags: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"option tags is {tags!r}, which has no")):
        parsed(tags=tags)


@pytest.mark.parametrize("tags", [" * ", '{"orders": " * "}'])
def test_star_is_everything_only_without_blanks_as_elsewhere(tags: str) -> None:
    with pytest.raises(InvalidArgument, match=r"' \* ', which asks for a tag named '\*'"):
        parsed(tags=tags)


@pytest.mark.parametrize("tags", ["", "*", '{"orders": null, "refunds": ""}'])
def test_no_tags_mean_everything(tags: str) -> None:
    pulling = parsed(tags=tags).pulling
    assert not pulling.of("orders").is_filtered
    assert not pulling.of("refunds").is_filtered


def test_each_queue_can_have_its_own_task() -> None:
    few, many = QueueRange("orders", "a", 1, 5, 6), QueueRange("orders", "a", 0, 0, 1_000_000)
    assert plan([few, many], PlanLimits(is_per_queue=True)) == [(many,), (few,)]
    assert parsed(partitionPerQueue="true").plan == PlanLimits(is_per_queue=True)
    with pytest.raises(
        InvalidArgument, match="partitionPerQueue and minPartitions are mutually exclusive"
    ):
        parsed(partitionPerQueue="true", minPartitions="4")


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("group", OfGroup()),
        ("group,earliest", OfGroup(Earliest())),
        ("Group, latest", OfGroup(Latest())),
        ("group,1769817600000", OfGroup(AtTime(1769817600000))),
    ],
)
def test_a_group_position_may_name_a_fallback(text: str, position: OfGroup) -> None:
    assert parse_position("startingOffsets", text) == position


@pytest.mark.parametrize("text", ["group,group", 'group,{"orders": {"0": 1}}', "group,", "a,b"])
def test_an_invalid_fallback_of_a_group_position_is_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument, match="option startingOffsets must be earliest"):
        parse_position("startingOffsets", text)
