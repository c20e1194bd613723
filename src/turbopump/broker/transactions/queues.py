"""Reading half messages and operations, and finding out how one ended before a crash."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import takewhile

from turbopump.broker.searches import Searches
from turbopump.broker.transactions.half import QUEUE_ID, Identity, ended_by, identity_of
from turbopump.errors import RecordError
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.store import outcomes
from turbopump.store.config import ReadLimits
from turbopump.store.outcomes import EVERYTHING
from turbopump.store.store import Store
from turbopump.wire import properties as names
from turbopump.wire.names import (
    CHECKED_TOO_OFTEN_TOPIC,
    HALF_OPERATIONS_TOPIC,
    HALF_TOPIC,
    SCHEDULE_TOPIC,
)
from turbopump.wire.record import MessageView, decode_record
from turbopump.wire.sysflag import Transaction

_log = logging.getLogger(__name__)

RUN_COUNT = 256
_LIMITS = ReadLimits.uniform(bytes_max=8 * 1024 * 1024, count_max=RUN_COUNT)

_SKIPPED = (outcomes.MessagesRemoved, outcomes.MessageDamaged, outcomes.OffsetTooSmall)
_FETCHES_MAX = 3
_FOUND_MAX = 64
_FOREVER_MS = 1 << 62


class TransactionQueues:
    """The queues of half messages and of operations."""

    def __init__(self, store: Store, searches: Searches) -> None:
        self._store = store
        self._searches = searches

    @property
    def half_range(self) -> tuple[QueueOffset, QueueOffset]:
        """The first existing half message, and the offset of the next one."""
        return self._store.queue_range(HALF_TOPIC, QUEUE_ID)

    def half(self, offset: QueueOffset) -> MessageView | None:
        """Return a half message by its offset; None if it is missing or cannot be read."""
        found = self.halves(offset, 1)
        return found[0] if found and found[0].queue_offset == offset else None

    def halves(self, offset: QueueOffset, count_max: int = RUN_COUNT) -> list[MessageView]:
        """Return some half messages from an offset on; none at the end of the queue."""
        return self._run(HALF_TOPIC, offset, count_max)[0]

    def message_at(self, position: PhysicalOffset) -> MessageView | None:
        """Return the message at a position of the log, if its queue has it."""
        search = self._store.find_message(position)
        stored = next((found for found in search if not isinstance(found, outcomes.Cold)), None)
        return None if stored is None else _decoded(stored)

    async def fetched_message(self, position: PhysicalOffset) -> MessageView | None:
        """Do the same; if it is not in memory, have it read meanwhile."""
        search = takewhile(lambda each: each is not None, self._store.find_message(position))
        stored = await self._searches.result(search)
        return None if stored is None else _decoded(stored)

    async def fetch_halves(self, offset: QueueOffset, count_max: int) -> None:
        """Have the half messages read into memory that `halves` returns."""
        for _ in range(_FETCHES_MAX):
            outcome = self._store.read_from_memory(
                HALF_TOPIC, QUEUE_ID, offset, count_max, EVERYTHING, _LIMITS
            )
            if not isinstance(outcome, outcomes.Cold):
                return
            await self._searches.fetched(outcome)

    def is_removed(self, position: PhysicalOffset) -> bool:
        """Whether the log no longer has a position."""
        return position < self._store.min_offset

    def operations(self, offset: QueueOffset) -> Iterator[tuple[QueueOffset, QueueOffset]]:
        """Yield all operations from an offset on: their own, and that of the half message."""
        while True:
            found, offset = self._run(HALF_OPERATIONS_TOPIC, offset, RUN_COUNT)
            if not found:
                return
            for view in found:
                ended = ended_by(view.stored_body)
                if ended is not None:
                    yield view.queue_offset, ended

    def _run(
        self, topic: str, offset: QueueOffset, count_max: int
    ) -> tuple[list[MessageView], QueueOffset]:
        """Return messages of a queue and where to read next, past what is gone or damaged."""
        while True:
            outcome = self._store.read(topic, QUEUE_ID, offset, count_max, EVERYTHING, _LIMITS)
            if isinstance(outcome, outcomes.Found):
                views = [_decoded(message) for message in outcome.messages]
                readable = [view for view in views if view is not None]
                if readable:
                    return readable, outcome.next_offset
            elif not isinstance(outcome, _SKIPPED):
                return [], offset
            if outcome.next_offset <= offset:
                return [], offset
            offset = outcome.next_offset

    # --- the past ---------------------------------------------------------------------------------

    async def was_committed(self, view: MessageView) -> bool:
        """Whether the committed message of a half message is in its topic already.

        A crash may come between it and its operation. Without a unique key, or without the key
        index, this is unknown.
        """
        for topic in dict.fromkeys((view.properties.get(names.REAL_TOPIC, ""), SCHEDULE_TOPIC)):
            copies = await self._copies_in(topic, identity_of(view))
            if any(copy.transaction is Transaction.COMMIT for copy in copies):
                return True
        return False

    async def was_abandoned(self, view: MessageView) -> bool:
        """Whether a half message is kept for operators, and was not resumed since."""
        identity = identity_of(view)
        abandoned = _newest(await self._copies_in(CHECKED_TOO_OFTEN_TOPIC, identity))
        return abandoned > _newest(await self._copies_in(HALF_TOPIC, identity))

    async def _copies_in(self, topic: str, identity: Identity | None) -> list[MessageView]:
        if identity is None or not topic:
            return []
        search = self._store.find_by_key(topic, identity[0], _FOUND_MAX, 0, _FOREVER_MS)
        views = map(_decoded, (await self._searches.found(search)).messages)
        return [
            view
            for view in views
            if view is not None and view.topic == topic and identity_of(view) == identity
        ]


def _newest(copies: Iterable[MessageView]) -> int:
    return max((copy.physical_offset for copy in copies), default=-1)


def _decoded(stored: memoryview) -> MessageView | None:
    try:
        return decode_record(stored)
    except RecordError as error:
        _log.warning("skipped a transaction record that cannot be read: %s", error)
        return None
