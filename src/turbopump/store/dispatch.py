"""The dispatcher: follows the log and enters each message into its queue and the key index.

It can restart at any earlier position: messages already entered are recognized and skipped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Protocol

from turbopump.core import RecordEntry, Records, property_value, tags_code
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store.config import UNIT_BYTES
from turbopump.store.consume_queue import ConsumeQueue, QueueKey
from turbopump.store.key_index import KeyIndex
from turbopump.store.outcomes import Arrival
from turbopump.store.queues import Queues
from turbopump.wire import properties, sysflag
from turbopump.wire.names import SCHEDULE_TOPIC

SCHEDULE_TOPIC_BYTES = SCHEDULE_TOPIC.encode()
"""Its units hold the delivery time in place of the tag's hash."""
_UNKNOWN_LEVEL_MS = 1000
QUEUE_PENDING_MAX = 16 * 1024 // UNIT_BYTES
"""Units of a queue that may wait in memory."""

_WAITING_MAX = 64
"""Writes that may wait to be entered while there is no listener: entering many costs less."""

_WAITING_BYTES_MAX = 1024 * 1024
"""Bytes of messages that may wait so."""

INVISIBLE_BIT = sysflag.Transaction.PREPARED.value & sysflag.Transaction.ROLLBACK.value
"""Set in the system flag of prepared and rolled back messages, and of no others."""

_TAGS = properties.TAGS.encode()
_DELAY = properties.DELAY.encode()

Listener = Callable[[list[Arrival]], None]

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


