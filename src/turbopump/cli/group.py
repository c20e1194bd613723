"""``turbopump group``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import (
    NAMESERVER,
    ClusterOption,
    DryRunOption,
    GroupArgument,
    JsonOption,
    NameServerOption,
    YesOption,
    administration,
    complete_group,
    complete_topic,
    confirm,
)
from turbopump.cli.formats import format_duration, format_number
from turbopump.cli.output import Column, Output, progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turbopump.admin import Connection, Difference, GroupSettings, HeldQueue, Progress
    from turbopump.admin.blocking import Admin

app = typer.Typer()

_SETTINGS = (
    Column("group", "GROUP"),
    Column("retries_max", "RETRIES", "number"),
    Column("retry_queues", "RETRY QUEUES", "number"),
    Column("can_consume", "CONSUMES"),
    Column("can_broadcast", "BROADCASTS"),
    Column("broker_id", "READS FROM", "number"),
    Column("slow_broker_id", "SLOW FROM", "number"),
)


@app.command("list")
def list_groups(
    all_kinds: Annotated[bool, typer.Option("--all", help="Include system groups.")] = False,
    cluster: ClusterOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """List consumer groups."""
    from turbopump.broker.groups import BOOT_GROUPS

    with administration(nameserver) as admin:
        found = admin.groups.list(cluster)
    rows = [
        {
            **_settings_row(each.settings),
            "members": each.members,
            "is_consistent": each.is_consistent,
            "brokers": list(each.brokers),
        }
        for each in found
        if all_kinds or each.settings.group not in BOOT_GROUPS
    ]
    columns = (
        _SETTINGS[0],
        Column("members", "MEMBERS", "number"),
        Column("is_consistent", "CONSISTENT"),
        *_SETTINGS[1:3],
        Column("brokers", "BROKERS"),
    )
    Output(as_json=json).rows(
        rows, columns, nothing="No groups; the first consumer of a group creates it."
    )


@app.command()
def create(
    group: Annotated[str, typer.Argument(help="Name of the consumer group.")],
    retries: Annotated[int, typer.Option(help="How often a failed message is redelivered.")] = 16,
    retry_queues: Annotated[
        int, typer.Option(help="Queues for retries on each broker; 0 drops what fails.")
    ] = 1,
    cluster: ClusterOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Create a consumer group; needed if brokers do not create groups automatically."""
    from turbopump.admin import GroupSettings

    settings = GroupSettings(group, retries, retry_queues)
    with administration(nameserver) as admin:
        brokers = admin.groups.create(settings, cluster)
    value = {**_settings_row(settings), "brokers": list(brokers)}
    Output(as_json=json).done(value, f"Created group {group} on {', '.join(brokers)}.")


