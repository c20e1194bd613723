"""Properties, hashes, ids, batches, compression, flags, hosts: as Apache RocketMQ has them."""

from __future__ import annotations

import datetime
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import BodyError, InvalidArgument, RecordError
from turbopump.message import PhysicalOffset
from turbopump.wire import hashing, ids, properties, sysflag
from turbopump.wire.batch import BatchEntry, decode_batch, encode_batch
from turbopump.wire.bodies import BrokerRegistration, DataVersion, TopicConfig, TopicConfigTable
from turbopump.wire.compression import deflate, inflate
from turbopump.wire.hosts import Host, host, split_address
from turbopump.wire.registration import decode_compressed, encode_compressed
from turbopump.wire.sysflag import Compression, Transaction
from vectors import Vector, case, load

CODECS = load("codecs.json")
HASHES = load("hashes.json")


# --- properties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", CODECS["propertiesEncode"])
def test_properties_encode(vector: Vector) -> None:
    text = properties.encode(vector["properties"])
    entries = sorted(text.split(properties.ENTRY_END))
    assert entries == sorted(vector["text"].split(properties.ENTRY_END))


@pytest.mark.parametrize("vector", CODECS["propertiesDecode"])
def test_properties_decode(vector: Vector) -> None:
    assert properties.decode(vector["text"] or "") == vector["properties"]


plain = st.text(st.characters(exclude_characters="\x01\x02"), min_size=1, max_size=10)