class Dispatcher:
    """Enters messages up to a position that the owner has confirmed."""

    def __init__(
        self, queues: Queues, index: KeyIndex | None, delay_levels: tuple[int, ...]
    ) -> None:
        self._queues = queues
        self._removed = queues.removed
        self._index = index
        self._delay_levels = delay_levels
        self._waiting: deque[Records] = deque()
        self._waiting_bytes = 0
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
        return self._waiting[-1].end if self._waiting else self._queues.entered_to

    @property
    def followed_ms(self) -> int:
        """Store timestamp of that message; 0 if there was none since the start."""
        return self._waiting[-1].store_timestamp_ms if self._waiting else self.store_timestamp_ms

    def follow(self, found: Iterable[Records]) -> bool:
        """Remember messages to be entered once they are confirmed.

        Returns whether to enter them as soon as possible: there is a listener, or they are many.
        """
        for records in found:
            self._waiting.append(records)
            self._waiting_bytes += records.end - records.physical_offset
        return (
            self.listener is not None
            or len(self._waiting) >= _WAITING_MAX
            or self._waiting_bytes >= _WAITING_BYTES_MAX
        )

    def set_listener(self, listener: Listener | None, watched: Watches) -> None:
        """Set the listener for newly entered messages: watched queues, and delays."""
        self.listener = listener
        self.watched = _NO_QUEUE if listener is None else watched

    def forget(self) -> None:
        """Discard the pending messages, which have been dropped from the log."""
        self._waiting.clear()
        self._waiting_bytes = 0

    def advance(self, confirmed: PhysicalOffset) -> None:
        """Enter pending messages that end at or before a position, and notify the listener.

        A slave may have flushed only the first part of the next ones.
        """
        waiting, arrivals, is_any = self._waiting, list[Arrival](), False
        while waiting and waiting[0].physical_offset < confirmed:
            first = waiting.popleft()
            if first.end > confirmed:
                count = first.count_before(confirmed)
                waiting.appendleft(first[count:])
                first = first[:count]
                if not first:
                    break
            self._waiting_bytes -= first.end - first.physical_offset
            arrivals += self._enter(first)
            is_any = True
        if is_any and self.listener is not None:
            self.listener(arrivals)

    def enter(self, records: Records) -> None:
        """Enter messages immediately, and notify the listener."""
        arrivals = self._enter(records)
        if self.listener is not None:
            self.listener(arrivals)

    def follows(self, records: Records) -> bool:
        """Whether messages directly follow in each of their queues, or are already in them."""
        return all(
            self._is_next(queue, self._missing(queue, part))
            for topic, queue_id, part in records.by_queue()
            for queue in (self._queues.for_record(topic, queue_id),)
        )

    def _missing(self, queue: ConsumeQueue, records: Records) -> Records:
        """Return those of a queue's records that it lacks, and that were not removed with it."""
        known = records.count_before(queue.physical_end)
        if self._removed.has_any:
            removed_to = self._removed.end_of(queue.stored_topic[1:])
            known = max(known, bisect_left(records.positions(), removed_to))
        return records[known:] if known else records

    def _is_next(self, queue: ConsumeQueue, missing: Records) -> bool:
        return not missing or (
            missing.physical_offset >= queue.physical_end and missing.follow(queue.max_offset)
        )

    def _enter(self, records: Records) -> list[Arrival]:
        arrivals: list[Arrival] = []
        begun: list[tuple[PhysicalOffset, int, ConsumeQueue]] = []
        for topic, queue_id, part in records.by_queue():
            queue = self._queues.by_record[topic, queue_id]
            missing = self._missing(queue, part)
            is_next = self._is_next(queue, missing)
            # Around a gap, or where a topic was created again: one by one.
            for each in (missing,) if is_next else _one_by_one(missing):
                added = self._add(queue, each, is_next=is_next) if each else None
                if added is not None:
                    arrivals += added
                    if not queue.is_waiting:
                        begun.append((each.physical_offset, each[0].store_timestamp_ms, queue))
            if queue.max_offset - queue.written_offset >= QUEUE_PENDING_MAX:
                self.crowded.append(queue)
        # In the order of the log: the queue that waits first has the oldest unit.
        for position, time_ms, queue in sorted(begun, key=itemgetter(0)) if begun else ():
            if not queue.is_waiting:
                self._queues.mark_waiting(queue, time_ms, position)
        if self._index is not None:
            self._index.add(records)
        self.store_timestamp_ms = records.store_timestamp_ms
        self._queues.entered_to = records.end
        return arrivals

    def _add(self, queue: ConsumeQueue, records: Records, *, is_next: bool) -> list[Arrival] | None:
        """Add records to their queue; return the arrivals, or None if the queue has them."""
        watch = self.watched.get(queue.key)
        codes: Sequence[int] | None = None
        if queue.topic == SCHEDULE_TOPIC:
            codes = [self.code_of(entry) for entry in records]
        elif watch is not None or not is_next:
            codes = records.tags_codes()
        if is_next:
            queue.add_units(records.units(codes), records.end)
        else:
            assert codes is not None
            (entry,), (code,) = records, codes
            if not queue.add(entry.queue_offset, entry.physical_offset, entry.size, code):
                return None
        return [] if codes is None else self._arrivals(queue, watch, records, codes)

    def _arrivals(
        self, queue: ConsumeQueue, watch: Watch | None, records: Records, codes: Sequence[int]
    ) -> list[Arrival]:
        """Return those of a queue's newest messages that are awaited; delayed ones always are."""
        is_delayed = queue.topic == SCHEDULE_TOPIC
        wanted: Container[int | None] = ()
        if watch is not None:
            watch.seen, wanted = queue.max_offset, watch.tags_codes
        is_any = is_delayed or ANY_TAG in wanted
        # The queue's own count: the records' differs where units were missing.
        first = queue.max_offset - len(records)
        times_ms = records.store_timestamps_ms()
        return [
            Arrival(
                queue.topic,
                queue.queue_id,
                QueueOffset(first + number),
                code,
                times_ms[number],
                records.properties(number),
            )
            for number, code in enumerate(codes)
            if is_any or code in wanted
        ]

    def code_of(self, entry: RecordEntry) -> int:
        """Return a unit's tags code: the tag's hash, or the delivery time of a delayed message."""
        if entry.topic == SCHEDULE_TOPIC_BYTES and (level := _delay_level(entry.properties)) > 0:
            return entry.store_timestamp_ms + self._delay_ms(level)
        tags = property_value(entry.properties, _TAGS)
        return tags_code(None if tags is None else tags.decode("utf-8", "replace"))

    def _delay_ms(self, level: int) -> int:
        if not self._delay_levels:
            return _UNKNOWN_LEVEL_MS
        return self._delay_levels[min(level, len(self._delay_levels)) - 1]


def _one_by_one(records: Records) -> Iterator[Records]:
    return (records[number : number + 1] for number in range(len(records)))


def _delay_level(text: bytes) -> int:
    value = property_value(text, _DELAY)
    try:
        return int(value) if value else 0
    except ValueError:
        return 0
