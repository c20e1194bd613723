"""Rows encoded from columns are sent like the messages that could be created from them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import cluster
from sink_tasks import take
from turbopump.client.message_sender import unique_ids
from turbopump.client.outgoing import check_message, encoded_batch, outgoing_batch, properties_text
from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue, QueueOffset
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.retrying_sender import RetryingSender
from turbopump.spark.writing.row_converter import ConvertedRows, Origin, RowConverter
from turbopump.spark.writing.row_encoder import EncodedRows, RowEncoder
from turbopump.spark.writing.send_planner import BatchLimits, EncodedSend, Send, sends
from turbopump.store.outcomes import Found
from turbopump.testing import virtual_time
from turbopump.wire.batch import BatchEntry, encode_batch
from turbopump.wire.ids import UniqueIds
from turbopump.wire.record import decode_records

ORIGIN = Origin("query", "7", 3)
QUEUES = {name: tuple(MessageQueue(name, "a", n) for n in range(4)) for name in ("t", "u")}
CUTS = BatchLimits(messages_max=3, bytes_max=10_000, alone_from_bytes=4096)
FIRST_ROW = 98
MAP = pa.map_(pa.string(), pa.string())


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


def both(
    columns: Mapping[str, Any], maker: UniqueIds | None = None, **options: Any
) -> tuple[EncodedRows | None, ConvertedRows]:
    """Return rows in both forms."""
    chosen = SinkOptions(nameserver="127.0.0.1:9876", **{"topic": "t", **options})
    names = frozenset(columns)
    batch = pa.RecordBatch.from_pydict(dict(columns))
    encoded = RowEncoder(names, chosen, ORIGIN, maker or ids()).rows(batch, FIRST_ROW)
    return encoded, RowConverter(names, chosen, ORIGIN).rows(batch, FIRST_ROW)


def as_encoded_one_by_one(encoded: EncodedRows, rows: ConvertedRows) -> list[bytes]:
    """Return what the producer would put into a batch for each message."""
    return [
        encode_batch(
            [BatchEntry(message.body, properties_text(message, encoded.message_id(place)).encode())]
        )
        for place, message in enumerate(rows.messages)
    ]


def is_sendable(rows: ConvertedRows, options: SinkOptions) -> bool:
    """Whether the producer accepts it."""
    try:
        for message in rows.messages:
            check_message(message, options.rules())
            properties_text(message, "")
    except InvalidArgument:
        return False
    return True


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
def test_bytes_equal_those_of_messages_and_invalid_rows_take_the_slow_path(
    bodies: list[bytes], tags: list[str | None], keys: Any, stamp: str, start: int
) -> None:
    columns = {
        "body": pa.array(bodies, pa.binary()).slice(start),
        "tags": pa.array(tags, pa.string()).slice(start),
        "keys": keys.slice(start),
    }
    encoded, rows = both(columns, stamp=stamp)
    sendable = is_sendable(rows, SinkOptions(nameserver="x:1", stamp=stamp))
    assert (encoded is not None) == sendable
    if encoded is not None:
        assert encoded.entries.to_pylist() == as_encoded_one_by_one(encoded, rows)
        assert encoded.body_sizes.tolist() == [len(message.body) for message in rows.messages]


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
    try:
        encoded, rows = both(columns, **options)
    except InvalidArgument as error:
        assert "SPARK_ROW is reserved" in str(error)
        return
    if encoded is None:
        names = [[name for name, _ in each or ()] for each in own[start:]]
        special = any(len(set(each)) < len(each) or "SPARK_ROW" in each for each in names)
        assert special or not is_sendable(rows, SinkOptions(nameserver="x:1", **options))
    else:
        assert is_sendable(rows, SinkOptions(nameserver="x:1", **options))
        assert encoded.entries.to_pylist() == as_encoded_one_by_one(encoded, rows)


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
    encoded, rows = both({"body": pa.array([b"1", b"22", b"3"]), **more}, stamp=stamp, topic=topic)
    assert encoded is not None
    assert encoded.entries.to_pylist() == as_encoded_one_by_one(encoded, rows)
    assert encoded.topics == rows.topics


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"body": pa.array([b"x" * 4096])}, {}),
        ({"body": pa.array([b"x" * 50])}, {"body_bytes_max": 49}),
        ({"body": pa.array([b""])}, {}),
        ({"delayLevel": pa.array([3])}, {}),
        ({"properties": pa.array([[("SPARK_ROW", "1")]], MAP)}, {"reserved_properties": "drop"}),
        ({"tags": pa.array(["x" * 32768])}, {}),
        ({"topic": pa.array(["%RETRY%g"])}, {"topic": None}),
    ],
)
def test_rows_that_need_more_take_the_slow_path(
    more: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    encoded, rows = both({"body": pa.array([b"1"]), **more}, **options)
    assert encoded is None
    assert len(rows.messages) == 1


def test_ids_are_unique_and_consecutive() -> None:
    maker = ids()
    seen: list[str] = []
    for count in (30_000, 30_000, 5_600):
        encoded, _ = both({"body": pa.array([b"1"] * count)}, maker)
        assert encoded is not None
        found = [encoded.message_id(place) for place in range(count)]
        assert f"UNIQ_KEY\x01{found[-1]}\x02".encode() in encoded.entries[count - 1].as_py()
        seen += found
    # There are 65,536 in a millisecond.
    assert len(set(seen)) == 65_536
    assert int(seen[-1][-4:], 16) == (65_600 - 1) & 0xFFFF
    assert int(maker.next()[-4:], 16) == 65_600 & 0xFFFF
    with pytest.raises(InvalidArgument, match="count must be 1 to 65536, got 65537"):
        maker.claim(65_537)


def test_sends_are_cut_by_number_and_size() -> None:
    encoded, rows = both({"body": pa.array([b"x" * 100] * 7 + [b"x" * 900] + [b"x"] * 2)})
    assert encoded is not None
    cut = list(sends(encoded, QUEUES, BatchLimits(3, 1000, 4096), 0))
    assert [list(each.rows) for each in cut] == [
        [98, 99, 100], [101, 102, 103], [104], [105], [106, 107],
    ]  # fmt: skip
    assert [each.body_bytes for each in cut] == [300, 300, 100, 900, 2]
    bodies = [each.body for each in cut if isinstance(each, EncodedSend)]
    assert b"".join(bodies) == b"".join(as_encoded_one_by_one(encoded, rows))


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
    encoded, rows = both(columns, topic=None if "topic" in chosen else "t")
    assert encoded is not None
    other = list(sends(rows, QUEUES, CUTS, 0))
    cut = list(sends(encoded, QUEUES, CUTS, 0))
    assert [(each.destination, list(each.rows)) for each in cut] == [
        (each.destination, list(each.rows)) for each in other
    ]
    one_by_one = as_encoded_one_by_one(encoded, rows)
    rules = SinkOptions(nameserver="x:1").rules()
    for made, before in zip(cut, other, strict=True):
        assert isinstance(made, EncodedSend)
        assert isinstance(before, Send)
        places = [row - FIRST_ROW for row in made.rows]
        assert made.body == b"".join(one_by_one[place] for place in places)
        names = [encoded.message_id(place) for place in places]
        joined = outgoing_batch(before.messages, names, rules, "space")
        ready = encoded_batch(before.messages[0].topic, made.message_id, made.body, rules, "space")
        assert ready.message_id == names[0]
        assert (ready.topic, ready.body, ready.properties, ready.is_batch) == (
            joined.topic, joined.body, joined.properties, joined.is_batch,
        )  # fmt: skip


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
        assert rows is not None
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
        assert rows is not None
        task = RetryingSender(session, options, partition=3)
        try:
            with pytest.raises(
                InvalidArgument, match="row 42 of partition 3: a batch must have at most"
            ):
                await take(task, rows)
        finally:
            await task.producer.close()
