from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from archives import extract
from example_counts import in_long_runs
from stored_rows import (
    decoded,
    entries,
    expected,
    names,
    numbered,
    one_batch,
    plain,
    records_in,
    row,
    rows_of,
    stored,
)
from turbopump.core import scan_records
from turbopump.errors import RecordError
from turbopump.spark.records import record_columns
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.spark.records.schema import COLUMNS
from turbopump.wire import framing
from turbopump.wire.compression import deflate
from turbopump.wire.hosts import Host, host
from turbopump.wire.record import (
    MAGIC_V2,
    Record,
    decode_record,
    encode_blank,
)
from turbopump.wire.sysflag import COMPRESSED, Compression, with_compression
from vectors import frame, load

hosts = st.sampled_from(
    [host("127.0.0.1", 1), host("255.0.0.1", 65535), host("::1", 10911), Host(b"\xff" * 16, -1)]
)
i32 = st.integers(-(2**31), 2**31 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
times_ms = i64 | st.integers(0, 2**41) | st.sampled_from(
    [-62_135_596_800_000, -62_135_596_800_001, 253_402_300_799_999, 253_402_300_800_000]
)  # fmt: skip
property_texts = (
    st.lists(entries | st.text("a\x01\x02", max_size=4), max_size=6)
    .map("\x02".join)
    .map(str.encode)
) | st.binary(max_size=30)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, int]:
    body = draw(st.binary(max_size=50))
    kind = draw(st.none() | st.sampled_from(Compression))
    other = draw(st.sampled_from([0, 0x2, 0x4, 0x8, 0xC, 0x800]))
    return (body, other) if kind is None else (deflate(body, kind), with_compression(other, kind))


@st.composite
def records(draw: st.DrawFn) -> bytes:
    body, flag = draw(bodies())
    record = Record(
        topic=draw(st.text(min_size=1, max_size=20).map(str.encode)),
        queue_id=draw(i32),
        body=body,
        properties=draw(property_texts),
        sys_flag=flag,
        born_timestamp_ms=draw(times_ms),
        born_host=draw(hosts),
        store_host=draw(hosts),
        reconsume_times=draw(i32),
    )
    data = stored(record, draw(i64), draw(i64), draw(times_ms))
    return as_release_5(data) if draw(st.booleans()) else data


def as_release_5(data: bytes) -> bytes:
    """The same record with two bytes for the length of its topic."""
    view = decode_record(data)
    topic = view.topic.encode()
    tail_bytes = 1 + len(topic) + 2 + len(view.stored_properties)
    head = struct.pack(">iI", len(data) + 1, MAGIC_V2) + data[8:-tail_bytes]
    return head + b"\0" + data[-tail_bytes:]


def check_all_columns(parts: list[bytes]) -> None:
    data = b"".join(parts)
    assert rows_of(data) == expected(data)


def check_some_rows(parts: list[bytes], data: st.DataObject) -> None:
    """Omit rows, perhaps all of them."""
    whole = b"".join(parts)
    rows = expected(whole)
    offsets = st.none() | st.sampled_from([0, *(one["queueOffset"] for one in rows)])
    start, end = data.draw(offsets), data.draw(offsets)
    tags = data.draw(st.none() | st.frozensets(st.sampled_from(["x", "xy", "none"])))
    assert rows_of(whole, start=start, end=end, tags=tags) == [
        one
        for one in rows
        if (start is None or one["queueOffset"] >= start)
        and (end is None or one["queueOffset"] < end)
        and (tags is None or one["tags"] in tags)
    ]


def check_damaged(parts: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(b"".join(parts))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.sampled_from([len(whole), at]))])
    check_one_by_one(damaged, check_crc=data.draw(st.booleans()))


def check_one_by_one(damaged: bytes, *, check_crc: bool) -> None:
    try:
        wanted: list[dict[str, Any]] = []
        while (at := sum(one["size"] for one in wanted)) < len(damaged):
            wanted.append(row(decode_record(damaged, at, check_crc=check_crc), "broker-a"))
    except RecordError:
        with pytest.raises(RecordError):
            rows_of(damaged, check_bodies=check_crc)
    else:
        assert rows_of(damaged, check_bodies=check_crc) == wanted


