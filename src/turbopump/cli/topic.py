"""``turbopump topic``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import (
    ClusterOption,
    DryRunOption,
    TopicArgument,
    complete_broker,
)
from turbopump.cli.command import Console, command
from turbopump.cli.formats import format_number
from turbopump.cli.options import option
from turbopump.cli.output import columns, row_of

if TYPE_CHECKING:
    from turbopump.admin import TopicInfo

app = typer.Typer()

NewTopicArgument = Annotated[str, typer.Argument(help="Name of the topic.")]
BrokerOption = Annotated[
    list[str] | None,
    option("Only on this broker; can be repeated.", "--broker", autocompletion=complete_broker),
]
PermissionOption = Annotated[
    str | None, option("What clients may do: r, w or rw.", metavar="r|w|rw")
]
ReadQueuesOption = Annotated[int | None, option("Queues that consumers read, if it differs.")]

_ON_BROKERS = columns(
    "broker write_queues=WRITE:number read_queues=READ:number permission=PERM is_ordered=ORDERED"
)


@command(app, "list")
def list_topics(
    console: Console,
    all_kinds: Annotated[
        bool, option("Retry, dead-letter and system topics as well.", "--all")
    ] = False,
    cluster: ClusterOption = None,
) -> None:
    """List topics."""
    found = console.admin.topics.list(cluster)
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
    kind = "kind" if all_kinds else ""
    shown = columns(f"topic {kind} queues:number permission=PERM brokers")
    nothing = "No topics; create one with `turbopump topic create NAME`."
    console.rows(rows, shown, nothing=nothing)


@command(app)
def create(
    console: Console,
    topic: NewTopicArgument,
    queues: Annotated[int, typer.Option(help="Queues on each broker.")] = 8,
    read_queues: ReadQueuesOption = None,
    permission: PermissionOption = None,
    ordered: Annotated[
        bool, option("Keep the list of queues fixed while brokers come and go.", "--ordered")
    ] = False,
    cluster: ClusterOption = None,
    broker: BrokerOption = None,
) -> None:
    """Create a topic, by default on all brokers."""
    made = console.admin.topics.create(
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
    console.one({"topic": topic, "brokers": rows}, rows, _ON_BROKERS, f"Created topic {topic}.")


@command(app)
def update(
    console: Console,
    topic: TopicArgument,
    queues: Annotated[int | None, option("Queues on each broker.")] = None,
    read_queues: ReadQueuesOption = None,
    permission: PermissionOption = None,
    ordered: Annotated[
        bool | None, option("Keep the queues fixed.", "--ordered/--not-ordered")
    ] = None,
    cluster: ClusterOption = None,
    broker: BrokerOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Change the given settings of a topic.

    With fewer queues, consumers keep reading the queues that producers no longer use.

    Once they are drained, close them with `--read-queues`.
    """
    before, after = console.admin.topics.update(
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
    console.one(value, _broker_rows(after), _ON_BROKERS, done)


@command(app, confirms=True)
def delete(console: Console, topic: TopicArgument, cluster: ClusterOption = None) -> None:
    """Delete a topic with all its messages."""
    status = console.admin.topics.status(topic)
    groups = console.admin.topics.groups(topic)
    loss = f"topic {topic} with {format_number(status.messages)} messages"
    readers = f", consumed by {', '.join(groups)}" if groups else ""
    value = {"topic": topic, "messages": status.messages, "groups": list(groups)}
    if console.is_dry_run:
        brokers = sorted({each.queue.broker for each in status.queues})
        value |= {"brokers": brokers, "dry_run": True}
        console.done(value, f"Would delete {loss}{readers}.")
        return
    console.confirm(f"Delete {loss}{readers}?")
    gone = console.admin.topics.delete(topic, cluster)
    value |= {"brokers": list(gone), "dry_run": False}
    console.done(value, f"Deleted topic {topic}.")


@command(app, confirms=True)
def purge(
    console: Console,
    topic: TopicArgument,
    force: Annotated[bool, option("Even while groups consume it.", "--force")] = False,
    cluster: ClusterOption = None,
) -> None:
    """Delete all messages of a topic, but neither the topic nor its settings.

    Groups lose their offsets in it, as its queues begin again at 0.
    """
    status = console.admin.topics.status(topic)
    loss = f"{format_number(status.messages)} messages of topic {topic}"
    groups = console.admin.topics.groups(topic)
    for group in () if force else groups:
        console.admin.groups.require_stopped(group)
    readers = f", consumed by {', '.join(groups)}" if groups else ""
    value = {"topic": topic, "messages": status.messages, "groups": list(groups)}
    if console.is_dry_run:
        brokers = sorted({each.queue.broker for each in status.queues})
        value |= {"brokers": brokers, "dry_run": True}
        console.done(value, f"Would delete {loss}{readers}.")
        return
    console.confirm(f"Delete {loss}{readers}?")
    purged = console.admin.topics.purge(topic, cluster)
    value |= {"brokers": list(purged), "dry_run": False}
    console.done(value, f"Deleted {loss}.")


@command(app)
def route(console: Console, topic: TopicArgument) -> None:
    """Show the brokers and queues of a topic."""
    found = console.admin.topics.route(topic)
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
    shown = (*columns("cluster broker broker_id=ID:number address"), *_ON_BROKERS[1:4])
    order = f" Ordered: {found.order}." if found.order else ""
    value = {"topic": topic, "order": found.order, "brokers": rows}
    summary = f"{sum(each.write_queues for each in found.on_brokers)} queues to write.{order}"
    console.one(value, rows, shown, summary)


@command(app, watches=True)
def status(console: Console, topic: TopicArgument) -> None:
    """Show the offsets of each queue, and when its last message was stored."""
    found = console.admin.topics.status(topic)
    rows = [row_of(each, "messages") for each in found.queues]
    shown = columns(
        "broker queue_id=QUEUE:number min_offset=MIN:number max_offset=MAX:number messages:number"
        " last_stored_ms=LAST_STORED:time"
    )
    value = {"topic": topic, "messages": found.messages, "queues": rows}
    summary = f"{format_number(found.messages)} messages in {len(rows)} queues."
    console.one(value, rows, shown, summary)


@command(app)
def groups(console: Console, topic: TopicArgument) -> None:
    """List the groups that consume a topic, or once did."""
    rows = [{"group": group} for group in console.admin.topics.groups(topic)]
    console.rows(rows, columns("group"), nothing=f"No group consumes topic {topic}.")


def _warn_of_unread(topic: TopicInfo) -> None:
    """Say on stderr which queues producers write and no consumer reads."""
    for each in topic.on_brokers:
        if each.read_queues < each.write_queues:
            numbers = range(each.read_queues, each.write_queues)
            noun = "queue" if len(numbers) == 1 else "queues"
            unread = ", ".join(map(str, numbers))
            typer.echo(
                f"turbopump: warning: no consumer reads {noun} {unread} of topic {topic.name} on "
                f"broker {each.broker}: {each.write_queues} queues are written, "
                f"{each.read_queues} read",
                err=True,
            )


def _broker_rows(topic: TopicInfo) -> list[dict[str, Any]]:
    return [row_of(each) for each in topic.on_brokers]
