from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import InvalidArgument, RecordError
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire import framing, properties
from turbopump.wire.hosts import host
from turbopump.wire.record import (
    FIXED_BYTES,
    HEAD_BYTES_MAX,
    MAGIC_V2,
    MessageView,
    Record,
    decode_record,
    decode_records,
    encode_blank,
    store_timestamp_in,
)
from turbopump.wire.sysflag import COMPRESSED, Transaction
from vectors import Vector, frame, load

VECTORS = load("codecs.json")["records"]
GOLDEN = bytes.fromhex(VECTORS[0]["hex"])


def record_of(vector: Vector, encoded_properties: bytes) -> Record:
    return Record(
        topic=vector["topic"].encode(),
        queue_id=vector["queueId"],
        body=bytes.fromhex(vector["storedBodyHex"]),
        properties=encoded_properties,
        flag=vector["flag"],
        sys_flag=vector["storedSysFlag"],
        born_timestamp_ms=vector["bornTimestamp"],
        born_host=host(*vector["bornHost"]),
        store_host=host(*vector["storeHost"]),
        reconsume_times=vector["reconsumeTimes"],
        prepared_transaction_offset=vector["preparedTransactionOffset"],
    )


@pytest.mark.parametrize("vector", VECTORS)
def test_golden_records(vector: Vector) -> None:
    data = bytes.fromhex(vector["hex"])
    view = decode_record(data, check_crc=True)
    assert view.topic == vector["topic"]
    assert view.body.hex() == vector["bodyHex"]
    assert view.properties == vector["properties"]
    assert view.body_crc == vector["bodyCrc"]
    assert view.size == vector["storeSize"]
    assert view.offset_id == vector["offsetMsgId"]
    assert view.born_host == host(*vector["bornHost"])
    record = record_of(vector, view.stored_properties)
    encoded = record.encode(
        vector["queueOffset"], vector["physicalOffset"], vector["storeTimestamp"]
    )
    assert record.size == len(encoded)
    assert encoded.hex() == vector["hex"]
    head = encoded.ljust(HEAD_BYTES_MAX, b"\0")
    assert store_timestamp_in(head, vector["physicalOffset"]) == vector["storeTimestamp"]
    assert store_timestamp_in(head, vector["physicalOffset"] + 1) == 0
    assert store_timestamp_in(head[: HEAD_BYTES_MAX - 1], vector["physicalOffset"]) == 0


def test_a_run_of_records_as_in_the_answer_to_a_pull() -> None:
    body = framing.decode(frame("pull_found.response")).body
    assert isinstance(body, bytes)
    views = list(decode_records(body))
    assert [view.physical_offset for view in views] == [0, 352, 611]
    assert sum(view.size for view in views) == len(body)


