"""Plots of reports; drawn without pyplot's process-wide state."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from turbopump.errors import MissingPackage
from turbopump.spark.pipelines.reports import moment

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


class Windowed(Protocol):
    """A value of a report that belongs to a window."""

    @property
    def window_ms(self) -> int | None: ...


W = TypeVar("W", bound=Windowed)


def save_lag_plot(report: LagReport, path: str | os.PathLike[str]) -> None:
    """Plot how far groups were behind, and how fast they consumed, to a PNG file."""
    title = "Lag of consumer groups"
    picture = Picture(title, report.by_window, lambda each: f"{each.group} · {each.topic}")
    picture.panel("lag: messages not consumed, maximum per window", lambda each: each.lag_max)
    picture.panel("messages consumed per window", lambda each: each.consumed)
    picture.save(path)


def save_trace_plot(report: TraceReport, path: str | os.PathLike[str]) -> None:
    """Plot latencies and failures to a PNG file."""
    picture = Picture(
        "Latency and failures of consumer groups",
        report.consumptions_by_window,
        lambda each: f"{each.group} · {each.topic or '?'} · {each.tag or '-'}",
    )
    picture.panel("from send to consumption, p50, ms", lambda each: each.latency_p50_ms)
    picture.panel("from send to consumption, p99, ms", lambda each: each.latency_p99_ms)
    picture.panel("failed listener calls", lambda each: each.failed)
    picture.save(path)


class Picture(Generic[W]):
    """Panels below each other; a line has the same colour in all of them."""

    def __init__(self, title: str, found: Sequence[W], name: Callable[[W], str]) -> None:
        self._title = title
        self._found = found
        self._name = name
        windows = Counter(map(name, found))
        self._windows_per_point = -(-max(windows.values(), default=0) // _POINTS_MAX)
        self._panels: list[tuple[str, Callable[[W], float | None]]] = []

    def panel(self, title: str, value: Callable[[W], float | None]) -> None:
        self._panels.append((title, value))

    def save(self, path: str | os.PathLike[str]) -> None:
        self.figure().savefig(path, format="png", dpi=110)

    def figure(self) -> Figure:
        figure = _figure(len(self._panels))
        figure.suptitle(self._title)
        names = self._names()
        for row, (title, value) in enumerate(self._panels):
            axes = figure.add_subplot(len(self._panels), 1, row + 1)
            axes.set_title(title + self._shared_points(), fontsize="medium")
            self._draw(axes, names, value)
        handles = figure.axes[0].get_legend_handles_labels()
        if names:
            figure.legend(*handles, loc="outside lower center", ncols=2, fontsize="small")
        return figure

    def _shared_points(self) -> str:
        count = self._windows_per_point
        return f" (points show the highest of {count} windows)" if count > 1 else ""

    def _names(self) -> list[str]:
        """Return the names of the lines to draw."""
        heights: dict[str, float] = {}
        for each in self._found:
            name, height = self._name(each), self._panels[0][1](each) or 0
            heights[name] = max(height, heights.get(name, 0))
        highest = sorted(heights, key=lambda name: -heights[name])
        return sorted(highest[:_LINES_MAX])

    def _draw(self, axes: Axes, names: Sequence[str], value: Callable[[W], float | None]) -> None:
        from matplotlib.ticker import MaxNLocator

        lines = {name: self._points(name, value) for name in names}
        style = {"marker": "o", "markersize": 3} if self._windows_per_point <= 1 else {}
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

    def _points(
        self, name: str, value: Callable[[W], float | None]
    ) -> list[tuple[datetime, float]]:
        """Return the points of a line, each the highest of several successive windows."""
        points: list[tuple[datetime, float]] = []
        for each in self._found:
            start, height = moment(each.window_ms), value(each)
            if self._name(each) == name and start is not None and height is not None:
                points.append((start, height))
        step = max(1, self._windows_per_point)
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
