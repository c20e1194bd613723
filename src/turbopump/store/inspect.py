"""Inspects a store directory without opening it: nothing is written, locked or repaired.

For people and tools, while the store is running or stopped; a running store may have moved on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace

from turbopump.errors import RecordError, StoreDamaged
from turbopump.machine.files import REAL_FILES, Files, closing
from turbopump.store.checkpoint import Checkpoint, read_checkpoint
from turbopump.store.config import UNIT_BYTES
from turbopump.store.consume_queue import FILLER_SIZE
from turbopump.store.index_file import ENTRY_BYTES, HEADER_BYTES, read_header
from turbopump.store.key_index import is_index_name
from turbopump.store.log_scan import good_entry, is_blank, next_magic
from turbopump.store.outcomes import Units
from turbopump.store.segments import entries
from turbopump.store.survey import (
    Damage,
    LogEntries,
    check_row,
    expected_size,
    numbered_files,
    queue_directories,
    used_units,
    wrong_entries,
)
from turbopump.wire import properties
from turbopump.wire.hashing import body_crc
from turbopump.wire.record import MAGIC, MAGIC_V2, MessageView, decode_record

_UNWRITTEN = b"\0" * 8


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
    """Whether ``abort`` exists: the store is running, or was not stopped cleanly."""
    min_offset: int
    max_offset: int
    messages: int
    checkpoint: Checkpoint
    segments: list[SegmentReport]
    queues: list[QueueReport]
    index: list[IndexReport]
    damage: list[Damage]


def walk(
    directory: Path, files: Files = REAL_FILES
) -> Iterator[tuple[Path, int, MessageView | Damage]]:
    """Walk the commit log: yield each message, or the damage in its place, with file and start.

    A message whose body is damaged yields both, the damage first.
    """
    damage: list[Damage] = []
    found = numbered_files(files, directory / "commitlog", damage)
    damage += check_row(found, expected_size([found]))
    for one in damage:
        yield Path(one.path), -1, one
    used = (start for path, start, size in found if size and _head(files, path, 8).strip(b"\0"))
    last_used = max(used, default=-1)
    for path, start, size in found:
        if size:
            for item in _walk_segment(files, path, start, more_behind=start < last_used):
                yield path, start, item


def messages(directory: Path, files: Files = REAL_FILES) -> Iterator[MessageView]:
    """Return the messages of the commit log in order, skipping damage."""
    for _, _, item in walk(directory, files):
        if isinstance(item, MessageView) and body_crc(item.stored_body) == item.body_crc:
            yield item


def message_fields(view: MessageView) -> dict[str, Any]:
    """Return a message as other tools show it; names as in the protocol."""
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


def log_file_count(directory: Path, files: Files = REAL_FILES) -> int:
    """Return how many files the commit log has."""
    return len(entries(files, directory / "commitlog"))


def damage_row(damage: Damage, directory: Path) -> dict[str, Any]:
    """Return damage with its file relative to the store's directory."""
    path = Path(damage.path)
    inside = path.relative_to(directory) if path.is_relative_to(directory) else path
    return {"path": str(inside), "position": damage.position, "reason": damage.reason}


def inspect(
    directory: Path, on_file: Callable[[], None] = lambda: None, files: Files = REAL_FILES
) -> StoreReport:
    """Check everything in a store; ``on_file`` is called after each file of the log."""
    if not files.is_directory(directory / "commitlog"):
        raise StoreDamaged(f"{directory} is not a store: it has no directory commitlog")
    crashed = files.exists(directory / "abort")
    log = _LogSummary(files, directory, on_file)
    queues = _queues(directory, log, crashed)
    index = _index(directory / "index", log)
    return StoreReport(
        directory=str(directory),
        crashed=crashed,
        min_offset=log.entries.min_offset,
        max_offset=log.entries.end,
        messages=sum(segment.messages for segment in log.segments),
        checkpoint=log.checkpoint,
        segments=log.segments,
        queues=queues,
        index=index,
        damage=log.damage,
    )


class _LogSummary:
    """Scans the log once; records where each queue's messages are."""

    def __init__(self, files: Files, directory: Path, on_file: Callable[[], None]) -> None:
        self.files = files
        self.segments: list[SegmentReport] = []
        self.damage: list[Damage] = []
        self.entries = LogEntries(files, directory)
        self.checkpoint = read_checkpoint(files, directory / "checkpoint")
        found = numbered_files(files, directory / "commitlog", [])
        self.entries.min_offset = self.entries.end = found[0][1] if found else 0
        seen: dict[int, tuple[int, int, MessageView]] = {}
        reached = -1
        for _, start, item in walk(directory, files):
            if start > reached >= 0:
                on_file()
            reached = start
            if isinstance(item, Damage):
                self.damage.append(item)
                continue
            self.entries.end = item.physical_offset + item.size
            if not item.transaction & 0x4:
                self.entries.add(item)
            count, first_ms, _ = seen.get(start, (0, item.store_timestamp_ms, item))
            seen[start] = count + 1, first_ms, item
        for path, start, size in found:
            report = SegmentReport(path.name, start, size, 0, 0, None, None)
            if start in seen:
                count, first_ms, last = seen[start]
                used = last.physical_offset + last.size - start
                times = first_ms, last.store_timestamp_ms
                report = SegmentReport(path.name, start, size, used, count, *times)
            self.segments.append(report)