hosts = st.sampled_from([host("127.0.0.1", 1), host("255.0.0.1", 65535), host("::1", 10911)])
i32 = st.integers(-(2**31), 2**31 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
records = st.builds(
    Record,
    topic=st.binary(min_size=1, max_size=127).filter(lambda raw: raw.isascii()),
    queue_id=i32,
    body=st.binary(max_size=200),
    properties=st.binary(max_size=100),
    flag=i32,
    sys_flag=st.integers(0, 0xFF) | st.just(0x301),
    born_timestamp_ms=i64,
    born_host=hosts,
    store_host=hosts,
    reconsume_times=i32,
    prepared_transaction_offset=i64,
)


@given(records, i64, i64, i64)
def test_round_trip(record: Record, queue_offset: int, offset: int, stored_ms: int) -> None:
    data = record.encode(QueueOffset(queue_offset), PhysicalOffset(offset), stored_ms)
    view = decode_record(data, check_crc=True)
    assert len(data) == record.size == view.size
    assert view.topic.encode() == record.topic
    assert view.stored_body == record.body
    assert view.stored_properties == record.properties
    assert (view.born_host, view.store_host) == (record.born_host, record.store_host)
    assert view.sys_flag & ~0x30 == record.sys_flag & ~0x30
    assert (view.queue_offset, view.physical_offset) == (queue_offset, offset)
    assert view.store_timestamp_ms == stored_ms


def outcome(views: Iterable[MessageView]) -> list[object]:
    """Return all fields of each message, and the error that ends them."""
    found: list[object] = []
    try:
        found.extend(view.__reduce__()[1][:-2] for view in views)
    except RecordError as error:
        found.append(str(error))
    return found


def one_by_one(data: bytes) -> Iterator[MessageView]:
    at = 0
    while at < len(data):
        view = decode_record(data, at)
        yield view
        at += view.size


@given(st.lists(records, min_size=1, max_size=2), st.lists(st.integers(0, 1), max_size=8))
def test_a_run_is_read_as_its_records_are(kinds: list[Record], order: list[int]) -> None:
    chosen = [kinds[number % len(kinds)] for number in order]
    data = b"".join(
        record.encode(QueueOffset(number), PhysicalOffset(number), number)
        for number, record in enumerate(chosen)
    )
    assert outcome(decode_records(data)) == outcome(one_by_one(data))
    assert len(outcome(decode_records(memoryview(data)))) == len(chosen)


def test_a_run_with_a_flipped_bit_is_read_as_its_records_are() -> None:
    data = bytearray(GOLDEN * 4)
    for bit in range(8 * 2 * len(GOLDEN), 8 * 3 * len(GOLDEN)):
        data[bit // 8] ^= 1 << bit % 8
        damaged = bytes(data)
        assert outcome(decode_records(damaged)) == outcome(one_by_one(damaged))
        data[bit // 8] ^= 1 << bit % 8


def plain_view(body: bytes = b"hello", text: str = "", sys_flag: int = 0) -> MessageView:
    record = Record(
        topic=b"T",
        queue_id=0,
        body=body,
        properties=text.encode(),
        sys_flag=sys_flag,
        born_timestamp_ms=1,
        born_host=host("127.0.0.1", 1),
        store_host=host("192.168.1.2", 10911),
    )
    return decode_record(record.encode(QueueOffset(1), PhysicalOffset(12345), 2))


def test_nothing_is_parsed_or_inflated_before_it_is_accessed() -> None:
    view = plain_view(body=b"this is not zlib", text="TAGS\x01a", sys_flag=COMPRESSED)
    assert view._properties is None
    assert view._body is None
    assert view.tags == "a"
    assert view._properties is None
    assert view.properties == {"TAGS": "a"}
    assert view.properties is view.properties
    with pytest.raises(RecordError, match="body is not valid ZLIB"):
        _ = view.body


def test_the_view_for_users() -> None:
    text = properties.encode({"TAGS": "a", "KEYS": "k1  k2", "UNIQ_KEY": "U"})
    view = plain_view(text=text, sys_flag=Transaction.COMMIT)
    assert (view.tags, view.keys, view.unique_key) == ("a", ["k1", "k2"], "U")
    assert view.message_id == "U"
    assert view.offset_id == "C0A8010200002A9F0000000000003039"
    assert str(view.store_host) == "192.168.1.2:10911"
    assert view.transaction is Transaction.COMMIT
    bare = plain_view()
    assert (bare.tags, bare.keys, bare.message_id) == (None, [], bare.offset_id)


def test_topic_length_of_two_bytes_in_records_of_release_5() -> None:
    at = GOLDEN.index(b"\x06TopicA")
    newer = bytearray(GOLDEN[:at] + b"\x00" + GOLDEN[at:])
    struct.pack_into(">iI", newer, 0, len(newer), MAGIC_V2)
    view = decode_record(bytes(newer))
    assert (view.topic, view.body) == ("TopicA", b"hello")


def test_cut_records() -> None:
    for length in range(len(GOLDEN)):
        with pytest.raises(RecordError):
            decode_record(GOLDEN[:length])


@pytest.mark.parametrize("bit", range(8))
def test_flipped_bits_are_noticed_or_harmless(bit: int) -> None:
    for at in range(len(GOLDEN)):
        damaged = bytearray(GOLDEN)
        damaged[at] ^= 1 << bit
        try:
            view = decode_record(bytes(damaged), check_crc=True)
        except RecordError:
            continue
        assert (view.size, view.stored_body) == (len(GOLDEN), b"hello"), f"byte {at}"


def test_damage_is_described_with_its_position() -> None:
    bad_magic = b"prefix" + GOLDEN[:4] + b"\0\0\0\0" + GOLDEN[8:]
    with pytest.raises(RecordError, match=r"magic number 0x00000000 .*at byte 10"):
        decode_record(bad_magic, 6)
    bad_body = bytearray(GOLDEN)
    bad_body[88] ^= 1
    with pytest.raises(RecordError, match=r"checksum 907060870 \(at byte 88\)"):
        decode_record(bytes(bad_body), check_crc=True)
    assert decode_record(bytes(bad_body)).body != b"hello"


def test_records_that_cannot_be_stored_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="topic must be 1 to 127 bytes, got 128"):
        Record(
            topic=b"t" * 128,
            queue_id=0,
            body=b"",
            born_timestamp_ms=0,
            born_host=host("::1", 1),
            store_host=host("::1", 1),
        )
    with pytest.raises(InvalidArgument, match="properties must be at most 32767 bytes, got 32768"):
        Record(
            topic=b"t",
            queue_id=0,
            body=b"",
            properties=b"p" * 32768,
            born_timestamp_ms=0,
            born_host=host("::1", 1),
            store_host=host("::1", 1),
        )


def test_numbers_that_do_not_fit() -> None:
    record = Record(
        topic=b"t",
        queue_id=2**40,
        body=b"",
        born_timestamp_ms=0,
        born_host=host("::1", 1),
        store_host=host("::1", 1),
    )
    with pytest.raises(InvalidArgument, match="does not fit into its record"):
        record.encode(QueueOffset(0), PhysicalOffset(0), 0)


def test_blank_record() -> None:
    assert encode_blank(100).hex() == "00000064cbd43194"


def test_smallest_size() -> None:
    assert decode_record(GOLDEN).size == FIXED_BYTES + len("hello") + len("TopicA") + len("k\x01v")
