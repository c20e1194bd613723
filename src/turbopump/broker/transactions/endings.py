"""Ends of transactions: a producer's decision, and the callbacks that wait until it is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVarTuple

from msgspec import Struct

from turbopump.broker.transactions.half import Identity
from turbopump.errors import RemoteError
from turbopump.message import PhysicalOffset, QueueOffset

Ts = TypeVarTuple("Ts")

OnEnded = Callable[[RemoteError | None, *Ts], None]
"""Called once with what kept a transaction from ending, or None on success."""


class End(Struct, frozen=True):
    """A producer's decision."""

    group: str
    queue_offset: QueueOffset
    physical_offset: PhysicalOffset
    commits: bool
    message_id: str = ""
    """The producer's id of the message: its unique key, if it follows the protocol."""


EndingKey = Identity | QueueOffset
"""Identifies an ending, whichever copy a request names."""


class Ending:
    """A transaction whose end is being stored."""

    def __init__(self, target: QueueOffset, *, commits: bool, was_open: bool) -> None:
        self.target = target
        self.commits = commits
        self.was_open = was_open
        """Otherwise it was abandoned."""
        self._waiting: list[tuple[Callable[..., None], tuple[object, ...]]] = []

    def add(self, on_ended: Callable[..., None], args: tuple[object, ...]) -> None:
        self._waiting.append((on_ended, args))

    def report(self, error: RemoteError | None) -> None:
        waiting, self._waiting = self._waiting, []
        for on_ended, args in waiting:
            on_ended(error, *args)
