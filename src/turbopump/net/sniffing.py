"""One port for connections with TLS and without: the first byte tells which it is.

The byte is looked at without taking it out of the socket, so whoever gets the socket then, TLS or
not, finds its stream whole. That needs nothing but public calls of asyncio and uvloop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from turbopump.net.tls import HANDSHAKE_FIRST_BYTE

_log = logging.getLogger(__name__)

UNDECIDED_MAX = 4096
FIRST_BYTE_TIMEOUT_S = 120.0
"""The time after which idle connections are closed, since until then they are nothing else."""

_PAUSE_AFTER_FAILURE_S = 1.0


class SniffingListener:
    """Accepts connections, waits for the first byte of each, and starts TLS where it says so."""

    def __init__(
        self,
        listening: socket.socket,
        protocol_factory: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        handshake_timeout_s: float,
    ) -> None:
        self._listening = listening
        self._at = listening.getsockname()
        self._protocol_factory = protocol_factory
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._accepting: asyncio.Task[None] | None = None
        self._undecided: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(UNDECIDED_MAX)

    @property
    def host(self) -> str:
        return str(self._at[0])

    @property
    def port(self) -> int:
        return int(self._at[1])

    def start(self) -> None:
        """Begin to accept."""
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Take no more connections; those that have sent a byte live on."""
        tasks = [task for task in (self._accepting, *self._undecided) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                # Out of file descriptors, most likely: they come back when connections close.
                _log.warning("cannot accept a connection: %s", error)
                self._room.release()
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
                continue
            task = asyncio.create_task(self._decide(accepted))
            self._undecided.add(task)
            task.add_done_callback(self._decided)

    def _decided(self, task: asyncio.Task[None]) -> None:
        self._undecided.discard(task)
        self._room.release()

    async def _decide(self, accepted: socket.socket) -> None:
        """Hand the connection over as soon as its first byte is there."""
        try:
            async with asyncio.timeout(FIRST_BYTE_TIMEOUT_S):
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
        except asyncio.CancelledError:
            accepted.close()
            raise


async def _readable(waiting: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(waiting, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(waiting)
