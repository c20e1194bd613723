"""How many examples Hypothesis generates where a test sets the number itself."""

from __future__ import annotations

from hypothesis import settings


def at_most(count: int) -> int:
    """Return a number of examples for a full run, or fewer for a quick one."""
    return min(count, settings().max_examples)


def in_long_runs(count: int) -> int:
    """Return a number of examples for a run of the long tests, or a fifth of it for others."""
    return count if settings.get_current_profile_name() == "long" else count // 5
