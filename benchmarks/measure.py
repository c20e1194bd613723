"""What the benchmarks share: timing a function in rounds, tables and plots."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

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


def panels(rows: int, columns: int, inches: tuple[float, float], **grid: Any) -> tuple[Any, Any]:
    """Return a figure of Matplotlib for a file, and its panels in rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(
        rows, columns, figsize=inches, squeeze=False, layout="constrained", gridspec_kw=grid
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, all columns but the first aligned to the right."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    lines.insert(1, "|---|" + "---:|" * (len(columns) - 1))
    return "\n".join(lines)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(table(columns, rows))
