"""Shared by the benchmarks: timing a function in rounds, tables, plots and documentation."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROUNDS = 5
ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "benchmarks/README.md", "docs/performance.md")
_BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)


def per_second(action: Callable[[], int], seconds: float = 0.4) -> float:
    """Return the rate of an action per second: the best of several rounds.

    The action returns how many items it processed. The best round is the one that other work on the
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
    """Return a Matplotlib figure to be saved, and its panels in rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(
        rows, columns, figsize=inches, squeeze=False, layout="constrained", gridspec_kw=grid
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with all columns except the first right-aligned."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, *rows)]
    lines.insert(1, "|---|" + "---:|" * (len(columns) - 1))
    return "\n".join(lines)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(table(columns, rows))


def update_docs(texts: Mapping[str, str], root: Path = ROOT) -> list[Path]:
    """Replace named blocks in the documentation; return the changed files.

    A block is between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``.
    """

    def replaced(block: re.Match[str]) -> str:
        text = texts.get(block[2])
        return block[0] if text is None else f"{block[1]}\n{text}\n\n{block[3]}"

    changed = []
    for path in (root / name for name in DOCUMENTS):
        before = path.read_text(encoding="utf-8")
        after = _BLOCK.sub(replaced, before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"updated {path.relative_to(root)}", file=sys.stderr)
            changed.append(path)
    return changed
