"""Limit for what all connections of a server have received and not served."""

from __future__ import annotations

from typing import Protocol


class Holder(Protocol):
    """A connection that has received something and not served it yet."""

    def fail(self, reason: str) -> None:
        """Close the connection."""
        ...


class ReceiveBudget:
    """Limits what all connections of a server have received and not served.

    When it is exceeded, the connection is closed whose unfinished frame began first: an honest peer
    finishes its frame soon, one that hoards memory does not. Closing cannot end in a deadlock, as
    pausing all of them could.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        # In the order in which the unfinished frame of each began.
        self._held: dict[Holder, int] = {}
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        """What all connections together have received and not served."""
        return self._bytes

    def note(self, holder: Holder, held_bytes: int, *, has_begun_another: bool) -> None:
        """Update what a connection holds, and whether it finished a frame since the last call."""
        self._bytes += held_bytes - self._held.get(holder, 0)
        if has_begun_another or not held_bytes:
            self._held.pop(holder, None)
        if held_bytes:
            self._held[holder] = held_bytes
        while self._bytes > self._bytes_max:
            oldest = next(iter(self._held))
            reason = f"{self._bytes} bytes received and not served on all connections"
            oldest.fail(f"{reason}, at most {self._bytes_max} allowed")
            # Closing updates it already; this ends the loop even if it did not.
            self._bytes -= self._held.pop(oldest, 0)
