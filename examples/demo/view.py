"""How the demo shows its progress: bars and spinners on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from demo.board import LIVE, Board

_SAMPLE_S = 0.25
_LINE_EVERY = 8

Lags = Callable[[], Mapping[str, int]]
"""Returns the lag of each group."""


@contextmanager
def spinner(console: Console, subject: str, text: str) -> Iterator[None]:
    """Show that something takes a while, and afterwards how long it took."""
    started = time.perf_counter()
    label = f"[bold cyan]{subject:>9}[/]  {text}"
    with console.status(f"{label} …"):
        yield
    console.print(f"{label}: {time.perf_counter() - started:.1f} s")


@contextmanager
def watching(console: Console, board: Board, total: int, lags: Lags) -> Iterator[None]:
    """Sample the board and show it, from a separate thread, until the block ends."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: _watch(console, board, total, lags, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(console: Console, board: Board, total: int, lags: Lags, stop: threading.Event) -> None:
    with shown(console, board, total) as show:
        is_last = False
        while not is_last:
            is_last = stop.wait(_SAMPLE_S)
            board.sample(lags())
            show(is_last)


Show = Callable[[bool], None]


def shown(console: Console, board: Board, total: int) -> AbstractContextManager[Show]:
    """Return a function that shows the board as it is; pass True the last time."""
    return (_bars if console.is_terminal else _lines)(console, board, total)


@contextmanager
def _bars(console: Console, board: Board, total: int) -> Iterator[Show]:
    columns = (
        TextColumn("{task.description:>9}", style="bold cyan"),
        BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=8) as progress:
        tasks = {name: progress.add_task(name, total=total, note="") for name in LIVE}

        def show(_: bool) -> None:
            for name, task in tasks.items():
                progress.update(task, completed=board[name], note=_note(name, board))

        yield show


@contextmanager
def _lines(console: Console, board: Board, total: int) -> Iterator[Show]:
    def show(is_last: bool) -> None:
        if is_last or len(board.samples) % _LINE_EVERY == 0:
            counts = " · ".join(f"{name} {board[name]:,}" for name in LIVE)
            note = _note("billing", board)
            console.print(f"{board.seconds:5.1f} s  {counts} · of {total:,}{note}", soft_wrap=True)

    yield show


def _note(name: str, board: Board) -> str:
    if name != "billing":
        return ""
    counted = ("retries", "dead letters", "redriven")
    return "".join(f" · {board[each]:,} {each}" for each in counted if board[each])
