"""Connections of a process that outlive its tasks: made once, used by one task after the other.

They are plain sockets, without TLS. A forked process starts without any.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.errors import ConnectFailed
from turbopump.net.limits import DEFAULT_LIMITS
from turbopump.net.sockets import CONNECT_TIMEOUT_MS
from turbopump.wire.hosts import split_address

KEPT_MAX = 4
"""Connections to one address; a process has as many as it has had tasks at the same time."""

KEPT_MS = DEFAULT_LIMITS.idle_ms // 2
"""A connection that was idle for longer is not used again: the peer may be about to close it."""


_ROOM_BYTES = 4 * 1024 * 1024
"""Of answers that wait in the system while a task is at work on the ones before. By itself, Linux
sometimes stays with so little room that broker and task wait for each other in turn."""


class Connection(Protocol):
    """What is asked of a connection."""

    address: str

    def is_silent(self) -> bool:
        """Whether it is open and nothing has come that nobody asked for, not even the end."""
        ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


def connected_socket(address: str, timeout_ms: int = CONNECT_TIMEOUT_MS) -> socket.socket:
    """Connect; raises ConnectFailed."""
    host, port = split_address(address)
    try:
        made = socket.create_connection((host, port), timeout_ms / 1000)
    except TimeoutError as error:
        raise ConnectFailed(f"{address}: no answer within {timeout_ms} ms") from error
    except (OSError, UnicodeError) as error:
        # A host name that cannot even be asked for is a UnicodeError.
        raise ConnectFailed(f"{address}: {error}") from error
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _may_have_room():
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM_BYTES)
    return made


@lru_cache(maxsize=1)
def _may_have_room() -> bool:
    """Whether the system gives that much to who asks for it.

    If it does not, nobody asks: with less than asked for, it would not make more room by itself.
    """
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM_BYTES)
        return tried.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= _ROOM_BYTES


def request_numbers() -> Iterator[int]:
    """Number the requests of one connection, which answers are known by: Java's int, from 0 on."""
    while True:
        yield from range(1 << 31)


class KeptConnections(Generic[C]):
    """Connections that nobody uses at the moment, by address."""

    def __init__(self, connect: Callable[[str], C], clock: Clock = SYSTEM_CLOCK) -> None:
        self._connect = connect
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[str, list[tuple[int, C]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def take(self, address: str) -> C:
        """Return one for the caller alone; raises ConnectFailed."""
        self._drop_old()
        while True:
            with self._lock:
                kept = self._kept.get(address)
                if not kept:
                    break
                _, connection = kept.pop()
            if connection.is_silent():
                return connection
            connection.close()
        return self._connect(address)

    def give_back(self, connection: C) -> None:
        """Keep a connection, on which every request has been answered, for the next one."""
        with self._lock:
            kept = self._kept.setdefault(connection.address, [])
            if len(kept) < KEPT_MAX:
                kept.append((self._clock.monotonic_ms(), connection))
                return
        connection.close()

    def close(self) -> None:
        """Close all that nobody uses."""
        with self._lock:
            kept, self._kept = self._kept, {}
        for each in kept.values():
            for _, connection in each:
                connection.close()

    def lasting(self) -> KeptConnections[C]:
        """Have them closed in children, which have copies of the sockets, and at the end."""
        os.register_at_fork(after_in_child=self.after_fork)
        atexit.register(self.close)
        return self

    def after_fork(self) -> None:
        """Begin anew in a child: the parent goes on with its own."""
        self._lock = threading.Lock()
        self.close()

    def _drop_old(self) -> None:
        oldest_ms = self._clock.monotonic_ms() - KEPT_MS
        old: list[C] = []
        with self._lock:
            for address, kept in list(self._kept.items()):
                old += [each for since_ms, each in kept if since_ms < oldest_ms]
                kept[:] = [(since, each) for since, each in kept if since >= oldest_ms]
                if not kept:
                    del self._kept[address]
        for connection in old:
            connection.close()
