"""Client connections for threads: used by one thread at a time, cached for the next use."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from threading import get_ident
from typing import overload
from weakref import WeakSet

from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.errors import ConnectFailed
from turbopump.machine.process import after_fork
from turbopump.net.blocking_connection import BlockingConnection
from turbopump.net.pool_config import Backoff, PoolConfig
from turbopump.net.request_protocol import Prepared, Request, RequestHook, RequestProtocol
from turbopump.net.sockets import CONNECT_TIMEOUT_MS, SocketNetwork
from turbopump.wire.command import Command, Response


class BlockingPool:
    """Blocking connections by address; any thread may use it.

    A forked child starts without connections.
    """

    def __init__(
        self,
        network: SocketNetwork,
        config: PoolConfig | None = None,
        *,
        hooks: Sequence[RequestHook] = (),
        clock: Clock = SYSTEM_CLOCK,
        random: Random | None = None,
    ) -> None:
        self._network = network
        self._config = config or PoolConfig()
        self._hooks = tuple(hooks)
        self._clock = clock
        self._random = random or Random()  # noqa: S311 - spreads load, keeps no secret
        self._idle: dict[tuple[str, int], BlockingConnection] = {}
        """By address and by the thread that used it last: one-way requests of a thread keep their
        order, as it gets the same connection again. There is no lock: each change is one call,
        which neither another thread nor a signal handler that sends can interrupt."""
        self._backoffs: dict[str, Backoff] = {}
        self._is_closed = False
        _pools.add(self)

    def __len__(self) -> int:
        """Return how many idle connections there are."""
        return len(self._idle)

    @overload
    def request(self, address: str, request: Command, timeout_ms: int) -> Command: ...
    @overload
    def request(self, address: str, request: Prepared, timeout_ms: int) -> Response: ...
    def request(self, address: str, request: Request, timeout_ms: int) -> Response:
        """Connect if necessary, send a request and return its response, all within the timeout."""
        connection, left_ms = self._take_in_time(address, timeout_ms)
        try:
            return connection.request(request, left_ms)
        finally:
            self.give_back(connection)

    def oneway(self, address: str, request: Request, timeout_ms: int) -> None:
        """Connect if necessary and send a one-way request, all within the timeout."""
        connection, left_ms = self._take_in_time(address, timeout_ms)
        try:
            connection.oneway(request, left_ms)
        finally:
            self.give_back(connection)

    def take(self, address: str, timeout_ms: int = CONNECT_TIMEOUT_MS) -> BlockingConnection:
        """Return a connection for the caller alone; raises ConnectFailed."""
        return self._take_idle(address) or self._connect(address, timeout_ms)

    def give_back(self, connection: BlockingConnection) -> None:
        """Keep a connection for the next caller, unless it cannot be used again."""
        backoff = self._backoffs.get(connection.address)
        if backoff is not None and connection.has_received:
            backoff.succeeded()
        elif backoff is not None and not connection.is_open:
            # A peer that accepts connections only to drop them is as good as down.
            backoff.failed(f"{connection.address}: closed without sending anything")
        if not connection.is_clean:
            connection.close()
            return
        key = connection.address, get_ident()
        # One call: another thread may take the cached connection in between.
        if self._idle.setdefault(key, connection) is not connection:
            connection.close()
        if self._is_closed:
            # After the cache update: either this or `close` sees the connection.
            self.drop_idle()

    def close_idle(self) -> None:
        """Close connections that have been idle for too long to be used again."""
        for key, connection in tuple(self._idle.items()):
            if not connection.is_idle_for_long:
                continue
            taken = self._idle.pop(key, None)
            if taken is connection:
                taken.close()
            elif taken is not None and self._idle.setdefault(key, taken) is not taken:
                # Two others were given back meanwhile.
                taken.close()

    def close(self) -> None:
        """Close idle connections now, those in use when they are given back."""
        self._is_closed = True
        self.drop_idle()

    def drop_idle(self) -> None:
        """Close idle connections; in a child of a fork, the parent keeps using its own."""
        while self._idle:
            with suppress(KeyError):
                self._idle.popitem()[1].close()

    def _take_in_time(self, address: str, timeout_ms: int) -> tuple[BlockingConnection, int]:
        connection = self._take_idle(address)
        if connection is not None:
            return connection, timeout_ms
        start_ms = self._clock.monotonic_ms()
        connection = self._connect(address, timeout_ms)
        return connection, max(timeout_ms - (self._clock.monotonic_ms() - start_ms), 1)

    def _take_idle(self, address: str) -> BlockingConnection | None:
        """Return a connection that can be used: the one of this thread, or else another one."""
        connection = self._idle.pop((address, get_ident()), None)
        if connection is None and self._idle:
            connection = self._pop_any(address)
        while connection is not None and not connection.is_usable():
            connection.close()
            connection = self._pop_any(address)
        return connection

    def _pop_any(self, address: str) -> BlockingConnection | None:
        for key in tuple(self._idle):
            if key[0] == address and (connection := self._idle.pop(key, None)) is not None:
                return connection
        return None

    def _connect(self, address: str, timeout_ms: int) -> BlockingConnection:
        if self._is_closed:
            raise ConnectFailed(f"{address}: the pool is closed")
        backoff = self._backoffs.get(address)
        if backoff is None:
            backoff = Backoff(self._config, self._clock, self._random)
            backoff = self._backoffs.setdefault(address, backoff)
        backoff.require_over()
        try:
            connected = self._network.connect_blocking(
                address, tls=self._config.tls, timeout_ms=timeout_ms
            )
        except ConnectFailed as error:
            backoff.failed(str(error))
            raise backoff.failure() from error
        protocol = RequestProtocol[Request](self._clock, self._config.limits, self._hooks)
        return BlockingConnection(address, connected, protocol)


_pools: WeakSet[BlockingPool] = WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close()


def _reset_pools() -> None:
    for pool in list(_pools):
        pool.drop_idle()


after_fork(_reset_pools)
