"""Cluster address, client identity and intervals: settings shared by producers and consumers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from random import Random

from turbopump.client.arguments import checked_hooks, joined_addresses
from turbopump.durations import Duration, set_duration
from turbopump.errors import InvalidArgument
from turbopump.machine.process import process_id
from turbopump.net.limits import require_at_least
from turbopump.net.name_server_list import (
    ADDRESSES_VARIABLE,
    check_source,
    nameserver_from_environment,
)
from turbopump.net.request_protocol import RequestHook
from turbopump.net.tls import ClientTls

_TEST_NET_ADDRESS = ("192.0.2.1", 9)
"""A documentation address: the source address of its route is this machine's own."""


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """The cluster's address, this client's identity and its intervals.

    ::

        ClientConfig("10.0.0.1:9876;10.0.0.2:9876", namespace="staging")
    """

    nameserver: str | Sequence[str] = ""
    """Addresses of name servers, ``host:port;host:port`` or a list, or the URL that returns them,
    ``http://host/path``; if empty, taken from the environment variable ``NAMESRV_ADDR`` or
    ``ROCKETMQ_NAMESRV_DOMAIN``."""

    namespace: str = ""
    """Prefix of topic and group names, so that several systems can share a cluster."""

    instance: str = ""
    """The second half of the client id; if empty, a unique one is generated."""

    host: str = ""
    """The first half of the client id, normally this machine's IP address; if empty, detected."""

    tls: ClientTls | None = None
    """None connects without TLS."""

    request_timeout: Duration = 3
    """For everything except sending and pulling: routes, heartbeats, offsets, locks."""

    route_interval: Duration = 30
    """How often routes are refreshed from the name servers."""

    heartbeat_interval: Duration = 30
    persist_interval: Duration = 5
    """How often consumers commit their offsets."""

    requests_in_flight_max: int = 4096
    """Requests in flight per connection; further ones wait, which slows down fast senders."""

    request_hooks: Sequence[RequestHook] = field(default=(), compare=False)
    """Hooks around every request, for instance to sign it."""

    unit_name: str = ""
    """The unit of a deployment in units, appended to the client id."""

    unit_mode: bool = False
    """Whether sends and heartbeats say that this client belongs to a unit: the topics that they
    create are then marked as topics of units."""

    request_timeout_ms: int = field(init=False, repr=False, compare=False)
    route_interval_ms: int = field(init=False, repr=False, compare=False)
    heartbeat_interval_ms: int = field(init=False, repr=False, compare=False)
    persist_interval_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A list is stored as text, since members with equal configurations share a session.
        object.__setattr__(self, "nameserver", joined_addresses(self.nameserver))
        hooks = checked_hooks(
            "request_hooks", self.request_hooks, "before_request", "after_response"
        )
        object.__setattr__(self, "request_hooks", hooks)
        for source in self.nameserver_addresses:
            check_source(source)
        require_at_least("requests_in_flight_max", self.requests_in_flight_max, 1)
        for name in ("request_timeout", "route_interval", "heartbeat_interval", "persist_interval"):
            set_duration(self, name)
        for name in ("namespace", "instance", "host", "unit_name"):
            text: object = getattr(self, name)
            if not isinstance(text, str):
                raise InvalidArgument(f"{name} must be a string, got {text!r}")
            if any(mark.isspace() or mark == "@" for mark in text):
                raise InvalidArgument(f"{name} must have no blanks and no @, got {text!r}")
        if not isinstance(self.unit_mode, bool):
            raise InvalidArgument(f"unit_mode must be a bool, got {self.unit_mode!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClientConfig) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        compared = (getattr(self, each.name) for each in fields(self) if each.compare)
        # Hooks by identity: they may have state, and need not be hashable.
        return *compared, *map(id, self.request_hooks)

    @property
    def nameserver_addresses(self) -> tuple[str, ...]:
        """The addresses, and URLs, as a list; raises InvalidArgument if none is configured."""
        text = joined_addresses(self.nameserver) or nameserver_from_environment()
        addresses = tuple(part.strip() for part in text.split(";") if part.strip())
        if not addresses:
            raise InvalidArgument(
                f"nameserver must be host:port;host:port, got {self.nameserver!r}; pass it, or set "
                f"{ADDRESSES_VARIABLE}"
            )
        return addresses


def client_id(config: ClientConfig, random: Random) -> str:
    """Return ``host@instance`` or ``host@instance@unit``, filling in what is left open."""
    instance = config.instance or f"{process_id()}#{random.randrange(10**12)}"
    parts = [config.host or own_address(), instance, config.unit_name]
    return "@".join(part for part in parts if part)


def own_address() -> str:
    """Return this machine's own IP address, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(_TEST_NET_ADDRESS)
        except OSError:
            return "127.0.0.1"
        return str(asking.getsockname()[0])