@st.composite
def alike(draw: st.DrawFn) -> list[bytes]:
    """Draw records of one producer: the same names, perhaps one twice, in the same order."""
    named = draw(st.lists(names, min_size=1, max_size=4))
    values = st.text("xyß", min_size=1, max_size=3) | st.sampled_from(["x", "x\x01"])
    ends = draw(st.sampled_from(["", "\x02", "\x02\x02"]))
    body_bytes = draw(st.none() | st.integers(0, 1500))
    found = []
    for offset in range(draw(st.integers(1, 6))):
        text = "\x02".join(f"{name}\x01{draw(values)}" for name in named) + ends
        body = b"%d" % offset * offset if body_bytes is None else bytes(body_bytes)
        topic = draw(st.sampled_from([b"T", b"T", b"T", b"U", b"TT"]))
        found.append(stored(plain(body, text.encode(), topic=topic), offset))
    return found


def check_spans(parts: list[bytes], data: st.DataObject) -> None:
    """Place records in runs of a buffer with other bytes between them."""
    buffer, spans = b"", []
    while parts:
        buffer += data.draw(st.binary(max_size=5))
        count = data.draw(st.integers(1, len(parts)))
        span, parts = b"".join(parts[:count]), parts[count:]
        spans.append((len(buffer), len(buffer) + len(span)))
        buffer += span
    made = RecordColumns(COLUMNS)
    run = records_in(memoryview(buffer), spans)
    (batch,) = made.batches_of(run, broker="b")
    assert batch == one_batch(made, b"".join(buffer[start:end] for start, end in spans))


@given(alike(), st.data())
@settings(max_examples=10, deadline=None)
def test_messages_of_the_same_layout_in_runs_of_a_buffer(
    parts: list[bytes], data: st.DataObject
) -> None:
    check_all_columns(parts)
    check_spans(parts, data)


@pytest.mark.slow
@given(alike() | st.lists(records(), max_size=8), st.data())
@settings(max_examples=in_long_runs(1000), deadline=None)
def test_many_messages_in_runs_of_a_buffer(parts: list[bytes], data: st.DataObject) -> None:
    check_all_columns(parts)
    check_spans(parts, data)


def test_damage_in_a_run_is_located() -> None:
    good = numbered([b"a\x01b"] * 3)
    buffer = b"xx" + good + b"yyy" + good + b"z"
    second = 2 + len(good) + 3
    spans = [(2, 2 + len(good)), (second, second + len(good))]
    made = RecordColumns(["queueOffset"])
    assert len(records_in(buffer, spans)) == 6
    for at, told in ((second + 88, "checksum"), (second + 4, "magic"), (second + 3, "record")):
        damaged = bytearray(buffer)
        damaged[at] ^= 0x55
        with pytest.raises(RecordError, match=told):
            list(made.batches_of(records_in(memoryview(damaged), spans), broker="b"))
    with pytest.raises(RecordError, match="record"):
        records_in(buffer[: len(good)], [(2, len(good))])


@given(alike() | st.lists(records(), min_size=1, max_size=3), st.data())
@settings(max_examples=3, deadline=None)
def test_damage_is_found_or_harmless(parts: list[bytes], data: st.DataObject) -> None:
    check_damaged(parts, data)


@pytest.mark.slow
@given(alike() | st.lists(records(), max_size=8), st.data())
@settings(max_examples=in_long_runs(1000), deadline=None)
def test_columns_equal_the_messages_decoded_one_by_one(
    parts: list[bytes], data: st.DataObject
) -> None:
    check_all_columns(parts)
    check_some_rows(parts, data)


@pytest.mark.slow
@given(alike() | st.lists(records(), min_size=1, max_size=3), st.data())
@settings(max_examples=in_long_runs(1000), deadline=None)
def test_more_damage_is_found_or_harmless(parts: list[bytes], data: st.DataObject) -> None:
    check_damaged(parts, data)


@pytest.mark.parametrize("vector", load("codecs.json")["records"])
def test_golden_records(vector: dict[str, Any]) -> None:
    (found,) = rows_of(bytes.fromhex(vector["hex"]))
    assert found["topic"] == vector["topic"]
    assert found["body"].hex() == vector["bodyHex"]
    assert found["properties"] == vector["properties"]
    assert found["offsetMsgId"] == vector["offsetMsgId"]
    assert found["size"] == vector["storeSize"]
    assert (found["queueId"], found["queueOffset"]) == (vector["queueId"], vector["queueOffset"])


