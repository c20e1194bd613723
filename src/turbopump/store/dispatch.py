"""The dispatcher: follows the log and enters each message into its queue and the key index.

It can restart at any earlier position: messages already entered are recognized and skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Protocol, TypeAlias, cast

import numpy as np

from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.config import UNIT_BYTES
from turbopump.store.consume_queue import ConsumeQueue, QueueKey
from turbopump.store.entry_batch import EntryBatch, tags_codes
from turbopump.store.entry_run import EntryRun
from turbopump.store.key_index import KeyIndex
from turbopump.store.outcomes import Arrival
from turbopump.store.queues import Queues
from turbopump.wire import properties, sysflag
from turbopump.wire.aligned_properties import Ints
from turbopump.wire.hashing import tags_code
from turbopump.wire.names import SCHEDULE_TOPIC
from turbopump.wire.property_texts import PropertyTexts
from turbopump.wire.record import RecordEntry
from turbopump.wire.record_batch import RecordBatch

SCHEDULE_TOPIC_BYTES = SCHEDULE_TOPIC.encode()
"""Its units hold the delivery time in place of the tag's hash."""
_UNKNOWN_LEVEL_MS = 1000
QUEUE_PENDING_MAX = 16 * 1024 // UNIT_BYTES
"""Units of a queue that may wait in memory."""

_WAITING_MAX = 64
"""Messages that may wait to be entered while there is no listener: batching costs less. A stored
batch counts as one, since its messages are entered together anyway."""

_RUN_MIN = 64
"""Fewer records in a run are entered faster one by one."""

INVISIBLE_BIT = sysflag.Transaction.PREPARED.value & sysflag.Transaction.ROLLBACK.value
"""Set in the system flag of prepared and rolled back messages, and of no others."""

_ENTRY_END = properties.ENTRY_END.encode()

Listener = Callable[[list[Arrival]], None]

Entry: TypeAlias = RecordEntry | EntryBatch | EntryRun
"""One or more consecutive messages of the log that are to be entered."""

ANY_TAG = None
"""Among tag hashes: matches messages with any tag, or without."""


class Watch:
    """What is awaited in one queue: messages with certain tags, which may change."""

    __slots__ = ("seen", "tags_codes")

    def __init__(self, tags_codes: Container[int | None]) -> None:
        self.tags_codes = tags_codes
        """Hashes of the tags, or `ANY_TAG`."""
        self.seen = 0
        """The offset after the last message examined, wanted or not."""


class Watches(Protocol):
    """A live view of what is awaited, by queue."""

    def get(self, key: QueueKey, /) -> Watch | None:
        """Return what is awaited in a queue; None if nothing is."""
        ...


class EveryQueue:
    """Awaits all messages of all queues."""

    _everything = Watch({ANY_TAG})

    def get(self, _: QueueKey, /) -> Watch:
        return self._everything


EVERY_QUEUE = EveryQueue()
_NO_QUEUE: Watches = dict[QueueKey, Watch]()
_NOBODY = Watch(frozenset())
"""For queues without a watch, so that a message costs the same with and without one."""


