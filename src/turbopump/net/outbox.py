"""Frames on their way out: what is sent within one turn of the event loop is written together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turbopump.net.limits import ConnectionLimits
from turbopump.wire.command import Buffer, Command
from turbopump.wire.framing import encode_parts

_JOINED_BYTES_MAX = 16 * 1024
"""Pieces above this are handed over as they are: copying them costs more than a longer list."""


class Outbox:
    """Corks the frames of one turn of the loop: one system call for many small frames."""

    def __init__(
        self,
        transport: asyncio.Transport,
        limits: ConnectionLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._loop = loop
        self._parts: list[Buffer] = []
        self._corked_bytes = 0
        self._flush_is_due = False

    @property
    def unwritten_bytes(self) -> int:
        """Bytes that this side still holds in memory."""
        return self._corked_bytes + self._transport.get_write_buffer_size()

    def put(self, command: Command) -> None:
        """Send a frame, with the others of this turn."""
        parts = encode_parts(command, self._limits.frame_bytes_max)
        self._parts += parts
        self._corked_bytes += sum(map(len, parts))
        if self._corked_bytes >= self._limits.write_pause_bytes:
            # Hand over now: only the transport can say that the peer does not keep up.
            self.flush()
        elif not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush_in_turn)

    def hold(self) -> None:
        """Keep frames back until `release`, because many may follow at once."""
        self._flush_is_due = True

    def release(self) -> None:
        self._flush_is_due = False
        self.flush()

    def flush(self) -> None:
        """Hand everything to the transport."""
        parts = self._parts
        if not parts:
            return
        corked_bytes = self._corked_bytes
        self._parts = []
        self._corked_bytes = 0
        if self._transport.is_closing():
            return
        if corked_bytes <= _JOINED_BYTES_MAX:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(coalesced(parts))

    def _flush_in_turn(self) -> None:
        self._flush_is_due = False
        self.flush()


def coalesced(parts: Sequence[Buffer]) -> list[Buffer]:
    """Join neighbours that are small; leave large pieces alone."""
    merged: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if len(part) <= _JOINED_BYTES_MAX:
            small.append(part)
            continue
        if small:
            merged.append(b"".join(small))
            small = []
        merged.append(part)
    if small:
        merged.append(b"".join(small))
    return merged
