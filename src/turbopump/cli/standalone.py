"""``turbopump standalone``: a name server and a broker in one process, or several brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from turbopump.cli.administration import reported
from turbopump.cli.logs import LogFormat, LogLevel, LogSettings
from turbopump.cli.options import (
    AdvertiseOption,
    BrokerPortOption,
    ConfigOption,
    DirOption,
    HostOption,
    LogFormatOption,
    LogLevelOption,
    NameServerPortOption,
    PrintConfigOption,
    file_settings,
    given,
    settings_of,
)
from turbopump.errors import InvalidArgument
from turbopump.settings import Settings, configured, described, render_properties
from turbopump.wire.hosts import ANY_HOST

if TYPE_CHECKING:
    from pathlib import Path

    from turbopump.broker.config import BrokerConfig
    from turbopump.nameserver import NameServerConfig

REPLICAS_MAX = 8
BROKERS_MAX = 64
_PORT_STEP = 10


def standalone(
    dir: DirOption = None,  # noqa: A002 - the option's name
    host: HostOption = None,
    nameserver_port: NameServerPortOption = None,
    broker_port: BrokerPortOption = None,
    advertise: AdvertiseOption = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=0,
            max=REPLICAS_MAX,
            help="Slaves of the broker, each with a copy of everything in a directory of its own.",
        ),
    ] = 0,
    brokers: Annotated[
        int,
        typer.Option(
            min=1,
            max=BROKERS_MAX,
            help="Brokers that share the topics; more than one run as processes of their own.",
        ),
    ] = 1,
    config: ConfigOption = None,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
    print_config: PrintConfigOption = False,
) -> None:
    """Run a name server and a broker in one process, or several brokers in processes."""
    from turbopump.broker.config_keys import as_properties, parse
    from turbopump.cli.life_cycle import serve
    from turbopump.nameserver import NameServerConfig

    with reported():
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
        slaves = [slave_changes(checked, number) for number in range(1, replicas + 1)]
        others = further_brokers(broker, checked, brokers, replicas)
        if print_config:
            sections = {"nameserver": described(nameserver), "broker": as_properties(checked)}
            lines = {f"{name}.{k}": v for name, each in sections.items() for k, v in each.items()}
            typer.echo(render_properties(lines), nl=False)
            return
        log = LogSettings(log_level, log_format)
        if others:
            serve(_running_processes(nameserver, [broker, *others], config, log), str, log=log)
            return
        running = _running(nameserver, broker, slaves, config)
        serve(running, str, log=log, directory=checked.directory)


def further_brokers(
    first: Settings, checked: BrokerConfig, count: int, replicas: int
) -> Sequence[Settings]:
    """Return the settings of the brokers after the first, which is as if it were alone.

    Raises InvalidArgument if one of them cannot run.
    """
    from turbopump.broker.config_keys import parse

    if count > 1 and replicas:
        raise InvalidArgument(
            f"--brokers {count} and --replicas {replicas} cannot be combined; use one of them, or "
            "run each broker with `turbopump broker`"
        )
    if count > 1 and checked.identity.is_slave:
        raise InvalidArgument(f"--brokers {count} needs masters, got brokerRole=SLAVE")
    others = [{**first, **_broker_changes(checked, number)} for number in range(2, count + 1)]
    for each in others:
        parse(each)
    return others


def _broker_changes(first: BrokerConfig, number: int) -> dict[str, str]:
    """Return what is different for a further broker: its name, its directory and its ports."""
    return given(
        brokerName=f"{first.identity.broker_name}-{number}",
        storePathRootDir=first.directory.with_name(f"{first.directory.name}-{number}"),
        **_other_ports(first, number - 1),
    )


def slave_changes(master: BrokerConfig, number: int) -> dict[str, str]:
    """Return what is different for a slave: its role, its directory and its ports."""
    return given(
        brokerRole="SLAVE",
        brokerId=number,
        storePathRootDir=master.directory.with_name(f"{master.directory.name}-slave{number}"),
        **_other_ports(master, number),
    )


def _other_ports(first: BrokerConfig, number: int) -> dict[str, int]:
    """Return the ports of a broker on the same machine; those that may be any stay so."""
    port, filters = first.identity.port, first.filters
    return {
        # Each broker takes three ports: its own, the one after it and the second one before.
        "listenPort": port and port + _PORT_STEP * number,
        "haListenPort": 0,
        "filterServerPort": filters.server_port and filters.server_port + filters.servers * number,
    }


@asynccontextmanager
async def _running(
    nameserver: NameServerConfig,
    broker: Settings,
    slaves: Sequence[Settings],
    config_path: Path | None,
) -> AsyncIterator[str]:
    """Run all, and give the line that says so; brokers end first, to unregister."""
    from turbopump.broker.config_keys import parse
    from turbopump.broker.replicated import ReplicatedBroker
    from turbopump.cli.life_cycle import ready_line
    from turbopump.nameserver import NameServer
    from turbopump.net.sockets import SocketNetwork

    network = SocketNetwork()
    async with AsyncExitStack() as servers:
        names = await servers.enter_async_context(NameServer(nameserver, network))
        own = reachable(names.address)
        common = _with_nameserver(broker, own)
        addresses = []
        for number, changes in enumerate([{}, *slaves]):
            # Changes of settings are written to the master's file only.
            path = None if number else config_path
            running = ReplicatedBroker(parse({**common, **changes}), network, config_path=path)
            addresses.append((await servers.enter_async_context(running)).address)
        master, *others = addresses
        roles = {"broker": master, **({"slave": ",".join(others)} if others else {})}
        yield ready_line(nameserver=names.address, **roles)


@asynccontextmanager
async def _running_processes(
    nameserver: NameServerConfig,
    brokers: Sequence[Settings],
    config_path: Path | None,
    log: LogSettings,
) -> AsyncIterator[str]:
    """Run a name server here and each broker in a process, and give the line that says so."""
    from turbopump.cli.broker_process import BrokerJob, broker_processes
    from turbopump.cli.life_cycle import ready_line
    from turbopump.nameserver import NameServer
    from turbopump.net.sockets import SocketNetwork

    async with NameServer(nameserver, SocketNetwork()) as names:
        own = reachable(names.address)
        jobs = [
            BrokerJob(
                _with_nameserver(each, own),
                log.level,
                log.format,
                # Changes of settings are written to the first broker's file only.
                None if number else config_path,
            )
            for number, each in enumerate(brokers)
        ]
        async with broker_processes(jobs) as addresses:
            yield ready_line(nameserver=names.address, broker=",".join(addresses))


def reachable(address: str) -> str:
    """Return an address for this machine to connect to, given one that it listens at."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host.strip("[]") in ANY_HOST else address


def _with_nameserver(broker: Settings, own: str) -> dict[str, str]:
    """Return the settings of a broker that also registers with the name server of this process."""
    from turbopump.broker.config_keys import parse

    return {**broker, "namesrvAddr": ";".join((*parse(broker).registration.sources, own))}
