"""Which half messages are open, and from where both queues must be read. Pure.

Half messages are numbered by their queue. One is open if it is not before ``floor`` and no
operation names it. Those sent since the last check are known only by their operations: they are
read once they are old enough to be checked, so that a transaction that ends in time costs nothing
here.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from itertools import islice

from msgspec import Struct

from turbopump.broker.transactions.half import Half, Identity
from turbopump.message import QueueOffset

CLOSED_MAX = 10_000
"""Ended transactions before ``floor``, and abandoned ones, remembered for requests."""


class Fate(Enum):
    """What became of a half message."""

    COMMITTED = auto()
    ROLLED_BACK = auto()
    REPLACED = auto()
    """There is a newer copy."""
    ABANDONED = auto()
    ENDED = auto()
    """It ended in an earlier run: how is unknown."""


class Progress(Struct, frozen=True):
    """Where to resume reading after a restart."""

    half: QueueOffset
    operation: QueueOffset


class Ledger:
    """The state of half messages, from offset ``floor`` on."""

    def __init__(self, floor: QueueOffset, next_operation: QueueOffset) -> None:
        self.floor = floor
        """Every half message before it has ended, or has a newer copy."""
        self.seen = floor
        """Those before it that have not ended are in ``open``."""
        self.open: dict[QueueOffset, Half] = {}
        self._by_identity: dict[Identity, QueueOffset] = {}
        self._closed: dict[QueueOffset, Fate] = {}
        self._abandoned: dict[Identity, QueueOffset] = {}
        """The newest copy of each half message that was abandoned, whatever became of it since."""
        self._operations: deque[tuple[QueueOffset, QueueOffset]] = deque()
        """Offset in the queue of operations, and of the half message."""
        self._next_operation = next_operation

    def is_open(self, offset: QueueOffset) -> bool:
        """Whether a half message that exists has not ended and is the newest copy."""
        return offset >= self.floor and offset not in self._closed

    def fate(self, offset: QueueOffset) -> Fate | None:
        """Return what became of a half message, if that is remembered."""
        return self._closed.get(offset)

    def newest_copy(self, identity: Identity | None) -> QueueOffset | None:
        """Return the open copy of a half message that is not the first."""
        found = None if identity is None else self._by_identity.get(identity)
        return found if found is not None and self.open[found].is_copy else None

    def abandoned_copy(self, identity: Identity | None, offset: QueueOffset) -> QueueOffset:
        """Return the newest copy of a half message that was abandoned and not resumed.

        Return ``offset`` if it was not abandoned, or if that is unknown.
        """
        return offset if identity is None else self._abandoned.get(identity, offset)

    def add(self, half: Half) -> QueueOffset | None:
        """Note an open half message; return an open one that it is a copy of."""
        self.open[half.queue_offset] = half
        if half.identity is None:
            return None
        older = self._by_identity.get(half.identity)
        self._by_identity[half.identity] = half.queue_offset
        return older if half.is_copy else None

    def close(self, offset: QueueOffset, fate: Fate) -> None:
        """Note that a half message has ended."""
        self.forget(offset)
        self._closed[offset] = fate

    def give_up(self, half: Half) -> None:
        """Note that a half message was abandoned."""
        self.close(half.queue_offset, Fate.ABANDONED)
        if half.identity is not None:
            self._abandoned[half.identity] = half.queue_offset

    def note_resumed(self, identity: Identity | None) -> None:
        """Note that an abandoned half message has a newer copy, which counts from now on."""
        before = None if identity is None else self._abandoned.pop(identity, None)
        if before is not None:
            self._closed[before] = Fate.REPLACED

    def reopen(self, half: Half) -> None:
        """Undo `close`, because what was stored instead is lost."""
        self._closed.pop(half.queue_offset, None)
        if half.identity is not None:
            self._abandoned.pop(half.identity, None)
        self.add(half)

    def forget(self, offset: QueueOffset) -> None:
        """Forget an open half message that is gone."""
        half = self.open.pop(offset, None)
        identity = None if half is None else half.identity
        if identity is not None and self._by_identity.get(identity) == offset:
            del self._by_identity[identity]

    def skip_known(self, stop: QueueOffset) -> None:
        """Move ``seen`` past what has ended or is in ``open``, up to an offset at most."""
        seen, closed, open_ = self.seen, self._closed, self.open
        # As `is_open`, which costs a call for each.
        while seen < stop and (seen in closed or seen in open_):
            seen = QueueOffset(seen + 1)
        self.seen = seen

    def note_operation(self, at: QueueOffset, half: QueueOffset) -> None:
        """Note that the queue of operations has one for a half message."""
        self._operations.append((at, half))
        self._next_operation = max(self._next_operation, QueueOffset(at + 1))

    def forget_operations(self, first: QueueOffset) -> None:
        """Undo `note_operation` from an offset on, because they are lost."""
        kept = [operation for operation in self._operations if operation[0] < first]
        self._operations = deque(kept)
        self._next_operation = min(self._next_operation, first)

    @property
    def is_crowded(self) -> bool:
        """Whether most messages from the oldest open one on have ended."""
        # Copies lie behind what was seen, so this is a lower bound.
        ended = self.seen - self._oldest - len(self.open)
        return ended > CLOSED_MAX + len(self.open)

    @property
    def _oldest(self) -> QueueOffset:
        return min(min(self.open, default=self.seen), self.seen)

    def advance(self) -> Progress:
        """Move the floor to the oldest open half message; return where to read from."""
        self.floor = self._oldest
        while self._operations and self._operations[0][1] < self.floor:
            self._operations.popleft()
        # In one pass: finding the first entry of a dict again after each removal takes ever longer.
        for offset in list(islice(self._closed, max(0, len(self._closed) - CLOSED_MAX))):
            if offset >= self.floor:
                break
            del self._closed[offset]
        for identity in list(islice(self._abandoned, max(0, len(self._abandoned) - CLOSED_MAX))):
            del self._abandoned[identity]
        operation = self._operations[0][0] if self._operations else self._next_operation
        return Progress(self.floor, operation)
