"""``turbopump nameserver``."""

from __future__ import annotations

import typer

from turbopump.cli.administration import reported
from turbopump.cli.logs import LogFormat, LogLevel, LogSettings
from turbopump.cli.options import (
    ConfigOption,
    HostOption,
    LogFormatOption,
    LogLevelOption,
    NameServerPortOption,
    PrintConfigOption,
    file_settings,
    given,
    settings_of,
)
from turbopump.settings import is_toml


def nameserver(
    host: HostOption = None,
    port: NameServerPortOption = None,
    config: ConfigOption = None,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
    print_config: PrintConfigOption = False,
) -> None:
    """Run a name server, which routes clients to brokers."""
    from turbopump.cli.life_cycle import ready_line, serve
    from turbopump.nameserver import NameServer, NameServerConfig
    from turbopump.net.sockets import SocketNetwork
    from turbopump.settings import configured, described, render_properties

    with reported():
        settings = {
            # Where changes by requests are written, unless it is TOML.
            **given(configStorePath=config if config and not is_toml(config) else None),
            **settings_of("nameserver", file_settings(config)),
            **given(bindAddress=host, listenPort=port),
        }
        chosen = configured(NameServerConfig, settings)
        if print_config:
            typer.echo(render_properties(described(chosen)), nl=False)
            return
        server = NameServer(chosen, SocketNetwork())
        log = LogSettings(log_level, log_format)
        serve(server, lambda running: ready_line(nameserver=running.address), log=log)
