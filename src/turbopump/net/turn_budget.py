"""Fairness: how much is done for one peer before others get their turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LARGE_CHUNK_BYTES = 64 * 1024
_LARGE_CHUNKS_MAX = 4
WRITTEN_BYTES_MAX = 4 * 1024 * 1024
"""Takes a few milliseconds; in comparison, a change of turns is free."""


class TurnBudget:
    """Counts what a peer sends in one turn of the loop, and what is written to it.

    While a peer sends faster than it is served, uvloop keeps reading. While it reads answers as
    fast as they are produced, a single chunk of short requests may yield hundreds of megabytes of
    them. Everything else would wait: other peers, answers to this one, timers. ``on_change`` is
    called when the turn is over, and when the next one begins.
    """

    __slots__ = ("_chunks", "_is_next_due", "_loop", "_on_change", "_written_bytes")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_change: Callable[[], None]) -> None:
        self._loop = loop
        self._on_change = on_change
        self._chunks = 0
        # Not reset in each turn: that would cost more than an occasional early end.
        self._written_bytes = 0
        self._is_next_due = False

    @property
    def is_over(self) -> bool:
        """Whether other peers are next."""
        return self._chunks >= _LARGE_CHUNKS_MAX or self._written_bytes >= WRITTEN_BYTES_MAX

    def note_large(self) -> None:
        """Count a chunk of `LARGE_CHUNK_BYTES` or more."""
        self._await_next()
        self._chunks += 1
        if self._chunks == _LARGE_CHUNKS_MAX:
            self._on_change()

    def note_written(self, size: int) -> None:
        """Count bytes passed to the transport."""
        before = self._written_bytes
        self._written_bytes += size
        if before < WRITTEN_BYTES_MAX <= self._written_bytes:
            self._await_next()
            self._on_change()

    def _await_next(self) -> None:
        if not self._is_next_due:
            self._is_next_due = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._is_next_due = False
        self._chunks = self._written_bytes = 0
        self._on_change()
