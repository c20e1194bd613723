"""The records of a batch of few messages equal those encoded one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.errors import BodyError, InvalidArgument
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire.batch import BatchEntry, decode_batch, encode_batch
from turbopump.wire.record_batch import MESSAGES_MIN, record_batch
from turbopump.wire.record_list import RecordList, record_list
from unit.wire.test_record_batch import ENTRIES, EQUAL, LIKE, SHARED, one_by_one

TIME_MS = 1_700_000_000_123
STORABLE = st.lists(ENTRIES.filter(lambda entry: b"\0" not in entry.properties), min_size=1)


def check_same(batch: RecordList, body: bytes) -> None:
    wanted = one_by_one(body)
    assert list(batch.records()) == wanted
    assert batch.sizes == [record.size for record in wanted]
    assert batch.total_bytes == sum(batch.sizes)
    assert batch.largest_bytes == max(batch.sizes)
    assert batch.body_bytes == sum(len(record.body) for record in wanted)
    assert list(batch.texts().parts) == [record.properties for record in wanted]
    data, positions = batch.placed(QueueOffset(70), PhysicalOffset(5000), TIME_MS)
    assert positions == [5000 + sum(batch.sizes[:number]) for number in range(len(batch))]
    assert data == b"".join(
        record.encode(QueueOffset(70 + number), PhysicalOffset(position), TIME_MS)
        for number, (record, position) in enumerate(zip(wanted, positions, strict=True))
    )


@given(STORABLE | EQUAL)
def test_batches_become_the_same_records(entries: list[BatchEntry]) -> None:
    body = encode_batch(entries)
    if any(b"\0" in entry.properties for entry in entries):
        with pytest.raises(InvalidArgument, match="zero byte"):
            record_list(LIKE, body, SHARED)
    else:
        check_same(record_list(LIKE, body, SHARED), body)


@given(st.lists(ENTRIES, min_size=1, max_size=4) | EQUAL)
def test_batches_of_many_messages_have_the_same_bytes(entries: list[BatchEntry]) -> None:
    body = encode_batch((entries * MESSAGES_MIN)[: MESSAGES_MIN + 3 * len(entries)])
    many = record_batch(LIKE, body, SHARED)
    if many is not None:
        few = record_list(LIKE, body, SHARED)
        data, positions = many.placed(QueueOffset(70), PhysicalOffset(5000), TIME_MS)
        placed = few.placed(QueueOffset(70), PhysicalOffset(5000), TIME_MS)
        assert placed == (data, positions.tolist())


@given(st.data())
def test_damaged_batches_are_rejected(data: st.DataObject) -> None:
    body = bytearray(encode_batch([BatchEntry(b"abc", b"A\x01b")] * 5))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(body[: data.draw(st.integers(1, len(body)) | st.just(len(body)))])
    try:
        entries = list(decode_batch(damaged))
    except BodyError:
        with pytest.raises(BodyError):
            record_list(LIKE, damaged, SHARED)
        return
    if any(b"\0" in entry.properties for entry in entries):
        with pytest.raises(InvalidArgument):
            record_list(LIKE, damaged, SHARED)
    else:
        check_same(record_list(LIKE, damaged, SHARED), damaged)


def test_properties_that_are_too_long_with_the_shared_ones() -> None:
    body = encode_batch([BatchEntry(b"", b"A\x01" + b"x" * 32_760)] * 2)
    with pytest.raises(InvalidArgument, match="properties must be at most 32767 bytes"):
        record_list(LIKE, body, SHARED)
