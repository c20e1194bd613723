"""Plots of reports: readable with one window and with thousands."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.dates import num2date
from matplotlib.figure import Figure

from turbopump.spark.pipelines.plots import Picture, Row

NOON_MS = 1_794_830_400_000


def drawn(windows: int, height: float = 0, groups: int = 1) -> Figure:
    rows = [
        (NOON_MS + 10_000 * number, f"g{group}", [height + number % 5])
        for number in range(windows)
        for group in range(groups)
    ]
    figure = Picture("Lag", ["messages"], rows).figure()
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("height", [0, 0.2, 1, 7, 12_345])
def test_one_window_has_an_axis_of_a_minute_and_whole_numbers(height: float) -> None:
    figure = drawn(1, height)
    (axes,) = figure.axes
    first, last = map(num2date, axes.get_xlim())
    assert (last - first).total_seconds() == pytest.approx(60)
    assert axes.get_xlabel() == "time (UTC)"
    ticks = axes.get_yticks()
    assert len(ticks) > 1
    assert all(tick == int(tick) for tick in ticks)
    assert axes.get_ylim()[1] >= height
    assert (figure.get_suptitle(), axes.get_title()) == ("Lag", "messages")


def test_thousands_of_windows_share_points_that_show_the_highest() -> None:
    (axes,) = drawn(5000, groups=3).axes
    assert axes.get_title() == "messages (points show the highest of 17 windows)"
    for line in axes.get_lines():
        heights = np.asarray(line.get_ydata())
        assert 250 < len(heights) <= 300
        assert set(heights[:-1]) == {4}


def test_no_window_is_drawn_as_such() -> None:
    (axes,) = drawn(0).axes
    assert [text.get_text() for text in axes.texts] == ["no data"]


def test_a_line_without_points_leaves_room_for_the_others() -> None:
    rows: list[Row] = [(NOON_MS, "g0", [3, 3]), (NOON_MS, "g1", [None, None])]
    picture = Picture("Lag", ["p50", "p99"], rows)
    # Warnings are errors here: without room the layout is abandoned with one.
    picture.figure().draw_without_rendering()