class Dispatcher:
    """Enters messages up to a position that the owner has confirmed."""

    def __init__(
        self, queues: Queues, index: KeyIndex | None, delay_levels: tuple[int, ...]
    ) -> None:
        self._queues = queues
        self._removed = queues.removed
        self._index = index
        self._delay_levels = delay_levels
        self._waiting: deque[Entry] = deque()
        self.listener: Listener | None = None
        self.watched = _NO_QUEUE
        self.crowded: list[ConsumeQueue] = []
        """Queues with enough units in memory to be worth a write."""
        self.store_timestamp_ms = 0
        """Of the last message entered."""

    @property
    def first_waiting(self) -> PhysicalOffset | None:
        """Position of the first message that is not entered yet."""
        return self._waiting[0].physical_offset if self._waiting else None

    @property
    def followed_to(self) -> PhysicalOffset:
        """Position after the last message that is entered or pending."""
        if not self._waiting:
            return self._queues.entered_to
        last = self._waiting[-1]
        return PhysicalOffset(last.physical_offset + last.size)

    @property
    def followed_ms(self) -> int:
        """Store timestamp of that message; 0 if there was none since the start."""
        return self._waiting[-1].store_timestamp_ms if self._waiting else self.store_timestamp_ms

    def follow(self, entries: Sequence[Entry]) -> bool:
        """Remember messages to be entered once they are confirmed.

        Returns whether to enter them as soon as possible: there is a listener, or they are many.
        """
        self._waiting += entries
        return self.listener is not None or len(self._waiting) >= _WAITING_MAX

    def set_listener(self, listener: Listener | None, watched: Watches) -> None:
        """Set the listener for newly entered messages: watched queues, and delays."""
        self.listener = listener
        self.watched = _NO_QUEUE if listener is None else watched

    def forget(self) -> None:
        """Discard the pending messages, which have been dropped from the log."""
        self._waiting.clear()

    def advance(self, confirmed: PhysicalOffset) -> None:
        """Enter pending messages that end at or before a position, and notify the listener.

        A slave may have flushed only the first part of the next one.
        """
        waiting = self._waiting
        if not waiting or waiting[0].physical_offset >= confirmed:
            return
        if waiting[-1].physical_offset + waiting[-1].size <= confirmed:
            due = list(waiting)
            waiting.clear()
        else:
            due = []
            while waiting[0].physical_offset + waiting[0].size <= confirmed:
                due.append(waiting.popleft())
            first = waiting[0]
            if type(first) is EntryRun and (count := first.count_before(confirmed)):
                due.append(first.part(slice(count)))
                waiting[0] = first.part(slice(count, None))
        self.enter_all(due)

    def enter_all(self, entries: Sequence[Entry]) -> None:
        """Enter messages immediately, and notify the listener."""
        if not entries:
            return
        if EntryRun in map(type, entries):
            arrivals = self._enter_runs(entries)
        else:
            arrivals = self._enter(cast(Sequence[RecordEntry | EntryBatch], entries))
        if self.listener is not None:
            self.listener(arrivals)

    def _enter_runs(self, entries: Sequence[Entry]) -> list[Arrival]:
        """Enter messages of which some are in runs."""
        arrivals: list[Arrival] = []
        for kind, group in groupby(entries, type):
            if kind is not EntryRun:
                arrivals += self._enter(cast(list[RecordEntry | EntryBatch], list(group)))
                continue
            for run in cast(Iterator[EntryRun], group):
                for part in run.parts():
                    found = self.enter_run(part) if len(part) >= _RUN_MIN else None
                    arrivals += self._enter(part.entries()) if found is None else found
        return arrivals

    def _enter(self, entries: Sequence[RecordEntry | EntryBatch]) -> list[Arrival]:
        arrivals = self._enter_queues(entries)
        if self._index is not None:
            self._index.add(entries)
        last = entries[-1]
        self.store_timestamp_ms = last.store_timestamp_ms
        self._queues.entered_to = PhysicalOffset(last.physical_offset + last.size)
        return arrivals

    def enter_run(self, run: EntryRun) -> list[Arrival] | None:
        """Enter records of the log by column, and return those that are awaited.

        None if they do not directly follow in each queue: nothing is entered then. All records go
        into the index, unless they are already in it.
        """
        missing = self._missing_records(run)
        if missing is None:
            return None
        queues, rows, counts = missing
        texts, times_ms = run.texts(), run.times_ms[rows].tolist()
        codes = tags_codes(texts)
        units = run.units(codes)[rows].tobytes()
        positions = run.positions
        starts, ends = positions[rows].tolist(), (positions + run.sizes)[rows].tolist()
        arrivals: list[Arrival] = []
        extended: list[tuple[PhysicalOffset, int, ConsumeQueue]] = []
        first = 0
        for queue, count in zip(queues, counts, strict=True):
            end = first + count
            if count:
                added = units[first * UNIT_BYTES : end * UNIT_BYTES]
                queue.add_units(added, PhysicalOffset(ends[end - 1]))
                extended.append((PhysicalOffset(starts[first]), times_ms[first], queue))
                arrivals += self._run_arrivals(queue, run, rows[first:end], codes, texts)
            first = end
        # In the order of the log: the queue that waits first has the oldest unit.
        for position, time_ms, queue in sorted(extended):
            self._note_waiting(queue, time_ms, position)
        if self._index is not None:
            self._index.add_run(run.topic_of_each(), texts, positions, run.times_ms)
        self.store_timestamp_ms = run.store_timestamp_ms
        self._queues.entered_to = run.end
        return arrivals

    def _missing_records(self, run: EntryRun) -> tuple[list[ConsumeQueue], Ints, list[int]] | None:
        """Return the queues of a run, the records that they lack, and how many each one lacks.

        None unless these directly follow in each queue.
        """
        if np.bitwise_or.reduce(run.sys_flags) & INVISIBLE_BIT:
            return None
        queues, parts = [], []
        for topic, queue_id, part in run.by_queue():
            first = run.base + int(run.starts[part[0]])
            if topic == SCHEDULE_TOPIC_BYTES or self._removed.covers(topic, first):
                return None
            queues.append(self._queues.for_record(topic, queue_id))
            parts.append(part)
        counts = np.array([len(part) for part in parts])
        number, rows = np.repeat(np.arange(len(parts)), counts), np.concatenate(parts)
        places = [(queue.max_offset, queue.physical_end) for queue in queues]
        next_offsets, known_ends = np.array(places)[number].T
        positions, offsets = run.positions[rows], run.queue_offsets[rows]
        lacks = positions + run.sizes[rows] > known_ends
        if (offsets[~lacks] > next_offsets[~lacks]).any():
            return None
        rows, number = rows[lacks], number[lacks]
        counts = np.bincount(number, minlength=len(parts))
        # How many of the same queue precede each.
        before = np.arange(len(rows)) - (np.cumsum(counts) - counts)[number]
        follows = (offsets[lacks] == next_offsets[lacks] + before) & (
            positions[lacks] >= known_ends[lacks]
        )
        return (queues, rows, counts.tolist()) if follows.all() else None

    def _run_arrivals(
        self, queue: ConsumeQueue, run: EntryRun, rows: Ints, codes: Ints, texts: PropertyTexts
    ) -> list[Arrival]:
        return [
            Arrival(
                queue.topic,
                queue.queue_id,
                QueueOffset(int(run.queue_offsets[row])),
                code,
                int(run.times_ms[row]),
                texts.parts[row],
            )
            for row, code in self._awaited(queue, rows, codes)
        ]

    def _note_waiting(self, queue: ConsumeQueue, time_ms: int, position: PhysicalOffset) -> None:
        """Record that a queue has new units, and whether they are worth a write."""
        if not queue.is_waiting:
            self._queues.mark_waiting(queue, time_ms, position)
        if queue.max_offset - queue.written_offset >= QUEUE_PENDING_MAX:
            self.crowded.append(queue)

    def _enter_queues(self, entries: Sequence[RecordEntry | EntryBatch]) -> list[Arrival]:
        """Enter messages into their queues, unless they are half messages or removed."""
        queues, removed = self._queues.by_record, self._removed
        arrivals: list[Arrival] = []
        last: ConsumeQueue | None = None
        watch = _NOBODY
        codes = _tags_codes(
            [b"" if type(entry) is EntryBatch else entry.properties for entry in entries]
        )
        for entry, code in zip(entries, codes, strict=True):
            topic, at = entry.topic, entry.physical_offset
            if entry.sys_flag & INVISIBLE_BIT or (removed.has_any and removed.covers(topic, at)):
                continue
            queue = queues[topic, entry.queue_id]
            if type(entry) is EntryBatch:
                arrivals += self._enter_run(queue, entry)
                continue
            if queue is not last:
                last, watch = queue, self.watched.get(queue.key) or _NOBODY
            is_delayed = topic == SCHEDULE_TOPIC_BYTES
            if is_delayed:
                code = self._delivery_ms(entry) or code
            if queue.add(entry.queue_offset, at, entry.size, code):
                if not queue.is_waiting:
                    self._queues.mark_waiting(queue, entry.store_timestamp_ms, at)
                if queue.max_offset - queue.written_offset >= QUEUE_PENDING_MAX:
                    self.crowded.append(queue)
                watch.seen = queue.max_offset
                wanted = watch.tags_codes
                if code in wanted or ANY_TAG in wanted or is_delayed:
                    # The queue's own count: the record's differs where units were missing.
                    offset = QueueOffset(queue.max_offset - 1)
                    arrivals.append(_arrival(queue, offset, entry, code))
        return arrivals

    def _enter_run(self, queue: ConsumeQueue, run: EntryBatch) -> list[Arrival]:
        """Enter the messages of a batch, in one step if they directly follow."""
        follows = run.queue_offset == queue.max_offset
        if (
            not follows
            or run.physical_offset < queue.physical_end
            or run.topic == SCHEDULE_TOPIC_BYTES
        ):
            return self._enter_queues(run.entries())
        batch = run.batch
        found = (
            tags_codes(batch.texts())
            if type(batch) is RecordBatch
            else _tags_codes(batch.stored_texts)
        )
        queue.add_units(run.units(found), PhysicalOffset(run.physical_offset + run.size))
        self._note_waiting(queue, run.store_timestamp_ms, run.physical_offset)
        awaited = self._awaited(queue, np.arange(len(run)), np.asarray(found))
        entries = run.entries() if awaited else []
        return [
            _arrival(queue, entries[number].queue_offset, entries[number], code)
            for number, code in awaited
        ]

    def _awaited(self, queue: ConsumeQueue, rows: Ints, codes: Ints) -> list[tuple[int, int]]:
        """Return row and tags code of those that are awaited among a queue's newest messages."""
        watch = self.watched.get(queue.key)
        if watch is None:
            return []
        watch.seen, wanted = queue.max_offset, watch.tags_codes
        each: list[int] = codes[rows].tolist()
        if ANY_TAG not in wanted and not any(code in wanted for code in set(each)):
            # The messages need not be examined one by one.
            return []
        return [
            (row, code)
            for row, code in zip(rows.tolist(), each, strict=True)
            if code in wanted or ANY_TAG in wanted
        ]

    def code_of(self, entry: RecordEntry) -> int:
        """Return a unit's tags code: the tag's hash, or the delivery time of a delayed message."""
        code = _tags_code(entry.properties)
        return self._delivery_ms(entry) or code if entry.topic == SCHEDULE_TOPIC_BYTES else code

    def _delivery_ms(self, entry: RecordEntry) -> int | None:
        """Return when a delayed message is due; None if it is not delayed."""
        level = _delay_level(entry.properties)
        return entry.store_timestamp_ms + self._delay_ms(level) if level > 0 else None

    def _delay_ms(self, level: int) -> int:
        if not self._delay_levels:
            return _UNKNOWN_LEVEL_MS
        return self._delay_levels[min(level, len(self._delay_levels)) - 1]


