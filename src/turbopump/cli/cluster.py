"""``turbopump cluster``."""

from __future__ import annotations

from typing import Annotated

import typer

from turbopump.cli.administration import BrokerArgument
from turbopump.cli.command import Console, command
from turbopump.cli.output import Column, columns, row_of

app = typer.Typer()

_LAGS = columns("lag_bytes:number lag_ms=BEHIND:duration")
"""Shown where a broker has slaves."""


@command(app, "list", watches=True)
def list_clusters(console: Console) -> None:
    """List the brokers of all clusters."""
    rows = [row_of(node) for cluster in console.admin.clusters.list() for node in cluster.nodes]
    shown = columns("cluster broker broker_id=ID:number address")
    console.rows(rows, shown, nothing="No brokers are registered.")


@command(app, watches=True)
def status(
    console: Console,
    cluster: Annotated[str | None, typer.Argument(help="Only this cluster.")] = None,
) -> None:
    """Show how brokers are doing: roles, replication, messages in and out, disks."""
    found = console.admin.clusters.status(cluster)
    rows = [row_of(broker) for each in found for broker in each.brokers]
    for row in rows:
        # `cluster info` shows it.
        del row["runtime_info"]
    shown = (
        *columns("cluster broker broker_id=ID:number role link"),
        *(_LAGS if any(row["broker_id"] for row in rows) else ()),
        *columns("version in_per_s=IN/S:number out_per_s=OUT/S:number disk_used=DISK:part"),
        *columns("error" if any(row["error"] for row in rows) else ""),
    )
    console.rows(rows, shown, nothing="No brokers are registered.")
    if any(row["error"] for row in rows):
        raise typer.Exit(1)


@command(app)
def info(console: Console, broker: BrokerArgument) -> None:
    """Show all runtime information that a broker reports."""
    table = console.admin.clusters.runtime_info(broker)
    console.fields(dict(sorted(table.items())), [Column(key, key) for key in sorted(table)])


@command(app, confirms=True)
def drain(console: Console, broker: BrokerArgument) -> None:
    """Stop routing producers to a broker so that it drains.

    Lasts until `restore`, or until the broker registers its topics again.
    """
    if console.is_dry_run:
        console.admin.configuration.broker(broker)
        console.done(
            {"broker": broker, "topics": None, "dry_run": True},
            f"Would stop routing producers to all topics of broker {broker}.",
        )
        return
    console.confirm(f"Stop routing producers to broker {broker}?")
    count = console.admin.clusters.wipe_write_permission(broker)
    console.done(
        {"broker": broker, "topics": count, "dry_run": False},
        f"Stopped routing producers to {count} topics of broker {broker}.",
    )


@command(app)
def restore(console: Console, broker: BrokerArgument) -> None:
    """Route producers to a broker again."""
    count = console.admin.clusters.add_write_permission(broker)
    console.done(
        {"broker": broker, "topics": count},
        f"Producers are routed to {count} topics of broker {broker} again.",
    )
