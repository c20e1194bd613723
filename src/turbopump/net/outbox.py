"""Outgoing frames: those of one turn of the event loop are written in few, growing bursts.

One write per frame costs a system call each. One write for all frames of a turn leaves the peer
idle until the last of them is ready, and then this side until the peer has served them all. So the
first frame of a turn is written alone and immediately, then the next 8 together, then 64, etc.
"""

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

_BURST_GROWTH = 8
_BURST_FRAMES_MAX = 256


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
        self._corked_frames = 0
        self._burst = 1
        self.is_held = False
        """Whether a flush at the end of this turn is due."""

    @property
    def unwritten_bytes(self) -> int:
        return self._corked_bytes + self._transport.get_write_buffer_size()

    def put(self, parts: Sequence[Buffer]) -> None:
        """Send the pieces of a frame, now or with others of this turn."""
        length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        if self._burst == 1:
            assert not self._parts, "a frame must not overtake those before it"
            self._burst = _BURST_GROWTH
            self._write(parts, length)
            return
        self._parts += parts
        self._corked_bytes += length
        self._corked_frames += 1
        # By bytes too: only the transport can tell that the peer does not keep up.
        if self._corked_frames >= self._burst or self._corked_bytes >= self._bytes_max:
            self._burst = min(self._burst * _BURST_GROWTH, _BURST_FRAMES_MAX)
            self.flush()
        elif not self.is_held:
            self.is_held = True
            self._loop.call_soon(self.release)

    def hold(self) -> None:
        """Hold frames back until `release`, because many may follow."""
        self.is_held = True
        if not self._parts:
            self._burst = 1

    def release(self) -> None:
        """Write what was held back: the turn is over."""
        self.is_held = False
        self._burst = 1
        self.flush()

    def flush(self) -> None:
        parts = self._parts
        if not parts:
            return
        length = self._corked_bytes
        self._parts = []
        self._corked_bytes = 0
        self._corked_frames = 0
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
