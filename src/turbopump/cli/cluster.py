"""``turbopump cluster``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import (
    NAMESERVER,
    DryRunOption,
    JsonOption,
    NameServerOption,
    YesOption,
    administration,
    confirm,
)
from turbopump.cli.output import Column, Output

if TYPE_CHECKING:
    from turbopump.admin import BrokerStatus

app = typer.Typer()

_REPLICATION = (
    Column("role", "ROLE"),
    Column("link", "LINK"),
    Column("lag_bytes", "LAG BYTES", "number"),
    Column("lag_ms", "BEHIND", "duration"),
)
"""Shown where a broker has slaves: a terminal of 80 columns has no room for them elsewhere."""

BrokerArgument = Annotated[str, typer.Argument(help="Name of the broker.")]


@app.command("list")
def list_clusters(nameserver: NameServerOption = NAMESERVER, json: JsonOption = False) -> None:
    """List the brokers of all clusters."""
    with administration(nameserver) as admin:
        rows = [
            {
                "cluster": node.cluster,
                "broker": node.broker,
                "broker_id": node.broker_id,
                "address": node.address,
            }
            for cluster in admin.clusters.list()
            for node in cluster.nodes
        ]
    columns = (
        Column("cluster", "CLUSTER"),
        Column("broker", "BROKER"),
        Column("broker_id", "ID", "number"),
        Column("address", "ADDRESS"),
    )
    Output(as_json=json).rows(rows, columns, nothing="No brokers are registered.")


@app.command()
def status(
    cluster: Annotated[str | None, typer.Argument(help="Only this cluster.")] = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Show how brokers are doing: roles, replication, messages in and out, disks."""
    with administration(nameserver) as admin:
        found = admin.clusters.status(cluster)
    rows = [_status_row(broker) for each in found for broker in each.brokers]
    columns = (
        Column("cluster", "CLUSTER"),
        Column("broker", "BROKER"),
        Column("broker_id", "ID", "number"),
        *(_REPLICATION if any(row["broker_id"] for row in rows) else ()),
        Column("version", "VERSION"),
        Column("in_per_s", "IN/S", "number"),
        Column("out_per_s", "OUT/S", "number"),
        Column("in_today", "IN TODAY", "number"),
        Column("out_today", "OUT TODAY", "number"),
        Column("disk_used", "DISK", "part"),
        *([Column("error", "ERROR")] if any(row["error"] for row in rows) else []),
    )
    Output(as_json=json).rows(rows, columns, nothing="No brokers are registered.")
    if any(row["error"] for row in rows):
        raise typer.Exit(1)


@app.command()
def info(
    broker: BrokerArgument, nameserver: NameServerOption = NAMESERVER, json: JsonOption = False
) -> None:
    """Show all runtime information that a broker reports."""
    with administration(nameserver) as admin:
        table = admin.clusters.runtime_info(broker)
    columns = [Column(key, key) for key in sorted(table)]
    Output(as_json=json).fields(dict(sorted(table.items())), columns)


@app.command()
def drain(
    broker: BrokerArgument,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Stop routing producers to a broker so that it drains.

    Lasts until `restore`, or until the broker registers its topics again.
    """
    with administration(nameserver) as admin:
        output = Output(as_json=json)
        if dry_run:
            admin.configuration.broker(broker)
            output.done(
                {"broker": broker, "topics": None, "dry_run": True},
                f"Would stop routing producers to all topics of broker {broker}.",
            )
            return
        confirm(f"Stop routing producers to broker {broker}?", is_sure=yes, as_json=json)
        count = admin.clusters.wipe_write_permission(broker)
        output.done(
            {"broker": broker, "topics": count, "dry_run": False},
            f"Stopped routing producers to {count} topics of broker {broker}.",
        )


@app.command()
def restore(
    broker: BrokerArgument, nameserver: NameServerOption = NAMESERVER, json: JsonOption = False
) -> None:
    """Route producers to a broker again."""
    with administration(nameserver) as admin:
        count = admin.clusters.add_write_permission(broker)
    Output(as_json=json).done(
        {"broker": broker, "topics": count},
        f"Producers are routed to {count} topics of broker {broker} again.",
    )


def _status_row(broker: BrokerStatus) -> dict[str, Any]:
    return {
        "cluster": broker.node.cluster,
        "broker": broker.node.broker,
        "broker_id": broker.node.broker_id,
        "address": broker.node.address,
        "version": broker.version,
        "in_per_s": broker.in_per_s,
        "out_per_s": broker.out_per_s,
        "in_today": broker.in_today,
        "out_today": broker.out_today,
        "disk_used": broker.disk_used,
        "boot_ms": broker.boot_ms,
        "role": broker.role,
        "epoch": broker.epoch,
        "link": broker.link,
        "lag_bytes": broker.lag_bytes,
        "lag_ms": broker.lag_ms,
        "error": broker.error,
    }
