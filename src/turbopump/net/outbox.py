"""Outgoing frames: those of one turn of the event loop are written together, after the first."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from turbopump.net.limits import ConnectionLimits
from turbopump.wire.command import Buffer

_JOINED_BYTES_MAX = 4 * 1024
"""Larger pieces are not joined: copying them costs more than a longer list."""

# asyncio's own transports do not pause their protocol in `writelines` of 3.12.1 and 3.13.0: a peer
# that does not read would fill the memory.
_ALWAYS_JOINED = ("asyncio.selector_events",) if sys.hexversion >= 0x030C0000 else ()
"""Modules of transports whose `write` has to be used."""


class Outbox:
    """Corks the frames of one turn of the loop: few system calls for many small frames.

    ``on_write`` is called with the number of bytes before they are passed to the transport. If
    ``has_hung_up`` returns true, they are dropped.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        limits: ConnectionLimits,
        loop: asyncio.AbstractEventLoop,
        on_write: Callable[[int], None],
        has_hung_up: Callable[[], bool] | None = None,
    ) -> None:
        self._transport = transport
        self._bytes_max = limits.write_pause_bytes
        self._loop = loop
        self._on_write = on_write
        self._has_hung_up = has_hung_up
        self._parts: list[Buffer] = []
        self._corked_bytes = 0
        self.is_held = False
        """Whether a flush at the end of this turn is due."""

    @property
    def unwritten_bytes(self) -> int:
        return self._corked_bytes + self._transport.get_write_buffer_size()

    def put(self, parts: Sequence[Buffer]) -> None:
        """Send the pieces of a frame: the first of a turn now, the others together at its end."""
        length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        if not self.is_held:
            self.is_held = True
            self._loop.call_soon(self.release)
            self._write(parts, length)
            return
        self._parts += parts
        self._corked_bytes += length
        if self._corked_bytes >= self._bytes_max:
            # Only the transport can tell that the peer does not keep up.
            self.flush()

    def hold(self) -> None:
        """Hold frames back until `release`, because many may follow."""
        self.is_held = True

    def release(self) -> None:
        """Write what was held back: the turn is over."""
        self.is_held = False
        self.flush()

    def flush(self) -> None:
        parts = self._parts
        if not parts:
            return
        length = self._corked_bytes
        self._parts = []
        self._corked_bytes = 0
        self._write(parts, length)

    def _write(self, parts: Sequence[Buffer], length: int) -> None:
        if self._transport.is_closing() or (self._has_hung_up is not None and self._has_hung_up()):
            return
        self._on_write(length)
        write_parts(self._transport, parts, length)


def write_parts(transport: asyncio.Transport, parts: Sequence[Buffer], length: int) -> None:
    """Pass pieces of ``length`` bytes to a transport, so that it pauses its protocol when due."""
    if length <= _JOINED_BYTES_MAX or type(transport).__module__ in _ALWAYS_JOINED:
        transport.write(b"".join(parts))
    else:
        transport.writelines(coalesced(parts))


def coalesced(parts: Sequence[Buffer]) -> list[Buffer]:
    """Join neighbors that are small; leave large pieces alone."""
    if max(map(len, parts), default=0) <= _JOINED_BYTES_MAX:
        # As messages mostly are: one check for thousands of them is enough.
        return [b"".join(parts)]
    merged: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if len(part) <= _JOINED_BYTES_MAX:
            small.append(part)
            continue
        if small:
            merged.append(b"".join(small) if len(small) > 1 else small[0])
            small = []
        merged.append(part)
    if small:
        merged.append(b"".join(small))
    return merged
