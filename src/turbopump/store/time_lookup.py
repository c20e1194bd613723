"""Finds messages by store timestamp.

A search by time reads records all over a queue. It yields what to fetch before it reads each, and
returns its result at the end; see `result_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeAlias, TypeVar

from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import UNIT_BYTES
from turbopump.store.consume_queue import ConsumeQueue, as_units
from turbopump.store.outcomes import Cold, Units
from turbopump.store.unit_check import store_timestamps_at, unit_matches

T = TypeVar("T")

Steps: TypeAlias = Generator[Cold, None, T]
"""What to fetch before each step, and the result."""

Prepare = Callable[[int], Iterator[Cold]]
"""Yields what to fetch before the record at a position is read."""

PrepareAll = Callable[[Units], Iterator[Cold]]
"""Yields what to fetch before all but the bodies of units' records is read."""

_NO_UNIT = bytes(UNIT_BYTES)


def read_anyway(_position: int) -> Iterator[Cold]:
    """Fetch nothing: the caller waits for the disk."""
    return iter(())


def result_of(steps: Steps[T]) -> T:
    """Return the result of all steps, without fetching anything."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: T = ended.value
            return result


def marks_at(
    log: CommitLog,
    queues: Sequence[ConsumeQueue | None],
    queue_ids: Sequence[int],
    offsets: Sequence[int],
    prepare: PrepareAll,
) -> Steps[tuple[list[int], list[int]]]:
    """Return when and where messages of one topic were stored; -1 for those that do not exist.

    Where units were missing, a message's own offset differs from that of its unit: it has a time,
    and no place.
    """
    topic = next((queue.stored_topic for queue in queues if queue is not None), None)
    if topic is None:
        return [-1] * len(offsets), [-1] * len(offsets)
    units = [
        _NO_UNIT if queue is None else queue.unit_bytes(offset) or _NO_UNIT
        for queue, offset in zip(queues, offsets, strict=True)
    ]
    data = b"".join(units)
    places = as_units(data)
    yield from prepare(places)
    times_ms = list(store_timestamps_at(log, topic, queue_ids, offsets, data))
    positions = places["physical_offset"].tolist()
    for at in [number for number, time_ms in enumerate(times_ms) if time_ms < 0]:
        queue, offset = queues[at], QueueOffset(offsets[at])
        stored = None if queue is None else result_of(_stored_at(log, queue, offset, read_anyway))
        is_own = stored is not None and stored[2] == offset
        times_ms[at] = -1 if stored is None else stored[0]
        positions[at] = stored[1] if stored and is_own else -1
    return times_ms, positions


def _stored_at(
    log: CommitLog, queue: ConsumeQueue, offset: QueueOffset, prepare: Prepare
) -> Steps[tuple[int, PhysicalOffset, QueueOffset] | None]:
    """Return when and where a message was stored, and its own offset; None if it does not exist."""
    unit = queue.unit(offset)
    if unit is None:
        return None
    yield from prepare(unit[0])
    if not unit_matches(log, queue, offset, unit[0], unit[1]):
        return None
    entry = log.entry_at(unit[0])
    return None if entry is None else (entry.store_timestamp_ms, unit[0], entry.queue_offset)


def store_timestamp_at(
    log: CommitLog, queue: ConsumeQueue, offset: QueueOffset, prepare: Prepare = read_anyway
) -> Steps[int | None]:
    """Return the store timestamp of the message at an offset; None if there is none."""
    found = yield from _stored_at(log, queue, offset, prepare)
    return None if found is None else found[0]


def offset_by_time(
    log: CommitLog, queue: ConsumeQueue, timestamp_ms: int, prepare: Prepare
) -> Steps[QueueOffset]:
    """Return the offset of the message stored nearest to a timestamp; 0 for an empty queue.

    As in Apache RocketMQ, the search is confined to one file, so that next to a file's end the
    nearest message within that file is found. The file is the first whose last message is not
    older. Apache RocketMQ uses the file's modification time instead, which lags behind what is
    written through a map and is lost when a store is copied: it then skips messages that were asked
    for.
    """
    ranges = queue.file_ranges()
    if not ranges:
        return QueueOffset(0)
    for low, high in ranges:
        last = yield from _first_with_time(log, queue, range(high - 1, low - 1, -1), prepare)
        if last is not None and last[0] >= timestamp_ms:
            return (yield from nearest_between(log, queue, low, high, timestamp_ms, prepare))
    return (yield from nearest_between(log, queue, *ranges[-1], timestamp_ms, prepare))


def nearest_between(
    log: CommitLog,
    queue: ConsumeQueue,
    low: QueueOffset,
    high: QueueOffset,
    timestamp_ms: int,
    prepare: Prepare = read_anyway,
) -> Steps[QueueOffset]:
    """Search a range of offsets; between two messages the nearer counts, the earlier on a tie."""
    earlier: tuple[int, QueueOffset] | None = None
    later: tuple[int, QueueOffset] | None = None
    while low < high:
        middle = QueueOffset((low + high - 1) // 2)
        found = yield from _first_with_time(log, queue, range(middle, high), prepare)
        if found is None:
            high = middle
        elif found[0] == timestamp_ms:
            return found[1]
        elif found[0] > timestamp_ms:
            high, later = middle, found
        else:
            low, earlier = QueueOffset(found[1] + 1), found
    if earlier is None:
        return later[1] if later is not None else QueueOffset(0)
    if later is None:
        return earlier[1]
    nearer_later = timestamp_ms - earlier[0] > later[0] - timestamp_ms
    return later[1] if nearer_later else earlier[1]


def _first_with_time(
    log: CommitLog, queue: ConsumeQueue, offsets: range, prepare: Prepare
) -> Steps[tuple[int, QueueOffset] | None]:
    """Return store timestamp and offset of the first message that is not lost."""
    for offset in offsets:
        time_ms = yield from store_timestamp_at(log, queue, QueueOffset(offset), prepare)
        if time_ms is not None:
            return time_ms, QueueOffset(offset)
    return None
