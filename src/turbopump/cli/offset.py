"""``turbopump offset``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import GroupArgument, TopicArgument, complete_topic, local_now
from turbopump.cli.command import Console, command
from turbopump.cli.formats import format_number, parse_queues, parse_time
from turbopump.cli.options import option
from turbopump.cli.output import columns, row_of
from turbopump.errors import InvalidArgument

if TYPE_CHECKING:
    from turbopump.admin import Plan, QueueChange
    from turbopump.admin.positions import Position

app = typer.Typer()

_COLUMNS = columns(
    "topic broker queue_id=QUEUE:number current:number target=NEW:number repeats:number"
    " skips:number"
)


@command(app, confirms=True)
def reset(
    console: Console,
    group: GroupArgument,
    topic: TopicArgument,
    to_time: Annotated[
        str | None,
        option("To what was stored since: 2026-03-01T12:00, 15m ago, epoch in ms.", metavar="TIME"),
    ] = None,
    to_offset: Annotated[int | None, option("To this offset.")] = None,
    to_earliest: Annotated[bool, option("To the oldest message.", "--to-earliest")] = False,
    to_latest: Annotated[bool, option("To the end: skip everything.", "--to-latest")] = False,
    queue: Annotated[
        list[str] | None, option("Only this queue; can be repeated.", metavar="[BROKER:]ID")
    ] = None,
) -> None:
    """Reset a group's offsets in a topic, whether it runs or not.

    First shows the new offset of each queue, and how many messages are repeated or skipped.
    """
    to = _position(to_time, to_offset, is_earliest=to_earliest, is_latest=to_latest)
    known = [each.queue for each in console.admin.topics.status(topic).queues] if queue else []
    plan = console.admin.offsets.plan(group, topic, to, parse_queues(queue or (), known))
    _carry_out(console, plan)


@command(app, confirms=True)
def skip(console: Console, group: GroupArgument, topic: TopicArgument) -> None:
    """Skip all messages that a group has not consumed yet."""
    from turbopump.admin import Latest

    plan = console.admin.offsets.plan(group, topic, Latest())
    _carry_out(console, plan)


@command(app, confirms=True)
def clone(
    console: Console,
    source: Annotated[str, typer.Argument(help="The group to copy offsets from.")],
    destination: Annotated[str, typer.Argument(help="The group to copy offsets to.")],
    topic: Annotated[
        str | None, option("Only in this topic.", autocompletion=complete_topic)
    ] = None,
    create: Annotated[
        bool, option("Create the destination if it does not exist.", "--create")
    ] = False,
) -> None:
    """Copy the offsets of a group to another, stopped one."""
    console.admin.groups.require(source)
    if not create:
        console.admin.groups.require(destination)
    console.admin.groups.require_stopped(destination)
    changes = console.admin.offsets.plan_clone(source, destination, topic)
    rows = _rows(changes)
    value = {
        "source": source,
        "destination": destination,
        "dry_run": console.is_dry_run,
        "queues": rows,
    }
    if not changes:
        raise InvalidArgument(f"group {source!r} has no committed offsets to copy")
    if console.is_dry_run:
        console.one(value, rows, _COLUMNS, f"Would set these offsets of group {destination}.")
        return
    if not console.is_sure and not console.as_json:
        console.one(value, rows, _COLUMNS, "")
    console.confirm(f"Copy the offsets of {source} to {destination} in {len(rows)} queues?")
    console.admin.offsets.clone(source, destination, topic, create=create)
    console.one(
        value,
        rows if console.is_sure else [],
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


def _carry_out(console: Console, plan: Plan) -> None:
    rows = _rows(plan.changes)
    value = {
        "group": plan.group,
        "topic": plan.topic,
        "is_running": plan.is_running,
        "repeats": plan.repeats,
        "skips": plan.skips,
        "dry_run": console.is_dry_run,
        "queues": rows,
    }
    effect = f"{format_number(plan.repeats)} repeated, {format_number(plan.skips)} skipped"
    state = "running" if plan.is_running else "stopped"
    if console.is_dry_run:
        console.one(value, rows, _COLUMNS, f"Would be {effect}; the group is {state}.")
        return
    is_shown = not console.is_sure and not console.as_json
    if is_shown:
        console.one(value, rows, _COLUMNS, f"{effect}; the group is {state}.")
    console.confirm(f"Reset group {plan.group} in {plan.topic}?")
    console.admin.offsets.apply(plan)
    note = " Its members resume there within seconds." if plan.is_running else ""
    console.one(value, [] if is_shown else rows, _COLUMNS, f"Reset: {effect}.{note}")


def _rows(changes: Sequence[QueueChange]) -> list[dict[str, Any]]:
    return [row_of(each, "repeats", "skips") for each in changes]
