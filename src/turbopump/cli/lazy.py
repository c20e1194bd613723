"""Groups of commands that are imported on first use.

``turbopump --help`` shows only the help text of a group, so it stays fast whatever the commands of
a group import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

import typer
from typer.core import TyperGroup

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
    """Add the commands of the ``app`` of a module as a group; nothing is imported yet.

    ::

        add_lazily(app, "topic", "turbopump.cli.topic", "Create, change, delete and list topics.")
    """
    kind = type(f"{name.title()}Group", (LazyGroup,), {"module": module})
    app.add_typer(typer.Typer(cls=kind, help=summary, no_args_is_help=True), name=name)
