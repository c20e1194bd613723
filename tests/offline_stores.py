"""Store directories to be read without a broker, and their expected content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from archives import extract
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.spark.offline.options import columns_of
from turbopump.spark.offline.source import DefaultSource, StoreReader
from turbopump.spark.records.schema import spark_schema
from turbopump.store.inspect import message_fields, messages
from turbopump.wire.hosts import host
from turbopump.wire.record import MAGIC, Record, encode_blank

DATA = Path(__file__).parent / "data" / "store"
BORN_MS = 1_700_000_000_000
HERE = host("127.0.0.1", 10911)
V6 = host("::1", 10911)

Row = dict[str, Any]


def unpacked(name: str, directory: Path) -> Path:
    """Unpack a store that a RocketMQ broker wrote."""
    extract(DATA / f"{name}.tar.gz", directory)
    return directory / name


def message(number: int, topic: bytes = b"orders", body: bytes | None = None) -> Record:
    return Record(
        topic=topic,
        queue_id=number % 3,
        body=b"body of %d " % number * (number % 7) if body is None else body,
        properties=b"TAGS\x01%s\x02KEYS\x01k%d" % (b"even" if number % 2 == 0 else b"odd", number),
        born_timestamp_ms=BORN_MS + number,
        born_host=V6 if number % 5 == 0 else HERE,
        store_host=HERE,
    )


def written(
    directory: Path, records: Iterable[Record], segment_bytes: int, step_ms: int = 1000
) -> Path:
    """Write a log as a broker leaves it: filler records at file ends, zeros after the log's end."""
    log = directory / "commitlog"
    log.mkdir(parents=True)
    content = bytearray()
    for number, record in enumerate(records):
        left = -len(content) % segment_bytes or segment_bytes
        if record.size + 8 > left:
            content += encode_blank(left).ljust(left, b"\0")
        stored_ms = BORN_MS + number * step_ms
        content += record.encode(QueueOffset(number), PhysicalOffset(len(content)), stored_ms)
    content += bytes(-len(content) % segment_bytes)
    for start in range(0, len(content), segment_bytes):
        (log / f"{start:020d}").write_bytes(content[start : start + segment_bytes])
    return directory


def reader_of(path: Path, options: Mapping[str, object]) -> StoreReader:
    given = {"path": str(path)} | {key.lower(): str(value) for key, value in options.items()}
    source = DefaultSource(given)
    reader = source.reader(schema=source.schema())
    assert source.schema() == spark_schema(columns_of(given))
    assert isinstance(reader, StoreReader)
    return reader


def parts_of(path: Path, **options: object) -> list[list[Row]]:
    """Read a store as Spark does, without Spark: the rows of each task."""
    reader = reader_of(path, options)
    return [
        [row for batch in reader.read(partition) for row in batch.to_pylist()]
        for partition in reader.partitions()
    ]


def rows_of(path: Path, **options: object) -> list[Row]:
    return [row for part in parts_of(path, **options) for row in part]


def inspected(path: Path) -> list[Row]:
    """Return what the store inspection prints for each message."""
    return [message_fields(view) for view in messages(path)]


def as_inspected(row: Row, position: int) -> Row:
    """Return a row in the format of the inspection."""
    return {
        "topic": row["topic"],
        "queueId": row["queueId"],
        "queueOffset": row["queueOffset"],
        "physicalOffset": position,
        "size": row["size"],
        "tags": row["tags"],
        "keys": row["keys"],
        "properties": dict(row["properties"]),
        "msgId": row["offsetMsgId"],
        "uniqKey": dict(row["properties"]).get("UNIQ_KEY"),
        "sysFlag": row["sysFlag"],
        "bornTimestamp": round(row["bornTimestamp"].timestamp() * 1000),
        "storeTimestamp": round(row["storeTimestamp"].timestamp() * 1000),
        "reconsumeTimes": row["reconsumeTimes"],
    }


def position_of(row: Row) -> int:
    """Return a message's position in the log, taken from its offset id."""
    return int(row["offsetMsgId"][-16:], 16)


def looks_like_a_record(position: int) -> bytes:
    """Return a body that looks like a stored record at the position where it will be."""
    record = message(1, b"fake", b"never sent")
    data = record.encode(QueueOffset(1), PhysicalOffset(position), BORN_MS)
    assert data[4:8] == MAGIC.to_bytes(4, "big")
    return data
