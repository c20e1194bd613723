"""Pictures of reports; drawn without the state that pyplot keeps for a whole process."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, TypeVar

from turbopump.errors import MissingPackage
from turbopump.spark.pipelines.reports import moment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from turbopump.spark.pipelines.lags import LagReport
    from turbopump.spark.pipelines.traces import TraceReport

_LINES_MAX = 12
"""More lines than this cannot be told apart; those with the highest values are drawn."""


class Windowed(Protocol):
    """A figure of a report that belongs to a window."""

    @property
    def window_ms(self) -> int | None: ...


W = TypeVar("W", bound=Windowed)


def save_lag_plot(report: LagReport, path: str | os.PathLike[str]) -> None:
    """Draw how far groups were behind, and how fast they went, into a PNG file."""
    figure, (above, below) = _figure(2)
    name = lambda each: f"{each.group} · {each.topic}"  # noqa: E731 - short and used twice
    _lines(above, report.by_window, name, lambda each: each.lag_max)
    above.set_title("lag: messages not consumed yet, most in each window")
    _lines(below, report.by_window, name, lambda each: each.consumed)
    below.set_title("messages consumed in each window")
    _save(figure, path)


def save_trace_plot(report: TraceReport, path: str | os.PathLike[str]) -> None:
    """Draw latencies and failures into a PNG file."""
    figure, (above, middle, below) = _figure(3)
    name = lambda each: f"{each.group} · {each.topic or '?'} · {each.tag or '-'}"  # noqa: E731
    found = report.consumptions_by_window
    _lines(above, found, name, lambda each: each.latency_p50_ms)
    above.set_title("from send to consumption, p50, ms")
    _lines(middle, found, name, lambda each: each.latency_p99_ms)
    middle.set_title("from send to consumption, p99, ms")
    _lines(below, found, name, lambda each: each.failed)
    below.set_title("failed calls of listeners")
    _save(figure, path)


def _figure(rows: int) -> tuple[Figure, Sequence[Axes]]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise MissingPackage("plots need matplotlib: pip install turbopump[spark]") from missing
    figure = Figure(figsize=(10, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]


def _lines(
    axes: Axes,
    found: Iterable[W],
    name: Callable[[W], str],
    value: Callable[[W], float | None],
) -> None:
    lines: dict[Hashable, list[tuple[datetime, float]]] = {}
    for each in found:
        start, height = moment(each.window_ms), value(each)
        if start is not None and height is not None:
            lines.setdefault(name(each), []).append((start, height))
    highest = sorted(lines, key=lambda line: -max(height for _, height in lines[line]))
    for line in highest[:_LINES_MAX]:
        points = sorted(lines[line])
        times, heights = [time for time, _ in points], [height for _, height in points]
        axes.plot(times, heights, marker="o", markersize=3, label=str(line))  # type: ignore[arg-type]
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    if lines:
        axes.legend(fontsize="small", loc="upper left")
    else:
        axes.text(0.5, 0.5, "nothing to show", ha="center", transform=axes.transAxes)


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    figure.savefig(path, format="png", dpi=110)
