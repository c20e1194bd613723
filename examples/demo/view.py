"""How the demo shows its progress: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from demo.board import LIVE, Board

_SAMPLE_S = 0.25
_LINE_EVERY = 8

Lags = Callable[[], Mapping[str, int]]
"""How many messages each group has not consumed yet."""


@contextmanager
def watching(console: Console, board: Board, total: int, lags: Lags) -> Iterator[None]:
    """Sample the board and show it, from a thread of its own, as long as it is used."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: _watch(console, board, total, lags, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(console: Console, board: Board, total: int, lags: Lags, stop: threading.Event) -> None:
    with _shown(console, board, total) as show:
        is_last = False
        while not is_last:
            is_last = stop.wait(_SAMPLE_S)
            board.sample(lags())
            show(is_last)


Show = Callable[[bool], None]


def _shown(console: Console, board: Board, total: int) -> AbstractContextManager[Show]:
    return (_bars if console.is_terminal else _lines)(console, board, total)


@contextmanager
def _bars(console: Console, board: Board, total: int) -> Iterator[Show]:
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=None),
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
            line = f"{board.seconds:5.1f} s  {counts} · of {total:,}{_retries(board)}"
            console.print(line, soft_wrap=True)

    yield show


def _note(name: str, board: Board) -> str:
    return _retries(board) if name == "billed" else ""


def _retries(board: Board) -> str:
    return f" · {board['retries']:,} retries" if board["retries"] else ""
