"""How far the clocks of brokers are trusted: the store records wall-clock times."""

from __future__ import annotations

CLOCK_MARGIN_MS = 3_600_000
"""The total by which a clock may have been set back.

Messages stored more than this before or after a time are certain to lie on that side of it; nearer
ones must be checked one by one.
"""
