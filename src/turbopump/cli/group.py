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
    complete_topic,
    confirm,
)
from turbopump.cli.output import Column, Output
from turbopump.cli.texts import duration_text, number_text

if TYPE_CHECKING:
    from turbopump.admin import Connection, GroupSettings

app = typer.Typer()

_SETTINGS = (
    Column("group", "GROUP"),
    Column("retries_max", "RETRIES", "number"),
    Column("retry_queues", "RETRY QUEUES", "number"),
    Column("can_consume", "CONSUMES"),
    Column("can_broadcast", "BROADCASTS"),
)


@app.command("list")
def list_groups(
    all_kinds: Annotated[
        bool, typer.Option("--all", help="Groups that brokers have for themselves as well.")
    ] = False,
    cluster: ClusterOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """List consumer groups."""
    from turbopump.broker.groups import BOOT_GROUPS

    with administration(nameserver) as admin:
        found = admin.groups.list(cluster)
    rows = [
        {**_settings_row(each.settings), "members": each.members, "brokers": list(each.brokers)}
        for each in found
        if all_kinds or each.settings.group not in BOOT_GROUPS
    ]
    columns = (
        _SETTINGS[0],
        Column("members", "MEMBERS", "number"),
        *_SETTINGS[1:3],
        Column("brokers", "BROKERS"),
    )
    Output(as_json=json).rows(rows, columns, nothing="No group yet: consuming makes one.")


@app.command()
def create(
    group: Annotated[str, typer.Argument(help="Name of the consumer group.")],
    retries: Annotated[int, typer.Option(help="How often a failed message is tried again.")] = 16,
    retry_queues: Annotated[
        int, typer.Option(help="Queues for retries on each broker; 0 drops what fails.")
    ] = 1,
    cluster: ClusterOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Make a consumer group; needed where brokers do not make them by themselves."""
    from turbopump.admin import GroupSettings

    settings = GroupSettings(group, retries, retry_queues)
    with administration(nameserver) as admin:
        brokers = admin.groups.create(settings, cluster)
    value = {**_settings_row(settings), "brokers": list(brokers)}
    Output(as_json=json).done(value, f"Group {group} is made on {', '.join(brokers)}.")


@app.command()
def update(
    group: GroupArgument,
    retries: Annotated[
        int | None,
        typer.Option(help="How often a failed message is tried again.", show_default=False),
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
    cluster: ClusterOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Change a consumer group, only in what is given."""
    with administration(nameserver) as admin:
        before, after = admin.groups.update(
            group,
            retries_max=retries,
            retry_queues=retry_queues,
            can_consume=consume,
            can_broadcast=broadcast,
            cluster=cluster,
        )
    value = {"before": _settings_row(before), "after": _settings_row(after)}
    row = _settings_row(after)
    Output(as_json=json).one(value, [row], _SETTINGS, f"Group {group} is changed.")


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
        what = f"group {group}, which is {number_text(lag)} messages behind"
        value: dict[str, Any] = {"group": group, "lag": lag, "dry_run": dry_run}
        if dry_run:
            output.done({**value, "topics": []}, f"Would delete {what}.")
            return
        confirm(f"Delete {what}?", is_sure=yes, as_json=json)
        topics = admin.groups.delete(
            group, cluster=cluster, with_dead_letters=dead_letters, force=force
        )
    also = f" with {', '.join(topics)}" if topics else ""
    output.done({**value, "topics": list(topics)}, f"Group {group} is deleted{also}.")


@app.command()
def progress(
    group: GroupArgument,
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
    """Show how far a group is behind, queue by queue, its retries included."""
    with administration(nameserver) as admin:
        found = admin.groups.progress(group, topic, with_owners=members)
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
        if members
        else Column("last_consumed_ms", "LAST CONSUMED", "time"),
    )
    value = {
        "group": group,
        "is_running": found.is_running,
        "lag": found.lag,
        "delay_ms": found.delay_ms,
        "consumed_per_s": found.consumed_per_s,
        "queues": rows,
    }
    late = f", {duration_text(found.delay_ms)} late" if found.lag else ""
    state = "running" if found.is_running else "stopped"
    summary = f"Lag {number_text(found.lag)}{late}; the group is {state}."
    if not rows:
        summary = f"Nothing is committed yet; the group is {state}."
    Output(as_json=json).one(value, rows, columns, summary)


@app.command()
def members(
    group: GroupArgument, nameserver: NameServerOption = NAMESERVER, json: JsonOption = False
) -> None:
    """Show who is in a group, from where, and which queues each owns."""
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
        "members": rows,
    }
    wants = ", ".join(f"{topic} ({tags})" for topic, tags in found.subscriptions.items())
    model = (found.message_model or "").lower()
    summary = f"{len(rows)} members, {model}, of {wants}." if rows else "The group has no members."
    Output(as_json=json).one(value, rows, columns, summary)


@app.command()
def producers(
    group: Annotated[str, typer.Argument(help="Name of the producer group.")],
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Show who is in a producer group."""
    with administration(nameserver) as admin:
        rows = [_connection_row(each) for each in admin.groups.producers(group)]
    nothing = f"No producer of group {group} is connected."
    Output(as_json=json).rows(rows, _CONNECTION, nothing=nothing)


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
    }
