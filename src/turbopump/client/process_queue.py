"""Unfinished messages of one queue: the only state that decides what to commit.

Nothing here waits, reads a clock or does I/O. Offsets nearly always arrive in ascending order,
which makes every operation cheap; any other order costs a sort and is still correct.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from turbopump.message import QueueOffset

NOTHING_REMOVED = QueueOffset(-1)
"""Returned by `ProcessQueue.remove` if there was nothing: no offset to commit."""


class Cached(Protocol):
    """A message as its queue needs it."""

    @property
    def queue_offset(self) -> QueueOffset: ...

    @property
    def body_length(self) -> int: ...


M = TypeVar("M", bound=Cached)


class ProcessQueue(Generic[M]):
    """The messages of one queue that are cached, or taken by an orderly listener."""

    def __init__(self) -> None:
        self._cached: dict[int, M] = {}
        self._taken: dict[int, M] = {}
        # Ascending; offsets no longer cached are dropped when they reach an end.
        self._order: deque[int] = deque()
        self._last_put = QueueOffset(0)
        self._consuming = False
        self.count = 0
        self.bytes = 0

    @property
    def cached_offsets(self) -> list[int]:
        return sorted(self._cached)

    @property
    def taken_offsets(self) -> list[int]:
        return sorted(self._taken)

    @property
    def is_empty(self) -> bool:
        """Whether all messages are finished."""
        return self.count == 0

    @property
    def first(self) -> M | None:
        """The cached message with the smallest offset."""
        self._trim()
        return self._cached[self._order[0]] if self._order else None

    def __contains__(self, message: M) -> bool:
        """Whether a message is cached: neither finished nor taken."""
        return message.queue_offset in self._cached

    def put(self, messages: Sequence[M]) -> bool:
        """Add pulled messages; return whether an orderly run must start to take them."""
        if not self._put_at_end(messages):
            for message in messages:
                self._put_one(message)
        if not self._cached or self._consuming:
            return False
        self._consuming = True
        return True

    def _put_at_end(self, messages: Sequence[M]) -> bool:
        """Append messages beyond all others in one step; nearly all arrive this way."""
        offsets = [message.queue_offset for message in messages]
        self._trim()
        last = self._order[-1] if self._order else -1
        if not offsets or offsets[0] <= last or any(map(operator.le, offsets[1:], offsets)):
            return False
        self._cached.update(zip(offsets, messages, strict=True))
        self._order.extend(offsets)
        self._last_put = offsets[-1]
        self.count += len(offsets)
        self.bytes += sum([message.body_length for message in messages])
        return True

    def _put_one(self, message: M) -> None:
        if message.queue_offset not in self._cached:
            self._last_put = message.queue_offset
            self.count += 1
            self.bytes += message.body_length
            self._add(message)

    def remove(self, messages: Iterable[M]) -> QueueOffset:
        """Finish messages; return the lowest unfinished offset, which is the one to commit."""
        if not self._cached:
            return NOTHING_REMOVED
        pop = self._cached.pop
        removed = [each for each in messages if pop(each.queue_offset, None) is not None]
        self.count -= len(removed)
        self.bytes -= sum([message.body_length for message in removed])
        self._trim()
        # Whatever finishes first: a crash may repeat messages above this offset, never skip one.
        return QueueOffset(self._order[0] if self._order else self._last_put + 1)

    # --- in order ---------------------------------------------------------------------------------

    def peek(self, count: int) -> list[M]:
        self._trim()
        offsets = (offset for offset in self._order if offset in self._cached)
        return [self._cached[offset] for offset in islice(offsets, count)]

    def take(self, count: int) -> list[M]:
        """Take the first messages to consume them; if there are none, consuming has ended."""
        messages = self.peek(count)
        for message in messages:
            self._taken[message.queue_offset] = self._cached.pop(message.queue_offset)
        if not messages:
            self._consuming = False
        return messages

    def commit(self) -> QueueOffset | None:
        """Finish all taken messages; return the offset after them, or None if there were none."""
        if not self._taken:
            return None
        after = QueueOffset(max(self._taken) + 1)
        self.count -= len(self._taken)
        self.bytes -= sum(message.body_length for message in self._taken.values())
        self._taken.clear()
        return after

    def rollback(self) -> None:
        """Return all taken messages, to be taken again."""
        self.again(list(self._taken.values()))

    def again(self, messages: Iterable[M]) -> None:
        """Return some taken messages, possibly changed, to be taken again."""
        for message in messages:
            self._taken.pop(message.queue_offset, None)
            self._add(message)

    def clear(self) -> None:
        """Forget everything, as when another member owns the queue."""
        self._cached.clear()
        self._taken.clear()
        self._order.clear()
        self.count = self.bytes = 0

    # --- order ------------------------------------------------------------------------------------

    def _add(self, message: M) -> None:
        offset = message.queue_offset
        self._trim()
        self._cached[offset] = message
        if not self._order or offset > self._order[-1]:
            self._order.append(offset)
        else:
            self._order = deque(sorted(self._cached))

    def _trim(self) -> None:
        order, cached = self._order, self._cached
        while order and order[0] not in cached:
            order.popleft()
        while order and order[-1] not in cached:
            order.pop()
