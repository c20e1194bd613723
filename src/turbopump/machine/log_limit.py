"""Logging that says the same thing at most once a minute."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable

from turbopump.clock import Clock

LOGGED_AGAIN_MS = 60_000
KEYS_MAX = 10_000
"""How many keys are remembered; further ones are not logged until the oldest is a minute old."""


class LogLimit:
    """Limits how often something is logged, by a key that says what it is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # What was logged within a minute, the oldest first.
        self._logged_ms: OrderedDict[Hashable, int] = OrderedDict()

    def log(self, key: Hashable, log: logging.Logger, level: int, text: str, *args: object) -> None:
        """Log at a level, or as DEBUG if something of the same key was logged within a minute."""
        log.log(level if self.is_due(key) else logging.DEBUG, text, *args)

    def is_due(self, key: Hashable) -> bool:
        """Whether to log something of this key now; if so, not again for a minute."""
        now_ms, logged = self._clock.monotonic_ms(), self._logged_ms
        while logged and now_ms - next(iter(logged.values())) >= LOGGED_AGAIN_MS:
            logged.popitem(last=False)
        if key in logged or len(logged) >= KEYS_MAX:
            return False
        logged[key] = now_ms
        return True
