"""Shared by the store tests: a manual clock, small stores, golden ones, faulty disks."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from archives import extract
from turbopump.message import QueueOffset
from turbopump.store import (
    Files,
    Filter,
    FlushConfig,
    FlushMode,
    Found,
    ReadLimits,
    Store,
    StoreConfig,
    parse_delay_levels,
)
from turbopump.wire.hashing import tags_code
from turbopump.wire.hosts import host
from turbopump.wire.record import MessageView, Record, decode_record

DATA = Path(__file__).parents[2] / "data" / "store"
HOST = host("10.20.30.40", 10911)
GOLDEN_LEVELS = parse_delay_levels("1s 2s 3s 4s 5s 6s 7s 8s 9s 10s 20s 30s 1m 2m 5m 10m 1h 2h")
GOLDEN_CONFIG = StoreConfig(
    segment_bytes=65536,
    queue_segment_units=100,
    index_slots=50,
    index_entries=200,
    delay_levels=GOLDEN_LEVELS,
)
SMALL = {
    "segment_bytes": 4096,
    "queue_segment_units": 10,
    "index_slots": 7,
    "index_entries": 20,
}


class ManualClock:
    """Time stands still until a test advances it."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.wall_ms = now_ms
        self.elapsed_ms = 0

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_ms(self) -> int:
        return self.elapsed_ms

    def uptime_ms(self) -> int:
        return self.elapsed_ms

    def advance(self, by_ms: int) -> None:
        self.wall_ms += by_ms
        self.elapsed_ms += by_ms


class FaultyFiles(Files):
    """A disk that fills up, fails to flush, tears a write, or loses unflushed data."""

    def __init__(self) -> None:
        self.bytes_left: int | None = None
        """When set: how many bytes can still be written before the disk is full."""
        self.sync_error: int | None = None
        self.erase_error: int | None = None
        """When set: written data cannot be overwritten with zeros."""
        self.queue_error: int | None = None
        """When set: nothing can be written to queues."""
        self.ratio = 0.1
        self.syncs = 0
        self.writes = 0

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        self.writes += 1
        if not any(data):
            # Overwriting existing data takes no space.
            _fail(self.erase_error)
            return super().write(fd, data, at)
        if "consumequeue" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            _fail(self.queue_error)
        left = self.bytes_left
        if left is None:
            return super().write(fd, data, at)
        fits = min(len(data), left)
        super().write(fd, memoryview(data)[:fits], at)
        self.bytes_left = left - fits
        if fits < len(data):
            _fail(errno.ENOSPC)
        return None

    def sync(self, fd: int) -> None:
        self.syncs += 1
        _fail(self.sync_error)
        super().sync(fd)

    def sync_file_system(self, fd: int, instead_of: int) -> bool:
        _fail(self.sync_error)
        return super().sync_file_system(fd, instead_of)

    def used_ratio(self, path: Path) -> float:
        return self.ratio


def _fail(number: int | None) -> None:
    if number is not None:
        raise OSError(number, os.strerror(number))


def small_config(mode: FlushMode = FlushMode.ASYNC, **changes: Any) -> StoreConfig:
    """Return a configuration with files so small that every limit is soon reached."""
    flush = changes.pop("flush", FlushConfig(mode=mode))
    return StoreConfig(**{**SMALL, "flush": flush, **changes})


def record(
    body: bytes = b"hello",
    *,
    topic: str = "Topic",
    queue_id: int = 0,
    sys_flag: int = 0,
    **properties: str,
) -> Record:
    text = "\x02".join(f"{name}\x01{value}" for name, value in properties.items())
    return Record(
        topic=topic.encode(),
        queue_id=queue_id,
        body=body,
        properties=text.encode(),
        sys_flag=sys_flag,
        born_timestamp_ms=1_699_999_999_000,
        born_host=HOST,
        store_host=HOST,
    )


def read_all(store: Store, topic: str = "Topic", queue_id: int = 0) -> list[MessageView]:
    """Read a queue from its first message to its last."""
    offset, end = store.queue_range(topic, queue_id)
    found: list[MessageView] = []
    while offset < end:
        outcome = store.read(topic, queue_id, offset, 32)
        assert isinstance(outcome, Found), outcome
        found += [decode_record(message, check_crc=True) for message in outcome.messages]
        offset = outcome.next_offset
    return found


def bodies(store: Store, topic: str = "Topic", queue_id: int = 0) -> list[bytes]:
    return [view.stored_body for view in read_all(store, topic, queue_id)]


def unpack(archive: str, into: Path) -> Path:
    """Unpack one of the golden store directories."""
    extract(DATA / f"{archive}.tar.gz", into)
    (found,) = (path for path in into.iterdir() if path.is_dir())
    return found


def golden(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def tag_filter(expression: str) -> Filter:
    """Return what a broker derives from a tag expression."""
    if expression == "*":
        return Filter()
    return Filter(tags_codes=frozenset(tags_code(tag.strip()) for tag in expression.split("||")))


def offset(value: int) -> QueueOffset:
    return QueueOffset(value)


LIMITS = ReadLimits()
