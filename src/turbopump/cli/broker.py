"""``turbopump broker``, which runs one, and ``turbopump broker promote``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from turbopump.cli.administration import BrokerArgument, reported
from turbopump.cli.command import Console, command
from turbopump.cli.logs import LogFormat, LogLevel, LogSettings
from turbopump.cli.options import (
    NAMESERVER_VARIABLE,
    AdvertiseOption,
    BrokerPortOption,
    ConfigOption,
    DirOption,
    HostOption,
    LogFormatOption,
    LogLevelOption,
    PrintConfigOption,
    file_settings,
    given,
    option,
    settings_of,
)
from turbopump.cli.output import row_of

if TYPE_CHECKING:
    from turbopump.admin import Promoted

app = typer.Typer(invoke_without_command=True)


@app.callback()
def broker(
    context: typer.Context,
    dir: DirOption = None,  # noqa: A002 - the option's name
    host: HostOption = None,
    port: BrokerPortOption = None,
    advertise: AdvertiseOption = None,
    nameserver: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT;...",
            help="Name servers to register with, or the URL that returns them.",
            show_default=f"{NAMESERVER_VARIABLE}, or none",
        ),
    ] = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
    print_config: PrintConfigOption = False,
) -> None:
    """Run a broker, which stores and delivers messages."""
    if context.invoked_subcommand is not None:
        return
    from turbopump.broker.config_keys import as_properties, parse
    from turbopump.broker.replicated import ReplicatedBroker
    from turbopump.cli.life_cycle import ready_line, serve
    from turbopump.net.sockets import SocketNetwork
    from turbopump.settings import render_properties

    with reported():
        chosen = parse(
            {
                **given(namesrvAddr=os.environ.get(NAMESERVER_VARIABLE) or None),
                **settings_of("broker", file_settings(config)),
                **given(storePathRootDir=dir and dir / "store"),
                **given(bindAddress=host, listenPort=port, namesrvAddr=nameserver),
                **given(brokerIP1=advertise),
            }
        )
        if print_config:
            typer.echo(render_properties(as_properties(chosen)), nl=False)
            return
        server = ReplicatedBroker(chosen, SocketNetwork(), config_path=config)
        serve(
            server,
            lambda running: ready_line(broker=running.address),
            log=LogSettings(log_level, log_format),
            directory=chosen.directory,
        )


@command(app, confirms=True)
def promote(
    console: Console,
    broker: BrokerArgument,
    broker_id: Annotated[
        int | None,
        option("Id of the slave; without it, the one that has most of the log.", "--id", min=1),
    ] = None,
    is_sync: Annotated[
        bool | None,
        option(
            "Whether it is SYNC_MASTER, which waits for a slave; by default, as the old master.",
            "--sync/--async",
        ),
    ] = None,
    is_forced: Annotated[
        bool,
        option(
            "Promote it even if its log begins later than its master's, which loses the messages"
            " before, or ends before its master's begins, which loses all that the master has.",
            "--force",
        ),
    ] = False,
) -> None:
    """Make a slave the master, in place of the one it has followed."""
    clusters = console.admin.clusters
    node = clusters.promotable(broker, broker_id)
    slave = f"slave {node.broker_id} of {broker} at {node.address}"
    old_role = clusters.role_of_master(node)
    chosen = None if is_sync is None else "SYNC_MASTER" if is_sync else "ASYNC_MASTER"
    role = chosen or old_role or "ASYNC_MASTER"
    before = f"the old master was {old_role}" if old_role else "the old master's role is unknown"
    if console.is_dry_run:
        value = {**row_of(node), "role": role, "old_role": old_role, "dry_run": True}
        console.done(value, f"Would promote {slave} to {role}; {before}.")
        return
    console.confirm(f"Promote {slave} to {role}?")
    done = clusters.promote(node, role, is_forced=is_forced)
    text = f"Promoted {slave} to {role}, with epoch {done.epoch} and log end {done.log_end}"
    value = {**row_of(done), "dry_run": False}
    console.done(value, f"{text}; {before}.\n{_old_master_text(done)}")


def _old_master_text(done: Promoted) -> str:
    if done.old_master is None:
        return "No other master is known."
    if done.missing_bytes is None:
        return (
            f"The old master, {done.old_master}, did not answer. When it returns, it becomes a"
            " slave, and what it had not replicated is kept aside in its store directory."
        )
    if done.missing_bytes:
        return (
            f"The old master, {done.old_master}, has {done.missing_bytes} bytes that were not"
            " replicated in time; they are kept aside in its store directory."
        )
    return f"The old master, {done.old_master}, becomes a slave; nothing is missing."
