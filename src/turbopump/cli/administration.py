"""What all commands for daily work share: options, the connection, errors with advice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from turbopump.cli.formats import parse_time, printable
from turbopump.cli.options import NAMESERVER_VARIABLE, option
from turbopump.errors import (
    AlreadyThere,
    ConnectFailed,
    InvalidArgument,
    NoBroker,
    NoNameServer,
    NotThere,
    RemoteError,
    StillInUse,
    TurbopumpError,
)
from turbopump.wire.codes import ResponseCode

if TYPE_CHECKING:
    from datetime import datetime

    from turbopump.admin import Destination
    from turbopump.admin.blocking import Admin

NAMESERVER = "127.0.0.1:9876"

FAILED = 1
BAD_INPUT = 2

NameServerOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--nameserver",
        envvar=NAMESERVER_VARIABLE,
        metavar="HOST:PORT;...",
        help="Addresses of the name servers, or the URL that returns them.",
    ),
]
JsonOption: TypeAlias = Annotated[bool, option("Print JSON instead of tables.", "--json")]
YesOption: TypeAlias = Annotated[bool, option("Do not ask for confirmation.", "--yes", "-y")]
DryRunOption: TypeAlias = Annotated[
    bool, option("Show what would be done without doing it.", "--dry-run")
]


def complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, lambda admin: admin.topics.names())


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    from turbopump.broker.groups import is_internal_group

    def names(admin: Admin) -> list[str]:
        found = [each.settings.group for each in admin.groups.list()]
        return [name for name in found if not is_internal_group(name)]

    return _names(ctx, incomplete, names)


def complete_broker(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(
        ctx,
        incomplete,
        lambda admin: [name for each in admin.clusters.list() for name in each.brokers],
    )


def complete_broker_key(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a setting of the broker that is the argument before it."""
    broker = ctx.params.get("name") or ""
    return _names(ctx, incomplete, lambda admin: sorted(admin.configuration.broker(broker)))


def complete_broker_setting(incomplete: str) -> list[str]:
    """Complete a setting that takes effect while a broker runs."""
    from turbopump.broker.config_keys import SETTINGS

    return [f"{each.key}=" for each in SETTINGS if each.live and each.key.startswith(incomplete)]


def complete_nameserver_key(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, _nameserver_keys)


def complete_nameserver_setting(ctx: typer.Context, incomplete: str) -> list[str]:
    return [f"{key}=" for key in complete_nameserver_key(ctx, incomplete)]


def _nameserver_keys(admin: Admin) -> list[str]:
    return sorted({key for each in admin.configuration.name_servers().values() for key in each})


TopicArgument: TypeAlias = Annotated[
    str, typer.Argument(help="Name of the topic.", autocompletion=complete_topic)
]
GroupArgument: TypeAlias = Annotated[
    str, typer.Argument(help="Name of the consumer group.", autocompletion=complete_group)
]
BrokerArgument: TypeAlias = Annotated[
    str, typer.Argument(help="Name of the broker.", autocompletion=complete_broker)
]
BrokerOption: TypeAlias = Annotated[
    str | None, option("Only on this broker.", autocompletion=complete_broker)
]
ClusterOption: TypeAlias = Annotated[str | None, option("Only in this cluster.")]
TagsOption: TypeAlias = Annotated[
    str, typer.Option(metavar="EXPRESSION", help="Only with these tags, as 'created || paid'.")
]
RedriveToOption: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="origin|retry|TOPIC",
        help="To the topic it came from, the group's retries, or a topic.",
    ),
]
AgainOption: TypeAlias = Annotated[
    bool, option("Also letters that were redriven before.", "--again")
]


@contextmanager
def administration(nameserver: str) -> Iterator[Admin]:
    """Connect; report failures on stderr with advice and an exit code."""
    from turbopump.admin.blocking import Admin

    with reported(), Admin(nameserver) as admin:
        yield admin


