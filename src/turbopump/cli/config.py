"""``turbopump config``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbopump.cli.administration import (
    BrokerArgument,
    BrokerOption,
    ClusterOption,
    complete_broker_key,
    complete_broker_setting,
    complete_nameserver_key,
    complete_nameserver_setting,
)
from turbopump.cli.command import Console, command
from turbopump.cli.formats import parse_pairs
from turbopump.cli.options import option
from turbopump.cli.output import Column, Output, columns, row_of
from turbopump.errors import InvalidArgument

if TYPE_CHECKING:
    from turbopump.admin import SettingChange

app = typer.Typer()

Completion = Callable[[typer.Context, str], list[str]]


def _keys(completion: Completion) -> Any:
    return typer.Argument(
        help="Only these settings.", metavar="[KEY]...", autocompletion=completion
    )


def _settings(completion: Callable[..., list[str]]) -> Any:
    return typer.Argument(
        help="Settings and their new values.", metavar="KEY=VALUE...", autocompletion=completion
    )


NamespaceArgument = Annotated[str, typer.Argument(help="Namespace of key-values.")]

_SETTINGS = columns("server key value")
_CHANGES = columns("server key old new is_stored=STORED")
_BROKER_CHANGES = (*columns("server=BROKER broker_id=ID:number address"), *_CHANGES[1:])
_KEY_VALUES = columns("key value")


@command(app)
def broker(
    console: Console,
    name: BrokerArgument,
    key: Annotated[list[str] | None, _keys(complete_broker_key)] = None,
    replica: Annotated[int, option("Id of the slave to ask; 0 is the master.", min=0)] = 0,
) -> None:
    """Show the settings of a broker."""
    found = {name: console.admin.configuration.broker(name, replica)}
    server = f"slave {replica} of {name}" if replica else f"broker {name}"
    _print_settings(server, found, key or (), console)


@command(app)
def nameservers(
    console: Console, key: Annotated[list[str] | None, _keys(complete_nameserver_key)] = None
) -> None:
    """Show the settings of the name servers."""
    found = console.admin.configuration.name_servers()
    _print_settings(f"name server {', '.join(found)}", found, key or (), console)


@command(app, confirms=True)
def update_broker(
    console: Console,
    settings: Annotated[list[str], _settings(complete_broker_setting)],
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    replica: Annotated[
        str,
        option("Id of the slaves to change, 0 for masters, all for both.", metavar="ID|all"),
    ] = "0",
) -> None:
    """Change settings of brokers while they run: of all, of a cluster, or of one.

    Slaves have settings of their own, which --replica changes.
    """
    change = console.admin.configuration.change_brokers
    chosen = partial(change, broker=broker, cluster=cluster, broker_id=_broker_id(replica))
    _update(console, settings, chosen, _BROKER_CHANGES)


@command(app, confirms=True)
def update_nameservers(
    console: Console, settings: Annotated[list[str], _settings(complete_nameserver_setting)]
) -> None:
    """Change settings of all name servers while they run."""
    _update(console, settings, console.admin.configuration.change_name_servers, _CHANGES)


@command(app)
def kv(
    console: Console,
    namespace: NamespaceArgument,
    key: Annotated[str | None, typer.Argument(help="Only this key.")] = None,
) -> None:
    """Show key-values that name servers keep."""
    if key is None:
        found = console.admin.configuration.key_values(namespace)
    else:
        found = {key: console.admin.configuration.key_value(namespace, key)}
    rows = [{"key": name, "value": value} for name, value in sorted(found.items())]
    nothing = f"Namespace {namespace} has no key-values."
    console.rows(rows, _KEY_VALUES, nothing=nothing)


@command(app)
def put_kv(
    console: Console,
    namespace: NamespaceArgument,
    key: Annotated[str, typer.Argument(help="The key.")],
    value: Annotated[str, typer.Argument(help="Its new value.")],
) -> None:
    """Write a key-value to all name servers."""
    console.admin.configuration.put_key_value(namespace, key, value)
    row = {"namespace": namespace, "key": key, "value": value}
    console.done(row, f"Set {namespace} {key} to {value}.")


@command(app, confirms=True)
def delete_kv(
    console: Console,
    namespace: NamespaceArgument,
    key: Annotated[str, typer.Argument(help="The key.")],
) -> None:
    """Delete a key-value from all name servers."""
    value = console.admin.configuration.key_value(namespace, key)
    row = {"namespace": namespace, "key": key, "value": value, "dry_run": console.is_dry_run}
    if console.is_dry_run:
        console.done(row, f"Would delete {namespace} {key}, currently {value}.")
        return
    console.confirm(f"Delete {namespace} {key}, currently {value}?")
    console.admin.configuration.delete_key_value(namespace, key)
    console.done(row, f"Deleted {namespace} {key}.")


def _broker_id(text: str) -> int | None:
    if text != "all" and not text.isdecimal():
        raise InvalidArgument(f"--replica must be the id of a broker, or all, got {text!r}")
    return None if text == "all" else int(text)


def _print_settings(
    server: str, found: dict[str, dict[str, str]], keys: Sequence[str], output: Output
) -> None:
    from turbopump.admin.configuration import unknown_setting

    known = {key for settings in found.values() for key in settings}
    for key in keys:
        if key not in known:
            raise unknown_setting(server, key, known)
    rows = [
        {"server": server, "key": key, "value": settings[key]}
        for server, settings in found.items()
        for key in sorted(settings)
        if not keys or key in keys
    ]
    output.rows(rows, _SETTINGS, nothing="No settings.")


def _update(
    console: Console,
    settings: list[str],
    change: Callable[..., Sequence[SettingChange]],
    shown: Sequence[Column],
) -> None:
    wanted = parse_pairs(settings, "setting")
    changes = change(wanted, dry_run=True)
    if _is_confirmed(changes, console, shown):
        done = change(wanted)
        is_shown = not console.is_sure and done == changes
        _print_result(done, console, shown, is_shown=is_shown)


def _is_confirmed(
    changes: Sequence[SettingChange], console: Console, shown: Sequence[Column]
) -> bool:
    """Show what would change and ask; False when there is nothing (more) to do."""
    if console.is_dry_run or not changes:
        nothing = (
            "Nothing would change."
            if console.is_dry_run
            else "Nothing changed: the settings already have these values."
        )
        _print_changes(changes, console, shown, is_done=False, nothing=nothing)
        return False
    if not console.is_sure and not console.as_json:
        _print_changes(changes, console, shown, is_done=False)
    console.confirm(f"Change {len(changes)} settings?")
    return True


def _print_result(
    changes: Sequence[SettingChange], output: Output, shown: Sequence[Column], *, is_shown: bool
) -> None:
    """Print what servers report after a change."""
    if output.as_json or not is_shown:
        nothing = "Nothing changed: the servers already had these values."
        _print_changes(changes, output, shown, is_done=True, nothing=nothing)
    if not output.as_json and changes:
        typer.echo(_lasting(changes))


def _lasting(changes: Sequence[SettingChange]) -> str:
    """Say which changes survive a restart."""
    lost = sorted({_name(each) for each in changes if each.is_stored is False})
    if lost:
        return (
            f"Changed until the next restart of {', '.join(lost)}: started without a --config file "
            "of key=value lines, which would keep the change."
        )
    is_known = all(each.is_stored for each in changes)
    return "Changed, and stored in the configuration file." if is_known else "Changed."


def _name(change: SettingChange) -> str:
    return f"slave {change.broker_id} of {change.server}" if change.broker_id else change.server


def _print_changes(
    changes: Sequence[SettingChange],
    output: Output,
    shown: Sequence[Column],
    *,
    is_done: bool,
    nothing: str = "",
) -> None:
    rows = [{**row_of(each), "is_done": is_done} for each in changes]
    output.rows(rows, shown, nothing=nothing)
