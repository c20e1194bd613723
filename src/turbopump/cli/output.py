"""What commands print: tables for people, JSON for programs, and progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TextIO

import typer

from turbopump.cli.formats import (
    format_duration,
    format_known,
    format_number,
    format_percent,
    format_time,
    format_value,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = Mapping[str, Any]

_WRITERS: dict[str, Callable[[Any], str]] = {
    "text": format_value,
    "number": format_number,
    "known": format_known,
    "time": format_time,
    "duration": format_duration,
    "part": format_percent,
    "id": format_value,
}
_RIGHT = frozenset({"number", "known", "duration", "part"})
_FOLDED = frozenset({"text", "id"})
_ID_WIDTH_MIN = 16
"""Half of a message id."""
_TEXT_WIDTH_MIN = 8
"""Narrower columns of text are unreadable."""
_GAPS = 2
"""Blanks between columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: the key of its values, its title, and what they are."""

    key: str
    title: str
    kind: str = "text"

    def text(self, row: Row) -> str:
        return _WRITERS[self.kind](row.get(self.key))

    @property
    def is_right(self) -> bool:
        return self.kind in _RIGHT


def columns(words: str, case: Callable[[str], str] = str.upper) -> tuple[Column, ...]:
    """Declare columns, separated by blanks: ``key``, ``key=TITLE``, ``key:kind``, or all three.

    Without a title, it is the key in capitals, or in another case; underscores become blanks.

    ::

        columns("topic queue_id=QUEUE:number last_stored_ms=LAST_STORED:time")
    """
    found = []
    for word in words.split():
        names, _, kind = word.partition(":")
        key, _, title = names.partition("=")
        found.append(Column(key, (title or case(key)).replace("_", " "), kind or "text"))
    return tuple(found)


def row_of(value: DataclassInstance, *computed: str) -> dict[str, Any]:
    """Return the fields of a value, including those of a queue or node in it, and properties."""
    from turbopump.message import MessageQueue

    row: dict[str, Any] = {}
    for name in (*(field.name for field in fields(value)), *computed):
        found = getattr(value, name)
        if isinstance(found, MessageQueue):
            row |= {"topic": found.topic, "broker": found.broker, "queue_id": found.queue_id}
        else:
            is_node = is_dataclass(found) and not isinstance(found, type)
            row |= row_of(found) if is_node else {name: found}
    return row


class Output:
    """Prints the results of one command, in one of two forms."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def rows(self, rows: Iterable[Row], columns: Sequence[Column], *, nothing: str) -> None:
        """Print rows: a table, or one JSON object a line; ``nothing`` says that there are none."""
        if self.as_json:
            for row in rows:
                self.line(row)
            return
        every = list(rows)
        self._begin()
        if every:
            _print_table(every, columns)
        else:
            typer.echo(nothing)

    def one(self, value: Row, rows: Sequence[Row], columns: Sequence[Column], summary: str) -> None:
        """Print one thing that has rows: a table and a line below, or one JSON object."""
        if self.as_json:
            self.line(value)
            return
        self._begin()
        if rows:
            _print_table(rows, columns)
        typer.echo(summary)

    def fields(self, value: Row, columns: Sequence[Column]) -> None:
        """Print one thing, a line for each of its values, or one JSON object."""
        if self.as_json:
            self.line(value)
            return
        self._begin()
        _print_fields(value, columns)

    def done(self, value: Row, text: str) -> None:
        """Say what was done."""
        typer.echo(json_line(value) if self.as_json else text)

    def line(self, value: Row) -> None:
        typer.echo(json_line(value))

    def _begin(self) -> None:
        """Called before text is printed."""


def json_line(value: Row) -> str:
    """Write a JSON object; in ASCII unless the output is UTF-8."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    return json.dumps(value, ensure_ascii=not encoding.startswith("utf"))


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def _print_table(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    if is_terminal(sys.stdout):
        _print_rich_table(rows, columns)
    else:
        for line in plain_table(rows, columns):
            typer.echo(line)


def plain_table(rows: Sequence[Row], columns: Sequence[Column]) -> Iterator[str]:
    """Yield the lines of a table for files and pipes, without cutting or wrapping."""
    cells = [[column.title for column in columns]]
    cells += [[column.text(row) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(
            text.rjust(width) if column.is_right else text.ljust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()


def width_needed(rows: Sequence[Row], columns: Sequence[Column]) -> int:
    """Return how narrow a table can be without losing any of it."""
    return sum(_width_min(rows, column) for column in columns) + _GAPS * (len(columns) - 1)


def widths(rows: Sequence[Row], columns: Sequence[Column], width_max: int) -> list[int]:
    """Return the widths of a table's columns, of which only text and ids may be folded.

    Without enough room, the widest columns shrink, down to what `width_needed` counts on.
    """
    from rich.cells import cell_len

    # Chinese characters, for example, take two columns of the terminal.
    longest = (max(len(c.title), *(cell_len(c.text(row)) for row in rows)) for c in columns)
    # No longer than the table: bodies may have millions of characters.
    found = [min(width, width_max) for width in longest]
    least = [_width_min(rows, column) for column in columns]
    excess = sum(found) + _GAPS * (len(columns) - 1) - width_max
    for _ in range(excess):
        widest = max(range(len(found)), key=lambda at: (found[at] > least[at], found[at]))
        found[widest] -= found[widest] > least[widest]
    return found


def _width_min(rows: Sequence[Row], column: Column) -> int:
    longest = max(len(column.text(row)) for row in rows)
    if column.kind == "id":
        longest = min(longest, _ID_WIDTH_MIN)
    elif column.kind in _FOLDED:
        longest = min(longest, _TEXT_WIDTH_MIN)
    return max(len(column.title), longest)


def _print_fields(value: Row, columns: Sequence[Column]) -> None:
    width = max(len(column.title) for column in columns)
    for column in columns:
        typer.echo(f"{column.title:<{width}}  {column.text(value)}")


def _print_rich_table(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if width_needed(rows, columns) > console.width:
        # Too narrow for a table: print one line for each value.
        for place, row in enumerate(rows):
            if place:
                typer.echo()
            _print_fields(row, columns)
        return
    table = Table(box=None, pad_edge=False, padding=(0, _GAPS, 0, 0), header_style="bold")
    # Rich would crop folded cells: it makes room by other rules than its own folding.
    for column, width in zip(columns, widths(rows, columns, console.width), strict=True):
        table.add_column(
            column.title,
            justify="right" if column.is_right else "left",
            # Do not wrap numbers and times; names and ids may take several lines.
            no_wrap=column.kind not in _FOLDED,
            overflow="fold",
            width=width,
        )
    for row in rows:
        table.add_row(*(Text(column.text(row)) for column in columns))
    console.print(table)


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show progress on a terminal; call the function at each step."""
    if not is_terminal(sys.stderr):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