@contextmanager
def reported() -> Iterator[None]:
    """Turn errors that users can fix into lines on stderr and an exit code."""
    try:
        yield
    except InvalidArgument as error:
        _fail(error, BAD_INPUT)
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does.
        raise
    except UnicodeEncodeError as error:
        # Bytes on the command line that are not UTF-8 get here as half characters.
        _fail(
            InvalidArgument(f"arguments other than the body must be UTF-8, got {error.object!r}"),
            BAD_INPUT,
        )
    except (TurbopumpError, OSError) as error:
        _fail(error, FAILED)


def confirm(question: str, *, is_sure: bool, as_json: bool) -> None:
    """Ask for confirmation; without a terminal, raise an error that names the options to pass."""
    if is_sure:
        return
    if as_json or not is_interactive():
        raise InvalidArgument(
            f"{question} No terminal to confirm on; pass --yes to proceed, or --dry-run to see "
            "what it would do"
        )
    typer.confirm(question, abort=True)


def require_range(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise InvalidArgument unless a number is in a range."""
    if value < least or (most is not None and value > most):
        expected = f"at least {least}" if most is None else f"{least}–{most}"
        raise InvalidArgument(f"{name} must be {expected}, got {value}")


def is_interactive() -> bool:
    """Whether a user can answer on a terminal."""
    return sys.stdin.isatty()


def local_now() -> datetime:
    from datetime import datetime

    return datetime.now().astimezone()


def parse_times(since: str | None, until: str | None) -> tuple[datetime | None, datetime | None]:
    """Parse ``--since`` and ``--until``; None for what was not given."""
    now = local_now()
    begin = None if since is None else parse_time(since, now)
    return begin, None if until is None else parse_time(until, now)


def destination(text: str) -> Destination | str:
    """Return where `RedriveToOption` sends dead letters."""
    from turbopump.admin import Destination

    return Destination(text) if text in {each.value for each in Destination} else text


def advice(error: Exception) -> str | None:
    """Say what to do next."""
    match error:
        case NoNameServer():
            return (
                f"Check the address (--nameserver HOST:PORT or {NAMESERVER_VARIABLE}), or start a "
                "name server with `turbopump standalone`."
            )
        case NoBroker():
            return (
                "Start a broker, or wait: brokers that run register every 30 s. `turbopump cluster"
                " status` shows them."
            )
        case NotThere():
            return _where_to_look(error.kind, error.name)
        case AlreadyThere():
            return "Use `update` to change it."
        case StillInUse():
            return "Stop its members first; `turbopump group members` lists them."
        case ConnectFailed():
            return "`turbopump cluster status` shows which brokers answer."
        case RemoteError(code=ResponseCode.NO_PERMISSION):
            return (
                "`turbopump topic route` and `turbopump group list` show permissions; change them "
                "with `topic update --permission` and `group update --consume`."
            )
        case _:
            return None


def _where_to_look(kind: str, name: str) -> str | None:
    match kind:
        case "topic" | "group":
            return (
                f"`turbopump {kind} list` lists those of the brokers that run; `turbopump {kind}"
                f" create {name}` creates it."
            )
        case "master broker":
            return (
                "`turbopump cluster status` shows which brokers have none; `turbopump broker"
                " promote` makes a slave one."
            )
        case "cluster" | "broker":
            return "`turbopump cluster list` lists all."
        case "message":
            return "No topic has a message with this id; brokers delete old messages."
        case _ if kind.startswith("message of topic"):
            return "Brokers delete old messages; `turbopump message query` finds others."
        case _:
            return None


def _fail(error: Exception, code: int) -> None:
    text = "\n".join(printable(line) for line in str(error).splitlines())
    typer.echo(f"turbopump: {text}", err=True)
    next_step = advice(error)
    if next_step is not None:
        typer.echo(f"  {next_step}", err=True)
    raise typer.Exit(code) from error


def _names(ctx: typer.Context, incomplete: str, ask: Callable[[Admin], Sequence[str]]) -> list[str]:
    """Complete names; any failure just means no completion."""
    from turbopump.admin.blocking import Admin
    from turbopump.net.name_server_list import nameserver_from_environment

    try:
        nameserver = ctx.params.get("nameserver") or nameserver_from_environment() or NAMESERVER
        with Admin(nameserver) as admin:
            return [name for name in ask(admin) if name.startswith(incomplete)]
    except (TurbopumpError, OSError):
        return []
