"""All commands, by name."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from typer.core import TyperGroup

from turbopump.cli.administration import reported
from turbopump.cli.broker import app as broker_app
from turbopump.cli.nameserver import nameserver
from turbopump.cli.options import DOMAIN_VARIABLE, NAMESERVER_VARIABLE
from turbopump.cli.standalone import standalone
from turbopump.cli.worker import worker
from turbopump.version import __version__

if TYPE_CHECKING:
    from typer._click import Command, Context


class LazyGroup(TyperGroup):
    """A group whose commands are those of the ``app`` of a module."""

    module: ClassVar[str] = ""
    _is_loaded = False

    def list_commands(self, ctx: Context) -> list[str]:
        self._load()
        return super().list_commands(ctx)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        self._load()
        return super().get_command(ctx, cmd_name)

    def _load(self) -> None:
        if not self._is_loaded:
            self._is_loaded = True
            group = typer.main.get_group(import_module(self.module).app)
            self.commands.update(group.commands)


def add_lazily(app: typer.Typer, name: str, module: str, summary: str) -> None:
    """Add the commands of the ``app`` of a module as a group; nothing is imported yet."""
    kind = type(f"{name.title()}Group", (LazyGroup,), {"module": module})
    app.add_typer(typer.Typer(cls=kind, help=summary, no_args_is_help=True), name=name)


app = typer.Typer(
    help="A RocketMQ-compatible messaging system.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    # Errors that users can fix are reported without a traceback; others need a plain one.
    pretty_exceptions_enable=False,
)
for command in (standalone, nameserver):
    app.command()(command)
app.add_typer(broker_app, name="broker")
app.command()(worker)

SUB_APPS = {
    "cluster": ("turbopump.cli.cluster", "Show clusters and the state of their brokers."),
    "topic": ("turbopump.cli.topic", "Create, change, delete and show topics."),
    "group": ("turbopump.cli.group", "Consumer groups: lag, members, settings."),
    "offset": ("turbopump.cli.offset", "Reset, skip and copy the offsets of groups."),
    "message": ("turbopump.cli.message", "Send, tail and find messages."),
    "dlq": ("turbopump.cli.dlq", "Show, redrive and export dead letters."),
    "transaction": ("turbopump.cli.transaction", "Transactions that have not ended."),
    "bench": ("turbopump.cli.bench", "Measure throughput and latency of a cluster."),
    "pipeline": ("turbopump.cli.pipeline", "Archive, replay, redrive and analyze, on Spark."),
    "spark": ("turbopump.cli.spark", "Package Turbopump for the executors of a Spark cluster."),
    "store": ("turbopump.cli.store", "Examine, repair and back up the stores of brokers."),
    "config": ("turbopump.cli.config", "Settings of brokers and name servers, key-values."),
}
"""Groups of commands, each the ``app`` of a module, imported when it is used."""

for name, (module, summary) in SUB_APPS.items():
    add_lazily(app, name, module, summary)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from turbopump.core import CORE_NAME

        typer.echo(f"turbopump {__version__} (core: {CORE_NAME})")
        raise typer.Exit


@app.callback()
def turbopump(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """A RocketMQ-compatible messaging system."""
    if os.environ.get(DOMAIN_VARIABLE):
        from turbopump.net.name_server_list import nameserver_from_environment

        with reported():
            # The default of the option --nameserver is one variable.
            os.environ[NAMESERVER_VARIABLE] = nameserver_from_environment()