@app.command()
def update(
    group: GroupArgument,
    retries: Annotated[
        int | None,
        typer.Option(help="How often a failed message is redelivered.", show_default=False),
    ] = None,
    retry_queues: Annotated[
        int | None,
        typer.Option(
            help="Queues for retries on each broker; 0 drops what fails.", show_default=False
        ),
    ] = None,
    consume: Annotated[
        bool | None,
        typer.Option(
            "--consume/--no-consume", help="Whether the group gets messages.", show_default=False
        ),
    ] = None,
    broadcast: Annotated[
        bool | None,
        typer.Option(
            "--broadcast/--no-broadcast",
            help="Whether its members may each get everything.",
            show_default=False,
        ),
    ] = None,
    broker_id: Annotated[
        int | None,
        typer.Option(
            help="Replica to read from, 0 for the master; needs slaveReadEnable.",
            show_default=False,
        ),
    ] = None,
    slow_broker_id: Annotated[
        int | None,
        typer.Option(
            help="Replica to read from while far behind; needs slaveReadEnable.",
            show_default=False,
        ),
    ] = None,
    cluster: ClusterOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Change the given settings of a consumer group."""
    with administration(nameserver) as admin:
        changes = admin.groups.update(
            group,
            retries_max=retries,
            retry_queues=retry_queues,
            can_consume=consume,
            can_broadcast=broadcast,
            broker_id=broker_id,
            slow_broker_id=slow_broker_id,
            cluster=cluster,
        )
    before = [{"broker": each.broker, **_settings_row(each.before)} for each in changes]
    after = [{"broker": each.broker, **_settings_row(each.after)} for each in changes]
    value = {"before": before, "after": after}
    columns = (Column("broker", "BROKER"), *_SETTINGS)
    is_changed = before != after
    done = f"Changed group {group}." if is_changed else f"Group {group} is already like this."
    Output(as_json=json).one(value, after, columns, done)


@app.command()
def delete(
    group: GroupArgument,
    dead_letters: Annotated[
        bool, typer.Option("--dead-letters", help="Delete its dead letters, too.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Even while it has members.")] = False,
    cluster: ClusterOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Delete a consumer group, its progress and its retry topic."""
    with administration(nameserver) as admin:
        output = Output(as_json=json)
        lag = admin.groups.progress(group).lag
        if not force:
            admin.groups.require_stopped(group)
        what = f"group {group}, which is {format_number(lag)} messages behind"
        value: dict[str, Any] = {"group": group, "lag": lag, "dry_run": dry_run}
        if dry_run:
            output.done({**value, "topics": []}, f"Would delete {what}.")
            return
        confirm(f"Delete {what}?", is_sure=yes, as_json=json)
        topics = admin.groups.delete(
            group, cluster=cluster, with_dead_letters=dead_letters, force=force
        )
    also = f" with {', '.join(topics)}" if topics else ""
    output.done({**value, "topics": list(topics)}, f"Deleted group {group}{also}.")


@app.command()
def progress(
    group: Annotated[
        str | None,
        typer.Argument(
            help="Consumer group; without it, a line for each.", autocompletion=complete_group
        ),
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option(help="Only in this topic.", autocompletion=complete_topic, show_default=False),
    ] = None,
    members: Annotated[
        bool, typer.Option("--members", help="Show which member owns each queue.")
    ] = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Show the lag of a group by queue, including its retry topic."""
    with administration(nameserver) as admin:
        if group is None:
            _progress_of_all(admin, topic, Output(as_json=json))
            return
        found = admin.groups.progress(group, topic, with_owners=members)
    _print_progress(found, Output(as_json=json), with_members=members)


def _print_progress(found: Progress, output: Output, *, with_members: bool) -> None:
    rows = [
        {
            "topic": each.queue.topic,
            "broker": each.queue.broker,
            "queue_id": each.queue.queue_id,
            "committed": each.committed,
            "max_offset": each.max_offset,
            "lag": each.lag,
            "delay_ms": each.delay_ms,
            "last_consumed_ms": each.last_consumed_ms,
            "client_id": each.client_id,
        }
        for each in found.queues
    ]
    columns = (
        Column("topic", "TOPIC"),
        Column("broker", "BROKER"),
        Column("queue_id", "QUEUE", "number"),
        Column("committed", "COMMITTED", "number"),
        Column("max_offset", "MAX", "number"),
        Column("lag", "LAG", "number"),
        Column("delay_ms", "DELAY", "duration"),
        Column("client_id", "MEMBER")
        if with_members
        else Column("last_consumed_ms", "LAST CONSUMED", "time"),
    )
    value = {**_progress_row(found), "queues": rows}
    late = f", {format_duration(found.delay_ms)} late" if found.lag else ""
    state = "running" if found.is_running else "stopped"
    summary = f"Lag {format_number(found.lag)}{late}; the group is {state}."
    if not rows:
        summary = f"Nothing is committed yet; the group is {state}."
    output.one(value, rows, columns, summary)


def _progress_of_all(admin: Admin, topic: str | None, output: Output) -> None:
    from turbopump.broker.groups import BOOT_GROUPS

    names = [each.settings.group for each in admin.groups.list()]
    rows = []
    with progress_bar("Asking", len(names)) as advance:
        for name in names:
            found = admin.groups.progress(name, topic)
            advance()
            if found.queues or name not in BOOT_GROUPS:
                rows.append(_progress_row(found))
    columns = (
        Column("group", "GROUP"),
        Column("is_running", "RUNNING"),
        Column("lag", "LAG", "number"),
        Column("delay_ms", "DELAY", "duration"),
        Column("consumed_per_s", "PER S", "number"),
    )
    output.rows(rows, columns, nothing="No groups; the first consumer of a group creates it.")


def _progress_row(found: Progress) -> dict[str, Any]:
    return {
        "group": found.group,
        "is_running": found.is_running,
        "lag": found.lag,
        "delay_ms": found.delay_ms,
        "consumed_per_s": found.consumed_per_s,
    }


@app.command()
def members(
    group: GroupArgument, nameserver: NameServerOption = NAMESERVER, json: JsonOption = False
) -> None:
    """Show the members of a group, their addresses and their queues."""
    with administration(nameserver) as admin:
        found = admin.groups.members(group)
    rows = [
        {
            **_connection_row(each.connection),
            "queues": None if each.queues is None else [str(queue) for queue in each.queues],
        }
        for each in found.members
    ]
    columns = (*_CONNECTION, Column("queues", "QUEUES"))
    value = {
        "group": group,
        "consume_type": found.consume_type,
        "message_model": found.message_model,
        "consume_from": found.consume_from,
        "subscriptions": dict(found.subscriptions),
        "differences": [
            {
                "topic": each.topic,
                "kind": each.kind,
                "expression": each.expression,
                "client_ids": list(each.client_ids),
            }
            for each in found.differences
        ],
        "members": rows,
    }
    wants = ", ".join(f"{topic} ({tags})" for topic, tags in found.subscriptions.items())
    model = (found.message_model or "").lower()
    summary = f"{len(rows)} members, {model}, of {wants}." if rows else "The group has no members."
    lines = [summary, *_difference_lines(found.differences)]
    Output(as_json=json).one(value, rows, columns, "\n".join(lines))


def _difference_lines(differences: Sequence[Difference]) -> list[str]:
    if not differences:
        return []
    lines = ["Members have different subscriptions, so messages are skipped:"]
    for each in differences:
        wanted = "not subscribed" if each.kind is None else f"{each.kind} {each.expression}"
        lines.append(f"  {each.topic}: {wanted} by {', '.join(each.client_ids)}")
    return lines


@app.command()
def inspect(
    group: GroupArgument,
    client_id: Annotated[
        str | None, typer.Argument(help="Which member; needed when there are several.")
    ] = None,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Include the stack of each of its threads.")
    ] = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Show the state of a member: cached messages per queue, rates and settings."""
    with administration(nameserver) as admin:
        found = admin.groups.inspect(group, client_id, with_stacks=stacks)
    rows = [_held_row(each) for each in found.queues]
    columns = (
        Column("topic", "TOPIC"),
        Column("broker", "BROKER"),
        Column("queue_id", "QUEUE", "number"),
        Column("committed", "COMMITTED", "number"),
        Column("held", "HELD", "number"),
        Column("is_locked", "LOCKED"),
        Column("last_pulled_ms", "LAST PULLED", "time"),
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
    Output(as_json=json).one(value, rows, columns, "\n".join([*lines, found.stacks or ""]).strip())


@app.command()
def producers(
    group: Annotated[str, typer.Argument(help="Name of the producer group.")],
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Show the members of a producer group."""
    with administration(nameserver) as admin:
        rows = [_connection_row(each) for each in admin.groups.producers(group)]
    nothing = f"No producer of group {group} is connected."
    Output(as_json=json).rows(rows, _CONNECTION, nothing=nothing)


def _held_row(held: HeldQueue) -> dict[str, Any]:
    return {
        "topic": held.queue.topic,
        "broker": held.queue.broker,
        "queue_id": held.queue.queue_id,
        "committed": held.committed,
        "held": held.held,
        "held_mib": held.held_mib,
        "is_locked": held.is_locked,
        "last_pulled_ms": held.last_pulled_ms,
        "last_consumed_ms": held.last_consumed_ms,
    }


_CONNECTION = (
    Column("client_id", "CLIENT"),
    Column("address", "ADDRESS"),
    Column("language", "LANGUAGE"),
    Column("version", "VERSION"),
)


def _connection_row(connection: Connection) -> dict[str, Any]:
    return {
        "client_id": connection.client_id,
        "address": connection.address,
        "language": connection.language,
        "version": connection.version,
    }


def _settings_row(settings: GroupSettings) -> dict[str, Any]:
    return {
        "group": settings.group,
        "retries_max": settings.retries_max,
        "retry_queues": settings.retry_queues,
        "can_consume": settings.can_consume,
        "can_broadcast": settings.can_broadcast,
        "broker_id": settings.broker_id,
        "slow_broker_id": settings.slow_broker_id,
    }
