"""Client connections on an event loop: one shared connection for each address."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self, overload

from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.errors import ConnectFailed
from turbopump.net.connection import Connection
from turbopump.net.deadlines import Deadlines
from turbopump.net.fifo_waiters import FifoWaiters
from turbopump.net.network import Network
from turbopump.net.pool_config import Backoff, PoolConfig
from turbopump.net.request_protocol import Prepared, Request, RequestHook
from turbopump.net.router import Router
from turbopump.net.thread_request import ThreadRequest
from turbopump.timeouts import timeout
from turbopump.wire.command import Command, Response
from turbopump.wire.hosts import split_address

_log = logging.getLogger(__name__)

Greeting = Callable[[str], Command | None]
"""Returns the first one-way request for a new connection to an address, or None."""


@dataclass(slots=True)
class _Peer:
    """The state of one address."""

    address: str
    backoff: Backoff
    connection: Connection | None = None
    number: int = 0
    dial: asyncio.Task[Connection | None] | None = None
    waiting: FifoWaiters = field(default_factory=FifoWaiters)

    @property
    def ready(self) -> Connection | None:
        """The open connection, if no request still waits for it."""
        connection = self.connection
        if connection is None or not connection.is_open or not self.waiting.is_empty:
            return None
        return connection


class ConnectionPool:
    """Connections by address, opened on first use and again after they are lost.

    ``router`` serves the peers' requests to this side; ``hooks`` see the requests that are sent.
    ``greeting`` introduces this side on every new connection.
    """

    def __init__(
        self,
        network: Network,
        config: PoolConfig | None = None,
        *,
        router: Router | None = None,
        hooks: Sequence[RequestHook] = (),
        greeting: Greeting | None = None,
        clock: Clock = SYSTEM_CLOCK,
        random: Random | None = None,
    ) -> None:
        self._network = network
        self._config = config or PoolConfig()
        self._router = router or Router()
        self._hooks = tuple(hooks)
        self._greeting = greeting
        self._clock = clock
        self._random = random or Random()  # noqa: S311 - spreads load, keeps no secret
        self._deadlines = Deadlines(clock)
        self._peers: dict[str, _Peer] = {}
        self._numbers = itertools.count(1)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connection(self, address: str) -> Connection:
        """Return the live connection to ``host:port``; raises ConnectFailed.

        Concurrent callers wait for the same attempt. After a failure, all callers fail immediately
        until the pause is over.
        """
        peer = self._peer(address)
        if peer.connection is not None and peer.connection.is_open:
            return peer.connection
        if peer.dial is None:
            peer.backoff.require_over()
            peer.dial = asyncio.create_task(self._dial(peer))
        connection = await self._dialed(peer.dial)
        if connection is None:
            raise peer.backoff.failure()
        return connection

    @overload
    def request(
        self, address: str, request: Command, timeout_ms: int
    ) -> Coroutine[Any, Any, Command]: ...
    @overload
    def request(
        self, address: str, request: Prepared, timeout_ms: int
    ) -> Coroutine[Any, Any, Response]: ...
    def request(
        self, address: str, request: Request, timeout_ms: int
    ) -> Coroutine[Any, Any, Response]:
        """Connect if necessary, send a request and return its answer, all within the timeout."""
        peer = self._peers.get(address)
        connection = None if peer is None else peer.ready
        if connection is not None:
            return connection.request(request, timeout_ms)
        return self._connect_and_request(address, request, timeout_ms)

    def start_request(self, address: str, waiting: ThreadRequest) -> bool:
        """Send a request that a thread waits for; False if it cannot leave now, see `request`."""
        peer = self._peers.get(address)
        connection = None if peer is None else peer.ready
        return connection is not None and connection.start_request(waiting)

    async def _connect_and_request(
        self, address: str, request: Request, timeout_ms: int
    ) -> Response:
        connection, left_ms = await self._connected_in_time(address, timeout_ms)
        return await connection.request(request, left_ms)

    def oneway(self, address: str, request: Request, timeout_ms: int) -> Coroutine[Any, Any, None]:
        """Connect if necessary and send a one-way request, all within the timeout."""
        peer = self._peers.get(address)
        connection = None if peer is None else peer.ready
        if connection is not None:
            return connection.oneway_in_time(request, timeout_ms)
        return self._connect_and_send(address, request, timeout_ms)

    async def _connect_and_send(self, address: str, request: Request, timeout_ms: int) -> None:
        connection, left_ms = await self._connected_in_time(address, timeout_ms)
        await connection.oneway_in_time(request, left_ms)

    def connection_number(self, address: str) -> int:
        """Return a number that no other connection of the pool has; 0 while there is none."""
        peer = self._peers.get(address)
        is_open = peer is not None and peer.connection is not None and peer.connection.is_open
        return peer.number if peer is not None and is_open else 0

    def has_failed_within(self, address: str, time_ms: int) -> bool:
        """Return whether there is no connection and the last attempt failed that recently."""
        peer = self._peers.get(address)
        if peer is None or peer.connection is not None:
            return False
        return peer.backoff.has_failed_within(time_ms)

    async def drop(self, address: str) -> None:
        """Close the connection to an address, if any, after the answers of requests in flight."""
        peer = self._peers.get(address)
        if peer is not None:
            await self._close_peer(peer)

    async def close(self) -> None:
        """Wait for the answers of requests in flight, then close everything."""
        self._closed = True
        for peer in self._peers.values():
            if peer.dial is not None:
                peer.dial.cancel()
        async with asyncio.TaskGroup() as group:
            for peer in self._peers.values():
                group.create_task(self._close_peer(peer))
        self._peers.clear()
        self._deadlines.close()

    async def _connected_in_time(self, address: str, timeout_ms: int) -> tuple[Connection, int]:
        """Return the connection and the remaining time."""
        start_ms = self._clock.monotonic_ms()
        try:
            async with timeout(timeout_ms / 1000):
                connection = await self._peer(address).waiting.after(self.connection(address))
        except TimeoutError as error:
            raise ConnectFailed(f"{address}: not connected within {timeout_ms} ms") from error
        return connection, max(timeout_ms - (self._clock.monotonic_ms() - start_ms), 1)

    async def _close_peer(self, peer: _Peer) -> None:
        if peer.dial is not None:
            await asyncio.wait([peer.dial])
        if peer.connection is not None:
            await peer.connection.drain(self._config.drain_timeout_ms)

    def _peer(self, address: str) -> _Peer:
        if self._closed:
            raise ConnectFailed(f"{address}: the pool is closed")
        peer = self._peers.get(address)
        if peer is None:
            split_address(address)
            self._forget_old_failures()
            backoff = Backoff(self._config, self._clock, self._random)
            peer = self._peers[address] = _Peer(address, backoff)
        return peer

    def _forget_old_failures(self) -> None:
        """Drop addresses whose pause ended long ago and that have not been used since."""
        old_ms = self._clock.monotonic_ms() - self._config.backoff_max_ms
        for address, peer in tuple(self._peers.items()):
            if peer.connection is None and peer.dial is None and peer.backoff.next_try_ms < old_ms:
                del self._peers[address]

    async def _dialed(self, dial: asyncio.Task[Connection | None]) -> Connection | None:
        """Wait for a dial without cancelling it when this caller alone is cancelled."""
        try:
            return await asyncio.shield(dial)
        except asyncio.CancelledError:
            if dial.cancelled() and self._closed:
                raise ConnectFailed("the pool was closed while connecting") from None
            raise

    async def _dial(self, peer: _Peer) -> Connection | None:
        """Try once; a failure is recorded, not raised, as no caller may be waiting any more."""
        host, port = split_address(peer.address)
        try:
            connection = await self._network.connect(
                host, port, functools.partial(self._new_connection, peer), tls=self._config.tls
            )
        except ConnectFailed as error:
            peer.backoff.failed(str(error))
            return None
        finally:
            peer.dial = None
        # Before any caller has the connection: nothing can be written ahead of it.
        self._greet(peer.address, connection)
        peer.connection, peer.number = connection, next(self._numbers)
        return connection

    def _greet(self, address: str, connection: Connection) -> None:
        command = None if self._greeting is None else self._greeting(address)
        if command is None:
            return
        try:
            connection.oneway(command)
        except Exception as error:  # noqa: BLE001 - perhaps a hook's; the connection works
            _log.warning("%s: connected, but not greeted: %s", address, error)

    def _new_connection(self, peer: _Peer) -> Connection:
        return Connection(
            self._router,
            self._deadlines,
            self._config.limits,
            aborts_silent=True,
            hooks=self._hooks,
            on_closed=functools.partial(self._lost, peer),
        )

    def _lost(self, peer: _Peer, connection: Connection) -> None:
        if connection is peer.connection:
            peer.connection = None
        if connection.has_received:
            peer.backoff.succeeded()
        else:
            # A peer that accepts connections only to drop them is as good as down.
            peer.backoff.failed(f"{peer.address}: closed without sending anything")
