"""Stored records, and the rows expected from their columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from turbopump.core import RecordTable, scan_records
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.spark.records.record_columns import RecordColumns, damage_at
from turbopump.spark.records.schema import COLUMNS, arrow_schema
from turbopump.wire import properties
from turbopump.wire.hosts import host
from turbopump.wire.record import MessageView, Record, decode_records

names = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "ä", ""]) | st.text("ab\x01", max_size=2)
entries = st.tuples(names, st.text("xyß\x01", max_size=3)).map("\x01".join)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def moment(time_ms: int) -> datetime | None:
    try:
        return EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return None


def row(view: MessageView, broker: str) -> dict[str, Any]:
    return {
        "topic": view.topic,
        "broker": broker,
        "queueId": view.queue_id,
        "queueOffset": view.queue_offset,
        "msgId": view.message_id,
        "offsetMsgId": view.offset_id,
        "tags": view.tags,
        "keys": view.properties.get(properties.KEYS),
        "properties": view.properties,
        "body": view.body,
        "bornTimestamp": moment(view.born_timestamp_ms),
        "storeTimestamp": moment(view.store_timestamp_ms),
        "bornHost": str(view.born_host),
        "storeHost": str(view.store_host),
        "reconsumeTimes": view.reconsume_times,
        "sysFlag": view.sys_flag,
        "size": view.size,
    }


def records_in(
    data: bytes | memoryview, spans: Sequence[tuple[int, int]] | None = None
) -> RecordTable:
    """Return the records of a buffer, or of parts of it; raises RecordError."""
    table, damaged_at = scan_records(data, spans)
    if damaged_at is not None:
        raise damage_at(data, damaged_at)
    return table


def decoded(
    made: RecordColumns,
    data: bytes | memoryview,
    broker: str = "b",
    *,
    start: int | None = None,
    end: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Decode whole records; raises RecordError."""
    table = records_in(data)
    if start is not None or end is not None:
        first, last = -(2**63) if start is None else start, 2**63 if end is None else end
        table = table.where(bytes(first <= offset < last for offset in table.queue_offsets()))
    return made.batches_of(table, broker=broker)


def one_batch(
    made: RecordColumns, data: bytes | memoryview, broker: str = "b", **offsets: int | None
) -> pa.RecordBatch:
    """Decode whole records into one batch; raises RecordError."""
    some = list(decoded(made, data, broker, **offsets))
    return pa.Table.from_batches(some).combine_chunks().to_batches()[0] if some[1:] else some[0]


def rows_of(
    data: bytes,
    columns: Sequence[str] = COLUMNS,
    *,
    start: int | None = None,
    end: int | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    made = RecordColumns(columns, **options)
    batch = one_batch(made, data, "broker-a", start=start, end=end)
    batch.validate(full=True)
    assert batch.schema.equals(arrow_schema(columns))
    rows = batch.to_pylist()
    for one in rows:
        if "properties" in one:
            pairs = one["properties"]
            one["properties"] = dict(pairs)
            assert len(one["properties"]) == len(pairs)
    return rows


def expected(data: bytes) -> list[dict[str, Any]]:
    return [row(view, "broker-a") for view in decode_records(data)]


def stored(record: Record, offset: int = 0, physical: int = 0, stored_ms: int = 2) -> bytes:
    return record.encode(QueueOffset(offset), PhysicalOffset(physical), stored_ms)


def plain(
    body: bytes = b"hello", text: bytes = b"", *, sys_flag: int = 0, topic: bytes = b"T"
) -> Record:
    return Record(
        topic=topic,
        queue_id=3,
        body=body,
        properties=text,
        sys_flag=sys_flag,
        born_timestamp_ms=1,
        born_host=host("127.0.0.1", 1),
        store_host=host("192.168.1.2", 10911),
    )


def numbered(texts: Iterable[bytes]) -> bytes:
    return b"".join(stored(plain(text=text), number) for number, text in enumerate(texts))
