"""``turbopump config``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from turbopump.cli.administration import (
    NAMESERVER,
    ClusterOption,
    DryRunOption,
    JsonOption,
    NameServerOption,
    YesOption,
    administration,
    confirm,
)
from turbopump.cli.formats import parse_pairs
from turbopump.cli.output import Column, Output

if TYPE_CHECKING:
    from turbopump.admin import SettingChange

app = typer.Typer()

KeysArgument = Annotated[
    list[str] | None, typer.Argument(help="Only these settings.", metavar="[KEY]...")
]
SettingsArgument = Annotated[
    list[str], typer.Argument(help="Settings and their new values.", metavar="KEY=VALUE...")
]
NamespaceArgument = Annotated[str, typer.Argument(help="Namespace of key-values.")]

_SETTINGS = (
    Column("server", "SERVER"),
    Column("key", "KEY"),
    Column("value", "VALUE"),
)
_CHANGES = (
    Column("server", "SERVER"),
    Column("key", "KEY"),
    Column("old", "OLD"),
    Column("new", "NEW"),
)
_KEY_VALUES = (Column("key", "KEY"), Column("value", "VALUE"))


@app.command()
def broker(
    name: Annotated[str, typer.Argument(help="Name of the broker.")],
    key: KeysArgument = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Show the settings of a broker."""
    with administration(nameserver) as admin:
        found = {name: admin.configuration.broker(name)}
    _print_settings(found, key or (), Output(as_json=json))


@app.command()
def nameservers(
    key: KeysArgument = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Show the settings of the name servers."""
    with administration(nameserver) as admin:
        found = admin.configuration.name_servers()
    _print_settings(found, key or (), Output(as_json=json))


@app.command()
def update_broker(
    settings: SettingsArgument,
    broker: Annotated[
        str | None, typer.Option(help="Only this broker.", show_default=False)
    ] = None,
    cluster: ClusterOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Change settings of brokers while they run: of all, of a cluster, or of one."""
    with administration(nameserver) as admin:
        wanted = parse_pairs(settings, "setting")
        output = Output(as_json=json)
        changes = admin.configuration.change_brokers(
            wanted, broker=broker, cluster=cluster, dry_run=True
        )
        if _is_confirmed(changes, output, dry_run=dry_run, yes=yes):
            done = admin.configuration.change_brokers(wanted, broker=broker, cluster=cluster)
            _tell_changed(done, output, is_shown=not yes and done == changes)


@app.command()
def update_nameservers(
    settings: SettingsArgument,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Change settings of all name servers while they run."""
    with administration(nameserver) as admin:
        wanted = parse_pairs(settings, "setting")
        output = Output(as_json=json)
        changes = admin.configuration.change_name_servers(wanted, dry_run=True)
        if _is_confirmed(changes, output, dry_run=dry_run, yes=yes):
            done = admin.configuration.change_name_servers(wanted)
            _tell_changed(done, output, is_shown=not yes and done == changes)


@app.command()
def kv(
    namespace: NamespaceArgument,
    key: Annotated[str | None, typer.Argument(help="Only this key.")] = None,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Show key-values that name servers keep."""
    with administration(nameserver) as admin:
        if key is None:
            found = admin.configuration.key_values(namespace)
        else:
            found = {key: admin.configuration.key_value(namespace, key)}
    rows = [{"key": name, "value": value} for name, value in sorted(found.items())]
    nothing = f"Namespace {namespace} has no key-values."
    Output(as_json=json).rows(rows, _KEY_VALUES, nothing=nothing)


@app.command()
def put_kv(
    namespace: NamespaceArgument,
    key: Annotated[str, typer.Argument(help="The key.")],
    value: Annotated[str, typer.Argument(help="Its new value.")],
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Write a key-value to all name servers."""
    with administration(nameserver) as admin:
        admin.configuration.put_key_value(namespace, key, value)
    row = {"namespace": namespace, "key": key, "value": value}
    Output(as_json=json).done(row, f"Set {namespace} {key} to {value}.")


@app.command()
def delete_kv(
    namespace: NamespaceArgument,
    key: Annotated[str, typer.Argument(help="The key.")],
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    nameserver: NameServerOption = NAMESERVER,
    json: JsonOption = False,
) -> None:
    """Delete a key-value from all name servers."""
    with administration(nameserver) as admin:
        output = Output(as_json=json)
        value = admin.configuration.key_value(namespace, key)
        row = {"namespace": namespace, "key": key, "value": value, "dry_run": dry_run}
        if dry_run:
            output.done(row, f"Would delete {namespace} {key}, currently {value}.")
            return
        confirm(f"Delete {namespace} {key}, currently {value}?", is_sure=yes, as_json=json)
        admin.configuration.delete_key_value(namespace, key)
    output.done(row, f"Deleted {namespace} {key}.")


# --- inside ---------------------------------------------------------------------------------------


def _print_settings(found: dict[str, dict[str, str]], keys: Sequence[str], output: Output) -> None:
    from turbopump.admin.servers import not_found
    from turbopump.cli.administration import reported

    known = {key for settings in found.values() for key in settings}
    with reported():
        for key in keys:
            if key not in known:
                raise not_found("setting", key, known)
    rows = [
        {"server": server, "key": key, "value": settings[key]}
        for server, settings in found.items()
        for key in sorted(settings)
        if not keys or key in keys
    ]
    output.rows(rows, _SETTINGS, nothing="No settings.")


def _is_confirmed(
    changes: Sequence[SettingChange], output: Output, *, dry_run: bool, yes: bool
) -> bool:
    """Show what would change and ask; False when there is nothing (more) to do."""
    if dry_run or not changes:
        nothing = (
            "Nothing would change."
            if dry_run
            else "Nothing changed: the settings already have these values."
        )
        _print_changes(changes, output, is_done=False, nothing=nothing)
        return False
    if not yes and not output.as_json:
        _print_changes(changes, output, is_done=False)
    confirm(f"Change {len(changes)} settings?", is_sure=yes, as_json=output.as_json)
    return True


def _tell_changed(changes: Sequence[SettingChange], output: Output, *, is_shown: bool) -> None:
    """Print what servers report after a change."""
    if output.as_json or not is_shown:
        nothing = "Nothing changed: the servers already had these values."
        _print_changes(changes, output, is_done=True, nothing=nothing)
    if not output.as_json and changes:
        typer.echo(_lasting(changes))


def _lasting(changes: Sequence[SettingChange]) -> str:
    """Say which changes survive a restart."""
    lost = sorted({each.server for each in changes if each.is_stored is False})
    if lost:
        return (
            f"Changed until the next restart of {', '.join(lost)}: started without a --config file "
            "of key=value lines, which would keep the change."
        )
    is_known = all(each.is_stored for each in changes)
    return "Changed, and stored in the configuration file." if is_known else "Changed."


def _print_changes(
    changes: Sequence[SettingChange], output: Output, *, is_done: bool, nothing: str = ""
) -> None:
    rows = [
        {
            "server": each.server,
            "key": each.key,
            "old": each.old,
            "new": each.new,
            "is_stored": each.is_stored,
            "is_done": is_done,
        }
        for each in changes
    ]
    output.rows(rows, _CHANGES, nothing=nothing)
