"""Messages as values: sending, reading and showing them."""

from __future__ import annotations

import dataclasses
import re
import threading
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Struct

import turbopump
from scripted_broker import scripted_broker, taken
from turbopump import Message, by_hash
from turbopump.aio import Producer
from turbopump.errors import InvalidArgument, InvalidBody
from turbopump.message import MessageFields, PhysicalOffset, QueueOffset
from turbopump.testing import Cluster
from turbopump.wire import properties
from turbopump.wire.hosts import host
from turbopump.wire.record import MessageView, Record, decode_record
from typed_bodies import Validated


class Order(Struct):
    """A body."""

    number: int


@dataclasses.dataclass
class Refund:
    """Another."""

    number: int
    at: datetime


def view(body: bytes, named: dict[str, str] | None = None, born_ms: int = 0) -> MessageView:
    record = Record(
        topic=b"orders",
        queue_id=3,
        body=body,
        properties=properties.encode(named or {}).encode(),
        born_timestamp_ms=born_ms,
        born_host=host("10.0.0.7", 4321),
        store_host=host("10.0.0.9", 10911),
    )
    return decode_record(record.encode(QueueOffset(17), PhysicalOffset(900), 1_700_000_000_456))


# --- reading --------------------------------------------------------------------------------------


def test_a_body_is_read_as_text() -> None:
    assert view("grün".encode()).text == "grün"
    with pytest.raises(InvalidBody, match=r"topic='orders', .* is not UTF-8 text: .* byte 0xff"):
        _ = view(b"\xff").text


def test_a_body_is_read_as_json_of_a_type() -> None:
    message = view(b'{"number": 4}')
    assert message.json() == {"number": 4}
    assert message.json(Order) == Order(4)
    assert message.json(dict[str, int]) == {"number": 4}
    assert message.json(Order | None) == Order(4)
    assert message.json(Annotated[Order, msgspec.Meta(extra={"cannot": "be hashed"})]) == Order(4)
    assert message.json(Validated).number == 4


@pytest.mark.parametrize(
    ("body", "kind", "error"),
    [
        (b"{", Any, r"queue_offset=17, .* is not JSON: .* truncated"),
        (b"\xff", Any, "is not JSON: "),
        (b"{}", Order, "is not Order: Object missing required field `number`"),
        (b"[1]", list[str], r"is not list\[str\]: Expected `str`, got `int` - at `\$\[0\]`"),
        (b'{"number": -1}', Validated, "is not Validated: number must be 0 or more"),
    ],
)
def test_a_body_of_another_type_is_an_error(body: bytes, kind: Any, error: str) -> None:
    with pytest.raises(InvalidBody, match=error):
        view(body).json(kind)


def test_a_type_that_json_does_not_have_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match=r"Thread cannot be read from JSON; use a msgspec"):
        view(b"{}").json(threading.Thread)


def test_times_are_in_utc() -> None:
    message = view(b"x", born_ms=1_700_000_000_123)
    assert message.born_at == datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)
    assert message.stored_at == message.born_at + timedelta(milliseconds=333)
    assert message.born_at.tzinfo is UTC
    # Senders can name any time; calendars end.
    assert view(b"x", born_ms=2**62).born_at.year == 9999
    assert view(b"x", born_ms=-5).born_at == datetime(1970, 1, 1, tzinfo=UTC)


# --- showing --------------------------------------------------------------------------------------


def test_a_stored_message_shows_what_people_look_for() -> None:
    named = {properties.TAGS: "paid", properties.KEYS: "k1 k2", properties.UNIQUE_KEY: "AB12"}
    message = view(b"secret" * 1000, named)
    assert repr(message) == (
        "MessageView(topic='orders', message_id='AB12', tags='paid', keys=['k1', 'k2'], "
        f"queue_id=3, queue_offset=17, size={message.size})"
    )
    assert "message_id='0A0000090000" in repr(view(b"x"))
    assert len(repr(view(b"x", {properties.TAGS: "t" * 9000, properties.KEYS: "k " * 9000}))) < 600


def test_a_message_shows_at_most_80_bytes_of_its_body() -> None:
    message = Message("orders", b"y" * 80, tags="paid", keys=["k"], delay=timedelta(seconds=3))
    assert repr(message) == (
        f"Message('orders', {message.body!r}, tags='paid', keys=['k'], "
        "delay=datetime.timedelta(seconds=3))"
    )
    assert eval(repr(message), {"Message": Message, "datetime": __import__("datetime")}) == message
    assert repr(Message("orders", b"y" * 81)) == f"Message('orders', {b'y' * 80!r}… (81 bytes))"
    wrong: Any = "z" * 99
    assert repr(Message("orders", wrong)) == f"Message('orders', {'z' * 80!r}… (99 characters))"


def test_all_fields_of_messages_can_be_given_with_a_value() -> None:
    assert set(MessageFields.__annotations__) == {*Message.__struct_fields__} - {"topic", "body"}


# --- sending --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "body"),
    [
        (Order(4), b'{"number":4}'),
        (Refund(4, datetime(2026, 1, 2, tzinfo=UTC)), b'{"number":4,"at":"2026-01-02T00:00:00Z"}'),
        (Validated(4), b'{"number":4}'),
        ([1, None, "ü"], '[1,null,"ü"]'.encode()),
        ("text", b'"text"'),
    ],
)
def test_a_message_of_a_value_is_read_back(value: object, body: bytes) -> None:
    message = Message.with_json("orders", value, tags="paid", keys=["4"])
    assert message == Message("orders", body, tags="paid", keys=["4"])
    assert view(body).json(type(value)).__class__ is value.__class__


def endless() -> object:
    held: list[object] = []
    held.append(held)
    return held


@pytest.mark.parametrize("value", [object(), {"a": object()}, "\ud800", endless(), {("a", "b"): 1}])
def test_a_value_that_json_cannot_hold_is_named(value: object) -> None:
    shown = re.escape(repr(value)[:10])
    with pytest.raises(InvalidArgument, match=f"^{shown}.* cannot be written as JSON: "):
        Message.with_json("orders", value)


async def test_producers_send_values(turbopump_cluster: Cluster) -> None:
    async with Producer("shop", nameserver=turbopump_cluster.nameserver) as producer:
        queue = (await producer.send_json("orders", Order(1), to=by_hash("c"), keys=["1"])).queue
        assert (await producer.send(Message("orders", b"2"), to=by_hash("c"))).queue == queue
        with pytest.raises(InvalidArgument, match="cannot be written as JSON"):
            await producer.send_json("orders", object())
    first, _ = turbopump_cluster.messages("orders")
    assert (first.json(Order), first.keys) == (Order(1), ["1"])


def test_blocking_producers_send_values() -> None:
    with (
        scripted_broker(taken) as broker,
        turbopump.Producer("shop", nameserver=broker.address) as producer,
    ):
        receipt = producer.send_json("T", Order(1), tags="paid", to=by_hash("c"))
        assert receipt.queue == producer.send(Message("T", b"2"), to=by_hash("c")).queue
        assert broker.stored == [b'{"number":1}', b"2"]
        wrong: Any = producer.send_json
        with pytest.raises(TypeError, match="tag"):
            wrong("T", Order(1), tag="paid")
