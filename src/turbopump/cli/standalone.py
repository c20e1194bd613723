"""``turbopump standalone``: a name server and a broker in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

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
from turbopump.settings import Settings, configured, described, render_properties
from turbopump.wire.hosts import ANY_HOST

if TYPE_CHECKING:
    from pathlib import Path

    from turbopump.nameserver import NameServerConfig


def standalone(
    dir: DirOption = None,  # noqa: A002 - the option's name
    host: HostOption = None,
    nameserver_port: PortOption = None,
    broker_port: PortOption = None,
    advertise: AdvertiseOption = None,
    config: ConfigOption = None,
    print_config: PrintConfigOption = False,
) -> None:
    """Run a name server and a broker in one process: all that a small system needs."""
    from turbopump.broker.config_keys import as_properties, parse
    from turbopump.cli.life_cycle import reported_errors, serve
    from turbopump.nameserver import NameServerConfig

    with reported_errors():
        from_file = file_settings(config)
        nameserver = configured(
            NameServerConfig,
            {
                **settings_of("nameserver", from_file, has_plain=False),
                **given(kvConfigPath=dir and dir / "namesrv" / "kvConfig.json"),
                **given(bindAddress=host, listenPort=nameserver_port),
            },
        )
        broker = {
            **settings_of("broker", from_file),
            **given(storePathRootDir=dir and dir / "store"),
            **given(bindAddress=host, listenPort=broker_port, brokerIP1=advertise),
        }
        # Before anything is started: a wrong setting must not leave half a system behind.
        checked = parse(broker)
        if print_config:
            _print_sections(nameserver=described(nameserver), broker=as_properties(checked))
            return
        serve(_running(nameserver, broker, config), str)


@asynccontextmanager
async def _running(
    nameserver: NameServerConfig, broker: Settings, config_path: Path | None
) -> AsyncIterator[str]:
    """Run both, and give the line that says so; the broker goes first, to say good-bye."""
    from turbopump.broker.broker import Broker
    from turbopump.broker.config_keys import parse
    from turbopump.cli.life_cycle import ready_line
    from turbopump.nameserver import NameServer
    from turbopump.net.sockets import SocketNetwork

    network = SocketNetwork()
    async with NameServer(nameserver, network) as names:
        own = reachable(names.address)
        config = parse({**broker, "namesrvAddr": _joined(broker.get("namesrvAddr", ""), own)})
        async with Broker(config, network, config_path=config_path) as running:
            yield ready_line(nameserver=names.address, broker=running.address)


def reachable(address: str) -> str:
    """Return an address for this machine to connect to, given one that it listens at."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host.strip("[]") in ANY_HOST else address


def _joined(others: str, own: str) -> str:
    return f"{others};{own}" if others else own


def _print_sections(**sections: Settings) -> None:
    lines = {
        f"{name}.{key}": value for name, each in sections.items() for key, value in each.items()
    }
    typer.echo(render_properties(lines), nl=False)
