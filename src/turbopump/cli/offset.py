"""``turbopump offset``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import (
    NAMESERVER,
    DryRunOption,
    GroupArgument,
    JsonOption,
    NameServerOption,
    TopicArgument,
    YesOption,
    administration,
    complete_topic,
    confirm,
    local_now,
)
from turbopump.cli.formats import format_number, parse_queues, parse_time
from turbopump.cli.output import Column, Output
from turbopump.errors import InvalidArgument

if TYPE_CHECKING:
    from turbopump.admin import Plan, QueueChange
    from turbopump.admin.blocking import Admin
    from turbopump.admin.positions import Position

app = typer.Typer()

_COLUMNS = (
    Column("topic", "TOPIC"),
    Column("broker", "BROKER"),
    Column("queue_id", "QUEUE", "number"),
    Column("current", "CURRENT", "number"),
    Column("target", "NEW", "number"),
    Column("repeats", "REPEATS", "number"),
    Column("skips", "SKIPS", "number"),
)


@app.command()
def reset(
    group: GroupArgument,
    topic: TopicArgument,
    to_time: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="To what was stored since: 2026-03-01T12:00, 15m ago, epoch in ms.",
            show_default=False,
        ),
    ] = None,
    to_offset: Annotated[
        int | None, typer.Option(help="To this offset.", show_default=False)
    ] = None,
    to_earliest: Annotated[
        bool, typer.Option("--to-earliest", help="To the oldest message.")
    ] = False,
    to_latest: Annotated[
        bool, typer.Option("--to-latest", help="To the end: skip everything.")
    ] = False,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[BROKER:]ID", help="Only this queue; can be repeated.", show_default=False
        ),
    ] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Reset a group's offsets in a topic, whether it runs or not.

    First shows the new offset of each queue, and how many messages are repeated or skipped.
    """
    with administration(nameserver) as admin:
        to = _position(to_time, to_offset, is_earliest=to_earliest, is_latest=to_latest)
        known = [each.queue for each in admin.topics.status(topic).queues] if queue else []
        plan = admin.offsets.plan(group, topic, to, parse_queues(queue or (), known))
        _carry_out(admin, plan, Output(as_json=json), dry_run=dry_run, yes=yes)


@app.command()
def skip(
    group: GroupArgument,
    topic: TopicArgument,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Skip all messages that a group has not consumed yet."""
    from turbopump.admin import Latest

    with administration(nameserver) as admin:
        plan = admin.offsets.plan(group, topic, Latest())
        _carry_out(admin, plan, Output(as_json=json), dry_run=dry_run, yes=yes)


@app.command()
def clone(
    source: Annotated[str, typer.Argument(help="The group to copy offsets from.")],
    destination: Annotated[str, typer.Argument(help="The group to copy offsets to.")],
    topic: Annotated[
        str | None,
        typer.Option(help="Only in this topic.", autocompletion=complete_topic, show_default=False),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the destination if it does not exist.")
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Copy the offsets of a group to another, stopped one."""
    with administration(nameserver) as admin:
        output = Output(as_json=json)
        admin.groups.require(source)
        if not create:
            admin.groups.require(destination)
        admin.groups.require_stopped(destination)
        changes = admin.offsets.plan_clone(source, destination, topic)
        rows = _rows(changes)
        value = {"source": source, "destination": destination, "dry_run": dry_run, "queues": rows}
        if not changes:
            raise InvalidArgument(f"group {source!r} has no committed offsets to copy")
        if dry_run:
            output.one(value, rows, _COLUMNS, f"Would set these offsets of group {destination}.")
            return
        if not yes and not json:
            output.one(value, rows, _COLUMNS, "")
        confirm(
            f"Copy the offsets of {source} to {destination} in {len(rows)} queues?",
            is_sure=yes,
            as_json=json,
        )
        admin.offsets.clone(source, destination, topic, create=create)
        output.one(
            value,
            rows if yes else [],
            _COLUMNS,
            f"Copied the offsets of {source} to {destination}.",
        )


def _position(
    to_time: str | None, to_offset: int | None, *, is_earliest: bool, is_latest: bool
) -> Position:
    from turbopump.admin import AtOffset, AtTime, Earliest, Latest

    given: list[Position] = []
    if to_time is not None:
        given.append(AtTime(parse_time(to_time, local_now())))
    if to_offset is not None:
        given.append(AtOffset(to_offset))
    if is_earliest:
        given.append(Earliest())
    if is_latest:
        given.append(Latest())
    if len(given) != 1:
        raise InvalidArgument(
            "specify exactly one of --to-time, --to-offset, --to-earliest and --to-latest"
        )
    return given[0]


def _carry_out(admin: Admin, plan: Plan, output: Output, *, dry_run: bool, yes: bool) -> None:
    rows = _rows(plan.changes)
    value = {
        "group": plan.group,
        "topic": plan.topic,
        "is_running": plan.is_running,
        "repeats": plan.repeats,
        "skips": plan.skips,
        "dry_run": dry_run,
        "queues": rows,
    }
    effect = f"{format_number(plan.repeats)} repeated, {format_number(plan.skips)} skipped"
    state = "running" if plan.is_running else "stopped"
    if dry_run:
        output.one(value, rows, _COLUMNS, f"Would be {effect}; the group is {state}.")
        return
    is_shown = not yes and not output.as_json
    if is_shown:
        output.one(value, rows, _COLUMNS, f"{effect}; the group is {state}.")
    confirm(f"Reset group {plan.group} in {plan.topic}?", is_sure=yes, as_json=output.as_json)
    admin.offsets.apply(plan)
    note = " Its members resume there within seconds." if plan.is_running else ""
    output.one(value, [] if is_shown else rows, _COLUMNS, f"Reset: {effect}.{note}")


def _rows(changes: Sequence[QueueChange]) -> list[dict[str, Any]]:
    return [
        {
            "topic": each.queue.topic,
            "broker": each.queue.broker,
            "queue_id": each.queue.queue_id,
            "current": each.current,
            "target": each.target,
            "repeats": each.repeats,
            "skips": each.skips,
        }
        for each in changes
    ]
