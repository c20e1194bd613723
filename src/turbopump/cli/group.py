"""``turbopump group``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import (
    ClusterOption,
    GroupArgument,
    complete_group,
    complete_topic,
)
from turbopump.cli.command import Console, command
from turbopump.cli.formats import format_duration, format_number
from turbopump.cli.options import option
from turbopump.cli.output import Output, columns, progress_bar, row_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turbopump.admin import Difference, Progress

app = typer.Typer()

_SETTINGS = columns(
    "group retries_max=RETRIES:number retry_queues:number can_consume=CONSUMES"
    " can_broadcast=BROADCASTS broker_id=READS_FROM:number slow_broker_id=SLOW_FROM:number"
)


@command(app, "list")
def list_groups(
    console: Console,
    all_kinds: Annotated[bool, option("Include system groups.", "--all")] = False,
    cluster: ClusterOption = None,
) -> None:
    """List consumer groups."""
    from turbopump.broker.groups import is_internal_group

    found = console.admin.groups.list(cluster)
    rows = [
        {
            **row_of(each.settings),
            "members": each.members,
            "is_consistent": each.is_consistent,
            "brokers": list(each.brokers),
        }
        for each in found
        if all_kinds or not is_internal_group(each.settings.group)
    ]
    shown = (
        _SETTINGS[0],
        *columns("members:number is_consistent=CONSISTENT"),
        *_SETTINGS[1:3],
        *columns("brokers"),
    )
    console.rows(rows, shown, nothing="No groups; the first consumer of a group creates it.")


@command(app)
def create(
    console: Console,
    group: Annotated[str, typer.Argument(help="Name of the consumer group.")],
    retries: Annotated[int, typer.Option(help="How often a failed message is redelivered.")] = 16,
    retry_queues: Annotated[
        int, typer.Option(help="Queues for retries on each broker; 0 drops what fails.")
    ] = 1,
    cluster: ClusterOption = None,
) -> None:
    """Create a consumer group; needed if brokers do not create groups automatically."""
    from turbopump.admin import GroupSettings

    settings = GroupSettings(group, retries, retry_queues)
    brokers = console.admin.groups.create(settings, cluster)
    value = {**row_of(settings), "brokers": list(brokers)}
    console.done(value, f"Created group {group} on {', '.join(brokers)}.")


@command(app)
def update(
    console: Console,
    group: GroupArgument,
    retries: Annotated[int | None, option("How often a failed message is redelivered.")] = None,
    retry_queues: Annotated[
        int | None, option("Queues for retries on each broker; 0 drops what fails.")
    ] = None,
    consume: Annotated[
        bool | None, option("Whether the group gets messages.", "--consume/--no-consume")
    ] = None,
    broadcast: Annotated[
        bool | None,
        option("Whether its members may each get everything.", "--broadcast/--no-broadcast"),
    ] = None,
    broker_id: Annotated[
        int | None, option("Replica to read from, 0 for the master; needs slaveReadEnable.")
    ] = None,
    slow_broker_id: Annotated[
        int | None, option("Replica to read from while far behind; needs slaveReadEnable.")
    ] = None,
    cluster: ClusterOption = None,
) -> None:
    """Change the given settings of a consumer group."""
    changes = console.admin.groups.update(
        group,
        retries_max=retries,
        retry_queues=retry_queues,
        can_consume=consume,
        can_broadcast=broadcast,
        broker_id=broker_id,
        slow_broker_id=slow_broker_id,
        cluster=cluster,
    )
    before = [{"broker": each.broker, **row_of(each.before)} for each in changes]
    after = [{"broker": each.broker, **row_of(each.after)} for each in changes]
    value = {"before": before, "after": after}
    is_changed = before != after
    done = f"Changed group {group}." if is_changed else f"Group {group} is already like this."
    console.one(value, after, (*columns("broker"), *_SETTINGS), done)


@command(app, confirms=True)
def delete(
    console: Console,
    group: GroupArgument,
    dead_letters: Annotated[
        bool, option("Delete its dead letters, too.", "--dead-letters")
    ] = False,
    force: Annotated[bool, option("Even while it has members.", "--force")] = False,
    cluster: ClusterOption = None,
) -> None:
    """Delete a consumer group, its progress and its retry topic."""
    found = console.admin.groups.progress(group)
    if not force:
        console.admin.groups.require_stopped(group)
    what = f"group {group}, which {_behind(found)}"
    value: dict[str, Any] = {"group": group, "lag": found.lag, "dry_run": console.is_dry_run}
    if console.is_dry_run:
        console.done({**value, "topics": []}, f"Would delete {what}.")
        return
    console.confirm(f"Delete {what}?")
    topics = console.admin.groups.delete(
        group, cluster=cluster, with_dead_letters=dead_letters, force=force
    )
    also = f" with {', '.join(topics)}" if topics else ""
    console.done({**value, "topics": list(topics)}, f"Deleted group {group}{also}.")


@command(app, watches=True)
def progress(
    console: Console,
    group: Annotated[
        str | None,
        typer.Argument(
            help="Consumer group; without it, a line for each.", autocompletion=complete_group
        ),
    ] = None,
    topic: Annotated[
        str | None, option("Only in this topic.", autocompletion=complete_topic)
    ] = None,
    members: Annotated[bool, option("Show which member owns each queue.", "--members")] = False,
) -> None:
    """Show the lag of a group by queue, including its retry topic."""
    if group is None:
        _progress_of_all(console, topic)
        return
    found = console.admin.groups.progress(group, topic, with_owners=members)
    _print_progress(found, console, with_members=members)


def _print_progress(found: Progress, output: Output, *, with_members: bool) -> None:
    rows = [row_of(each, "lag") for each in found.queues]
    shown = columns(
        "topic broker queue_id=QUEUE:number committed:number max_offset=MAX:number lag:known"
        " delay_ms=DELAY:duration "
        + ("client_id=MEMBER" if with_members else "last_consumed_ms=LAST_CONSUMED:time")
    )
    value = {**_progress_row(found), "queues": rows}
    state = "running" if found.is_running else "stopped"
    output.one(value, rows, shown, f"{_summary(found)}; the group is {state}.")


def _summary(found: Progress) -> str:
    if not found.queues:
        return "Nothing is committed yet"
    if found.lag is None:
        return f"Lag unknown: the group {_behind(found)}"
    late = f", {format_duration(found.delay_ms)} late" if found.lag else ""
    return f"Lag {format_number(found.lag)}{late}"


def _behind(found: Progress) -> str:
    """Say how far a group is behind, as far as that is known."""
    if not found.queues:
        return "has no committed offsets"
    if found.lag is not None:
        return f"is {format_number(found.lag)} messages behind"
    return (
        f"is at least {format_number(found.known_lag)} messages behind, and has no committed offset"
        f" in {len(found.unknown_queues)} queues, where only members know where they start"
    )


def _progress_of_all(console: Console, topic: str | None) -> None:
    from turbopump.broker.groups import BOOT_GROUPS

    names = [each.settings.group for each in console.admin.groups.list()]
    rows = []
    with progress_bar("Asking", len(names)) as advance:
        for name in names:
            found = console.admin.groups.progress(name, topic)
            advance()
            if found.queues or name not in BOOT_GROUPS:
                rows.append(_progress_row(found))
    shown = columns(
        "group is_running=RUNNING lag:known delay_ms=DELAY:duration consumed_per_s=PER_S:number"
    )
    console.rows(rows, shown, nothing="No groups; the first consumer of a group creates it.")


def _progress_row(found: Progress) -> dict[str, Any]:
    return {
        "group": found.group,
        "is_running": found.is_running,
        "lag": found.lag,
        "known_lag": found.known_lag,
        "delay_ms": found.delay_ms,
        "consumed_per_s": found.consumed_per_s,
        "failed_per_s": found.failed_per_s,
    }


@command(app, watches=True)
def members(console: Console, group: GroupArgument) -> None:
    """Show the members of a group, their addresses and their queues."""
    found = console.admin.groups.members(group)
    rows = [
        {
            **row_of(each.connection),
            "queues": None if each.queues is None else [str(queue) for queue in each.queues],
        }
        for each in found.members
    ]
    value = {
        "group": group,
        "consume_type": found.consume_type,
        "message_model": found.message_model,
        "consume_from": found.consume_from,
        "subscriptions": dict(found.subscriptions),
        "differences": [row_of(each) for each in found.differences],
        "members": rows,
    }
    wants = ", ".join(f"{topic} ({tags})" for topic, tags in found.subscriptions.items())
    model = (found.message_model or "").lower()
    summary = f"{len(rows)} members, {model}, of {wants}." if rows else "The group has no members."
    lines = [summary, *_difference_lines(found.differences)]
    console.one(value, rows, (*_CONNECTION, *columns("queues")), "\n".join(lines))


def _difference_lines(differences: Sequence[Difference]) -> list[str]:
    if not differences:
        return []
    lines = ["Members have different subscriptions, so messages are skipped:"]
    for each in differences:
        wanted = "not subscribed" if each.kind is None else f"{each.kind} {each.expression}"
        lines.append(f"  {each.topic}: {wanted} by {', '.join(each.client_ids)}")
    return lines


@command(app, watches=True)
def inspect(
    console: Console,
    group: GroupArgument,
    client_id: Annotated[
        str | None, typer.Argument(help="Which member; needed when there are several.")
    ] = None,
    stacks: Annotated[
        bool, option("Include the stack of each of its threads.", "--stacks")
    ] = False,
) -> None:
    """Show the state of a member: cached messages per queue, rates and settings."""
    found = console.admin.groups.inspect(group, client_id, with_stacks=stacks)
    rows = [row_of(each) for each in found.queues]
    shown = columns(
        "topic broker queue_id=QUEUE:number committed:number held:number is_locked=LOCKED"
        " last_pulled_ms=LAST_PULLED:time"
    )
    value = {
        "client_id": found.client_id,
        "queues": rows,
        "consumed_per_s": dict(found.consumed_per_s),
        "failed_per_s": dict(found.failed_per_s),
        "settings": dict(found.settings),
        "stacks": found.stacks,
    }
    lines = [f"{found.client_id} holds {sum(each.held for each in found.queues)} messages."]
    lines += [
        f"{topic}: {rate:.1f} consumed a second, {found.failed_per_s[topic]:.1f} failed"
        for topic, rate in found.consumed_per_s.items()
    ]
    lines += [f"{key}={text}" for key, text in sorted(found.settings.items())]
    console.one(value, rows, shown, "\n".join([*lines, found.stacks or ""]).strip())


@command(app)
def producers(
    console: Console, group: Annotated[str, typer.Argument(help="Name of the producer group.")]
) -> None:
    """Show the members of a producer group."""
    rows = [row_of(each) for each in console.admin.groups.producers(group)]
    nothing = f"No producer of group {group} is connected."
    console.rows(rows, _CONNECTION, nothing=nothing)


_CONNECTION = columns("client_id=CLIENT address language version")
