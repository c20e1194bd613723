"""Members of a group with different subscriptions: noticed, logged once, and shown."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from broker_parts import FakePeer, Parts
from turbopump.wire import headers
from turbopump.wire.bodies import (
    ConsumerConnections,
    ConsumerData,
    ConsumeType,
    Heartbeat,
    MessageModel,
    Subscription,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import whole_body

TAG, SQL92, CODE = "TAG", "SQL92", "CODE"
Wanted = dict[str, tuple[str, str]]
A: Wanted = {"orders": (TAG, "a")}
B: Wanted = {"orders": (TAG, "b")}


@pytest.fixture
def parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Parts:
    caplog.set_level(logging.INFO, "turbopump.broker.subscription_conflicts")
    return Parts(tmp_path)


def beat(
    parts: Parts,
    client_id: str,
    wanted: Wanted,
    peer: FakePeer | None = None,
    consume_type: ConsumeType = ConsumeType.PUSH,
) -> FakePeer:
    """Send a heartbeat; the version grows with each, as for members that start one by one."""
    parts.clock.advance_ns(1_000_000_000)
    peer = peer or FakePeer(client_id)
    subscriptions = [
        Subscription(
            topic=topic,
            sub_string=expression,
            expression_type=TAG if kind == CODE else kind,
            class_filter_mode=kind == CODE,
            sub_version=parts.clock.now_ms(),
        )
        for topic, (kind, expression) in {**wanted, "%RETRY%g": (TAG, "*")}.items()
    ]
    data = ConsumerData(
        group_name="g",
        consume_type=consume_type,
        message_model=MessageModel.CLUSTERING,
        subscription_data_set=subscriptions,
    )
    body = Heartbeat(client_id=client_id, consumer_data_set=[data])
    assert parts.ask(RequestCode.HEART_BEAT, body=body, peer=peer).code == ResponseCode.SUCCESS
    return peer


def leave(parts: Parts, peer: FakePeer) -> None:
    parts.clients.connection_closed(peer)


def shown(parts: Parts) -> list[tuple[str, str | None, str | None, list[str]]]:
    header = headers.ConsumerGroup(consumer_group="g")
    answer = parts.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)
    rows = ConsumerConnections.decode(whole_body(answer)).inconsistent_subscriptions or []
    return [(each.topic, each.expression_type, each.sub_string, each.client_ids) for each in rows]


def test_members_that_agree_are_not_mentioned(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    beat(parts, "one", {"orders": (TAG, "a || b")})
    beat(parts, "two", {"orders": (TAG, " b||a ")})
    header = headers.ConsumerGroup(consumer_group="g")
    answer = parts.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)
    assert b"inconsistent" not in whole_body(answer)
    assert not caplog.records


@pytest.mark.parametrize(
    ("other", "row"),
    [
        (B, ("orders", TAG, "b", ["two"])),
        ({"orders": (SQL92, "a")}, ("orders", SQL92, "a", ["two"])),
        ({"orders": (CODE, "a")}, ("orders", CODE, "a", ["two"])),
        ({"orders": (TAG, "*")}, ("orders", TAG, "*", ["two"])),
        ({"bills": (TAG, "a")}, ("orders", None, None, ["two"])),
        ({}, ("orders", None, None, ["two"])),
    ],
)
def test_a_different_subscription_is_logged_and_shown(
    parts: Parts,
    other: Wanted,
    row: tuple[str, str | None, str | None, list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    beat(parts, "one", A)
    beat(parts, "two", other)
    found = [each for each in shown(parts) if each[0] == "orders"]
    assert found == [("orders", TAG, "a", ["one"]), row]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "group g: members have different subscriptions" in record.message
    assert "orders: TAG 'a' by one" in record.message


def test_a_conflict_is_logged_once_however_many_heartbeats_arrive(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = beat(parts, "one", A), beat(parts, "two", B)
    for _ in range(5):
        beat(parts, "one", A, one)
        beat(parts, "two", B, two)
    assert len(caplog.records) == 1


def test_a_rolling_change_is_logged_when_it_begins_and_when_it_ends(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    members = [beat(parts, f"c{number}", A) for number in range(4)]
    for number, member in enumerate(members):
        leave(parts, member)
        beat(parts, f"c{number}", B)
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    assert "group g: all members have the same subscriptions again" in caplog.text
    assert shown(parts) == []


def test_a_subscription_changed_while_running_is_compared(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = beat(parts, "one", A), beat(parts, "two", A)
    beat(parts, "one", B, one)
    assert len(shown(parts)) == 2
    beat(parts, "one", A, one)
    assert shown(parts) == []
    assert len(caplog.records) == 2


def test_each_distinct_inconsistency_is_logged_once(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    beat(parts, "one", A)
    beat(parts, "two", B)
    for _ in range(3):
        leave(parts, beat(parts, "three", {"orders": (TAG, "c")}))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_pull_consumers_without_subscriptions_are_not_compared(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    beat(parts, "one", A)
    peer = beat(parts, "two", {}, consume_type=ConsumeType.PULL)
    assert shown(parts) == []
    beat(parts, "two", B, peer, ConsumeType.PULL)
    assert len(shown(parts)) == 2
    beat(parts, "two", {}, peer, ConsumeType.PULL)
    assert shown(parts) == []
    assert len(caplog.records) == 2


def test_a_removed_group_is_forgotten(parts: Parts) -> None:
    for member in (beat(parts, "one", A), beat(parts, "two", B)):
        leave(parts, member)
    beat(parts, "three", A)
    assert shown(parts) == []
    assert parts.conflicts._logged == {}


def test_long_lists_are_cut_in_the_log_only(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(8):
        beat(parts, f"c{number}", A)
    beat(parts, "other", {**A, **{f"t{number}": (TAG, "x" * 500) for number in range(8)}})
    assert "c0, c1, c2, c3, c4 and 3 more" in caplog.records[-1].message
    assert caplog.records[-1].message.endswith("; ...")
    assert len(caplog.records[-1].message) < 2000
    assert len(shown(parts)) == 16
