"""Which kinds of trouble there are, and how much of the time each gets."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from torture import clock, damage, disruptions, exits, full_disk, hostile
from torture.processes import Processes
from torture.scenario import Kind, Row, Scenario

KINDS: Mapping[str, tuple[tuple[str, Kind, float], ...]] = {
    "kill": (
        ("kill, SYNC_FLUSH", disruptions.kill_sync, 1.0),
        ("kill, ASYNC_FLUSH", disruptions.kill_async, 1.0),
    ),
    "restart": (
        ("restart, SYNC_FLUSH", disruptions.restart_sync, 0.7),
        ("restart, ASYNC_FLUSH", disruptions.restart_async, 0.7),
    ),
    "stop": (("stop", disruptions.stopped, 0.5),),
    "consumer-kill": (("consumer-kill", disruptions.consumer_killed, 0.5),),
    "damage": (("damage", damage.damaged, 1.0),),
    "hostile": (("hostile", hostile.attacked, 0.8),),
    "full-disk": (("full-disk", full_disk.full_disk, 0.5),),
    "clock": (("clock", clock.jumping, 1.0),),
    "exit-without-close": (("exit-without-close", exits.exit_without_close, 0.2),),
}
"""By the name for ``--only``: rows of the table, what makes them, and their weight."""

_OVERHEAD_S = 12.0
"""Of a scenario beside its time for trouble: starting, draining, stopping."""


def chosen_kinds(only: str) -> list[tuple[str, Kind, float]]:
    """Return what to run; raises ValueError for a kind that does not exist."""
    names = [name.strip() for name in only.split(",") if name.strip()] or list(KINDS)
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise ValueError(f"unknown kinds: {', '.join(unknown)}; expected {', '.join(KINDS)}")
    return [each for name in names for each in KINDS[name]]


def run_all(
    console: Console,
    kinds: Sequence[tuple[str, Kind, float]],
    directory: Path,
    chance: random.Random,
    seconds: float,
) -> list[Row]:
    """Run all, one after another; one that fails in itself is a row too."""
    rows = []
    for place, (name, kind, weight) in enumerate(kinds):
        share = weight / sum(each for _, _, each in kinds)
        budget_s = max(1.0, (seconds - _OVERHEAD_S * len(kinds)) * share)
        folder = directory / f"{place:02d}-{name.replace(', ', '-').lower()}"
        folder.mkdir(parents=True)
        # One seed for each: what another kind draws, and what the time allows, must not matter.
        own = random.Random(f"{chance.random()}{name}")
        rows.append(_run(console, name, kind, folder, own, budget_s))
    return rows


def _run(
    console: Console, name: str, kind: Kind, folder: Path, chance: random.Random, seconds: float
) -> Row:
    begin = time.monotonic()
    # No thread that refreshes: processes are forked from here.
    with (
        Live(name, console=console, auto_refresh=False, transient=True) as live,
        Processes(folder) as processes,
    ):

        def say(text: str) -> None:
            live.update(f"{name}: {text}", refresh=True)

        scenario = Scenario(name, folder, chance, seconds, processes, say)
        try:
            row = kind(scenario)
        except Exception as error:  # noqa: BLE001 - the other kinds still have something to tell
            console.print_exception()
            row = Row(name, broken=[f"{type(error).__name__}: {error}"])
    row.seconds = time.monotonic() - begin
    result = f"[red]{len(row.broken)} promises broken[/red]" if row.broken else "[green]✓[/green]"
    console.print(f"{name}: {row.skipped or row.did}, {row.seconds:.0f} s", result)
    return row
