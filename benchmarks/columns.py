"""How fast stored records are decoded to Arrow columns, compared with one by one.

``python benchmarks/columns.py [--rows 10000] [--seconds 2]``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import pyarrow as pa

from measure import print_table
from turbopump.core import scan_records
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.spark.records.schema import COLUMNS, arrow_schema
from turbopump.wire import properties
from turbopump.wire.compression import deflate
from turbopump.wire.hosts import host
from turbopump.wire.record import MessageView, Record, decode_records
from turbopump.wire.sysflag import Compression, with_compression

CELLS: dict[str, Callable[[MessageView], object]] = {
    "topic": lambda view: view.topic,
    "broker": lambda _: "broker-a",
    "queueId": lambda view: view.queue_id,
    "queueOffset": lambda view: view.queue_offset,
    "msgId": lambda view: view.message_id,
    "offsetMsgId": lambda view: view.offset_id,
    "tags": lambda view: view.tags,
    "keys": lambda view: view.properties.get(properties.KEYS),
    "properties": lambda view: list(view.properties.items()),
    "body": lambda view: view.body,
    "bornTimestamp": lambda view: view.born_timestamp_ms * 1000,
    "storeTimestamp": lambda view: view.store_timestamp_ms * 1000,
    "bornHost": lambda view: str(view.born_host),
    "storeHost": lambda view: str(view.store_host),
    "reconsumeTimes": lambda view: view.reconsume_times,
    "sysFlag": lambda view: view.sys_flag,
    "size": lambda view: view.size,
}


def stored(
    rows: int, body_bytes: int, key_digits: int = 0, compression: Compression | None = None
) -> bytes:
    """Return records as a broker stores them for an ordinary producer.

    Keys are numbers, zero-padded to ``key_digits`` digits, so that their length stays the same.
    """
    flag = 0 if compression is None else with_compression(0, compression)
    parts: list[bytes] = []
    at = 0
    for number in range(rows):
        text = properties.encode(
            {
                "KEYS": f"order-{number:0{key_digits}}",
                "UNIQ_KEY": f"7F0000011F4418B4AAC2{number:012X}",
                "CLUSTER": "DefaultCluster",
                "WAIT": "true",
                "TAGS": f"tag{number % 5}",
            }
        )
        body = number.to_bytes(8, "big") * (body_bytes // 8)
        record = Record(
            topic=b"orders",
            queue_id=number % 8,
            body=body if compression is None else deflate(body, compression),
            properties=text.encode(),
            sys_flag=flag,
            born_timestamp_ms=1_700_000_000_000 + number,
            born_host=host("10.1.2.3", 40000 + number % 4),
            store_host=host("10.1.2.4", 10911),
        )
        stored_ms = 1_700_000_000_001 + number
        parts.append(record.encode(QueueOffset(number), PhysicalOffset(at), stored_ms))
        at += len(parts[-1])
    return b"".join(parts)


def one_by_one(data: bytes, columns: tuple[str, ...]) -> pa.RecordBatch:
    """Do the same with one Python object per cell."""
    views = list(decode_records(data))
    schema = arrow_schema(columns)
    arrays = [
        pa.array([CELLS[name](view) for view in views], schema.field(name).type) for name in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def one_batch(made: RecordColumns, data: bytes) -> pa.RecordBatch:
    table, damaged_at = scan_records(data)
    assert damaged_at is None
    (batch,) = made.batches_of(table, broker="broker-a")
    return batch


def rate(work: Callable[[], object], rows: int, seconds: float) -> float:
    """Return the best rows per second of CPU time within a duration: the machine may be shared."""
    work()
    best, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.process_time()
        work()
        best = max(best, rows / (time.process_time() - begun))
    return best


def rates(data: bytes, columns: tuple[str, ...], rows: int, seconds: float) -> list[float]:
    """Return the rates with body checks, without them, and one by one."""
    checked, unchecked = RecordColumns(columns), RecordColumns(columns, check_bodies=False)
    assert one_batch(checked, data) == one_by_one(data, columns)
    ways: list[Callable[[], object]] = [
        lambda: one_batch(checked, data),
        lambda: one_batch(unchecked, data),
        lambda: one_by_one(data, columns),
    ]
    return [rate(work, rows, seconds) for work in ways]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    pa.set_cpu_count(1)
    table = []
    for body_bytes in (128, 1024):
        for label, columns, key_digits, compression in (
            ("all", COLUMNS, 0, None),
            ("all, keys of one length", COLUMNS, 9, None),
            ("body, queueOffset", ("body", "queueOffset"), 0, None),
            ("body, queueOffset, compressed", ("body", "queueOffset"), 0, Compression.ZLIB),
        ):
            data = stored(options.rows, body_bytes, key_digits, compression)
            figures = rates(data, columns, options.rows, options.seconds)
            table.append((f"{body_bytes} B, {label}", *(f"{figure:,.0f}" for figure in figures)))
    print_table(("rows/s of one core", "at once", "bodies unchecked", "one by one"), table)


if __name__ == "__main__":
    main()
