"""``turbopump topic``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import (
    NAMESERVER,
    ClusterOption,
    DryRunOption,
    JsonOption,
    NameServerOption,
    TopicArgument,
    YesOption,
    administration,
    confirm,
)
from turbopump.cli.formats import format_number
from turbopump.cli.output import Column, Output

if TYPE_CHECKING:
    from turbopump.admin import TopicInfo

app = typer.Typer()

NewTopicArgument = Annotated[str, typer.Argument(help="Name of the topic.")]
BrokerOption = Annotated[
    list[str] | None,
    typer.Option("--broker", help="Only on this broker; can be repeated.", show_default=False),
]
PermissionOption = Annotated[
    str | None,
    typer.Option(help="What clients may do: r, w or rw.", metavar="r|w|rw", show_default=False),
]
ReadQueuesOption = Annotated[
    int | None,
    typer.Option(help="Queues that consumers read, if it differs.", show_default=False),
]

_ON_BROKERS = (
    Column("broker", "BROKER"),
    Column("write_queues", "WRITE", "number"),
    Column("read_queues", "READ", "number"),
    Column("permission", "PERM"),
    Column("is_ordered", "ORDERED"),
)


@app.command("list")
def list_topics(
    all_kinds: Annotated[
        bool, typer.Option("--all", help="Retry, dead-letter and system topics as well.")
    ] = False,
    cluster: ClusterOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """List topics."""
    with administration(nameserver) as admin:
        found = admin.topics.list(cluster)
    rows = [
        {
            "topic": topic.name,
            "kind": topic.kind.value,
            "queues": topic.write_queues,
            "permission": sorted({each.permission for each in topic.on_brokers}),
            "brokers": [each.broker for each in topic.on_brokers],
        }
        for topic in found
        if all_kinds or topic.kind.value == "normal"
    ]
    columns = (
        Column("topic", "TOPIC"),
        *([Column("kind", "KIND")] if all_kinds else []),
        Column("queues", "QUEUES", "number"),
        Column("permission", "PERM"),
        Column("brokers", "BROKERS"),
    )
    nothing = "No topics; create one with `turbopump topic create NAME`."
    Output(as_json=json).rows(rows, columns, nothing=nothing)


@app.command()
def create(
    topic: NewTopicArgument,
    queues: Annotated[int, typer.Option(help="Queues on each broker.")] = 8,
    read_queues: ReadQueuesOption = None,
    permission: PermissionOption = None,
    ordered: Annotated[
        bool,
        typer.Option("--ordered", help="Keep the list of queues fixed while brokers come and go."),
    ] = False,
    cluster: ClusterOption = None,
    broker: BrokerOption = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Create a topic, by default on all brokers."""
    with administration(nameserver) as admin:
        made = admin.topics.create(
            topic,
            queues=queues,
            read_queues=read_queues,
            permission=permission or "rw",
            is_ordered=ordered,
            cluster=cluster,
            brokers=broker or (),
        )
    _warn_of_unread(made)
    rows = _broker_rows(made)
    Output(as_json=json).one(
        {"topic": topic, "brokers": rows}, rows, _ON_BROKERS, f"Created topic {topic}."
    )


