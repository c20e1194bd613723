"""``turbopump nameserver``."""

from __future__ import annotations

from pathlib import Path

import typer

from turbopump.cli.options import (
    ConfigOption,
    HostOption,
    PortOption,
    PrintConfigOption,
    file_settings,
    given,
    settings_of,
)
from turbopump.settings import is_toml


def nameserver(
    host: HostOption = None,
    port: PortOption = None,
    config: ConfigOption = None,
    print_config: PrintConfigOption = False,
) -> None:
    """Run a name server, which tells clients where topics are."""
    from turbopump.cli.life_cycle import ready_line, reported_errors, serve
    from turbopump.nameserver import NameServer, NameServerConfig
    from turbopump.net.sockets import SocketNetwork
    from turbopump.settings import configured, described, render_properties

    with reported_errors():
        settings = {
            **_store_path(config),
            **settings_of("nameserver", file_settings(config)),
            **given(bindAddress=host, listenPort=port),
        }
        chosen = configured(NameServerConfig, settings)
        if print_config:
            typer.echo(render_properties(described(chosen)), nl=False)
            return
        server = NameServer(chosen, SocketNetwork())
        serve(server, lambda running: ready_line(nameserver=running.address))


def _store_path(config: Path | None) -> dict[str, str]:
    """Let changes made from afar go into the file that the settings came from, if they can."""
    return {} if config is None or is_toml(config) else {"configStorePath": str(config)}
