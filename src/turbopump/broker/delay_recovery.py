"""Finding delayed messages that were delivered before a crash, so that none is delivered twice.

A level's progress is saved periodically, so after a crash the saved offset lies before what was
delivered since. The end of the log at that time is saved with it: the copies of later messages lie
after that position and after the messages themselves, in delivery order.
"""

from __future__ import annotations

import logging
from collections import Counter

from turbopump.errors import RecordError
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store import outcomes
from turbopump.store.config import ReadLimits
from turbopump.store.outcomes import EVERYTHING
from turbopump.store.store import Store
from turbopump.wire import properties as names
from turbopump.wire.bodies import DelayOffsets
from turbopump.wire.names import SCHEDULE_TOPIC
from turbopump.wire.record import MessageView, decode_record

_log = logging.getLogger(__name__)

EXAMINED_MAX = 200_000
"""Most messages examined for one level; beyond them, deliveries may be repeated."""

_CLOCK_MARGIN_MS = 60_000
"""How much earlier than due a copy may appear to be stored, because the clock was corrected."""

_SKIPPED_MIN = 500
"""How many messages stored before a copy is due are worth skipping by time.

Fewer are read: if the clock was set back, copies among them appear to be older than they are.
"""

_RUN_COUNT = 256
_LIMITS = ReadLimits.uniform(bytes_max=8 * 1024 * 1024, count_max=_RUN_COUNT)

_Identity = tuple[str, int, str]
"""The unique key, the number of earlier tries, and the delay level."""


class SavedDelays(DelayOffsets, frozen=True, kw_only=True):
    """The file (delayOffset.json); Apache RocketMQ ignores what is ours in it."""

    log_ends: dict[int, int] = {}  # noqa: RUF012 - copied by msgspec
    """By level, where the log ended when its offset was reached."""


def delivered_end(
    store: Store,
    queue_id: int,
    offset: QueueOffset,
    delay_ms: int,
    log_end: PhysicalOffset,
    examined_max: int = EXAMINED_MAX,
) -> QueueOffset:
    """Return the offset after the last delivered message of a level; ``offset`` if none is known.

    Everything before ``offset`` was delivered when the log ended at ``log_end``. A message counts
    as delivered only if a copy is found for it alone, by its unique key: an ambiguous one is
    delivered again rather than lost.
    """
    copies = _Copies(store, delay_ms, log_end, examined_max)
    while not copies.is_exhausted:
        outcome = store.read(SCHEDULE_TOPIC, queue_id, offset, _RUN_COUNT, EVERYTHING, _LIMITS)
        if not isinstance(outcome, outcomes.Found):
            break
        # A level delivers in order: messages before a delivered one are delivered too.
        behind = [
            QueueOffset(at + 1)
            for at, message in zip(outcome.queue_offsets, outcome.messages, strict=True)
            if copies.take(message)
        ]
        if not behind:
            break
        offset = behind[-1]
    return offset


class _Copies:
    """Delivered copies by queue; each queue is read once, from the first possible copy."""

    def __init__(
        self, store: Store, delay_ms: int, log_end: PhysicalOffset, examined_max: int
    ) -> None:
        self._store = store
        self._delay_ms = delay_ms
        self._log_end = log_end
        self._left = examined_max
        self._found: dict[tuple[str, int], Counter[_Identity]] = {}

    @property
    def is_exhausted(self) -> bool:
        return self._left <= 0

    def take(self, scheduled: memoryview) -> bool:
        """Claim the copy of a delayed message in its topic; return whether there is one."""
        self._left -= 1
        try:
            view = decode_record(scheduled)
            topic = view.properties[names.REAL_TOPIC]
            queue_id = int(view.properties[names.REAL_QUEUE_ID])
            identity = _identity(view)
        except (RecordError, KeyError, ValueError):
            return False
        copies = self._found.get((topic, queue_id))
        if copies is None:
            start = self._start(topic, queue_id, view)
            copies = self._found[topic, queue_id] = self._read(topic, queue_id, start)
        if not copies[identity]:
            return False
        copies[identity] -= 1
        return True

    def _read(self, topic: str, queue_id: int, offset: QueueOffset) -> Counter[_Identity]:
        found: Counter[_Identity] = Counter()
        while not self.is_exhausted:
            outcome = self._store.read(topic, queue_id, offset, _RUN_COUNT, EVERYTHING, _LIMITS)
            if not isinstance(outcome, outcomes.Found):
                return found
            for message in outcome.messages:
                self._note(message, found)
            self._left -= len(outcome.sizes)
            offset = outcome.next_offset
        _log.warning(
            "too many messages in %s to find every delayed message already delivered", topic
        )
        return found

    def _note(self, message: memoryview, found: Counter[_Identity]) -> None:
        try:
            view = decode_record(message)
            if names.REAL_TOPIC in view.properties:
                found[_identity(view)] += 1
        except (RecordError, KeyError):
            return

    def _start(self, topic: str, queue_id: int, scheduled: MessageView) -> QueueOffset:
        """Return where to look for copies of a delayed message and of those after it."""
        low, high = self._store.queue_range(topic, queue_id)
        # A copy lies behind the message itself, too: the saved position may be days old.
        first = max(self._log_end, scheduled.physical_offset)
        while low < high:
            middle = QueueOffset((low + high) // 2)
            if self._position(topic, queue_id, middle) >= first:
                high = middle
            else:
                low = QueueOffset(middle + 1)
        stored_ms = scheduled.store_timestamp_ms
        due_ms = stored_ms + self._delay_ms - _CLOCK_MARGIN_MS
        near = self._store.offset_by_time(topic, queue_id, due_ms)
        newest = QueueOffset(self._store.queue_range(topic, queue_id)[1] - 1)
        newest_ms = self._store.store_timestamp_ms(topic, queue_id, newest)
        is_set_back = newest_ms is not None and newest_ms < stored_ms
        return low if is_set_back or near - low < _SKIPPED_MIN else near

    def _position(self, topic: str, queue_id: int, offset: QueueOffset) -> int:
        outcome = self._store.read(topic, queue_id, offset, 1, EVERYTHING, _LIMITS)
        try:
            if isinstance(outcome, outcomes.Found):
                return decode_record(outcome.messages[0]).physical_offset
        except RecordError:
            pass
        return -1


def _identity(view: MessageView) -> _Identity:
    named = view.properties
    return named[names.UNIQUE_KEY], view.reconsume_times, named[names.DELAY]
