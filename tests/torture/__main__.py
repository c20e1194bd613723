"""``scripts/torture``: see ``--help``."""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from rich.console import Console

from torture.mounts import make_private
from torture.plan import KINDS, chosen_kinds, run_all
from torture.report import show
from torture.scenario import Row


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/torture",
        description="Run real processes through trouble and count what becomes of their messages.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, about")
    parser.add_argument("--seed", type=int, help="repeat the decisions of another run")
    names = ", ".join(kind.names[0] for kind in KINDS)
    parser.add_argument("--only", metavar="KINDS", default="", help=f"comma-separated: {names}")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--dir", type=Path, help="where to put stores, logs and journals")
    return parser.parse_args(given)


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupted)
    options = arguments()
    make_private()
    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else 160)
    try:
        kinds = chosen_kinds(options.only)
    except ValueError as error:
        console.print(str(error))
        return 2
    seed = secrets.randbits(32) if options.seed is None else options.seed
    directory = options.dir or Path(tempfile.mkdtemp(prefix="torture-"))
    console.print(f"seed {seed}, {options.minutes:g} minutes, in {directory}")
    rows: list[Row] = []
    try:
        rows.extend(run_all(console, kinds, directory, seed, options.minutes * 60))
    finally:
        # Even if the run is interrupted.
        show(console, rows)
    if options.json:
        json.dump({"seed": seed, "rows": [asdict(row) for row in rows]}, sys.stdout, indent=1)
    if any(row.broken for row in rows):
        console.print(f"[red]Broken promises.[/red] seed {seed}; logs and journals: {directory}")
        return 1
    console.print(f"[green]All promises held.[/green] seed {seed}")
    if options.dir is None:
        shutil.rmtree(directory)
    return 0


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
