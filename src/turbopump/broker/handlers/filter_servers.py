"""Filter servers that register with the broker (301), for routes to carry their addresses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from turbopump.broker.config import FiltersConfig, IdentityConfig
from turbopump.clock import Clock
from turbopump.errors import InvalidArgument, RemoteError
from turbopump.net.connection import Connection
from turbopump.net.router import Handler, not_supported
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command
from turbopump.wire.headers import FilterServerAnswer, RegisterFilterServer
from turbopump.wire.hosts import split_address

_log = logging.getLogger(__name__)

EXPIRY_MS = 30_000
"""A filter server that does not register again for this long is forgotten."""
SWEEP_MS = 10_000
_SERVERS_MAX = 256
_ADDRESS_CHARS_MAX = 255


@dataclass(eq=False)
class FilterServers:
    """The filter servers that have registered (301), for routes to carry."""

    config: FiltersConfig
    identity: IdentityConfig
    clock: Clock
    on_change: Callable[[list[str]], None]

    def __post_init__(self) -> None:
        self._registered: dict[str, tuple[Connection, int]] = {}

    def handlers(self) -> dict[int, Handler]:
        handler = self._register if self.config.servers else not_supported
        return {RequestCode.REGISTER_FILTER_SERVER: handler}

    def sweep(self) -> None:
        """Forget those that have been silent for too long."""
        before_ms = self.clock.monotonic_ms() - EXPIRY_MS
        self._forget([a for a, (_, seen_ms) in self._registered.items() if seen_ms < before_ms])

    def connection_closed(self, closed: Connection) -> None:
        self._forget([a for a, (peer, _) in self._registered.items() if peer is closed])

    def _register(self, request: Command, peer: Connection) -> Command:
        header = RegisterFilterServer.from_ext_fields(request.ext_fields)
        address = _checked(header.filter_server_addr)
        is_new = address not in self._registered
        if is_new and len(self._registered) >= _SERVERS_MAX:
            raise RemoteError.system(f"{_SERVERS_MAX} filter servers are registered already")
        self._registered[address] = peer, self.clock.monotonic_ms()
        if is_new:
            _log.info("filter server %s registered", address)
            self.on_change(sorted(self._registered))
        answer = FilterServerAnswer(
            broker_name=self.identity.broker_name, broker_id=self.identity.broker_id
        )
        return request.answer(ResponseCode.SUCCESS, answer)

    def _forget(self, addresses: list[str]) -> None:
        for address in addresses:
            _log.warning("filter server %s removed", address)
            del self._registered[address]
        if addresses:
            self.on_change(sorted(self._registered))


def _checked(address: str) -> str:
    try:
        host, port = split_address(address)
    except InvalidArgument as error:
        raise RemoteError.system(f"filterServerAddr: {error}") from error
    is_plain = address.isascii() and address.isprintable() and not set(address) & set(" ,;")
    if not port or not host or not is_plain or len(address) > _ADDRESS_CHARS_MAX:
        remark = f"filterServerAddr must be host:port, got {address[:_ADDRESS_CHARS_MAX]!r}"
        raise RemoteError.system(remark)
    return address
