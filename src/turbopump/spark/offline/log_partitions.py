"""Dividing a store's log into tasks, and reading one part.

A part starts and ends between two messages. In older files these boundaries are found without
reading the data between them; reading a part then verifies that it ends where it should.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

from turbopump.core import RecordTable
from turbopump.errors import StoreDamaged
from turbopump.spark.clocks import CLOCK_MARGIN_MS
from turbopump.spark.offline.log_reader import End, Found, LogReader, Stop, opened
from turbopump.spark.offline.options import Wanted
from turbopump.spark.offline.store_files import LogFile

_log = logging.getLogger(__name__)


class Damage(Enum):
    """How a task handles bytes that are not a message."""

    FAILS = auto()
    ENDS_LOG = auto()
    """In the last file: data left by a crash is not part of the log."""
    IS_PASSED_OVER = auto()


@dataclass(frozen=True, slots=True)
class LogPart:
    """The unit of work of one task: the records that start in a part of a file."""

    file: LogFile
    start: int
    end: int
    damage: Damage


def plan(
    files: Sequence[LogFile], wanted: Wanted, part_bytes: int, *, ignore_damage: bool
) -> list[LogPart]:
    """Divide the log into parts of about a given size."""
    parts: list[LogPart] = []
    for file in _of_time(files, wanted):
        with opened(file) as reader:
            if ignore_damage:
                parts += _split(reader, part_bytes, Damage.IS_PASSED_OVER)
            elif file is files[-1]:
                parts += _split_last(reader, part_bytes)
            else:
                parts += _split(reader, part_bytes, Damage.FAILS)
    return parts


@dataclass(frozen=True, slots=True)
class DamagedBytes:
    """A range of a file without a readable message, or with a damaged one."""

    data: bytes
    reason: str


def records_of(part: LogPart) -> Iterator[RecordTable | DamagedBytes]:
    """Read a part, including skipped ranges; raises StoreDamaged."""
    with opened(part.file) as reader:
        at: int | None = part.start
        while at is not None:
            stop = Stop(at, End.REACHED)
            may_be_torn = part.damage is Damage.ENDS_LOG
            for item in reader.walk(at, part.end, may_be_torn=may_be_torn):
                if isinstance(item, Found):
                    yield item.records
                else:
                    stop = item
            at = _resumed(reader, part, stop)
            if part.damage is Damage.IS_PASSED_OVER and stop.end is End.DAMAGED:
                data = reader.data(stop.at, part.end if at is None else at)
                yield DamagedBytes(data, f"{part.file.path} at byte {stop.at}: {stop.reason}")


def _resumed(reader: LogReader, part: LogPart, stop: Stop) -> int | None:
    """Return where to resume after a stop, or None if the part ends there."""
    path = part.file.path
    if stop.at > part.end:
        raise StoreDamaged(
            f"{path}: a message spans byte {part.end}, where another one seemed to start; read the "
            f"file in one partition with bytesPerPartition={part.file.size}"
        )
    if stop.end is End.REACHED or (stop.end is End.BLANK and part.end == part.file.size):
        return None
    reason = stop.reason or f"{stop.end.name.lower()} bytes in the middle of the log"
    if part.damage is Damage.ENDS_LOG:
        _warn_of_torn_end(part.file, stop)
        return None
    if part.damage is Damage.FAILS:
        raise StoreDamaged(
            f"{path} at byte {stop.at}: {reason}; onBadRecord=skip leaves out damaged messages"
        )
    following = reader.next_record(stop.at + 1, part.end)
    if stop.end is not End.UNWRITTEN or following is not None:
        behind = part.end if following is None else following
        _log.warning("%s at byte %d: %s; resuming at %d", path, stop.at, reason, behind)
    return following


def _warn_of_torn_end(file: LogFile, stop: Stop) -> None:
    if stop.end is End.DAMAGED:
        _log.warning(
            "%s is torn at byte %d (%s): the log ends there", file.path, stop.at, stop.reason
        )


def _of_time(files: Sequence[LogFile], wanted: Wanted) -> list[LogFile]:
    """Return the files that may have messages of the requested time."""
    if wanted.start_ms is None and wanted.end_ms is None:
        return list(files)
    start_ms = -math.inf if wanted.start_ms is None else wanted.start_ms - CLOCK_MARGIN_MS
    end_ms = math.inf if wanted.end_ms is None else wanted.end_ms + CLOCK_MARGIN_MS
    times = [_first_time_ms(file) for file in files]
    # Everything in this file is earlier than the start of the next one, unless a clock was set
    # back.
    return [
        file
        for file, first_ms, next_ms in zip(files, times, [*times[1:], None], strict=True)
        if (next_ms is None or next_ms >= start_ms) and (first_ms is None or first_ms < end_ms)
    ]


def _first_time_ms(file: LogFile) -> int | None:
    with opened(file) as reader:
        return reader.first_store_time_ms()


def _split(reader: LogReader, part_bytes: int, damage: Damage) -> list[LogPart]:
    """Divide a file at records, recognized by their form."""
    size = reader.file.size
    filler = reader.filler() if size > part_bytes else None
    if filler is None:
        return [LogPart(reader.file, 0, size, damage)]
    places = {0, filler}
    for place in range(part_bytes, filler, part_bytes):
        found = None if place <= max(places - {filler}) else reader.next_record(place, filler)
        if found is not None:
            places.add(found)
    return _parts(reader.file, sorted(places), damage)


def _split_last(reader: LogReader, part_bytes: int) -> list[LogPart]:
    """Divide the file that the log ends in: only reading all of it finds the end."""
    file = reader.file
    if file.size <= part_bytes:
        return [LogPart(file, 0, file.size, Damage.ENDS_LOG)]
    places, end = [0], 0
    for item in reader.walk(0, file.size, may_be_torn=True):
        if isinstance(item, Stop):
            _warn_of_torn_end(file, item)
            continue
        starts = item.records.starts()
        shift, end = item.at - starts[0], item.end
        places += [at + shift for at in _places(starts, places[-1] - shift, part_bytes)]
    return _parts(file, [*places, end], Damage.FAILS)


def _places(starts: Sequence[int], last: int, part_bytes: int) -> Iterable[int]:
    """Return the starts that are one part size apart."""
    while (row := bisect_left(starts, last + part_bytes)) < len(starts):
        last = starts[row]
        yield last


def _parts(file: LogFile, places: Sequence[int], damage: Damage) -> list[LogPart]:
    return [LogPart(file, start, end, damage) for start, end in pairwise(places) if start < end]
