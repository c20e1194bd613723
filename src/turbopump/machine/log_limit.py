"""Logging that says the same thing at most once a minute."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from turbopump.clock import Clock

LOGGED_AGAIN_MS = 60_000
KEYS_MAX = 10_000
"""How many things are told apart; further ones are not logged until a minute is over."""


class LogLimit:
    """Limits how often something is logged, by a key that says what it is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_ms: dict[Hashable, int] = {}

    def log(self, key: Hashable, log: logging.Logger, level: int, text: str, *args: object) -> None:
        """Log at a level, or as DEBUG if something of the same key was logged within a minute."""
        log.log(level if self.is_due(key) else logging.DEBUG, text, *args)

    def is_due(self, key: Hashable) -> bool:
        """Whether to log something of this key now; if so, not again for a minute."""
        now_ms = self._clock.monotonic_ms()
        logged_ms = self._logged_ms.get(key)
        if logged_ms is not None and now_ms - logged_ms < LOGGED_AGAIN_MS:
            return False
        if len(self._logged_ms) >= KEYS_MAX:
            old_ms = now_ms - LOGGED_AGAIN_MS
            self._logged_ms = {each: ms for each, ms in self._logged_ms.items() if ms > old_ms}
            if len(self._logged_ms) >= KEYS_MAX:
                return False
        self._logged_ms[key] = now_ms
        return True
