"""The final table, and the violations."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from torture.scenario import Row


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the table of all rows, followed by each violated guarantee."""
    table = Table(title="What was tried, and what came of it")
    table.add_column("kind", no_wrap=True)
    table.add_column("what happened")
    for name in ("tried", "acknowledged", "lost", "duplicated", "dead of failing"):
        table.add_column(name, justify="right")
    table.add_column("also")
    table.add_column("result")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    for row in rows:
        for finding in row.broken:
            console.print(f"[red]✗[/red] {row.name}:", finding, soft_wrap=True, highlight=False)


def _cells(row: Row) -> list[str]:
    if row.skipped:
        return [row.name, f"[dim]{row.skipped}[/dim]", *[""] * 6, "[dim]skipped[/dim]"]
    lost = f"[red]{row.lost}[/red]" if row.lost else "0"
    return [
        row.name,
        row.did,
        f"{row.tried:,}",
        f"{row.acknowledged:,}",
        lost,
        f"{row.duplicated:,}",
        f"{row.dead} of {row.dead_expected}",
        ", ".join(row.notes),
        "[red]✗ broken[/red]" if row.broken else "[green]✓[/green]",
    ]
