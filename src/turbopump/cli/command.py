"""Commands that administer a cluster: the options that all of them have, and what they share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeAlias, get_type_hints

import typer
from typer.core import TyperCommand

from turbopump.cli.administration import (
    NAMESERVER,
    DryRunOption,
    JsonOption,
    NameServerOption,
    YesOption,
    administration,
    confirm,
    local_now,
)
from turbopump.cli.formats import format_time, printable
from turbopump.cli.options import option
from turbopump.cli.output import Output, is_terminal
from turbopump.errors import InvalidArgument, TurbopumpError

if TYPE_CHECKING:
    from typer._click import Context

    from turbopump.admin.blocking import Admin

P = ParamSpec("P")
_Command: TypeAlias = "Callable[Concatenate[Console, P], None]"

_WATCH = "--watch"
_WATCH_S = 2.0
_WATCH_MIN_S = 0.1
_WATCH_MAX_S = 86_400
_CLEAR = "\x1b[2J\x1b[H"


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
        self._watch_s: float | None = None

    def watch(self, seconds: float, show: Callable[[], None]) -> None:
        """Call a function that prints a status again and again, until Ctrl-C."""
        if not _WATCH_MIN_S <= seconds <= _WATCH_MAX_S:
            limits = f"{_WATCH_MIN_S}–{_WATCH_MAX_S}"
            raise InvalidArgument(f"{_WATCH} must be {limits}, got {seconds:g}")
        self._watch_s = seconds
        is_known = False
        with suppress(KeyboardInterrupt):
            while True:
                try:
                    # A command's own exit code is for scripts that ask once.
                    with suppress(typer.Exit):
                        show()
                    is_known = True
                except BrokenPipeError:
                    raise
                except (TurbopumpError, OSError) as error:
                    if not is_known:
                        raise
                    # A server that restarts, for example: the next round may find it.
                    typer.echo(f"turbopump: {printable(str(error))}", err=True)
                sys.stdout.flush()
                sleep(seconds)

    def _begin(self) -> None:
        """Print what separates the rounds of a status that is watched."""
        if self._watch_s is None:
            return
        now = format_time(int(local_now().timestamp() * 1000))
        every = f"{self._watch_s:g} s"
        clear = _CLEAR if is_terminal(sys.stdout) else ""
        typer.echo(f"{clear}{now}, every {every}; Ctrl-C stops")

    def confirm(self, question: str) -> None:
        confirm(question, is_sure=self.is_sure, as_json=self.as_json)


def command(
    app: typer.Typer, name: str | None = None, *, confirms: bool = False, watches: bool = False
) -> Callable[[_Command[P]], _Command[P]]:
    """Add a command with ``--nameserver`` and ``--json``, called with a `Console`.

    With ``confirms``, it has ``--dry-run`` and ``--yes`` as well, with ``watches`` ``--watch``.
    Errors that users can fix become a line on stderr and an exit code.

    ::

        @command(app, confirms=True)
        def delete(console: Console, topic: TopicArgument) -> None:
            console.confirm(f"Delete topic {topic}?")
    """

    def add(function: _Command[P]) -> _Command[P]:
        def run(**options: Any) -> None:
            nameserver, as_json = options.pop("nameserver"), options.pop("json")
            flags = {each.name: options.pop(each.name) for each in _CONFIRMING if confirms}
            watch_s: float | None = options.pop("watch", None)
            with administration(nameserver) as admin:
                call: Callable[..., None] = function
                console = Console(admin, nameserver, as_json=as_json, **flags)
                if watch_s is None:
                    call(console, **options)
                else:
                    console.watch(watch_s, partial(call, console, **options))

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        shared = (
            *(_CONFIRMING if confirms else ()),
            *((_WATCHING,) if watches else ()),
            *_SHARED,
        )
        # The signature that typer makes options of, with types instead of their names.
        types = get_type_hints(function, include_extras=True)
        _, *own = inspect.signature(function).parameters.values()
        parameters = [_option(each.name, each.default, types[each.name]) for each in own]
        vars(run)["__signature__"] = inspect.Signature([*parameters, *shared])
        run.__annotations__ = {each.name: each.annotation for each in (*parameters, *shared)}
        app.command(name, cls=_WatchedCommand if watches else None)(run)
        return function

    return add


class _WatchedCommand(TyperCommand):
    """A command whose ``--watch`` may be given without a value."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        found = []
        for word, following in zip_longest(args, args[1:], fillvalue=""):
            is_bare = word == _WATCH and not _is_number(following)
            found.append(f"{_WATCH}={_WATCH_S:g}" if is_bare else word)
        return super().parse_args(ctx, found)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _option(name: str, default: object, annotation: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


_CONFIRMING = (_option("dry_run", False, DryRunOption), _option("yes", False, YesOption))
_WATCHING = _option(
    "watch",
    None,
    Annotated[
        float | None,
        option(
            f"Repeat every {_WATCH_S:g} s, or every SECONDS, until Ctrl-C.",
            _WATCH,
            metavar="[SECONDS]",
        ),
    ],
)
_SHARED = (
    _option("nameserver", NAMESERVER, NameServerOption),
    _option("json", False, JsonOption),
)