@given(st.dictionaries(plain, plain, max_size=6))
def test_properties_round_trip(given_properties: dict[str, str]) -> None:
    text = properties.encode(given_properties)
    assert properties.decode(text) == given_properties
    assert properties.decode(text + properties.ENTRY_END) == given_properties


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("TAGS", "a", "'TAGS' is reserved"),
        (" ", "a", "must not be blank"),
        ("a", "", "must not be blank"),
        ("a", "b\x02c", "must not contain"),
        ("a\x01", "b", "must not contain"),
    ],
)
def test_properties_that_users_must_not_set(name: str, value: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        properties.check_user_property(name, value)


def test_properties_that_users_may_set() -> None:
    for name in ("colour", "TRANSACTION_CHECK_TIMES", "__STARTDELIVERTIME"):
        properties.check_user_property(name, "x")


# --- hashes ---------------------------------------------------------------------------------------


def test_tag_hashes() -> None:
    for vector in HASHES["tags"]:
        with case(vector["tag"]):
            check_tag(vector)


def check_tag(vector: Vector) -> None:
    code = hashing.tags_code(vector["tag"])
    assert code == vector["tagsCode"]
    if vector["unitHex"] is not None:
        assert code.to_bytes(8, "big", signed=True).hex() == vector["unitHex"]
    if vector["hash"] is not None:
        assert hashing.string_hash(vector["tag"]) == vector["hash"]


def test_index_hashes() -> None:
    for vector in HASHES["indexKeys"]:
        with case(vector["key"]):
            found = hashing.index_hash(vector["topic"], vector["key"])
            assert found == vector["keyHash"]
            for slots, slot in vector["slots"].items():
                assert found % int(slots) == slot


def test_places_in_a_bloom_filter() -> None:
    # As RocketMQ wrote them to consumerFilter.json.
    assert hashing.bloom_positions("cg_sql#Beta", 112, 3) == [91, 45, 32]
    # A published value for a text of several blocks.
    fox = b"The quick brown fox jumps over the lazy dog"
    assert hashing.murmur3(fox) == 0xE34B_BC7B_BC07_1B6C
    assert hashing.murmur3(b"") == 0


@pytest.mark.parametrize("vector", HASHES["bodyCrc"])
def test_body_checksums(vector: Vector) -> None:
    assert hashing.body_crc(bytes.fromhex(vector["bodyHex"])) == vector["crc"]


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", HASHES["offsetIds"])
def test_offset_ids(vector: Vector) -> None:
    place = host(vector["host"], vector["port"])
    offset = PhysicalOffset(vector["offset"])
    assert ids.offset_id(place, offset) == vector["id"]
    assert ids.parse_offset_id(vector["id"]) == (place, offset)
    assert ids.offset_ids(place, [offset]) == vector["id"]
    both = ids.offset_ids(place, [PhysicalOffset(0), offset])
    assert both == f"{ids.offset_id(place, PhysicalOffset(0))},{vector['id']}"


@pytest.fixture
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ids count from the start of the local month: the vectors were created in UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class UniqueId(NamedTuple):
    process: int
    maker: int
    month_ms: int
    counter: int


def parts_of(unique_id: str) -> UniqueId:
    return UniqueId(*struct.unpack(">HIIH", bytes.fromhex(unique_id)[-12:]))


@pytest.mark.usefixtures("_utc")
@pytest.mark.parametrize("vector", HASHES["uniqCreated"])
def test_unique_ids(vector: Vector) -> None:
    ip, clock = host(vector["ip"], 0).ip, HandClock(vector["nearlyTime"])
    made = ids.UniqueIds(clock, ip, process=vector["pidField"], maker=vector["hashField"])
    prefix, _ = made.claim(1)
    assert ids.with_counter(prefix, vector["counterField"]) == vector["id"]


class HandClock:
    def __init__(self, now_ms: int) -> None:
        self.at_ms = now_ms

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_ms(self) -> int:
        return self.at_ms

    def uptime_ms(self) -> int:
        return self.at_ms


def epoch_ms(
    year: int, month: int, day: int, hour: int = 0, minute: int = 0, second: int = 0
) -> int:
    moment = datetime.datetime(year, month, day, hour, minute, second, tzinfo=datetime.UTC)
    return int(moment.timestamp()) * 1000


@pytest.mark.usefixtures("_utc")
def test_unique_ids_across_the_turn_of_a_month() -> None:
    clock = HandClock(epoch_ms(2026, 10, 31, 23, 59, 59))
    made = ids.UniqueIds(clock, bytes([127, 0, 0, 1]), process=0x12345, maker=-1)
    first = parts_of(made.next())
    clock.at_ms += 2000
    second = parts_of(made.next())
    clock.at_ms -= 2000
    third = parts_of(made.next())
    assert (first.process, first.maker) == (0x2345, 0xFFFF_FFFF)
    assert first.month_ms == 31 * 86_400_000 - 1000
    assert second.month_ms == 1000
    assert third.month_ms == 0, "a clock set back a little stays at the month's first instant"
    assert [first.counter, second.counter, third.counter] == [0, 1, 2]
    clock.at_ms -= 3_600_000
    assert parts_of(made.next()).month_ms == 31 * 86_400_000 - 3_601_000


def test_unique_ids_do_not_repeat() -> None:
    made = ids.UniqueIds(HandClock(epoch_ms(2026, 1, 1)), bytes(4), process=1, maker=2)
    assert len({made.next() for _ in range(65_536)}) == 65_536


def test_unique_ids_do_not_repeat_among_threads() -> None:
    made = ids.UniqueIds(HandClock(epoch_ms(2026, 1, 1)), bytes(4), process=1, maker=2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            each = [threads.submit(lambda: [made.next() for _ in range(5000)]) for _ in range(2)]
            many = [
                threads.submit(lambda: [one for _ in range(500) for one in made.many(10)])
                for _ in range(2)
            ]
            found = [one for done in each + many for one in done.result()]
    finally:
        sys.setswitchinterval(interval)
    assert len(set(found)) == 20_000


def test_several_unique_ids_follow_one_another() -> None:
    made = ids.UniqueIds(HandClock(epoch_ms(2026, 1, 1)), bytes(4), process=1, maker=2)
    prefix, first = made.claim(0xFFFE)
    expected = [ids.with_counter(prefix, first + 0xFFFE + place) for place in range(3)]
    assert made.many(3) == expected
    assert expected[1:] == [f"{prefix}FFFF", f"{prefix}0000"]
    assert made.next() == f"{prefix}0001"


@pytest.mark.parametrize("text", ["", "7F", "zz" * 16, "7F" * 15, "7F 00" * 6, "7F" * 17])
def test_invalid_ids(text: str) -> None:
    with pytest.raises(InvalidArgument, match="must be 32 or 56 hex digits"):
        ids.parse_offset_id(text)


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", CODECS["batches"])
def test_batches(vector: Vector) -> None:
    data = bytes.fromhex(vector["hex"])
    entries = list(decode_batch(data))
    assert encode_batch(entries) == data
    for entry, message in zip(entries, vector["messages"], strict=True):
        assert entry.body.hex() == message["bodyHex"]
        assert entry.flag == message["flag"]
        assert properties.decode(entry.properties.decode()) == message["properties"]


@given(st.lists(st.builds(BatchEntry, st.binary(max_size=20), st.binary(max_size=20)), max_size=5))
def test_batches_round_trip(entries: list[BatchEntry]) -> None:
    assert list(decode_batch(encode_batch(entries))) == entries


def test_damaged_batches() -> None:
    data = encode_batch([BatchEntry(b"hello", b"k\x01v")])
    for length in range(1, len(data)):
        with pytest.raises(BodyError, match="batch"):
            list(decode_batch(data[:length]))
    for at in range(4):
        damaged = bytearray(data)
        damaged[at] ^= 0x81
        with pytest.raises(BodyError, match="batch"):
            list(decode_batch(bytes(damaged)))


def test_batch_flags_that_are_too_large() -> None:
    with pytest.raises(InvalidArgument, match="must fit into 32 bits"):
        encode_batch([BatchEntry(b"", flag=2**40)])


def test_batch_properties_that_are_too_long() -> None:
    with pytest.raises(InvalidArgument, match="properties must be at most 32767 bytes, got 40000"):
        encode_batch([BatchEntry(b"", b"x" * 40000)])


# --- compression and flags ------------------------------------------------------------------------


@pytest.mark.parametrize("vector", CODECS["compress"])
def test_bodies_compressed_by_apache_rocketmq(vector: Vector) -> None:
    body = bytes.fromhex(vector["bodyHex"])
    forms = {name: value for name, value in vector.items() if name != "bodyHex"}
    assert forms
    for name, value in forms.items():
        assert inflate(bytes.fromhex(value), Compression[name.partition("/")[0]]) == body


@given(st.binary(max_size=3000), st.sampled_from(Compression))
def test_compression_round_trip(body: bytes, compression: Compression) -> None:
    assert inflate(deflate(body, compression), compression) == body


@pytest.mark.parametrize("compression", Compression)
def test_bodies_that_cannot_be_inflated(compression: Compression) -> None:
    stored = deflate(b"hello hello hello" * 100, compression)
    with pytest.raises(RecordError, match=compression.name):
        inflate(b"nonsense", compression)
    with pytest.raises(RecordError, match=compression.name):
        inflate(stored[:-3], compression)
    with pytest.raises(RecordError, match="inflates to more than 1000 bytes"):
        inflate(stored, compression, bytes_max=1000)
    assert len(inflate(stored, compression, bytes_max=1700)) == 1700


@pytest.mark.parametrize("vector", CODECS["sysFlags"])
def test_flag_bits(vector: Vector) -> None:
    flag = vector["sysFlag"]
    compression = sysflag.compression_of(flag)
    assert (compression is not None) == vector["compressed"]
    if compression is not None:
        assert compression.name == vector["compressionType"]
    assert sysflag.transaction_of(flag) == vector["transaction"]


@pytest.mark.parametrize("kind", [4, 5, 6, 7])
def test_unknown_compression(kind: int) -> None:
    with pytest.raises(RecordError, match=f"unknown compression type {kind}"):
        sysflag.compression_of(kind << 8 | 1)


def test_hosts_have_4_or_16_bytes() -> None:
    with pytest.raises(InvalidArgument, match="an IP address must be 4 or 16 bytes, got 3"):
        Host(b"abc", 1)


def test_changing_flag_bits() -> None:
    assert sysflag.with_compression(0x10, Compression.ZLIB) == 0x311
    assert sysflag.with_compression(0x301, Compression.LZ4) == 0x101
    assert sysflag.with_transaction(0x4 | 0x1, Transaction.COMMIT) == 0x9


@pytest.mark.parametrize("vector", CODECS["pullSysFlags"])
def test_pull_flag_bits(vector: Vector) -> None:
    names = {
        "commitOffset": sysflag.PULL_COMMIT_OFFSET,
        "suspend": sysflag.PULL_SUSPEND,
        "subscription": sysflag.PULL_SUBSCRIPTION,
        "classFilter": sysflag.PULL_CLASS_FILTER,
        "litePull": sysflag.PULL_LITE,
    }
    for name, bit in names.items():
        assert bool(vector["flag"] & bit) == vector[name]


# --- hosts and registrations ----------------------------------------------------------------------


def test_hosts_as_text() -> None:
    assert str(host("10.0.0.1", 9876)) == "10.0.0.1:9876"
    assert str(host("::1", 9876)) == "[::1]:9876"
    with pytest.raises(InvalidArgument, match="'localhost' is not an IP address"):
        host("localhost", 1)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:9876", ("127.0.0.1", 9876)),
        (" broker-a:10911 ", ("broker-a", 10911)),
        ("[::1]:1", ("::1", 1)),
    ],
)
def test_addresses(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":1",
        "host:",
        "host:x",
        "host:65536",
        "host:-1",
        "host:" + "9" * 5000,
        "host:\uff19",
        "[]:1",
        "::1:9876",
        "[::1]",
        "[::1]]:1",
    ],
)
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(InvalidArgument, match="expected host:port"):
        split_address(text)