def test_a_recorded_answer_to_a_pull() -> None:
    body = framing.decode(frame("pull_found.response")).body
    assert isinstance(body, bytes)
    assert rows_of(body) == expected(body)
    assert one_batch(RecordColumns(COLUMNS), memoryview(body)).num_rows == 3


def test_nothing_gives_an_empty_batch() -> None:
    assert rows_of(b"") == []
    assert rows_of(b"", tags=frozenset({"a"})) == []


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("topic", [b"T", b"T\xff"])
def test_no_existing_row_is_selected(address: str, topic: bytes) -> None:
    at = host(address, 1)
    data = stored(replace(plain(topic=topic), born_host=at, store_host=at))
    assert rows_of(data, start=1) == []
    assert rows_of(data, end=0) == []
    assert rows_of(data, tags=frozenset({"a"})) == []


@pytest.mark.parametrize("column", COLUMNS)
def test_each_column_alone(column: str) -> None:
    data = numbered([b"TAGS\x01a\x02KEYS\x01k\x02UNIQ_KEY\x01u", b"", b"TAGS\x01b\x02"])
    assert rows_of(data, [column]) == [{column: one[column]} for one in expected(data)]


def test_a_name_given_twice_has_its_last_value() -> None:
    data = numbered([b"a\x01x\x02a\x01y", b"", b"b\x01z", b"TAGS\x01p\x02c\x01q\x02TAGS\x01r"])
    found = rows_of(data)
    assert [one["properties"] for one in found] == [
        {"a": "y"}, {}, {"b": "z"}, {"TAGS": "r", "c": "q"},
    ]  # fmt: skip
    assert [one["tags"] for one in found] == [None, None, None, "r"]


def test_many_names_may_repeat_too() -> None:
    many = b"\x02".join(b"name%d\x01v" % number for number in range(60))
    data = numbered([many, many + b"\x02name7\x01last"])
    assert rows_of(data) == expected(data)


def test_properties_that_are_not_utf8_are_read_with_replacements() -> None:
    data = numbered([b"TAGS\x01good", b"TAGS\x01b\xffad\x02\xfe\x01x", b"\xc3"])
    assert rows_of(data) == expected(data)
    assert [one["tags"] for one in rows_of(data)] == ["good", "b\ufffdad", None]


def test_a_topic_that_is_not_utf8_is_damage() -> None:
    data = stored(plain()) + stored(plain(topic=b"T\xff"), 7)
    with pytest.raises(RecordError, match="queue 3, offset 7: topic is not UTF-8"):
        rows_of(data)


def test_rows_outside_the_requested_offsets_are_omitted() -> None:
    data = numbered([b""] * 6)
    made = RecordColumns(["queueOffset"])
    for start, end, wanted in [(2, 4, [2, 3]), (None, 2, [0, 1]), (4, None, [4, 5]), (9, 9, [])]:
        found = one_batch(made, data, start=start, end=end)
        assert found.column(0).to_pylist() == wanted


def test_rows_of_other_tags_are_omitted() -> None:
    data = numbered([b"TAGS\x01Aa", b"TAGS\x01BB", b"", b"TAGS\x01Aa\x02x\x01y"])
    assert [one["queueOffset"] for one in rows_of(data, tags=frozenset({"Aa"}))] == [0, 3]
    assert rows_of(data, ["body"], tags=frozenset()) == []


def test_a_body_with_a_wrong_checksum_is_named() -> None:
    data = bytearray(stored(plain(body=b"hello"), 41))
    data[88] ^= 1
    with pytest.raises(
        RecordError, match="topic T, broker broker-a, queue 3, offset 41: body does not match"
    ):
        rows_of(bytes(data), ["queueOffset"])
    assert rows_of(bytes(data), ["body"], check_bodies=False) == [{"body": b"iello"}]


@pytest.mark.parametrize("kind", Compression)
def test_a_body_that_does_not_inflate_is_named(kind: Compression) -> None:
    flag = with_compression(0, kind)
    data = stored(plain(b"good", sys_flag=0), 1) + stored(plain(b"broken", sys_flag=flag), 2)
    with pytest.raises(
        RecordError, match=r"topic T, broker broker-a, queue 3, offset 2: body .*" + kind.name
    ):
        rows_of(data)


def test_an_unknown_compression_is_named() -> None:
    with pytest.raises(RecordError, match="offset 2: unknown compression type 7"):
        rows_of(stored(plain(sys_flag=COMPRESSED | 0x700), 2))


