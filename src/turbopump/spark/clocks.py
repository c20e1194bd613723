"""How far the clocks of brokers are trusted: the store writes what the wall shows."""

from __future__ import annotations

CLOCK_MARGIN_MS = 3_600_000
"""A clock may have been set back so far, altogether.

Messages stored more than this before or behind a time are known to lie on one side of it; whatever
is nearer has to be looked at, message by message.
"""
