"""How much one peer may have read in one turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LARGE_CHUNK_BYTES = 64 * 1024
_LARGE_CHUNKS_MAX = 4


class Turn:
    """Counts the large chunks of one turn of the loop.

    While a peer sends faster than it is served, uvloop reads on and on, and everybody else waits:
    other peers, answers to this one, timers. ``on_change`` is called when so much has come that it
    is others' turn, and when it is not any more.
    """

    __slots__ = ("_chunks", "_on_change")

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._chunks = 0

    @property
    def is_over(self) -> bool:
        """Whether it is others' turn."""
        return self._chunks >= _LARGE_CHUNKS_MAX

    def note_large(self) -> None:
        """Count a chunk of `LARGE_CHUNK_BYTES` or more."""
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self._begin)
        self._chunks += 1
        if self._chunks == _LARGE_CHUNKS_MAX:
            self._on_change()

    def _begin(self) -> None:
        self._chunks = 0
        self._on_change()
