"""One port for connections with and without TLS: the first byte tells which.

The byte is peeked at and stays in the socket, so that both TLS and plain protocols find the whole
stream. This takes only public calls of asyncio and uvloop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from turbopump.net.network import Listener
from turbopump.net.tls import HANDSHAKE_FIRST_BYTE
from turbopump.supervisor import Supervisor
from turbopump.timeouts import timeout

_log = logging.getLogger(__name__)

UNDECIDED_MAX = 4096
"""Connections without a first byte, or in their handshake; one more drops the oldest of them."""

FIRST_BYTE_TIMEOUT_S = 10.0

_PAUSE_AFTER_FAILURE_S = 1.0


class SniffingListener(Listener):
    """Accepts connections, waits for the first byte of each, and starts TLS accordingly.

    Starts immediately, on one or more sockets of the same port.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        protocol_factory: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        handshake_timeout_s: float,
    ) -> None:
        super().__init__(listening[0].getsockname())
        self._listening = tuple(listening)
        self._protocol_factory = protocol_factory
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        # A dict as an ordered set: the oldest is dropped first.
        self._undecided: dict[asyncio.Task[None], None] = {}
        self._work = Supervisor()
        for at in self._listening:
            self._work.keep(f"accepting at port {self.port}", functools.partial(self._accept, at))

    async def close(self) -> None:
        """Stop accepting; connections that have sent a byte stay open."""
        await self._work.stop()
        for listening in self._listening:
            listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                # Most likely out of file descriptors: closing connections frees some.
                _log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
                continue
            self._make_room()
            task = self._work.start(self._decide(accepted))
            self._undecided[task] = None
            task.add_done_callback(functools.partial(self._decided, accepted))
            # Accepting may never block: yield to the connections already accepted.
            await asyncio.sleep(0)

    def _make_room(self) -> None:
        """Drop the oldest, or silent peers would shut out all others."""
        if len(self._undecided) >= UNDECIDED_MAX:
            oldest = next(iter(self._undecided))
            del self._undecided[oldest]
            oldest.cancel()

    def _decided(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._undecided.pop(task, None)
        if task.cancelled() or task.exception() is not None:
            accepted.close()

    async def _decide(self, accepted: socket.socket) -> None:
        """Hand the connection over as soon as its first byte has arrived."""
        try:
            async with timeout(FIRST_BYTE_TIMEOUT_S):
                await _readable(accepted)
            first = accepted.recv(1, socket.MSG_PEEK)
            if not first:
                accepted.close()
                return
            is_tls = first[0] == HANDSHAKE_FIRST_BYTE
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol_factory,
                accepted,
                ssl=self._context if is_tls else None,
                ssl_handshake_timeout=self._handshake_timeout_s if is_tls else None,
            )
        except OSError as error:
            _log.info("connection closed before its first frame: %r", error)
            accepted.close()


async def _readable(waiting: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(waiting, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(waiting)
