"""What the reports of all pipelines have in common: a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeAlias

import msgspec

Cell: TypeAlias = str | int | float | datetime | None

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under names of columns; numbers are numbers, not text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Report(Protocol):
    """What a pipeline returns: a frozen value that can be shown."""

    def tables(self) -> Sequence[Table]:
        """Return what a person wants to see, the most important first."""


def facts(title: str, **pairs: Cell) -> Table:
    """Return a table of two columns, one row for each fact."""
    rows = tuple((name.replace("_", " "), value) for name, value in pairs.items())
    return Table(title, ("what", "value"), rows)


def as_json(report: Report) -> str:
    """Return everything that a report says, as one JSON object in one line."""
    return msgspec.json.encode(report).decode()


def cell_text(cell: Cell) -> str:
    """Return a cell as people read it."""
    match cell:
        case None:
            return _NOTHING
        case datetime():
            return f"{cell:%Y-%m-%d %H:%M:%S}"
        case float():
            return f"{cell:,.1f}"
        case int():
            return f"{cell:,}"
    return cell


def bytes_text(count: int | None) -> str | None:
    """Return a number of bytes in a unit that suits it."""
    if count is None:
        return None
    if count < 1024:
        return f"{count:,} B"
    power = min(len(_UNITS), (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:,.1f} {_UNITS[power - 1]}"


def per_second(count: int, seconds: float) -> float | None:
    """Return a rate; None when no time has passed to measure it by."""
    return count / seconds if seconds > 0 else None