def _walk_segment(
    files: Files, path: Path, start: int, *, more_behind: bool
) -> Iterator[MessageView | Damage]:
    with (
        closing(files, files.open_to_read(path)) as fd,
        memoryview(files.map(fd, files.size(fd))) as view,
    ):
        at = 0
        while at < len(view) and not is_blank(view, at):
            if view[at : at + 8] == _UNWRITTEN[: len(view) - at]:
                yield from _unwritten(path, view, at, more_behind)
                return
            try:
                record = _record(view, at, start)
            except RecordError as error:
                following = _next_record_at(view, at, start)
                size = (len(view) if following is None else following) - at
                yield Damage(str(path), at, f"{error.reason}; {size} bytes are skipped")
                if following is None:
                    return
                at = following
                continue
            if body_crc(record.stored_body) != record.body_crc:
                reason = (
                    f"topic {record.topic}, queue {record.queue_id}, offset {record.queue_offset}: "
                    f"body does not match its checksum {record.body_crc}"
                )
                yield Damage(str(path), at, reason)
            yield record
            at += record.size


def _record(view: memoryview, at: int, start: int) -> MessageView:
    size = int.from_bytes(view[at : at + 4], "big")
    magic = int.from_bytes(view[at + 4 : at + 8], "big")
    if magic not in {MAGIC, MAGIC_V2} or at + size > len(view):
        raise RecordError(f"neither a message nor the end of the file (size {size})", at)
    record = decode_record(bytes(view[at : at + size]))
    if record.physical_offset != start + at:
        raise RecordError(f"message says that it lies at {record.physical_offset}", at)
    return record


def _next_record_at(view: memoryview, at: int, start: int) -> int | None:
    """Return where the next record begins in a file, after damage; None if there is none."""
    found = next_magic(view, at, len(view), start)
    return None if good_entry(view, found, start, check_crc=False) is None else found


def _unwritten(path: Path, view: memoryview, at: int, more_behind: bool) -> Iterator[Damage]:
    """Ignore an unwritten end where the log ends: further files may have been created already."""
    rest = np.frombuffer(view[at:], np.uint8)
    more = np.flatnonzero(rest)
    del rest
    if len(more):
        yield Damage(str(path), at + int(more[0]), "bytes behind the end of the log")
    elif more_behind:
        yield Damage(str(path), at, "file ends without its closing record")


def _head(files: Files, path: Path, size: int) -> bytes:
    with closing(files, files.open_to_read(path)) as fd:
        return files.read(fd, size, 0)


def _queues(directory: Path, log: _LogSummary, crashed: bool) -> list[QueueReport]:
    root = directory / "consumequeue"
    found = queue_directories(log.files, root, log.damage)
    rows = [numbered_files(log.files, path, log.damage) for _, _, path in found]
    size = expected_size(rows)
    reports = []
    for (topic, number, path), row in zip(found, rows, strict=True):
        log.damage += check_row(row, size)
        reports.append(_queue(topic, number, path, row, log, crashed))
    present = {(topic, number) for topic, number, _ in found}
    for topic, number in log.entries.queues():
        if (topic, number) not in present:
            _check_complete(root / topic / str(number), topic, number, [], log, crashed)
    return reports


def _queue(
    topic: str,
    number: int,
    path: Path,
    row: list[tuple[Path, int, int]],
    log: _LogSummary,
    crashed: bool,
) -> QueueReport:
    low: int | None = None
    high = 0
    entered: list[Units] = []
    for file, start, _ in row:
        units, room = used_units(log.files, file)
        first = start // UNIT_BYTES
        high = first + len(units)
        good = np.flatnonzero(
            (units["physical_offset"] >= log.entries.min_offset) & (units["size"] != FILLER_SIZE)
        )
        if low is None and len(good):
            low = first + int(good[0])
        log.damage += log.entries.wrong_units(topic, number, first, units, str(file))
        entered.append(units)
        if len(units) < room:
            break
    _check_complete(path, topic, number, entered, log, crashed)
    return QueueReport(topic, number, high if low is None else low, high, len(row))


def _check_complete(
    path: Path, topic: str, number: int, entered: list[Units], log: _LogSummary, crashed: bool
) -> None:
    # What was stored last before a crash is entered by the next start.
    known_to = log.checkpoint.queues_end if crashed else log.entries.end
    missing = log.entries.missing(topic, number, entered, known_to)
    if missing:
        at = sum(len(units) for units in entered) * UNIT_BYTES
        reason = f"{missing} messages of the log are not entered"
        log.damage.append(Damage(str(path), at, reason))


def _index(directory: Path, log: _LogSummary) -> list[IndexReport]:
    reports, files = [], log.files
    every = entries(files, directory)
    found = [path for path in every if is_index_name(path.name) and files.is_file(path)]
    size_max = max(map(files.file_size, found), default=0)
    for path in every:
        if path not in found:
            log.damage.append(Damage(str(path), 0, "is not a store file"))
            continue
        data = _head(files, path, HEADER_BYTES)
        header = read_header(data)
        log.damage += wrong_entries(files, path, header, log.entries)
        size = files.file_size(path)
        if size < max(size_max, HEADER_BYTES + header.count * ENTRY_BYTES):
            log.damage.append(Damage(str(path), size, f"file has only {size} bytes"))
        covered = astuple(replace(header, count=header.count - 1))
        reports.append(IndexReport(path.name, *covered))
    return reports
