"""From record batches to messages, and from messages to sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.client.selectors import by_hash
from turbopump.errors import InvalidArgument
from turbopump.message import Message, MessageQueue
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.row_converter import (
    STAMP_PROPERTY,
    ConvertedRows,
    Origin,
    RowConverter,
)
from turbopump.spark.writing.send_planner import BatchLimits, Send, chosen_queue, sends

ORIGIN = Origin("query", "7", 3)
QUEUES = {"t": tuple(MessageQueue("t", "a", number) for number in range(4))}
CUTS = BatchLimits(messages_max=3, bytes_max=10_000, alone_from_bytes=500)
MAP = pa.map_(pa.string(), pa.string())


def read(columns: Mapping[str, Any], first_row: int = 0, **options: Any) -> ConvertedRows:
    given_options = SinkOptions(nameserver="127.0.0.1:9876", **{"topic": "t", **options})
    names = frozenset(columns)
    batch = pa.RecordBatch.from_pydict(dict(columns))
    return RowConverter(names, given_options, ORIGIN).rows(batch, first_row)


# --- rows to messages -----------------------------------------------------------------------------


def test_stamps_follow_the_number_of_the_row() -> None:
    rows = read({"body": pa.array([b"a", b"b"])}, first_row=41)
    assert [message.properties for message in rows.messages] == [
        {STAMP_PROPERTY: "query/7/3/41"},
        {STAMP_PROPERTY: "query/7/3/42"},
    ]
    assert [list(message.keys) for message in rows.messages] == [["query/7/3/41"], ["query/7/3/42"]]
    assert rows.first_row == 41


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_bodies_of_every_type(kind: pa.DataType) -> None:
    rows = read({"body": pa.array(["grün", "x"]).cast(kind)}, stamp="false")
    assert rows.messages == [Message("t", "grün".encode()), Message("t", b"x")]


def test_slices_are_read_where_they_begin() -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "body": pa.array([b"a", b"b", b"c"]),
            "properties": pa.array([[("n", "1")], None, [("n", "3"), ("m", "4")]], MAP),
        }
    )
    options = SinkOptions(nameserver="127.0.0.1:9876", topic="t", stamp="false")
    reader = RowConverter(frozenset({"body", "properties"}), options, ORIGIN)
    rows = reader.rows(batch.slice(1), 1)
    assert [message.body for message in rows.messages] == [b"b", b"c"]
    assert [message.properties for message in rows.messages] == [{}, {"n": "3", "m": "4"}]


def test_keys_as_text_and_as_list() -> None:
    texts = read({"body": pa.array([b"a"] * 3), "keys": pa.array(["k1 k2", None, ""])})
    lists = read(
        {"body": pa.array([b"a"] * 3), "keys": pa.array([["k1", "k2"], None, []])}, stamp="property"
    )
    assert [list(message.keys[:-1]) for message in texts.messages] == [["k1", "k2"], [], []]
    assert [list(message.keys) for message in lists.messages] == [["k1", "k2"], [], []]


def test_nulls_mean_absent() -> None:
    columns = {
        "body": pa.array([b"a"]),
        "tags": pa.array([None], pa.string()),
        "delayLevel": pa.array([None], pa.int32()),
        "properties": pa.array([None], MAP),
        "queueId": pa.array([None], pa.int32()),
        "broker": pa.array([None], pa.string()),
    }
    rows = read(columns, stamp="false")
    assert rows.messages == [Message("t", b"a")]
    assert next(sends(rows, QUEUES, CUTS, 3)).destination == "t"


@pytest.mark.parametrize("column", ["body", "topic"])
def test_an_invalid_null_is_reported_with_row_and_column(column: str) -> None:
    columns: dict[str, Any] = {"body": pa.array(["x"] * 3), "topic": pa.array(["t"] * 3)}
    columns[column] = pa.array(["x", "x", None])
    with pytest.raises(
        InvalidArgument, match=f"row 102 of partition 3, column {column}: must not be null"
    ):
        read(columns, first_row=100, topic=None)


def test_a_property_of_the_name_of_the_stamp() -> None:
    columns = {"body": pa.array([b"a"]), "properties": pa.array([[(STAMP_PROPERTY, "old")]], MAP)}
    with pytest.raises(InvalidArgument, match="row 5 of partition 3, column properties: SPARK_ROW"):
        read(columns, first_row=5)
    (dropped,) = read(columns, reserved_properties="drop").messages
    assert dropped.properties == {STAMP_PROPERTY: "query/7/3/0"}
    (kept,) = read(columns, stamp="false").messages
    assert kept.properties == {STAMP_PROPERTY: "old"}


# --- messages to sends ----------------------------------------------------------------------------


def test_rows_without_a_target_queue_are_sent_together() -> None:
    rows = ConvertedRows(10, [Message("t", b"x") for _ in range(7)])
    cut = list(sends(rows, QUEUES, CUTS, 0))
    assert [list(send.rows) for send in cut] == [[10, 11, 12], [13, 14, 15], [16]]
    assert {send.destination for send in cut} == {"t"}


def test_broker_alone_chooses_no_queue() -> None:
    messages = [Message("t", b"x") for _ in range(3)]
    rows = ConvertedRows(10, messages, queue_ids=[0, None, None], brokers=["a", None, "nobody"])
    with pytest.raises(InvalidArgument) as raised:
        list(sends(rows, QUEUES, CUTS, 7))
    assert str(raised.value) == (
        "row 12 of partition 7, column broker: 'nobody' needs a queueId beside it; "
        "set both, or neither"
    )


def test_delayed_large_and_retried_messages_are_sent_alone() -> None:
    messages = [
        Message("t", b"a"),
        Message("t", b"b", delay_level=1),
        Message("t", b"c"),
        Message("t", b"d" * 500),
    ]
    cut = list(sends(ConvertedRows(0, messages), QUEUES, CUTS, 0))
    assert [list(send.rows) for send in cut] == [[0], [1], [2], [3]]
    retried = ConvertedRows(0, [Message("%RETRY%g", b"a"), Message("%RETRY%g", b"b")])
    queues = {"%RETRY%g": (MessageQueue("%RETRY%g", "a", 0),)}
    assert [list(send.rows) for send in sends(retried, queues, CUTS, 0)] == [[0], [1]]


def test_bytes_bound_a_send() -> None:
    rows = ConvertedRows(0, [Message("t", b"x" * 400) for _ in range(3)])
    cut = list(sends(rows, QUEUES, BatchLimits(100, 1100, 500), 0))
    assert [list(send.rows) for send in cut] == [[0, 1], [2]]


WISHES = st.lists(st.one_of(st.none(), st.text(max_size=2), st.integers(-9, 9)), max_size=40)


@given(wishes=WISHES, kind=st.sampled_from(["key", "queue"]))
def test_every_row_is_sent_once_to_its_target_in_order(wishes: list[Any], kind: str) -> None:
    messages = [Message("t", b"x" * (1 + 499 * (n % 5 == 0))) for n in range(len(wishes))]
    ids = [None if wish is None else hash(wish) % 4 for wish in wishes]
    rows = (
        ConvertedRows(100, messages, sharding_keys=wishes)
        if kind == "key"
        else ConvertedRows(100, messages, queue_ids=ids)
    )
    cut = list(sends(rows, QUEUES, CUTS, 0))
    assert sorted(row for send in cut for row in send.rows) == list(range(100, 100 + len(messages)))
    order: dict[Any, list[int]] = {}
    for send in cut:
        assert isinstance(send, Send)
        assert 1 <= len(send.messages) == len(send.rows) <= CUTS.messages_max
        order.setdefault(send.destination, []).extend(send.rows)
        for row in send.rows:
            wish = wishes[row - 100]
            if wish is None:
                assert send.destination == "t"
            elif kind == "key":
                assert send.destination == by_hash(wish)(QUEUES["t"])
            else:
                assert send.destination == QUEUES["t"][ids[row - 100] or 0]
    assert all(numbers == sorted(numbers) for numbers in order.values())


def test_the_target_queue_is_found_or_the_others_are_named() -> None:
    two = (*QUEUES["t"], MessageQueue("t", "b", 0))
    assert chosen_queue(two, 1, None, "here") == MessageQueue("t", "a", 1)
    assert chosen_queue(two, 0, "b", "here") == MessageQueue("t", "b", 0)
    with pytest.raises(
        InvalidArgument, match=r"here, column queueId: queue 0 is on several brokers.*: a, b"
    ):
        chosen_queue(two, 0, None, "here")
    with pytest.raises(
        InvalidArgument, match=r"queue 1 of broker 'b' does not exist in topic 't'.*a:0"
    ):
        chosen_queue(two, 1, "b", "here")
