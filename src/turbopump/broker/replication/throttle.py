"""A limit on bytes per second, shared by all senders."""

from __future__ import annotations

from turbopump.clock import Clock

_BURST_MS = 100
"""Unused rate is carried over for up to this time."""


class Throttle:
    """Lets bytes through at a rate, in small bursts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._allowed_bytes = 0.0
        self._counted_ms = clock.monotonic_ms()

    def wait_ms(self, bytes_per_s: int) -> int:
        """Return how long to wait before more may be sent; 0 for no wait, as without a limit."""
        if not bytes_per_s:
            self._allowed_bytes = 0
            return 0
        now_ms = self._clock.monotonic_ms()
        per_ms = bytes_per_s / 1000
        gained = (now_ms - self._counted_ms) * per_ms
        self._counted_ms = now_ms
        self._allowed_bytes = min(self._allowed_bytes + gained, _BURST_MS * per_ms)
        if self._allowed_bytes > 0:
            return 0
        return max(1, -int(self._allowed_bytes // per_ms))

    def note_sent(self, size: int) -> None:
        self._allowed_bytes -= size
