"""``turbopump store``: the files of a broker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from turbopump.cli.administration import DryRunOption, JsonOption, YesOption, confirm, reported
from turbopump.cli.formats import format_number
from turbopump.cli.output import Output, columns, progress_bar
from turbopump.errors import InvalidArgument

if TYPE_CHECKING:
    from turbopump.store.losses import Losses

app = typer.Typer()

StoreArgument: TypeAlias = Annotated[
    Path, typer.Argument(metavar="DIR", help="The store's directory, which has commitlog in it.")
]

_LOST_TOPICS = columns("topic messages=LOST_MESSAGES:number")
_DAMAGE = columns("path=FILE position=AT_BYTE:number reason=DAMAGE")


@app.command()
def repair(
    directory: StoreArgument,
    segment_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="mappedFileSizeCommitLog of the broker, for a log without files.",
            show_default="size of the files, or 1 GiB",
        ),
    ] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Repair a store that has lost files of its commit log, so that it starts again.

    Shows which messages are lost and asks before it changes anything. Everything else is kept.
    """
    from turbopump.clock import SYSTEM_CLOCK
    from turbopump.machine.files import Files
    from turbopump.store.repair import stopped_store

    output = Output(as_json=json)
    with reported(), stopped_store(directory, Files(), SYSTEM_CLOCK) as store:
        losses = store.losses(segment_bytes)
        if losses is None:
            output.done({**_value(directory, None), "dry_run": dry_run}, "Nothing to repair.")
            return
        value = {**_value(directory, losses), "dry_run": dry_run}
        if not json:
            typer.echo(f"{losses.reason}.")
        rows = [{"topic": name, "messages": lost} for name, lost in losses.topics.items()]
        loss = f"about {format_number(losses.messages)} messages" if rows else "messages"
        if dry_run:
            output.one(value, rows, _LOST_TOPICS, f"Would abandon {loss}.")
            return
        if not json:
            output.one(value, rows, _LOST_TOPICS, f"Lost: {loss}.")
        confirm(f"Abandon {loss} of {directory}?", is_sure=yes, as_json=json)
        backup = store.repair(losses)
    value["backup"] = str(backup)
    output.done(value, f"Repaired {directory}; backed up the changed files in {backup}.")


def _value(directory: Path, losses: Losses | None) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "reason": losses.reason if losses is not None else None,
        "messages": losses.messages if losses is not None else 0,
        "topics": losses.topics if losses is not None else {},
        "backup": None,
    }


@app.command()
def backup(
    directory: StoreArgument,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The new directory of the backup.")
    ],
    json: JsonOption = False,
) -> None:
    """Copy a store while its broker runs, or of a stopped one.

    The copy is consistent: it has every message that was acknowledged before.

    A broker starts from it as after a crash. Space that files do not use takes none in the copy.
    """
    from turbopump.store.backup import back_up
    from turbopump.store.inspect import log_file_count

    with reported(), progress_bar("copying", log_file_count(directory)) as step:
        made = back_up(directory, target, step)
    value = {
        "directory": str(directory),
        "backup": str(target),
        "log_start": made.log_start,
        "log_end": made.log_end,
    }
    Output(as_json=json).done(
        value,
        f"Backed up {directory} in {target}: {format_number(made.log_end - made.log_start)} bytes"
        " of messages.",
    )


@app.command()
def verify(directory: StoreArgument, json: JsonOption = False) -> None:
    """Check all files of a store for damage; nothing is changed.

    Compares bodies with their checksums, queues and key index with the log.

    Stores of Apache RocketMQ can be checked as well. Exits with 1 if anything is damaged.
    """
    from turbopump.store.inspect import damage_row, inspect, log_file_count

    with reported(), progress_bar("checking", log_file_count(directory)) as step:
        if not (directory / "commitlog").is_dir():
            raise InvalidArgument(
                f"{directory} must be a store directory, but has no commitlog in it"
            )
        found = inspect(directory, step)
    rows = [damage_row(each, directory) for each in found.damage]
    state = "running or crashed" if found.crashed else "stopped"
    value = {
        "directory": str(directory),
        "state": state,
        "messages": found.messages,
        "queues": len(found.queues),
        "index_files": len(found.index),
        "damage": rows,
    }
    summary = (
        f"{format_number(found.messages)} messages, {len(found.queues)} queues and"
        f" {len(found.index)} index files checked: "
        + (f"{len(rows)} damaged places." if rows else "no damage.")
    )
    Output(as_json=json).one(value, rows, _DAMAGE, summary)
    if rows:
        raise typer.Exit(1)
