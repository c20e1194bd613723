"""The records of a batch encoded in one call equal those encoded one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import TurbopumpError
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire import properties
from turbopump.wire import record_batch as batches
from turbopump.wire.batch import BatchEntry, decode_batch, encode_batch
from turbopump.wire.hashing import string_hash
from turbopump.wire.hosts import host
from turbopump.wire.property_texts import PropertyTexts
from turbopump.wire.record import Record
from turbopump.wire.record_batch import MESSAGES_MIN, Messages, RecordBatch, record_batch

SHARED = b"CLUSTER\x01c"
LIKE = Record(
    topic="Törööö".encode(),
    queue_id=3,
    body=b"",
    sys_flag=1,
    born_timestamp_ms=1_700_000_000_000,
    born_host=host("2001:db8::1", 1234),
    store_host=host("10.0.0.1", 10911),
    reconsume_times=2,
)
ENTRIES = st.builds(
    BatchEntry,
    body=st.binary(max_size=6),
    properties=st.sampled_from(
        [b"", b"A\x01b", b"A\x01b\x02", b"KEYS\x01x y", b"A\x01\0", b"\x02"]
    ),
    flag=st.sampled_from([0, 0, 0, -7]),
)
EQUAL = st.integers(0, 3).flatmap(
    lambda size: st.lists(
        st.builds(
            BatchEntry,
            body=st.binary(min_size=size, max_size=size),
            properties=st.sampled_from([b"A\x01b"] * 6 + [b"A\x01c", b"A\x01\x02", b"A\x01\0"]),
            flag=st.sampled_from([5] * 9 + [0]),
        ),
        min_size=1,
        max_size=9,
    )
)


def one_by_one(body: bytes) -> list[Record]:
    """Encode the records as for small batches."""
    records = []
    for entry in decode_batch(body):
        separated = entry.properties and not entry.properties.endswith(b"\x02")
        text = entry.properties + (b"\x02" if separated else b"") + SHARED
        records.append(replaced(entry, text))
    return records


def replaced(entry: BatchEntry, text: bytes) -> Record:
    return Record(
        topic=LIKE.topic,
        queue_id=LIKE.queue_id,
        body=entry.body,
        properties=text,
        flag=entry.flag,
        sys_flag=LIKE.sys_flag,
        born_timestamp_ms=LIKE.born_timestamp_ms,
        born_host=LIKE.born_host,
        store_host=LIKE.store_host,
        reconsume_times=LIKE.reconsume_times,
    )


def check_same(batch: RecordBatch, body: bytes) -> None:
    wanted = one_by_one(body)
    assert list(batch.records()) == wanted
    assert batch.sizes.tolist() == [record.size for record in wanted]
    positions = batch.sizes.cumsum() - batch.sizes + 5000
    made = batch.encode(QueueOffset(70), positions, 1_700_000_000_123)
    assert made == b"".join(
        record.encode(QueueOffset(70 + number), PhysicalOffset(position), 1_700_000_000_123)
        for number, (record, position) in enumerate(zip(wanted, positions.tolist(), strict=True))
    )


@given(st.lists(ENTRIES, min_size=1, max_size=4) | EQUAL)
def test_batches_become_the_same_records(entries: list[BatchEntry]) -> None:
    body = encode_batch((entries * MESSAGES_MIN)[: MESSAGES_MIN + 3 * len(entries)])
    for sent in (body, memoryview(body)):
        batch = record_batch(LIKE, sent, SHARED)
        if batch is not None:
            check_same(batch, body)


@pytest.mark.parametrize("body_bytes", [2, 1000])
@pytest.mark.parametrize("end", [b"", b"\x02"])
def test_messages_of_the_same_lengths_are_not_extracted_one_by_one(
    body_bytes: int, end: bytes
) -> None:
    body = encode_batch(
        BatchEntry(b"%0*d" % (body_bytes, number % 100), b"KEYS\x01k%03d" % number + end, flag=-3)
        for number in range(200)
    )
    batch = record_batch(LIKE, body, SHARED)
    assert batch is not None
    assert isinstance(batch.bodies, np.ndarray)
    assert batch.own_texts.columns is not None
    check_same(batch, body)


def test_usual_batches_do_not_take_the_slow_path() -> None:
    for end in (b"", b"\x02"):
        body = encode_batch(
            BatchEntry(b"%d" % number, b"KEYS\x01k%d" % number + end) for number in range(200)
        )
        batch = record_batch(LIKE, body, SHARED)
        assert batch is not None
        assert len(batch) == 200
        check_same(batch, body)


@pytest.mark.parametrize("large", [b"A\x01" + b"x" * 32_760, b"A\x01" + b"x" * 32_756])
def test_properties_that_are_too_long_with_the_shared_ones(large: bytes) -> None:
    body = encode_batch([BatchEntry(b"", large)] * MESSAGES_MIN)
    assert record_batch(LIKE, body, SHARED) is None


@given(st.data())
def test_damaged_batches_take_the_slow_path(data: st.DataObject) -> None:
    body = bytearray(encode_batch([BatchEntry(b"abc", b"A\x01b")] * (MESSAGES_MIN + 8)))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(body[: data.draw(st.integers(0, len(body)) | st.just(len(body)))])
    batch = record_batch(LIKE, damaged, SHARED)
    try:
        wanted = one_by_one(damaged)
    except TurbopumpError:
        assert batch is None
    else:
        assert batch is None or list(batch.records()) == wanted


def test_small_batches_take_the_slow_path() -> None:
    body = encode_batch([BatchEntry(b"abc", b"A\x01b")] * (MESSAGES_MIN - 1))
    assert record_batch(LIKE, body, SHARED) is None


@pytest.mark.parametrize(
    "lengths", [(1, 7, 8, 9, 5000), (1, 2, 3, 8, 9, 31, 33, 64, 255, 256, 257)]
)
def test_long_and_short_values_have_java_hashes(lengths: tuple[int, ...]) -> None:
    values = [f"{length:x}z~".ljust(length, "~")[:length] for length in lengths]
    texts = PropertyTexts([f"KEYS\x01{value}".encode() for value in values])
    owners, starts, ends = texts.values(properties.KEYS)
    assert owners.tolist() == list(range(len(values)))
    signed = texts.hashes(starts, ends).view(np.int32)
    assert signed.tolist() == [string_hash(value) for value in values]


ROWS = 20_000


@pytest.mark.parametrize("in_a_row", [1, 2, 4, 8, 70, 5000, ROWS])
def test_the_search_for_messages_of_equal_length_is_linear(
    monkeypatch: pytest.MonkeyPatch, in_a_row: int
) -> None:
    looks = []

    def counted(body: bytes, at: int, like: tuple[int, int, int, int], tried: int) -> Messages:
        looks.append(tried)
        return look(body, at, like, tried)

    look = batches._same_lengths_prefix
    monkeypatch.setattr(batches, "_same_lengths_prefix", counted)
    body = encode_batch(
        [BatchEntry(b"xy"[: 1 + at // in_a_row % 2], b"A\x01b") for at in range(ROWS)]
    )
    batch = record_batch(LIKE, body, SHARED)
    assert batch is not None
    assert batch.body_lengths.tolist() == [1 + at // in_a_row % 2 for at in range(ROWS)]
    assert sum(looks) <= 5 * ROWS
    # Each costs as much as a few dozen messages, whatever it takes.
    assert len(looks) <= ROWS / 64
    if in_a_row == ROWS:
        assert len(looks) <= 8
