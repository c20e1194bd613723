"""The end of the demo: what was seen beside what must be, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from demo.board import LIVE, Sample


@dataclass(frozen=True, slots=True)
class Fact:
    """A number of the summary, and what it must be."""

    name: str
    seen: int
    expected: int

    @property
    def holds(self) -> bool:
        return self.seen == self.expected


def show_summary(console: Console, facts: Sequence[Fact]) -> bool:
    """Print what was seen beside what must be; return whether all of it holds."""
    table = Table(title="What happened")
    table.add_column("")
    table.add_column("seen", justify="right")
    table.add_column("expected", justify="right")
    table.add_column("")
    for fact in facts:
        mark = "[green]✓[/]" if fact.holds else "[red]✗[/]"
        table.add_row(fact.name, f"{fact.seen:,}", f"{fact.expected:,}", mark)
    console.print(table)
    return all(fact.holds for fact in facts)


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draw how fast messages were sent and handled, and how far each group was behind."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    rates, lags = figure.subplots(2, 1, sharex=True)
    seconds = [sample.seconds - samples[0].seconds for sample in samples]
    for name in LIVE:
        counts = [sample.counts.get(name, 0) for sample in samples]
        rates.plot(seconds[1:], _rates(seconds, counts), label=name)
    for group in sorted({group for sample in samples for group in sample.lags}):
        lags.plot(seconds, [sample.lags.get(group, 0) for sample in samples], label=group)
    rates.set_ylabel("orders a second")
    lags.set_ylabel("messages behind")
    lags.set_xlabel("seconds")
    for axes in (rates, lags):
        axes.legend(loc="best")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)


def _rates(seconds: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return what came between each sample and the one a second before it, per second."""
    rates = []
    for last in range(1, len(counts)):
        first = max((n for n in range(last) if seconds[last] - seconds[n] >= 1), default=0)
        rates.append((counts[last] - counts[first]) / (seconds[last] - seconds[first]))
    return rates
