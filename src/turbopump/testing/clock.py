"""A clock that stands still until it is moved."""

from __future__ import annotations

from turbopump.durations import Duration, as_milliseconds

START_EPOCH_MS = 1_700_000_000_000
"""The wall-clock time when virtual time begins: always the same, so runs can be compared."""

_NS_PER_MS = 1_000_000


class VirtualClock:
    """Time that only moves when its event loop, or a test, moves it."""

    def __init__(self, start_epoch_ms: int = START_EPOCH_MS) -> None:
        self._monotonic_ns = 0
        # Read much more often than time passes, so computed in advance.
        self._monotonic_ms = 0
        self.elapsed_s = 0.0
        """What `monotonic_s` returns; for the event loop, which reads it at every step."""
        self._wall_offset_ms = start_epoch_ms

    def now_ms(self) -> int:
        """Return the wall-clock time, in milliseconds since the Unix epoch."""
        return self._wall_offset_ms + self._monotonic_ms

    def monotonic_ms(self) -> int:
        """Return milliseconds since virtual time began."""
        return self._monotonic_ms

    def uptime_ms(self) -> int:
        """Return the same: virtual machines of this kind are never suspended."""
        return self._monotonic_ms

    def advance_ns(self, by_ns: int) -> None:
        """Advance time; timers fire only when the event loop runs again."""
        assert by_ns >= 0, "time does not run backwards"
        self._monotonic_ns += by_ns
        self._monotonic_ms = self._monotonic_ns // _NS_PER_MS
        self.elapsed_s = self._monotonic_ns / 1e9

    def jump_wall(self, by: Duration) -> None:
        """Set the wall clock forward or, with a negative duration, back, as people and NTP do."""
        self._wall_offset_ms += round(as_milliseconds(by))