REGISTRATION = BrokerRegistration(
    filter_server_list=["10.0.0.1:1"],
    topic_config_serialize_wrapper=TopicConfigTable(
        data_version=DataVersion(counter=2, timestamp=17),
        topic_config_table={
            "T": TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=8, perm=7),
            "%RETRY%g": TopicConfig(topic_name="%RETRY%g", topic_filter_type="MULTI_TAG"),
        },
    ),
)


def test_compressed_registration() -> None:
    assert decode_compressed(encode_compressed(REGISTRATION)) == REGISTRATION


def test_damaged_registrations() -> None:
    plain_form = zlib.decompress(encode_compressed(REGISTRATION))
    for length in range(len(plain_form)):
        with pytest.raises(BodyError):
            decode_compressed(zlib.compress(plain_form[:length]))
    with pytest.raises(BodyError, match="is not a registered topic's line"):
        decode_compressed(zlib.compress(plain_form.replace(b"T 4 8", b"T 4 x")))
    with pytest.raises(BodyError, match="ZLIB"):
        decode_compressed(b"not zlib")
    servers = plain_form.replace(b'["10.0.0.1:1"]', b'{"10.0.0.1":1}')
    with pytest.raises(BodyError, match="are not a list"):
        decode_compressed(zlib.compress(servers))