def test_plain_and_compressed_bodies_keep_their_order() -> None:
    flag = with_compression(0, Compression.ZSTD)
    parts = [plain(b"a"), plain(deflate(b"b" * 9, Compression.ZSTD), sys_flag=flag), plain(b"c")]
    data = b"".join(map(stored, parts))
    assert [one["body"] for one in rows_of(data)] == [b"a", b"b" * 9, b"c"]


def test_bodies_that_inflate_to_much_make_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_columns, "BATCH_BYTES", 10_000)
    flag = with_compression(0, Compression.ZLIB)
    large = plain(deflate(b"x" * 6000, Compression.ZLIB), b"TAGS\x01a", sys_flag=flag)
    parts = [plain(b"p"), large, large, plain(b"q"), large, plain(b"r"), large, plain(b"s")]
    data = b"".join(stored(part, number) for number, part in enumerate(parts))
    made = RecordColumns(["queueOffset", "body", "tags"])
    batches = list(decoded(made, data))
    assert [batch.num_rows for batch in batches] == [3, 4, 1]
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert rows == one_batch(made, data).to_pylist()
    inner = [batch.num_rows for batch in decoded(made, data, start=2, end=7)]
    assert inner == [3, 2]
    tagged = decoded(RecordColumns(["body"], tags=frozenset({"a"})), data)
    assert [batch.num_rows for batch in tagged] == [2, 2]
    # Nothing is inflated, or nothing exists: one batch.
    (few,) = decoded(RecordColumns(["queueOffset"]), data)
    assert few.num_rows == 8
    (none,) = decoded(made, data, start=99)
    assert none.num_rows == 0


@pytest.mark.parametrize("check_crc", [True, False])
def test_damage_among_records_of_the_same_layout(*, check_crc: bool) -> None:
    one = stored(plain(text=b"KEYS\x01k"))
    # Size, magic, flags, length of the body, of the topic, and of the properties.
    for at in (0, 3, 7, 39, 84, 87, 93, 95, 96):
        for bits in (0x01, 0x10, 0x20, 0xFF):
            other = one[:at] + bytes([one[at] ^ bits]) + one[at + 1 :]
            for parts in ([one, other, one], [other, other], [other]):
                check_one_by_one(b"".join(parts), check_crc=check_crc)


def test_lengths_of_bodies_that_reach_to_the_end_of_a_record() -> None:
    one = stored(plain(text=b"KEYS\x01k"))
    for length in range(len(one) - 88 - 3, len(one) - 88 + 2):
        other = one[:84] + struct.pack(">i", length) + one[88:]
        for parts in ([other], [other, other], [one, other]):
            check_one_by_one(b"".join(parts), check_crc=False)


@pytest.mark.parametrize(
    ("damage", "position"),
    [
        (encode_blank(100) + bytes(92), 4),
        (bytes(200), 4),
        (stored(plain())[:-1], 0),
        (b"\xff", 0),
        (struct.pack(">i", 12) + stored(plain())[4:], 84),
        (struct.pack(">i", -1) + stored(plain())[4:], 84),
        (
            struct.pack(">i", len(stored(plain())) + 40_000) + stored(plain())[4:] + bytes(40_000),
            95,
        ),
    ],
)
def test_bytes_that_are_not_a_record_are_located(damage: bytes, position: int) -> None:
    for good in (b"", stored(plain())):
        with pytest.raises(RecordError) as raised:
            rows_of(good + damage)
        assert raised.value.position == len(good) + position


def test_record_columns_can_be_pickled() -> None:
    made = pickle.loads(pickle.dumps(RecordColumns(["body"], tags=frozenset({"a"}))))
    assert one_batch(made, stored(plain(b"x", b"TAGS\x01a")), "").to_pylist() == [{"body": b"x"}]


@pytest.mark.parametrize("name", ["store", "store_v6", "store_trimmed"])
def test_golden_stores(name: str, tmp_path: Path) -> None:
    extract(Path(__file__).parents[2] / "data/store" / f"{name}.tar.gz", tmp_path)
    for path in sorted(tmp_path.rglob("commitlog/*")):
        content = path.read_bytes()
        _, damaged_at = scan_records(content)
        end = len(content) if damaged_at is None else damaged_at
        assert rows_of(content[:end]) == expected(content[:end])
