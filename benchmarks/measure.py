"""What the benchmarks share: timing a function in rounds, and tables in Markdown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

ROUNDS = 5


def per_second(action: Callable[[], int], seconds: float = 0.4) -> float:
    """Return how many things an action does a second: the best of several rounds.

    The action returns how many it did in one call. The best round is the one that other work on the
    machine disturbed least.
    """
    best = 0.0
    for _ in range(ROUNDS):
        done = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds / ROUNDS:
            done += action()
        best = max(best, done / elapsed)
    return best


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, all columns but the first aligned to the right."""
    print("| " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * (len(columns) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |")
