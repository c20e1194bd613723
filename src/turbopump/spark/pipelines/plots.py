"""Plots of reports; drawn without pyplot's process-wide state."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias

from turbopump.errors import MissingPackage
from turbopump.spark.pipelines.reports import timestamp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from turbopump.spark.pipelines.group_lag import LagReport
    from turbopump.spark.pipelines.trace_analysis import TraceReport

_LINES_MAX = 10
"""The number of colours; lines with the highest values in the first panel are drawn."""

_POINTS_MAX = 300
"""Per line; more would be indistinguishable, so several windows share a point."""

_MARGIN_MIN = timedelta(seconds=30)
"""At both ends of the time axis, so that a single window does not get an axis of years."""

Row: TypeAlias = tuple[int | None, str, Sequence[float | None]]
"""The start of a window in ms, the name of its line, and its value in each panel."""


def save_lag_plot(report: LagReport, path: str | os.PathLike[str]) -> None:
    """Plot how far groups were behind, and how fast they consumed, to a PNG file."""
    panels = "lag: messages not consumed, maximum per window", "messages consumed per window"
    rows = [
        (each.window_ms, f"{each.group} · {each.topic}", (each.lag_max, each.consumed))
        for each in report.by_window
    ]
    Picture("Lag of consumer groups", panels, rows).save(path)


def save_trace_plot(report: TraceReport, path: str | os.PathLike[str]) -> None:
    """Plot latencies and failures to a PNG file."""
    panels = (
        "from send to consumption, p50, ms",
        "from send to consumption, p99, ms",
        "failed listener calls",
    )
    rows = [
        (
            each.window_ms,
            f"{each.group} · {each.topic or '?'} · {each.tag or '-'}",
            (each.latency_p50_ms, each.latency_p99_ms, each.failed),
        )
        for each in report.consumptions_by_window
    ]
    Picture("Latency and failures of consumer groups", panels, rows).save(path)


class Picture:
    """Panels below each other; a line has the same colour in all of them."""

    def __init__(self, title: str, panels: Sequence[str], rows: Sequence[Row]) -> None:
        self._title = title
        self._panels = panels
        self._rows = rows
        windows = Counter(name for _, name, _ in rows)
        self._windows_per_point = max(1, -(-max(windows.values(), default=0) // _POINTS_MAX))

    def save(self, path: str | os.PathLike[str]) -> None:
        self.figure().savefig(path, format="png", dpi=110)

    def figure(self) -> Figure:
        figure = _figure(len(self._panels))
        figure.suptitle(self._title)
        names, shared = self._names(), self._windows_per_point
        note = f" (points show the highest of {shared} windows)" if shared > 1 else ""
        for panel, title in enumerate(self._panels):
            axes = figure.add_subplot(len(self._panels), 1, panel + 1)
            axes.set_title(title + note, fontsize="medium")
            self._draw(axes, names, panel)
        handles = figure.axes[0].get_legend_handles_labels()
        if names:
            figure.legend(*handles, loc="outside lower center", ncols=2, fontsize="small")
        return figure

    def _names(self) -> list[str]:
        heights: dict[str, float] = {}
        for _, name, values in self._rows:
            heights[name] = max(values[0] or 0, heights.get(name, 0))
        return sorted(heapq.nlargest(_LINES_MAX, heights, key=heights.__getitem__))

    def _draw(self, axes: Axes, names: Sequence[str], panel: int) -> None:
        from matplotlib.ticker import MaxNLocator

        lines = {name: self._points(name, panel) for name in names}
        style = {"marker": "o", "markersize": 3} if self._windows_per_point == 1 else {}
        for number, (name, points) in enumerate(lines.items()):
            times, heights = [time for time, _ in points], [height for _, height in points]
            (line,) = axes.plot(times, heights, f"C{number}-", label=name, linewidth=1, **style)  # type: ignore[arg-type]
            # A point at zero would be hidden behind the axis.
            line.set_clip_on(False)
            # A line without points has no finite extent, and would leave no room for the axes.
            line.set_in_layout(False)
        drawn = [point for points in lines.values() for point in points]
        if drawn:
            _time_axis(axes, [time for time, _ in drawn])
        else:
            axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes)
            axes.set_xticks([])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_ylim(0, 1.05 * max([1.0, *(height for _, height in drawn)]))
        axes.grid(visible=True, alpha=0.3)

    def _points(self, name: str, panel: int) -> list[tuple[datetime, float]]:
        """Return the points of a line, each the highest of several successive windows."""
        points = [
            (start, height)
            for window_ms, line, values in self._rows
            if line == name
            and (start := timestamp(window_ms)) is not None
            and (height := values[panel]) is not None
        ]
        step = self._windows_per_point
        shared = (points[at : at + step] for at in range(0, len(points), step))
        return [max(each, key=lambda point: point[1]) for each in shared]


def _time_axis(axes: Axes, times: Sequence[datetime]) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator()  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    first, last = min(times), max(times)
    margin = max((last - first) / 20, _MARGIN_MIN)
    axes.set_xlim(first - margin, last + margin)  # type: ignore[arg-type]
    axes.set_xlabel("time (UTC)", fontsize="small")


def _figure(rows: int) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise MissingPackage.of_extra("spark", "plots need matplotlib") from missing
    figure = Figure(figsize=(10, 2.8 * rows + 1), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
