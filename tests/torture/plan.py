"""The kinds of disruption, and each one's share of the time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from torture import clock, damage, disruptions, exits, full_disk, hostile
from torture.processes import Processes
from torture.scenario import Row, Scenario, Trouble


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table."""

    name: str
    trouble: Trouble
    weight: float
    """Its share of the time for disruptions, relative to the others."""
    overhead_s: float = 14.0
    """The additional time it takes to start, drain and stop."""

    @property
    def names(self) -> tuple[str, str]:
        """The names that ``--only`` accepts: the full name, or its first word."""
        return self.name.replace(" ", "-"), self.name.partition(" ")[0]


KINDS = (
    Kind("kill sync", disruptions.kill_sync, 1.0),
    Kind("kill async", disruptions.kill_async, 1.0),
    Kind("restart sync", disruptions.restart_sync, 0.7),
    Kind("restart async", disruptions.restart_async, 0.7),
    Kind("stop", disruptions.stopped, 0.4),
    # A dead member's lock lasts a minute.
    Kind("consumer-kill", disruptions.consumer_killed, 0.6, overhead_s=90.0),
    Kind("nameserver", disruptions.nameserver_killed, 0.4),
    Kind("damage", damage.damaged, 1.2, overhead_s=5.0),
    Kind("hostile", hostile.attacked, 0.8),
    Kind("full-disk", full_disk.full_disk, 0.6),
    Kind("clock", clock.jumping, 0.6),
    Kind("exit-without-close", exits.exit_without_close, 0.2, overhead_s=5.0),
)


def chosen_kinds(only: str) -> list[Kind]:
    """Return the kinds to run; ``kill`` selects all kinds with that first word.

    Raises ValueError for a kind that does not exist.
    """
    names = [name.strip().replace(" ", "-") for name in only.split(",") if name.strip()]
    found = {name: [kind for kind in KINDS if name in kind.names] for name in names}
    unknown = [name for name, kinds in found.items() if not kinds]
    if unknown:
        known = ", ".join(kind.names[0] for kind in KINDS)
        raise ValueError(f"unknown kinds: {', '.join(unknown)}; expected {known}")
    return [kind for kinds in found.values() for kind in kinds] or list(KINDS)


def run_all(
    console: Console, kinds: Sequence[Kind], directory: Path, seed: int, seconds: float
) -> Iterator[Row]:
    """Run all kinds in turn; one that crashes is reported as a row too."""
    for_trouble_s = seconds - sum(kind.overhead_s for kind in kinds)
    weights = sum(kind.weight for kind in kinds)
    for place, kind in enumerate(kinds):
        folder = directory / f"{place:02d}-{kind.names[0]}"
        folder.mkdir(parents=True)
        budget_s = max(1.0, for_trouble_s * kind.weight / weights)
        # One seed each, independent of which other kinds run and what they draw.
        yield _run(console, kind, folder, random.Random(f"{seed} {kind.name}"), budget_s)


def _run(console: Console, kind: Kind, folder: Path, chance: random.Random, seconds: float) -> Row:
    begin = time.monotonic()
    # No refresh thread: processes are forked from here.
    with (
        Live(kind.name, console=console, auto_refresh=False, transient=True) as live,
        Processes(folder) as processes,
    ):

        def say(text: str) -> None:
            live.update(f"{kind.name}: {text}", refresh=True)

        scenario = Scenario(kind.name, folder, chance, seconds, processes, say)
        try:
            row = kind.trouble(scenario)
        except Exception as error:  # noqa: BLE001 - the other kinds still have to run
            console.print_exception()
            row = Row(kind.name, broken=[f"{type(error).__name__}: {error}"])
    row.seconds = time.monotonic() - begin
    result = f"[red]{len(row.broken)} promises broken[/red]" if row.broken else "[green]✓[/green]"
    console.print(f"{kind.name}: {row.skipped or row.did}, {row.seconds:.0f} s", result)
    return row