@app.command()
def update(
    topic: TopicArgument,
    queues: Annotated[
        int | None, typer.Option(help="Queues on each broker.", show_default=False)
    ] = None,
    read_queues: ReadQueuesOption = None,
    permission: PermissionOption = None,
    ordered: Annotated[
        bool | None,
        typer.Option("--ordered/--not-ordered", help="Keep the queues fixed.", show_default=False),
    ] = None,
    cluster: ClusterOption = None,
    broker: BrokerOption = None,
    dry_run: DryRunOption = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Change the given settings of a topic.

    With fewer queues, consumers keep reading the queues that producers no longer use; once they
    are drained, close them with `--read-queues`.
    """
    with administration(nameserver) as admin:
        before, after = admin.topics.update(
            topic,
            queues=queues,
            read_queues=read_queues,
            permission=permission,
            is_ordered=ordered,
            cluster=cluster,
            brokers=broker or (),
            dry_run=dry_run,
        )
    _warn_of_unread(after)
    value = {
        "topic": topic,
        "before": _broker_rows(before),
        "after": _broker_rows(after),
        "dry_run": dry_run,
    }
    if before == after:
        done = f"Topic {topic} is already like this."
    else:
        done = f"Would change topic {topic} to this." if dry_run else f"Changed topic {topic}."
    Output(as_json=json).one(value, _broker_rows(after), _ON_BROKERS, done)


@app.command()
def delete(
    topic: TopicArgument,
    cluster: ClusterOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Delete a topic with all its messages."""
    with administration(nameserver) as admin:
        status = admin.topics.status(topic)
        groups = admin.topics.groups(topic)
        output = Output(as_json=json)
        loss = f"topic {topic} with {format_number(status.messages)} messages"
        readers = f", consumed by {', '.join(groups)}" if groups else ""
        value = {"topic": topic, "messages": status.messages, "groups": list(groups)}
        if dry_run:
            brokers = sorted({each.queue.broker for each in status.queues})
            value |= {"brokers": brokers, "dry_run": True}
            output.done(value, f"Would delete {loss}{readers}.")
            return
        confirm(f"Delete {loss}{readers}?", is_sure=yes, as_json=json)
        gone = admin.topics.delete(topic, cluster)
    value |= {"brokers": list(gone), "dry_run": False}
    output.done(value, f"Deleted topic {topic}.")


@app.command()
def route(
    topic: TopicArgument, nameserver: NameServerOption = NAMESERVER, json: JsonOption = False
) -> None:
    """Show the brokers and queues of a topic."""
    with administration(nameserver) as admin:
        found = admin.topics.route(topic)
    rows = [
        {
            "cluster": each.cluster,
            "broker": each.broker,
            "broker_id": broker_id,
            "address": address,
            "write_queues": each.write_queues,
            "read_queues": each.read_queues,
            "permission": each.permission,
        }
        for each in found.on_brokers
        for broker_id, address in each.addresses.items()
    ]
    columns = (
        Column("cluster", "CLUSTER"),
        Column("broker", "BROKER"),
        Column("broker_id", "ID", "number"),
        Column("address", "ADDRESS"),
        *_ON_BROKERS[1:4],
    )
    order = f" Ordered: {found.order}." if found.order else ""
    value = {"topic": topic, "order": found.order, "brokers": rows}
    summary = f"{sum(each.write_queues for each in found.on_brokers)} queues to write.{order}"
    Output(as_json=json).one(value, rows, columns, summary)


@app.command()
def status(
    topic: TopicArgument, nameserver: NameServerOption = NAMESERVER, json: JsonOption = False
) -> None:
    """Show the offsets of each queue, and when its last message was stored."""
    with administration(nameserver) as admin:
        found = admin.topics.status(topic)
    rows = [
        {
            "broker": each.queue.broker,
            "queue_id": each.queue.queue_id,
            "min_offset": each.min_offset,
            "max_offset": each.max_offset,
            "messages": each.messages,
            "last_stored_ms": each.last_stored_ms,
        }
        for each in found.queues
    ]
    columns = (
        Column("broker", "BROKER"),
        Column("queue_id", "QUEUE", "number"),
        Column("min_offset", "MIN", "number"),
        Column("max_offset", "MAX", "number"),
        Column("messages", "MESSAGES", "number"),
        Column("last_stored_ms", "LAST STORED", "time"),
    )
    value = {"topic": topic, "messages": found.messages, "queues": rows}
    summary = f"{format_number(found.messages)} messages in {len(rows)} queues."
    Output(as_json=json).one(value, rows, columns, summary)


@app.command()
def groups(
    topic: TopicArgument, nameserver: NameServerOption = NAMESERVER, json: JsonOption = False
) -> None:
    """List the groups that consume a topic, or once did."""
    with administration(nameserver) as admin:
        rows = [{"group": group} for group in admin.topics.groups(topic)]
    Output(as_json=json).rows(
        rows, [Column("group", "GROUP")], nothing=f"No group consumes topic {topic}."
    )


def _warn_of_unread(topic: TopicInfo) -> None:
    """Say on stderr which queues producers write and no consumer reads."""
    for each in topic.on_brokers:
        if each.read_queues < each.write_queues:
            unread = ", ".join(map(str, range(each.read_queues, each.write_queues)))
            typer.echo(
                f"turbopump: warning: no consumer reads queue {unread} of topic {topic.name} on "
                f"broker {each.broker}: {each.write_queues} queues are written, "
                f"{each.read_queues} read",
                err=True,
            )


def _broker_rows(topic: TopicInfo) -> list[dict[str, Any]]:
    return [
        {
            "cluster": each.cluster,
            "broker": each.broker,
            "write_queues": each.write_queues,
            "read_queues": each.read_queues,
            "permission": each.permission,
            "is_ordered": each.is_ordered,
        }
        for each in topic.on_brokers
    ]
