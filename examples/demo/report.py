"""The end of the demo: actual beside expected numbers, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from demo.board import LIVE, Sample

COLORS = dict(zip(LIVE, ("tab:gray", "tab:blue", "tab:orange", "tab:green"), strict=True))


@dataclass(frozen=True, slots=True)
class Check:
    """A number of the summary, and what it must be."""

    name: str
    actual: int
    expected: int

    @property
    def passed(self) -> bool:
        return self.actual == self.expected


def show_summary(console: Console, checks: Sequence[Check]) -> bool:
    """Print actual beside expected numbers; return whether all of them match."""
    table = Table(title="Summary")
    table.add_column("")
    table.add_column("actual", justify="right")
    table.add_column("expected", justify="right")
    table.add_column("")
    for check in checks:
        mark = "[green]✓[/]" if check.passed else "[red]✗[/]"
        table.add_row(check.name, f"{check.actual:,}", f"{check.expected:,}", mark)
    console.print(table)
    return all(check.passed for check in checks)


def plot(samples: Sequence[Sample], total: int) -> Figure:
    """Plot throughput and lag over time, with the same name and color for a group in both."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    figure.suptitle(f"Turbopump demo: {total:,} orders, two consumer groups and Spark")
    rates, lags = figure.subplots(2, 1, sharex=True)
    seconds = [sample.seconds - samples[0].seconds for sample in samples]
    for name in LIVE:
        counts = [sample.counts.get(name, 0) for sample in samples]
        rates.plot(seconds[1:], _rates(seconds, counts), label=name, color=COLORS[name])
        if any(name in sample.lags for sample in samples):
            behind = [sample.lags.get(name, 0) for sample in samples]
            lags.plot(seconds, behind, label=name, color=COLORS[name])
    rates.set(title="Throughput", ylabel="orders per second")
    lags.set(title="Consumer lag", ylabel="messages", xlabel="seconds")
    figure.legend(loc="outside right upper", handles=rates.get_lines())  # covers no data
    for axes in (rates, lags):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    return figure


def save_plot(samples: Sequence[Sample], total: int, path: Path) -> None:
    plot(samples, total).savefig(path, dpi=120)


def _rates(seconds: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return the rate at each sample, averaged over the second before it."""
    rates = []
    for last in range(1, len(counts)):
        first = max((n for n in range(last) if seconds[last] - seconds[n] >= 1), default=0)
        rates.append((counts[last] - counts[first]) / (seconds[last] - seconds[first]))
    return rates