class PropertyName:
    """A property to look for, with the bytes that precede its value."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.first = f"{name}{properties.NAME_END}".encode()
        self.later = properties.ENTRY_END.encode() + self.first
        self.later_bytes = len(self.later)


def property_value(text: bytes, name: PropertyName) -> bytes | None:
    """Find one property in the text form without parsing the others; the last one counts."""
    start = text.rfind(name.later)
    if start >= 0:
        start += name.later_bytes
    elif text.startswith(name.first):
        start = name.later_bytes - 1
    else:
        return None
    end = text.find(_ENTRY_END, start)
    value = text[start:] if end < 0 else text[start:end]
    if value:
        return value
    # An empty value does not count, but an earlier one might.
    found = properties.decode(text.decode("utf-8", "replace")).get(name.name)
    return found.encode() if found else None


_TAGS = PropertyName(properties.TAGS)
_DELAY = PropertyName(properties.DELAY)
_NO_TAGS = _TAGS.later + _TAGS.later
"""Never occurs where the last tags begin."""


@lru_cache(maxsize=4096)
def _code(tags: bytes | None) -> int:
    return tags_code(tags.decode("utf-8", "replace")) if tags else 0


def _tags_code(text: bytes) -> int:
    return _code(property_value(text, _TAGS))


def _tags_codes(texts: Sequence[bytes]) -> list[int]:
    """Return the tags code of each message.

    Mostly it is that of the previous message, and comparing is faster than extracting.
    """
    codes, first, later = [], _TAGS.first, _TAGS.later
    before, last = _NO_TAGS, 0
    for text in texts:
        start, code = text.rfind(later), 0
        if start >= 0 and text.startswith(before, start):
            code = last
        elif start >= 0 or text.startswith(first):
            code = last = _tags_code(text)
            before = _tags_entry(text, start)
        codes.append(code)
    return codes


def _tags_entry(text: bytes, start: int) -> bytes:
    """Return the tags that begin at a position, with their end mark; `_NO_TAGS` if that is missing.

    Messages whose last tags begin with it have the same tags.
    """
    value_at = start + _TAGS.later_bytes
    end = text.find(_ENTRY_END, value_at)
    return text[start : end + 1] if start >= 0 and end > value_at else _NO_TAGS


def _delay_level(text: bytes) -> int:
    value = property_value(text, _DELAY)
    try:
        return int(value) if value else 0
    except ValueError:
        return 0


def _arrival(queue: ConsumeQueue, offset: QueueOffset, entry: RecordEntry, code: int) -> Arrival:
    return Arrival(
        queue.topic, queue.queue_id, offset, code, entry.store_timestamp_ms, entry.properties
    )
