"""``turbopump broker``."""

from __future__ import annotations

from typing import Annotated

import typer

from turbopump.cli.options import (
    AdvertiseOption,
    ConfigOption,
    DirOption,
    HostOption,
    PortOption,
    PrintConfigOption,
    file_settings,
    given,
    settings_of,
)


def broker(
    dir: DirOption = None,  # noqa: A002 - the option's name
    host: HostOption = None,
    port: PortOption = None,
    advertise: AdvertiseOption = None,
    nameserver: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT;...", help="Name servers to register with.", show_default=False
        ),
    ] = None,
    config: ConfigOption = None,
    print_config: PrintConfigOption = False,
) -> None:
    """Run a broker, which keeps messages and hands them out."""
    from turbopump.broker.broker import Broker
    from turbopump.broker.config_keys import as_properties, parse
    from turbopump.cli.life_cycle import ready_line, reported_errors, serve
    from turbopump.net.sockets import SocketNetwork
    from turbopump.settings import render_properties

    with reported_errors():
        chosen = parse(
            {
                **settings_of("broker", file_settings(config)),
                **given(storePathRootDir=dir and dir / "store"),
                **given(bindAddress=host, listenPort=port, namesrvAddr=nameserver),
                **given(brokerIP1=advertise),
            }
        )
        if print_config:
            typer.echo(render_properties(as_properties(chosen)), nl=False)
            return
        server = Broker(chosen, SocketNetwork(), config_path=config)
        serve(server, lambda running: ready_line(broker=running.address))
