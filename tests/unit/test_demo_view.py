"""What the demo shows while it runs and afterwards."""

from __future__ import annotations

import io

from rich.console import Console

from demo.board import LIVE, Board, Sample
from demo.report import Check, plot, show_summary
from demo.view import shown, spinner

GREEN_BAR = "\x1b[32m━"


def terminal() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system="standard", width=100)
    return console, output


def last_frame(board: Board, total: int) -> str:
    console, output = terminal()
    with shown(console, board, total) as show:
        show(True)
    return output.getvalue()


def test_bars_end_green_when_every_order_is_accounted_for() -> None:
    board = Board()
    for name in LIVE:
        board.add(name, 10)
    assert last_frame(board, 10).count(GREEN_BAR) >= len(LIVE)


def test_bars_of_missing_orders_are_not_green() -> None:
    board = Board()
    for name in LIVE:
        board.add(name, 9)
    assert GREEN_BAR not in last_frame(board, 10)


def test_a_spinner_names_what_takes_long_and_how_long_it_took() -> None:
    console, output = terminal()
    with spinner(console, "spark", "starting"):
        pass
    assert "starting …" in output.getvalue()
    plain = io.StringIO()
    with spinner(Console(file=plain), "spark", "starting"):
        pass
    assert plain.getvalue().strip().startswith("spark  starting: 0.")


def test_both_panels_of_the_plot_have_the_same_names_and_colors() -> None:
    lags = dict.fromkeys(LIVE[1:], 3)
    samples = [Sample(float(n), dict.fromkeys(LIVE, n * 10), lags) for n in range(4)]
    figure = plot(samples, 40)
    assert figure.get_suptitle() == "Turbopump demo: 40 orders, two consumer groups and Spark"
    rates, behind = (
        {line.get_label(): line.get_color() for line in axes.get_lines()} for axes in figure.axes
    )
    assert set(rates) == set(LIVE)
    assert set(behind) == set(LIVE[1:])
    assert behind.items() <= rates.items()
    assert [axes.get_title() for axes in figure.axes] == ["Throughput", "Consumer lag"]


def test_the_legend_of_the_plot_covers_no_data() -> None:
    samples = [Sample(float(n), dict.fromkeys(LIVE, n * 10), {}) for n in range(4)]
    figure = plot(samples, 40)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(LIVE)
    box = legend.get_window_extent()
    assert not [axes for axes in figure.axes if axes.get_legend() or box.overlaps(axes.bbox)]


def test_a_check_that_fails_fails_the_summary() -> None:
    console, output = terminal()
    assert show_summary(console, [Check("rows", 5, 5)])
    assert not show_summary(console, [Check("rows", 5, 5), Check("cents", 4, 5)])
    assert "✗" in output.getvalue()
