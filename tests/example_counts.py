"""How many examples Hypothesis generates where a test sets the number itself."""

from __future__ import annotations

from hypothesis import settings


def at_most(count: int) -> int:
    """Return a number of examples for a full run, or fewer for a quick one."""
    return min(count, settings().max_examples)
