"""A filter server: accepts filters, serves pulls through them, and belongs to one broker."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Self

from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.errors import NetworkError, RemoteError
from turbopump.filter_server.pulls import Pulls
from turbopump.filter_server.uploads import Uploads
from turbopump.filters.server_config import FilterServerConfig
from turbopump.net.connection import Connection
from turbopump.net.limits import ConnectionLimits
from turbopump.net.network import Network, address_text, host_text
from turbopump.net.pool import ConnectionPool
from turbopump.net.router import Router
from turbopump.net.server import Server, ServerConfig
from turbopump.supervisor import Supervisor
from turbopump.wire.bodies import ConsumerConnections
from turbopump.wire.body_limits import BODY_BYTES_MAX
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.headers import ConsumerGroup, RegisterFilterClass, RegisterFilterServer

REGISTER_INTERVAL_MS = 10_000
REGISTER_TIMEOUT_MS = 3000
MEMBERS_TIMEOUT_MS = 3000
_SWEEP_INTERVAL_MS = 60_000
_CHECK_IDLE_INTERVAL_MS = 1000
_DRAIN_MS = 500
_PULLS_MAX = 20_000
"""Waiting pulls of one client: one for each of its queues."""


class FilterServer:
    """Serves for as long as its context lasts.

    ::

        config = FilterServerConfig(
            broker="127.0.0.1:10911", bind_host="127.0.0.1", advertised_host="127.0.0.1"
        )
        async with FilterServer(config, SocketNetwork()) as server:
            print(server.address)
    """

    def __init__(
        self, config: FilterServerConfig, network: Network, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._config = config
        self._pool = ConnectionPool(network, clock=clock)
        self.uploads = Uploads(config.limits, self._is_member, clock)
        pulls = Pulls(self.uploads, self._ask_broker, clock)
        router = Router(
            {
                RequestCode.REGISTER_MESSAGE_FILTER_CLASS: self._take,
                RequestCode.PULL_MESSAGE: pulls.pull,
            },
            body_bytes_max=BODY_BYTES_MAX,
        )
        listening = ServerConfig(
            host=config.bind_host,
            port=config.port,
            drain_timeout_ms=_DRAIN_MS,
            limits=ConnectionLimits(handlers_running_max=_PULLS_MAX),
        )
        self._server = Server(network, router, listening, clock=clock)
        self._work = Supervisor()
        self._running = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as starting:
            starting.push_async_callback(self.uploads.close)
            await starting.enter_async_context(self._pool)
            await starting.enter_async_context(self._server)
            starting.push_async_callback(self._work.stop)
            self._work.every("registration", REGISTER_INTERVAL_MS, self._register, first_ms=0)
            self._work.every("unused filters", _SWEEP_INTERVAL_MS, self.uploads.sweep)
            self._work.every("idle filters", _CHECK_IDLE_INTERVAL_MS, self.uploads.check_idle)
            self._running = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def address(self) -> str:
        """Where clients find it, as ``host:port``."""
        return address_text((self._config.advertised_host, self.port))

    async def _take(self, command: Command, peer: Connection) -> Command:
        header = RegisterFilterClass.from_ext_fields(command.ext_fields)
        await self.uploads.take(header, whole_body(command), peer.peer_address)
        return command.answer(ResponseCode.SUCCESS)

    async def _is_member(self, group: str, client: str) -> bool:
        """Whether a group has a member at a client's host: ports differ, as connections do."""
        command = request(
            RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroup(consumer_group=group)
        )
        try:
            answer = await self._ask_broker(command, MEMBERS_TIMEOUT_MS)
        except NetworkError as error:
            remark = f"cannot ask the broker for the members of group {group}: {error}"
            raise RemoteError.system(remark) from error
        if answer.code != ResponseCode.SUCCESS:
            return False
        members = ConsumerConnections.decode(whole_body(answer)).connection_set
        return host_text(client) in {host_text(member.client_addr) for member in members}

    async def _register(self) -> None:
        """Register this server with the broker; raises TurbopumpError."""
        header = RegisterFilterServer(filter_server_addr=self.address)
        command = request(RequestCode.REGISTER_FILTER_SERVER, header)
        answer = await self._ask_broker(command, REGISTER_TIMEOUT_MS)
        if answer.code != ResponseCode.SUCCESS:
            raise RemoteError(answer.code, answer.remark or "")

    async def _ask_broker(self, command: Command, timeout_ms: int) -> Command:
        return await self._pool.request(self._config.broker, command, timeout_ms)
