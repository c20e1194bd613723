"""Unread data of a lost connection: bytes that arrived but that its transport did not deliver.

A transport closes as soon as a write fails, although requests may still be in the socket's receive
buffer. Linux keeps them readable, even after the peer's reset.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Iterator
from itertools import islice

_PIECE_BYTES = 64 * 1024
_BYTES_MAX = 16 * 1024 * 1024
"""More than a receive buffer holds, unless the machine's limits were raised."""


def unread_chunks(transport: asyncio.BaseTransport) -> list[bytes]:
    """Return what can still be read; call it in ``connection_lost``, before the socket closes.

    With TLS, only what the transport has already read from the socket.
    """
    encrypted = transport.get_extra_info("ssl_object")
    plain = transport.get_extra_info("socket")
    if encrypted is not None:
        read: Callable[[], bytes] = lambda: encrypted.read(_PIECE_BYTES)  # noqa: E731
    elif plain is not None and plain.fileno() >= 0:
        read = lambda: os.read(plain.fileno(), _PIECE_BYTES)  # noqa: E731
    else:
        return []
    return list(islice(_pieces(read), _BYTES_MAX // _PIECE_BYTES))


def _pieces(read: Callable[[], bytes]) -> Iterator[bytes]:
    try:
        while piece := read():
            yield piece
    except (OSError, ValueError):
        # Nothing is left (BlockingIOError, SSLWantReadError), or the peer's reset comes next.
        return


def hang_up_check(transport: asyncio.BaseTransport) -> Callable[[], bool] | None:
    """Return a check whether the peer of a TLS connection has closed it; None without TLS.

    TLS connections cannot be half closed, so answers to such a peer are useless. Writing them would
    make the transport close with requests unread, and these cannot be read past it.
    """
    socket = transport.get_extra_info("socket")
    hang_up = getattr(select, "POLLRDHUP", 0)
    if transport.get_extra_info("ssl_object") is None or socket is None or not hang_up:
        return None
    poll = select.poll()
    poll.register(socket.fileno(), hang_up)
    return lambda: bool(poll.poll(0))
