"""Commands that administer a cluster: the options that all of them have, and what they share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, get_type_hints

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
from turbopump.cli.output import Output

if TYPE_CHECKING:
    from turbopump.admin.blocking import Admin

P = ParamSpec("P")
_Command: TypeAlias = "Callable[Concatenate[Console, P], None]"


class Console(Output):
    """The administration that a command calls, and the output that it prints to."""

    def __init__(
        self,
        admin: Admin,
        nameserver: str,
        *,
        as_json: bool,
        dry_run: bool = False,
        yes: bool = False,
    ) -> None:
        super().__init__(as_json=as_json)
        self.admin = admin
        self.nameserver = nameserver
        self.is_dry_run = dry_run
        self.is_sure = yes

    def confirm(self, question: str) -> None:
        confirm(question, is_sure=self.is_sure, as_json=self.as_json)


def command(
    app: typer.Typer, name: str | None = None, *, confirms: bool = False
) -> Callable[[_Command[P]], _Command[P]]:
    """Add a command with ``--nameserver`` and ``--json``, called with a `Console`.

    With ``confirms``, it has ``--dry-run`` and ``--yes`` as well. Errors that users can fix become
    a line on stderr and an exit code.

    ::

        @command(app, confirms=True)
        def delete(console: Console, topic: TopicArgument) -> None:
            console.confirm(f"Delete topic {topic}?")
    """

    def add(function: _Command[P]) -> _Command[P]:
        def run(**options: Any) -> None:
            nameserver, as_json = options.pop("nameserver"), options.pop("json")
            flags = {each.name: options.pop(each.name) for each in _CONFIRMING if confirms}
            with administration(nameserver) as admin:
                call: Callable[..., None] = function
                call(Console(admin, nameserver, as_json=as_json, **flags), **options)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        shared = (*_CONFIRMING, *_SHARED) if confirms else _SHARED
        # The signature that typer makes options of, with types instead of their names.
        types = get_type_hints(function, include_extras=True)
        _, *own = inspect.signature(function).parameters.values()
        parameters = [_option(each.name, each.default, types[each.name]) for each in own]
        vars(run)["__signature__"] = inspect.Signature([*parameters, *shared])
        run.__annotations__ = {each.name: each.annotation for each in (*parameters, *shared)}
        app.command(name)(run)
        return function

    return add


def _option(name: str, default: object, annotation: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


_CONFIRMING = (_option("dry_run", False, DryRunOption), _option("yes", False, YesOption))
_SHARED = (
    _option("nameserver", NAMESERVER, NameServerOption),
    _option("json", False, JsonOption),
)
