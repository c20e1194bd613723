"""Looking into a store directory without opening it: nothing is written, locked or mended.

For people and tools, with the store running or not; of a running one it tells a moment ago.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from turbopump.errors import RecordError, StoreDamaged
from turbopump.store.checkpoint import Checkpoint, read_checkpoint
from turbopump.store.commit_log import is_blank
from turbopump.store.config import UNIT_BYTES
from turbopump.store.consume_queue import as_units
from turbopump.store.index_file import HEADER_BYTES, IndexHeader, read_header
from turbopump.store.key_index import index_paths
from turbopump.store.outcomes import UNIT_DTYPE, Units
from turbopump.store.queues import queue_directories
from turbopump.store.segments import segment_files
from turbopump.wire import properties
from turbopump.wire.record import MAGIC, MAGIC_V2, MessageView, decode_record

_UNWRITTEN = b"\0" * 8
_FILLER_SIZE = 0x7FFF_FFFF


class Damage(Struct, frozen=True):
    """Something that should not be; ``position`` counts bytes within the file."""

    path: str
    position: int
    reason: str


class SegmentReport(Struct, frozen=True, rename="camel"):
    name: str
    start: int
    bytes: int
    used_bytes: int
    messages: int
    first_store_timestamp: int | None
    last_store_timestamp: int | None


class QueueReport(Struct, frozen=True, rename="camel"):
    topic: str
    queue_id: int
    min_offset: int
    max_offset: int
    files: int


class IndexReport(Struct, frozen=True, rename="camel"):
    name: str
    begin_timestamp: int
    end_timestamp: int
    begin_physical_offset: int
    end_physical_offset: int
    used_slots: int
    entries: int


class StoreReport(Struct, frozen=True, rename="camel"):
    """What is in a store."""

    directory: str
    crashed: bool
    """Whether ``abort`` is there: the store is running, or was not stopped in order."""
    min_offset: int
    max_offset: int
    messages: int
    checkpoint: Checkpoint
    segments: list[SegmentReport]
    queues: list[QueueReport]
    index: list[IndexReport]
    damage: list[Damage]


def walk(directory: Path) -> Iterator[tuple[Path, int, MessageView | Damage]]:
    """Go through the commit log: each message, or what stands in its place, with file and start."""
    found = segment_files(directory / "commitlog")
    sizes = {size for _, size in found}
    for number, (start, size) in enumerate(found):
        path = directory / "commitlog" / f"{start:020d}"
        if size == 0 or (len(sizes) > 1 and size != max(sizes)):
            yield path, start, Damage(str(path), size, f"file has {size} bytes only")
        if size:
            for item in _walk_segment(path, start, last=number == len(found) - 1):
                yield path, start, item


def messages(directory: Path) -> Iterator[MessageView]:
    """Return the messages of the commit log in order, passing over what is damaged."""
    for _, _, item in walk(directory):
        if isinstance(item, MessageView):
            yield item


def message_fields(view: MessageView) -> dict[str, Any]:
    """Return a message as other tools know it; names as in the protocol."""
    return {
        "topic": view.topic,
        "queueId": view.queue_id,
        "queueOffset": view.queue_offset,
        "physicalOffset": view.physical_offset,
        "size": view.size,
        "tags": view.tags,
        "keys": view.properties.get(properties.KEYS),
        "properties": view.properties,
        "bodyHex": view.stored_body.hex(),
        "msgId": view.offset_id,
        "uniqKey": view.unique_key,
        "sysFlag": view.sys_flag,
        "bornTimestamp": view.born_timestamp_ms,
        "storeTimestamp": view.store_timestamp_ms,
        "reconsumeTimes": view.reconsume_times,
    }


def inspect(directory: Path) -> StoreReport:
    """Go through everything in a store."""
    if not (directory / "commitlog").is_dir():
        raise StoreDamaged(f"{directory} is not a store: it has no directory commitlog")
    log = _LogSummary(directory)
    queues = [_queue(directory, topic, number, log) for topic, number in _queues(directory)]
    return StoreReport(
        directory=str(directory),
        crashed=(directory / "abort").exists(),
        min_offset=log.min_offset,
        max_offset=log.end,
        messages=sum(segment.messages for segment in log.segments),
        checkpoint=read_checkpoint(directory / "checkpoint"),
        segments=log.segments,
        queues=queues,
        index=[_index(path) for path in index_paths(directory / "index")],
        damage=log.damage,
    )


class _LogSummary:
    """One pass over the log; remembers per queue how far its messages go."""

    def __init__(self, directory: Path) -> None:
        self.segments: list[SegmentReport] = []
        self.damage: list[Damage] = []
        self.last_offsets: dict[tuple[str, int], int] = {}
        found = segment_files(directory / "commitlog")
        self.min_offset = self.end = found[0][0] if found else 0
        items: dict[int, list[int]] = {start: [] for start, _ in found}
        for _, start, item in walk(directory):
            if isinstance(item, Damage):
                self.damage.append(item)
                continue
            self._see(item)
            items[start] = _extended(items[start], start, item)
        for start, size in found:
            count, used, first, last = items[start] or (0, 0, None, None)
            self.segments.append(
                SegmentReport(f"{start:020d}", start, size, used or 0, count or 0, first, last)
            )

    def _see(self, view: MessageView) -> None:
        self.end = view.physical_offset + view.size
        if not view.transaction & 0x4:
            self.last_offsets[view.topic, view.queue_id] = view.queue_offset


def _extended(summary: list[int], start: int, view: MessageView) -> list[int]:
    used = view.physical_offset + view.size - start
    time_ms = view.store_timestamp_ms
    if not summary:
        return [1, used, time_ms, time_ms]
    return [summary[0] + 1, used, summary[2], time_ms]


def _walk_segment(path: Path, start: int, *, last: bool) -> Iterator[MessageView | Damage]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = memoryview(data)
        at = 0
        try:
            while at < len(view) and not is_blank(view, at):
                if view[at : at + 8] == _UNWRITTEN[: len(view) - at]:
                    yield from _unwritten(path, view, at, last)
                    return
                record = _record(view, at, start)
                yield record
                at += record.size
        except RecordError as error:
            yield Damage(str(path), at, str(error))
        finally:
            view.release()


def _record(view: memoryview, at: int, start: int) -> MessageView:
    size = int.from_bytes(view[at : at + 4], "big")
    magic = int.from_bytes(view[at + 4 : at + 8], "big")
    if magic not in {MAGIC, MAGIC_V2} or at + size > len(view):
        raise RecordError(f"neither a message nor the end of the file (size {size})", at)
    record = decode_record(bytes(view[at : at + size]), check_crc=True)
    if record.physical_offset != start + at:
        raise RecordError(f"message says that it lies at {record.physical_offset}", at)
    return record


def _unwritten(path: Path, view: memoryview, at: int, last: bool) -> Iterator[Damage]:
    """An unwritten end is fine in the last two files: the next one may have been made already."""
    rest = np.frombuffer(view[at:], np.uint8)
    more = np.flatnonzero(rest)
    del rest
    if len(more):
        yield Damage(str(path), at + int(more[0]), "bytes behind the end of the log")
    elif at and not last and _has_messages_behind(path, len(view)):
        yield Damage(str(path), at, "file ends without its closing record")


def _has_messages_behind(path: Path, segment_bytes: int) -> bool:
    following = path.with_name(f"{int(path.name) + segment_bytes:020d}")
    with following.open("rb") as file:
        return file.read(8) != _UNWRITTEN


def _queues(directory: Path) -> list[tuple[str, int]]:
    return queue_directories(directory / "consumequeue")


def _queue(directory: Path, topic: str, number: int, log: _LogSummary) -> QueueReport:
    path = directory / "consumequeue" / topic / str(number)
    low: int | None = None
    high = 0
    found = segment_files(path)
    for start, size in found:
        units = as_units((path / f"{start:020d}").read_bytes()[: size - size % UNIT_BYTES])
        used = _used_units(units)
        high = start // UNIT_BYTES + used
        good = np.flatnonzero(_in_log(units[:used], log.min_offset))
        if low is None and len(good):
            low = start // UNIT_BYTES + int(good[0])
        _check_units(path / f"{start:020d}", units[:used], log)
        if used < len(units):
            break
    _check_complete(path, topic, number, high, log)
    return QueueReport(topic, number, high if low is None else low, high, len(found))


def _used_units(units: Units) -> int:
    unused = np.flatnonzero((units["size"] <= 0) | (units["physical_offset"] < 0))
    return int(unused[0]) if len(unused) else len(units)


def _in_log(units: Units, log_min: int) -> Any:
    return (units["physical_offset"] >= log_min) & (units["size"] != _FILLER_SIZE)


def _check_units(path: Path, units: Units, log: _LogSummary) -> None:
    ends = units["physical_offset"].astype(np.int64) + units["size"]
    beyond = np.flatnonzero((ends > log.end) & (units["size"] != _FILLER_SIZE))
    if len(beyond):
        at = int(beyond[0]) * UNIT_DTYPE.itemsize
        log.damage.append(Damage(str(path), at, "unit points behind the end of the log"))


def _check_complete(path: Path, topic: str, number: int, high: int, log: _LogSummary) -> None:
    last = log.last_offsets.get((topic, number))
    if last is not None and last >= high:
        missing = last + 1 - high
        log.damage.append(
            Damage(str(path), high * UNIT_BYTES, f"{missing} messages of the log are not entered")
        )


def _index(path: Path) -> IndexReport:
    with path.open("rb") as file:
        data = file.read(HEADER_BYTES)
    header = read_header(data) if len(data) == HEADER_BYTES else IndexHeader(0, 0, 0, 0, 0, 1)
    return IndexReport(
        path.name,
        header.begin_ms,
        header.end_ms,
        header.begin_offset,
        header.end_offset,
        header.used_slots,
        header.count - 1,
    )
