"""Rows encoded from columns are sent like the messages that could be created from them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import cluster
from sink_tasks import MAP, ORIGIN, encoded, take
from turbopump.client.message_sender import unique_ids
from turbopump.client.outgoing import (
    check_message,
    encoded_batch,
    outgoing,
    outgoing_batch,
    properties_text,
)
from turbopump.client.selectors import by_hash
from turbopump.errors import InvalidArgument
from turbopump.message import Message, MessageQueue, QueueOffset
from turbopump.spark.records.arrow_arrays import cells
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.retrying_sender import RetryingSender
from turbopump.spark.writing.row_encoder import STAMP_PROPERTY, EncodedRows, Origin, RowEncoder
from turbopump.spark.writing.send_planner import BatchLimits, chosen_queue, sends
from turbopump.store.outcomes import Found
from turbopump.testing import virtual_time
from turbopump.wire.batch import BatchEntry, decode_batch, encode_batch
from turbopump.wire.ids import UniqueIds
from turbopump.wire.properties import RESERVED
from turbopump.wire.record import decode_records

QUEUES = {name: tuple(MessageQueue(name, "a", n) for n in range(4)) for name in ("t", "u")}
CUTS = BatchLimits(messages_max=3, bytes_max=10_000, alone_from_bytes=500)
FIRST_ROW = 98


class StandingClock:
    """Always returns the same."""

    def now_ms(self) -> int:
        return 1_800_000_000_000

    def monotonic_ms(self) -> int:
        return 0

    def uptime_ms(self) -> int:
        return 0


def ids() -> UniqueIds:
    return UniqueIds(StandingClock(), b"\x0a\x00\x00\x01", 77, 99)


def options_of(**options: Any) -> SinkOptions:
    return SinkOptions(**{"nameserver": "10.0.0.1:9876", "topic": "t", **options})


def rows_of(
    columns: Mapping[str, Any],
    first_row: int = FIRST_ROW,
    maker: UniqueIds | None = None,
    **options: Any,
) -> EncodedRows:
    encoder = RowEncoder(frozenset(columns), options_of(**options), ORIGIN, maker or ids())
    return encoder.rows(pa.RecordBatch.from_pydict(dict(columns)), first_row)


def messages_of(
    columns: Mapping[str, Any], first_row: int = FIRST_ROW, **options: Any
) -> list[Message]:
    """Return what the rows mean, one by one."""
    chosen = options_of(**options)
    found = []
    for number, row in enumerate(pa.RecordBatch.from_pydict(dict(columns)).to_pylist(), first_row):
        body, keys, own = row["body"], row.get("keys") or (), dict(row.get("properties") or ())
        keys = tuple(keys.split() if isinstance(keys, str) else keys)
        if chosen.reserved_properties == "drop":
            own = {name: value for name, value in own.items() if name not in RESERVED}
        stamp = f"{ORIGIN.prefix}{number}"
        if chosen.stamp == "true":
            keys = (*keys, stamp)
        if chosen.stamp != "false":
            own[STAMP_PROPERTY] = stamp
        found.append(
            Message(
                row.get("topic") or "t",
                body.encode() if isinstance(body, str) else body,
                tags=row.get("tags"),
                keys=keys,
                properties=own,
                delay_level=row.get("delayLevel") or 0,
            )
        )
    return found


def entries_of(rows: EncodedRows, messages: Sequence[Message]) -> list[bytes]:
    """Return what the producer would put into a batch for each message."""
    return [
        encode_batch(
            [BatchEntry(message.body, properties_text(message, rows.message_id(place)).encode())]
        )
        for place, message in enumerate(messages)
    ]


def are_sendable(messages: Sequence[Message], **options: Any) -> bool:
    """Whether the producer accepts them."""
    try:
        for message in messages:
            check_message(message, options_of(**options).rules())
            properties_text(message, "")
    except InvalidArgument:
        return False
    return True


def check(columns: Mapping[str, Any], **options: Any) -> None:
    """Rows are encoded as their messages, or refused if those are."""
    messages = messages_of(columns, **options)
    if not are_sendable(messages, **options):
        with pytest.raises(InvalidArgument, match=r"row [0-9]+ of partition 3, column "):
            rows_of(columns, **options)
        return
    rows = rows_of(columns, **options)
    assert rows.entries.to_pylist() == entries_of(rows, messages)
    assert rows.body_sizes.tolist() == [len(message.body) for message in messages]
    assert rows.topics == [message.topic for message in messages]


PIECES = st.sampled_from(["a", "Z", "ü", " ", "\t", "\u3000", "\x1c", "\x01", "\x02", "中", "~"])
TEXTS = st.one_of(st.none(), st.text(PIECES, max_size=5), st.just("created"))
OWN = st.one_of(
    st.none(),
    st.lists(
        st.tuples(
            st.one_of(st.sampled_from(["n", "m", "TAGS", "WAIT", "SPARK_ROW"]), st.text(PIECES)),
            st.one_of(st.sampled_from(["1", "two words"]), st.text(PIECES, max_size=3)),
        ),
        max_size=3,
    ),
)
KEYS = st.one_of(
    st.lists(TEXTS, min_size=5, max_size=5).map(lambda given: pa.array(given, pa.string())),
    st.lists(
        st.one_of(st.none(), st.lists(st.text(PIECES, max_size=3), max_size=3)),
        min_size=5,
        max_size=5,
    ).map(lambda given: pa.array(given, pa.list_(pa.string()))),
)


@given(
    st.lists(st.binary(max_size=9), min_size=5, max_size=5),
    st.lists(TEXTS, min_size=5, max_size=5),
    KEYS,
    st.sampled_from(["true", "property", "false"]),
    st.integers(0, 4),
)
def test_bytes_equal_those_of_messages(
    bodies: list[bytes], tags: list[str | None], keys: Any, stamp: str, start: int
) -> None:
    columns = {
        "body": pa.array(bodies, pa.binary()).slice(start),
        "tags": pa.array(tags, pa.string()).slice(start),
        "keys": keys.slice(start),
    }
    check(columns, stamp=stamp)


@given(
    st.lists(OWN, min_size=5, max_size=5),
    st.sampled_from(["true", "property", "false"]),
    st.sampled_from(["fail", "drop"]),
    st.integers(0, 4),
)
def test_properties_are_those_of_messages(
    own: list[Any], stamp: str, reserved: str, start: int
) -> None:
    maps = pa.array(own, MAP).slice(start)
    columns = {"body": pa.array([b"1"] * len(maps)), "properties": maps}
    options: dict[str, Any] = {"stamp": stamp, "reserved_properties": reserved}
    stamped = any(name == STAMP_PROPERTY for each in own[start:] for name, _ in each or ())
    if stamped and stamp != "false" and reserved == "fail":
        with pytest.raises(InvalidArgument, match="column properties: "):
            rows_of(columns, **options)
    else:
        check(columns, **options)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tags": pa.array(["a", None, "c"])},
        {"tags": pa.array([None, None, None], pa.string())},
        {"keys": pa.array(["k1", None, "k3 k4"])},
        {"keys": pa.array([["k1", "k2"], None, []])},
        {"keys": pa.array(["k1", "k2", "k3"], pa.large_string())},
        {"body": pa.array(["grün", "x", "y"])},
        {"delayLevel": pa.array([0, None, 0], pa.int32())},
        {"properties": pa.array([None] * 3, MAP)},
        {"properties": pa.array([[("n", "1"), ("m", "ü b")], None, [("n", "2")]], MAP)},
        {"properties": pa.array([[], [], [("n", "1")]], MAP).slice(0)},
        {"properties": pa.array([[("x", "0")], [("n", "1")], None, []], MAP).slice(1)},
        {"topic": pa.array(["t", "u", "t"])},
    ],
    ids=lambda more: ",".join(f"{name}:{each.type}" for name, each in more.items()) or "bodies",
)
@pytest.mark.parametrize("stamp", ["true", "property", "false"])
def test_columns_of_every_kind(more: Mapping[str, Any], stamp: str) -> None:
    topic = None if "topic" in more else "t"
    check({"body": pa.array([b"1", b"22", b"3"]), **more}, stamp=stamp, topic=topic)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_bodies_of_every_type(kind: pa.DataType) -> None:
    check({"body": pa.array(["gr\u00fcn", "x"]).cast(kind)}, stamp="false")


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"body": pa.array([b"x" * 50])}, {"body_bytes_max": 49}),
        ({"body": pa.array([b""])}, {}),
        ({"delayLevel": pa.array([3])}, {}),
        ({"delayLevel": pa.array([-1])}, {}),
        ({"properties": pa.array([[("SPARK_ROW", "1")]], MAP)}, {"reserved_properties": "drop"}),
        ({"properties": pa.array([[("SPARK_ROW", "old")]], MAP)}, {"stamp": "false"}),
        ({"properties": pa.array([[("a", "1"), ("b", "2"), ("a", "3")]], MAP)}, {}),
        ({"tags": pa.array(["x" * 32768])}, {}),
    ],
)
def test_unusual_rows(more: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    columns = {"body": pa.array([b"1"]), **more}
    if "delayLevel" not in more or not are_sendable(messages_of(columns, **options)):
        check(columns, **options)
        return
    rows = rows_of(columns, **options)
    (send,) = sends(rows, QUEUES, CUTS, 0)
    assert (send.is_alone, send.delay_level) == (True, 3)


@pytest.mark.parametrize("column", ["body", "topic"])
def test_an_invalid_null_is_reported_with_row_and_column(column: str) -> None:
    columns: dict[str, Any] = {"body": pa.array(["x"] * 3), "topic": pa.array(["t"] * 3)}
    columns[column] = pa.array(["x", "x", None])
    with pytest.raises(
        InvalidArgument, match=f"row 102 of partition 3, column {column}: must not be null"
    ):
        rows_of(columns, 100, topic=None)


def test_a_property_of_the_name_of_the_stamp() -> None:
    columns = {"body": pa.array([b"a"]), "properties": pa.array([[(STAMP_PROPERTY, "old")]], MAP)}
    with pytest.raises(InvalidArgument, match="row 5 of partition 3, column properties: SPARK_ROW"):
        rows_of(columns, 5)


def test_stamps_with_blanks_are_properties_but_no_keys() -> None:
    columns = frozenset({"body"})
    origin = Origin("my query", "7", 3)
    batch = pa.RecordBatch.from_pydict({"body": [b"a"]})
    rows = RowEncoder(columns, options_of(stamp="property"), origin, ids()).rows(batch, 5)
    assert b"SPARK_ROW\x01my query/7/3/5" in rows.entries[0].as_py()
    with pytest.raises(InvalidArgument, match=r"row 5 of partition 3, column keys: .* blanks"):
        RowEncoder(columns, options_of(), origin, ids()).rows(batch, 5)


def test_ids_are_unique_and_consecutive() -> None:
    maker = ids()
    seen: list[str] = []
    for count in (30_000, 30_000, 5_600):
        rows = rows_of({"body": pa.array([b"1"] * count)}, 0, maker)
        found = [rows.message_id(place) for place in range(count)]
        assert f"UNIQ_KEY\x01{found[-1]}\x02".encode() in rows.entries[count - 1].as_py()
        seen += found
    # There are 65,536 in a millisecond.
    assert len(set(seen)) == 65_536
    assert int(seen[-1][-4:], 16) == (65_600 - 1) & 0xFFFF
    assert int(maker.next()[-4:], 16) == 65_600 & 0xFFFF
    with pytest.raises(InvalidArgument, match="count must be 1 to 65536, got 65537"):
        maker.claim(65_537)


def test_sends_are_cut_by_number_and_size() -> None:
    rows = rows_of({"body": pa.array([b"x" * 100] * 7 + [b"x" * 900] + [b"x"] * 2)})
    cut = list(sends(rows, QUEUES, BatchLimits(3, 1000, 4096), 0))
    assert [list(each.rows) for each in cut] == [
        [98, 99, 100], [101, 102, 103], [104], [105], [106, 107],
    ]  # fmt: skip
    assert [each.body_bytes for each in cut] == [300, 300, 100, 900, 2]
    assert b"".join(each.body for each in cut) == b"".join(cells(rows.entries))


@pytest.mark.parametrize(
    "chosen",
    [
        {"shardingKey": pa.array([random.Random(n).choice(["a", "b", None]) for n in range(40)])},
        {"queueId": pa.array([n % 3 for n in range(40)])},
        {"topic": pa.array(["t", "u"] * 20)},
    ],
)
def test_lanes_are_those_of_messages(chosen: Mapping[str, Any]) -> None:
    columns = {"body": pa.array([str(n).encode() for n in range(40)]), **chosen}
    options: dict[str, Any] = {"topic": None if "topic" in chosen else "t"}
    rows, messages = rows_of(columns, **options), messages_of(columns, **options)
    one_by_one = entries_of(rows, messages)
    rules = options_of().rules()
    for made in sends(rows, QUEUES, CUTS, 0):
        places = [row - FIRST_ROW for row in made.rows]
        assert made.body == b"".join(one_by_one[place] for place in places)
        names = [rows.message_id(place) for place in places]
        joined = outgoing_batch([messages[place] for place in places], names, rules, "space")
        ready = encoded_batch(messages[places[0]].topic, made.message_id, made.body, rules, "space")
        assert ready.message_id == names[0]
        assert (ready.topic, ready.body, ready.properties, ready.is_batch) == (
            joined.topic, joined.body, joined.properties, joined.is_batch,
        )  # fmt: skip


def test_delayed_large_and_retried_messages_are_sent_alone() -> None:
    messages = [
        Message("t", b"a"),
        Message("t", b"b", delay_level=1),
        Message("t", b"c"),
        Message("t", b"d" * 500),
    ]
    cut = list(sends(encoded(messages), QUEUES, CUTS, 0))
    assert [list(send.rows) for send in cut] == [[0], [1], [2], [3]]
    assert [send.is_alone for send in cut] == [False, True, False, True]
    retried = encoded([Message("%RETRY%g", b"a"), Message("%RETRY%g", b"b")])
    queues = {"%RETRY%g": (MessageQueue("%RETRY%g", "a", 0),)}
    cut = list(sends(retried, queues, CUTS, 0))
    assert [(list(send.rows), send.is_alone) for send in cut] == [([0], True), ([1], True)]


@virtual_time()
async def test_what_is_sent_alone_equals_a_message(tmp_path: Path) -> None:
    async with cluster(tmp_path, ("a",)) as world, world.session() as session:
        options = options_of(namespace="space")
        task = RetryingSender(session, options, partition=3)
        message = Message("t", b"x" * 5000, tags="a", keys=["k"], delay_level=2)
        (send,) = sends(encoded([message]), QUEUES, task.cuts, 3)
        ready, known = (
            task.outgoing(send),
            outgoing(message, send.message_id, options.rules(), "space"),
        )
        assert (ready.topic, ready.body, ready.sys_flag, ready.is_batch) == (
            known.topic, known.body, known.sys_flag, known.is_batch,
        )  # fmt: skip
        # The order of properties has no meaning.
        assert sorted(ready.properties.split("\x02")) == sorted(known.properties.split("\x02"))
        await task.producer.close()


def test_broker_alone_chooses_no_queue() -> None:
    messages = [Message("t", b"x") for _ in range(3)]
    rows = encoded(messages, 10, queue_ids=[0, None, None], brokers=["a", None, "nobody"])
    with pytest.raises(InvalidArgument) as raised:
        list(sends(rows, QUEUES, CUTS, 7))
    assert str(raised.value) == (
        "row 12 of partition 7, column broker: 'nobody' needs a queueId beside it; "
        "set both, or neither"
    )


WISHES = st.lists(st.one_of(st.none(), st.text(max_size=2), st.integers(-9, 9)), max_size=40)


@given(wishes=WISHES, kind=st.sampled_from(["key", "queue"]), sent=st.booleans())
def test_every_row_is_sent_once_to_its_target_in_order(
    wishes: list[Any], kind: str, *, sent: bool
) -> None:
    messages = [Message("t", b"x" * (1 + 499 * (n % 5 == 0))) for n in range(len(wishes))]
    chosen = [None if wish is None else hash(wish) % 4 for wish in wishes]
    more = {"sharding_keys": wishes} if kind == "key" else {"queue_ids": chosen}
    stored = {103, 104} if sent else set()
    rows = encoded(messages, 100, sent=stored, **more)
    cut = list(sends(rows, QUEUES, CUTS, 0))
    numbers = set(range(100, 100 + len(messages))) - stored
    assert sorted(row for send in cut for row in send.rows) == sorted(numbers)
    order: dict[Any, list[int]] = {}
    for send in cut:
        assert [entry.body for entry in decode_batch(bytes(send.body))] == [
            messages[row - 100].body for row in send.rows
        ]
        assert 1 <= len(send.rows) <= CUTS.messages_max
        order.setdefault(send.destination, []).extend(send.rows)
        for row in send.rows:
            wish = wishes[row - 100]
            if wish is None:
                assert send.destination == "t"
            elif kind == "key":
                assert send.destination == by_hash(wish)(QUEUES["t"])
            else:
                assert send.destination == QUEUES["t"][chosen[row - 100] or 0]
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


@virtual_time()
async def test_encoded_rows_are_stored_in_order(tmp_path: Path) -> None:
    async with cluster(tmp_path, ("a",)) as world, world.session() as session:
        options = SinkOptions(nameserver="10.0.0.1:9876", topic="T", batch_size=10)
        columns = frozenset({"body", "keys", "shardingKey"})
        encoder = RowEncoder(columns, options, ORIGIN, unique_ids(session))
        task = RetryingSender(session, options, partition=3)
        numbers = [str(n) for n in range(30)]
        batch = pa.RecordBatch.from_pydict(
            {
                "body": pa.array(numbers),
                "keys": pa.array(numbers),
                "shardingKey": pa.array(["one"] * 30),
            }
        )
        rows = encoder.rows(batch, 0)
        counts = await take(task, rows)
        assert (counts.rows, counts.sends, counts.body_bytes) == (30, 3, 50)
        await task.producer.close()
        reads = (world.brokers["a"].store.read("T", n, QueueOffset(0), 32) for n in range(4))
        found = [
            message
            for read in reads
            if isinstance(read, Found)
            for message in decode_records(b"".join(read.messages))
        ]
    assert [message.body.decode() for message in found] == numbers
    assert [message.keys[0] for message in found] == numbers
    assert len({message.message_id for message in found}) == 30


@virtual_time()
async def test_a_row_too_large_with_its_properties_is_reported_by_number(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, ("a",)) as world, world.session() as session:
        options = SinkOptions(nameserver="10.0.0.1:9876", topic="T", body_bytes_max=1000)
        encoder = RowEncoder(frozenset({"body"}), options, ORIGIN, ids())
        rows = encoder.rows(pa.RecordBatch.from_pydict({"body": [b"x" * 990] * 2}), 42)
        task = RetryingSender(session, options, partition=3)
        try:
            with pytest.raises(
                InvalidArgument, match="row 42 of partition 3: a batch must have at most"
            ):
                await take(task, rows)
        finally:
            await task.producer.close()
