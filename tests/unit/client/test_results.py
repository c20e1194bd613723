"""The consequences of a listener's result, and where a queue starts: decisions without IO."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from turbopump import GiveUp, PushConsumer, RetryLater
from turbopump.client.allocation import average
from turbopump.client.delivery.results import (
    ConsumeContext,
    ConsumeResult,
    OrderlyStep,
    acknowledged_count,
    attempts,
    orderly_step,
    suspend_time_ms,
)
from turbopump.client.push_config import FlowLimits, Listening, Pulling, PushSettings
from turbopump.client.rebalance import PULL_IDLE_MS_MAX, changes
from turbopump.client.start_position import (
    At,
    AtEnd,
    AtTime,
    Start,
    consume_from,
    start_in,
)
from turbopump.client.stats import ConsumerStats
from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue, PhysicalOffset, QueueOffset
from turbopump.wire.bodies import ConsumeFrom
from turbopump.wire.hosts import host
from turbopump.wire.record import MessageView, Record, decode_record

SUCCESS, LATER = ConsumeResult.SUCCESS, ConsumeResult.RETRY_LATER
COMMIT, ROLLBACK = ConsumeResult.COMMIT, ConsumeResult.ROLLBACK
MOMENT = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
QUEUES = [MessageQueue("T", "b", number) for number in range(4)]


@pytest.mark.parametrize(
    ("result", "wanted", "count"),
    [
        (SUCCESS, None, 5),
        (SUCCESS, 3, 3),
        (SUCCESS, 0, 0),
        (SUCCESS, -1, 0),
        (SUCCESS, 99, 5),
        (LATER, None, 0),
        (LATER, 3, 0),
        (ROLLBACK, None, 0),
    ],
)
def test_how_many_messages_are_acknowledged(
    result: ConsumeResult, wanted: int | None, count: int
) -> None:
    assert acknowledged_count(result, wanted, 5) == count


@pytest.mark.parametrize(
    ("result", "by_itself", "by_hand"),
    [
        (SUCCESS, OrderlyStep.COMMIT, OrderlyStep.KEEP),
        (COMMIT, OrderlyStep.COMMIT, OrderlyStep.COMMIT),
        (ROLLBACK, OrderlyStep.COMMIT, OrderlyStep.ROLLBACK),
        (LATER, OrderlyStep.SUSPEND, OrderlyStep.SUSPEND),
    ],
)
def test_what_an_orderly_answer_means(
    result: ConsumeResult, by_itself: OrderlyStep, by_hand: OrderlyStep
) -> None:
    assert orderly_step(result, auto_commit=True) is by_itself
    assert orderly_step(result, auto_commit=False) is by_hand


def test_a_pause_is_neither_too_short_nor_too_long() -> None:
    assert suspend_time_ms(None, 1000) == 1000
    assert suspend_time_ms(0.001, 1000) == 10
    assert suspend_time_ms(timedelta(seconds=2), 1000) == 2000
    assert suspend_time_ms(10**9, 1000) == 30_000


def message(reconsume_times: int) -> MessageView:
    record = Record(
        topic=b"T",
        queue_id=0,
        body=b"x",
        born_timestamp_ms=0,
        born_host=host("127.0.0.1", 1),
        store_host=host("127.0.0.1", 1),
        reconsume_times=reconsume_times,
    )
    return decode_record(record.encode(QueueOffset(0), PhysicalOffset(0), 0))


def test_messages_without_retries_left_are_separated() -> None:
    again, exhausted = attempts([message(0), message(2), message(3)], max_attempts=3)
    assert [each.reconsume_times for each in again] == [1, 3]
    assert [each.reconsume_times for each in exhausted] == [3]


@pytest.mark.parametrize(
    ("topic", "stored", "start_from", "start"),
    [
        ("T", 7, "last", At(QueueOffset(7))),
        ("T", 7, "first", At(QueueOffset(7))),
        ("T", 7, MOMENT, At(QueueOffset(7))),
        ("T", 0, "last", At(QueueOffset(0))),
        ("T", None, "last", AtEnd()),
        ("T", None, "first", At(QueueOffset(0))),
        ("T", None, MOMENT, AtTime(1714979289000)),
        ("%RETRY%g", None, "last", At(QueueOffset(0))),
        ("%RETRY%g", None, "first", At(QueueOffset(0))),
        ("%RETRY%g", None, MOMENT, AtEnd()),
        ("%RETRY%g", 3, MOMENT, At(QueueOffset(3))),
    ],
)
def test_where_a_queue_is_started(
    topic: str, stored: int | None, start_from: Any, start: Start
) -> None:
    offset = None if stored is None else QueueOffset(stored)
    assert start_in(topic, offset, start_from) == start


def test_any_other_start_is_rejected() -> None:
    other: Any = "middle"
    for decide in (consume_from, lambda start: start_in("T", None, start)):
        with pytest.raises(InvalidArgument, match=r"start_from must be .* got 'middle'"):
            decide(other)


def test_what_is_gained_and_lost() -> None:
    a, b, c, d = QUEUES
    now_ms = 1_000_000
    owned = {a: now_ms, b: now_ms, c: now_ms - PULL_IDLE_MS_MAX - 1}
    assert changes(owned, [b, c, d], now_ms) == ([c, d], [a, c])
    assert changes({a: now_ms}, [a], now_ms) == ([], [])
    assert changes({a: now_ms - PULL_IDLE_MS_MAX}, [a], now_ms) == ([], [])
    assert changes({}, [a], now_ms) == ([a], [])


def push_settings(**settings: Any) -> PushSettings:
    given: dict[str, Any] = {
        "start_from": "last",
        "strategy": average,
        "is_orderly": True,
        "is_broadcast": False,
        "flow": FlowLimits(),
        "pulling": Pulling(),
        "listening": Listening(),
        "concurrency": 20,
        "batch_size": 1,
        "max_attempts": None,
        "offsets_directory": None,
    }
    return PushSettings(**(given | settings))


def consuming(**settings: Any) -> PushConsumer:
    return PushConsumer("g", lambda *_: ConsumeResult.SUCCESS, nameserver="a:1", **settings)


@pytest.mark.parametrize(
    ("kind", "field", "value", "allowed"),
    [
        (FlowLimits, "messages_per_queue", 0, "1–65535"),
        (FlowLimits, "mebibytes_per_queue", 1025, "1–1024"),
        (FlowLimits, "span", True, "1–65535"),
        (FlowLimits, "messages_per_topic", 0, "1–6553500"),
        (FlowLimits, "mebibytes_per_topic", 102_401, "1–102400"),
        (Pulling, "batch_size", 1025, "1–1024"),
        (Pulling, "interval", -1, "0–65.535"),
        (Pulling, "hold", 0, "at least 0.001"),
        (Pulling, "timeout", 15, "at least 15.001"),
        (Pulling, "carries_subscription", "yes", "a bool"),
        (Listening, "timeout", 59, "60–10800"),
        (Pulling, "timeout", 3_000_000, "15.001–2147483.647"),
        (Listening, "close_wait", -1, "at least 0"),
        (Listening, "close_wait", float("inf"), "0–2147483.647"),
        (Listening, "suspend", 0.009, "0.01–30"),
        (Listening, "suspend", timedelta(seconds=31), "0.01–30"),
        (Listening, "suspend", "1s", "0.01–30"),
        (Listening, "suspend", True, "0.01–30"),
        (Listening, "suspend", float("nan"), "0.01–30"),
        (consuming, "concurrency", 1001, "1–1000"),
        (consuming, "concurrency", True, "1–1000"),
        (consuming, "concurrency", (20, 64, 3), "a number, or a minimum and a maximum"),
        (consuming, "concurrency", "20", "a number, or a minimum and a maximum"),
        (consuming, "batch_size", 0, "1–1024"),
        (consuming, "max_attempts", -1, "0–"),
    ],
)
def test_an_invalid_setting_is_named(
    kind: Callable[..., object], field: str, value: object, allowed: str
) -> None:
    text = f"{field} must be .*{allowed}.*, got {re.escape(repr(value))}"
    with pytest.raises(InvalidArgument, match=text):
        kind(**{field: value})


@pytest.mark.parametrize(
    ("concurrency", "text"),
    [
        ((0, 5), "minimum of concurrency must be 1–1000, got 0"),
        ((5, 4), "maximum of concurrency must be 5–1000, got 4"),
        ((5, 1001), "maximum of concurrency must be 5–1000, got 1001"),
        ((5, "6"), "maximum of concurrency must be 5–1000, got '6'"),
    ],
)
def test_invalid_limits_of_calls_are_named(concurrency: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(text)):
        consuming(concurrency=concurrency)


def test_a_limit_itself_is_allowed() -> None:
    # As floats, 1.001 * 1000 is less than 1001.
    assert Pulling(hold=1, timeout=1.001).timeout_ms == 1001


def test_limits_of_a_topic_are_divided_among_its_queues() -> None:
    limits = FlowLimits(messages_per_topic=100, mebibytes_per_topic=3)
    assert limits.of_queue(3).messages_max == 33
    assert limits.of_queue(3).bytes_max == 1024 * 1024
    assert limits.of_queue(1000).messages_max == 1
    assert FlowLimits().of_queue(3).messages_max == 1000


def test_how_often_a_message_is_redelivered() -> None:
    assert push_settings().orderly_max_attempts == 2**31 - 1
    assert push_settings(max_attempts=3).orderly_max_attempts == 3


@pytest.mark.parametrize(
    ("delay", "level"),
    [
        (0, 1),
        (1, 1),
        (1.001, 2),
        (30, 4),
        (31, 5),
        (timedelta(minutes=10), 14),
        (timedelta(minutes=11), 15),
        (timedelta(hours=2), 18),
    ],
)
def test_a_delay_is_the_first_level_that_is_long_enough(
    delay: float | timedelta, level: int
) -> None:
    assert RetryLater(delay).delay_level == level


@pytest.mark.parametrize(
    "given",
    [{"delay": -1}, {"delay": 1, "delay_level": 1}, {"delay": 7201}, {"delay": timedelta(hours=5)}],
)
def test_a_wrong_delay_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="delay"):
        RetryLater(**given)


@pytest.mark.parametrize(
    "outcome", [RetryLater(), RetryLater(30), RetryLater(delay_level=3), GiveUp(), GiveUp("why")]
)
def test_outcomes_are_values(outcome: Exception) -> None:
    for same in (copy.copy(outcome), pickle.loads(pickle.dumps(outcome))):
        assert same == outcome
        assert hash(same) == hash(outcome)
        assert repr(same) == repr(outcome)


def test_subclasses_of_outcomes_have_constructors_of_their_own() -> None:
    class NotYet(RetryLater):
        def __init__(self, order: int) -> None:
            self.order = order

    context = ConsumeContext("billing", MessageQueue("orders", "a", 0), delay_level=4)
    context.accept(NotYet(7))
    assert (context.delay_level, context.suspend) == (4, None)
    assert repr(NotYet(7)) == "RetryLater(delay_level=0)"


def test_rates_are_those_of_the_last_minute() -> None:
    stats = ConsumerStats()
    stats.sample(0)
    stats.called("T", consumed=60, failed=6, spent_ms=12)
    stats.called("T", consumed=60, failed=0, spent_ms=8)
    stats.pulled("T", 90, 30)
    rates = stats.rates("T", 60_000)
    assert (rates.consume_ok_tps, rates.consume_failed_tps, rates.pull_tps) == (2.0, 0.1, 1.5)
    assert (rates.consume_rt, rates.pull_rt, rates.consume_failed_msgs) == (10.0, 30.0, 6)
    for number in range(1, 9):
        stats.sample(number * 10_000)
    late = stats.rates("T", 80_000)
    assert (late.consume_ok_tps, late.consume_failed_msgs) == (0.0, 6)


def test_heartbeats_contain_where_a_group_starts() -> None:
    assert consume_from("last") is ConsumeFrom.LAST_OFFSET
    assert consume_from("first") is ConsumeFrom.FIRST_OFFSET
    assert consume_from(MOMENT) is ConsumeFrom.TIMESTAMP


@pytest.mark.parametrize("kind", [FlowLimits, Pulling, Listening])
def test_every_setting_is_in_the_guide(kind: type) -> None:
    guide = Path(__file__).parents[3] / "docs" / "guide" / "consuming.md"
    rows = guide.read_text(encoding="utf-8")
    for field in (each for each in fields(kind) if each.init):
        assert f"| `{kind.__name__}.{field.name}` |" in rows
