"""The common form of all pipeline reports: a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Protocol, TypeAlias

import msgspec

Cell: TypeAlias = str | int | float | datetime | None

_UNITS = ("KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under column names; numbers stay numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    is_facts: bool = False
    """Whether each row is a separate fact, a name and a value."""


class Report(Protocol):
    """The result of a pipeline: a frozen value that can be displayed."""

    def tables(self) -> Sequence[Table]:
        """Return the tables to show, the most important first."""


def facts(title: str, **pairs: Cell) -> Table:
    """Return a table of two columns, one row per fact."""
    rows = tuple((name.replace("_", " "), value) for name, value in pairs.items())
    return Table(title, ("what", "value"), rows, is_facts=True)


def table(title: str, columns: str, rows: Iterable[Any]) -> Table:
    """Return values of a report as a table, without their windows."""
    cells = [
        tuple(getattr(row, each.name) for each in fields(row) if each.name != "window_ms")
        for row in rows
    ]
    return Table(title, tuple(columns.split(", ")), tuple(cells))


def as_json(report: Report) -> str:
    """Return the whole report as one JSON object on one line."""
    return msgspec.json.encode(report).decode()


def bytes_text(count: int | None) -> str | None:
    """Return a number of bytes in a suitable unit."""
    if count is None:
        return None
    if count < 1024:
        return f"{count:,} B"
    power = min(len(_UNITS), (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:,.1f} {_UNITS[power - 1]}"


def per_second(count: int, seconds: float) -> float | None:
    """Return a rate; None if no time has passed."""
    return count / seconds if seconds > 0 else None


def timestamp(ms: int | None) -> datetime | None:
    """Return the timestamp for milliseconds since 1970."""
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
