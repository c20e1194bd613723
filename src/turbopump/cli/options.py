"""Options that several commands share, and settings from options and a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from turbopump.cli.logs import LogFormat, LogLevel
from turbopump.errors import InvalidArgument
from turbopump.settings import Settings, read_settings

SECTIONS = ("nameserver", "broker")
"""Tables of a TOML file, and what precedes a key and a dot in a file of ``key=value`` lines."""

NAMESERVER_VARIABLE = "NAMESRV_ADDR"
"""The environment variable of clients, commands and brokers, as Apache RocketMQ has it."""
DOMAIN_VARIABLE = "ROCKETMQ_NAMESRV_DOMAIN"
"""The host of a URL that returns name servers; used without the other one."""

_PORT_MAX = 0xFFFF


def _parse_port(text: str) -> int:
    # The parser of typer does not say what was given.
    if not text.isdecimal() or int(text) > _PORT_MAX:
        raise typer.BadParameter(f"must be 0–{_PORT_MAX}, got {text!r}")
    return int(text)


def option(help: str, *names: str, **settings: Any) -> Any:  # noqa: A002 - typer's name
    """Declare an option without a default to show: a flag, or one that may be left out."""
    return typer.Option(*names, help=help, show_default=False, **settings)


def _port(default: str) -> Any:
    return typer.Option(
        parser=_parse_port, metavar="PORT", help="0 takes any free port.", show_default=default
    )


HostOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Name or IP address to listen at.", show_default="127.0.0.1")
]
NameServerPortOption: TypeAlias = Annotated[int | None, _port("9876")]
BrokerPortOption: TypeAlias = Annotated[int | None, _port("10911")]
LogLevelOption: TypeAlias = Annotated[
    LogLevel, typer.Option(help="Log messages of this severity and above.")
]
LogFormatOption: TypeAlias = Annotated[
    LogFormat, typer.Option(help="Log lines of text, or JSON objects.")
]
AdvertiseOption: TypeAlias = Annotated[
    str | None,
    option(
        "Host that clients connect to, if it differs.", metavar="HOST", envvar="TURBOPUMP_ADVERTISE"
    ),
]
DirOption: TypeAlias = Annotated[
    Path | None, typer.Option(help="Data directory.", show_default="~/.turbopump")
]
ConfigOption: TypeAlias = Annotated[
    Path | None, option("Configuration file: TOML, or key=value lines.")
]
PrintConfigOption: TypeAlias = Annotated[
    bool, option("Print the resulting settings and exit.", "--print-config")
]


def file_settings(path: Path | None) -> dict[str, str]:
    return {} if path is None else read_settings(path)


def settings_of(section: str, settings: Settings, *, has_plain: bool = True) -> dict[str, str]:
    """Return the settings of one section; with ``has_plain`` those of no section are its as well.

    Raises InvalidArgument for a section that does not exist, so that a misspelled one is noticed.
    """
    found, plain = {}, {}
    for key, value in settings.items():
        owner, dot, name = key.rpartition(".")
        if dot and owner not in SECTIONS:
            raise InvalidArgument(f"{key}: section must be {' or '.join(SECTIONS)}, got {owner}")
        if owner == section:
            found[name] = value
        elif not dot:
            plain[key] = value
    return {**found, **plain} if has_plain else found


def given(**options: object) -> dict[str, str]:
    """Return the options that were given, as settings."""
    return {key: str(value) for key, value in options.items() if value is not None}
