"""Incoming frames: chunks are cut into frames and passed on, unless reading is paused."""

from __future__ import annotations

import asyncio
import os
import select
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from turbopump.core import Frame, FrameDecoder
from turbopump.errors import WireError
from turbopump.net.outbox import Outbox
from turbopump.net.turn_budget import LARGE_CHUNK_BYTES, TurnBudget

if TYPE_CHECKING:
    from turbopump.net.connection import Connection
    from turbopump.net.router import Serving

_REASON_CHARS_MAX = 200
_UNREAD_PIECE_BYTES = 64 * 1024
_UNREAD_BYTES_MAX = 16 * 1024 * 1024
"""More than a receive buffer holds, unless the machine's limits were raised."""
_NO_FRAMES: Iterator[Frame] = iter(())


class Inbox:
    """The frames of the chunk being served, chunks received while paused, and a partial frame."""

    _loop: asyncio.AbstractEventLoop
    _transport: asyncio.Transport
    _outbox: Outbox
    turn: TurnBudget

    def __init__(
        self,
        connection: Connection,
        serving: Serving,
        decoder: FrameDecoder,
        budget: ReceiveBudget | None,
    ) -> None:
        self.decoder = decoder
        self.is_reading = True
        self._frames_taken = 0
        self.fail = connection.close_unread
        self._connection = connection
        self._serving = serving
        self._budget = budget
        self._is_noted = False
        self._frames = _NO_FRAMES
        self._chunks: deque[bytes] = deque()
        self._on_finished: Callable[[], None] | None = None
        self.is_finishing = False
        """Whether the peer has closed and frames that it sent before are left."""

    def open(self, transport: asyncio.Transport, outbox: Outbox, turn: TurnBudget) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._outbox = outbox
        self.turn = turn

    @property
    def held_bytes(self) -> int:
        """Bytes received and not served."""
        held_bytes = self.decoder.held_bytes
        return held_bytes + sum(map(len, self._chunks)) if self._chunks else held_bytes

    def receive(self, data: bytes) -> int:
        """Serve a chunk, or keep it until reading resumes; return the number of frames served."""
        self._frames_taken = 0
        is_next = self.is_reading and not self._chunks
        self._chunks.append(data)
        if is_next:
            self._read()
        else:
            # Paused, but the transport had this chunk already.
            self._note(0)
        taken = self._frames_taken
        if len(data) >= LARGE_CHUNK_BYTES:
            self.turn.note_large()
        return taken

    def adjust(self) -> None:
        """Pause reading immediately, or resume it soon, as conditions require."""
        should_read = self._should_read()
        if self.is_reading and not should_read:
            self.is_reading = False
            if not self._transport.is_closing():
                self._transport.pause_reading()
        elif should_read and not self.is_reading:
            # Later: the transport or a handler may be in the middle of a call.
            self._loop.call_soon(self._resume)

    def finish(self, unread: Iterable[bytes], on_finished: Callable[[], None]) -> None:
        """Serve what a closed peer sent before, yielding to other peers, then call a function."""
        self._on_finished, self.is_finishing = on_finished, True
        self._chunks.extend(unread)
        self.is_reading = False
        self._resume()

    def clear(self) -> None:
        """Free all memory now: connections are in reference cycles."""
        self.is_reading = False
        self._frames = _NO_FRAMES
        self._chunks.clear()
        self.decoder.clear()
        self._note(0)

    def _should_read(self) -> bool:
        return not self.turn.is_over and self._connection.may_read()

    def _resume(self) -> None:
        """Serve delayed frames, then continue reading."""
        if self.is_reading or not self._should_read():
            return
        self.is_reading = True
        self._read()
        if self._on_finished is not None:
            if self.is_reading or not self.held_bytes:
                on_finished, self._on_finished = self._on_finished, None
                self.is_finishing = False
                on_finished()
        elif self.is_reading and not self._transport.is_closing():
            self._transport.resume_reading()
        self._connection.note_quiet()

    def _read(self) -> None:
        """Serve received frames until none are left or reading must pause."""
        self._frames_taken = 0
        self._outbox.hold()
        try:
            self._take_chunks()
        except WireError as error:
            self.fail(f"malformed frame: {error}")
        except Exception as error:  # noqa: BLE001 - the transport could not handle it
            self.fail(f"reading failed: {error!r}"[:_REASON_CHARS_MAX])
        finally:
            self._outbox.release()
        self._note(self._frames_taken)

    def _take_chunks(self) -> None:
        try:
            self._take_frames()
            while self.is_reading and self._chunks:
                self._frames = self.decoder.feed(self._chunks.popleft())
                self._take_frames()
                if self.is_finishing:
                    # Nothing is written, which would end the turn.
                    self.turn.note_large()
        finally:
            # Also if the next frame is malformed: those before it are answered.
            self._serving.settle()

    def _take_frames(self) -> None:
        taken, take = 0, self._serving.take
        for frame in self._frames:
            taken += 1
            take(frame)
            if not self.is_reading:
                # What is left of the chunk stays in the iterator.
                break
        self._frames_taken += taken

    def _note(self, frames_taken: int) -> None:
        """Report to the budget what is left after frames were taken."""
        if self._budget is None:
            return
        held_bytes = self.held_bytes
        if held_bytes or self._is_noted:
            self._is_noted = held_bytes > 0
            self._budget.note(self, held_bytes, has_begun_another=frames_taken > 0)


class ReceiveBudget:
    """Limits what all connections of a server have received and not served.

    When it is exceeded, the connection is closed whose unfinished frame began first: an honest peer
    finishes its frame soon, one that hoards memory does not. Closing cannot end in a deadlock, as
    pausing all of them could.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        # In the order in which the unfinished frame of each began.
        self._held: dict[Inbox, int] = {}
        self.held_bytes = 0
        """What all connections together have received and not served."""

    def note(self, inbox: Inbox, held_bytes: int, *, has_begun_another: bool) -> None:
        """Update what a connection holds, and whether it finished a frame since the last call."""
        self.held_bytes += held_bytes - self._held.get(inbox, 0)
        if has_begun_another or not held_bytes:
            self._held.pop(inbox, None)
        if held_bytes:
            self._held[inbox] = held_bytes
        while self.held_bytes > self._bytes_max:
            oldest = next(iter(self._held))
            reason = f"{self.held_bytes} bytes received and not served on all connections"
            oldest.fail(f"{reason}, at most {self._bytes_max} allowed")
            # Closing updates it already; this ends the loop even if it did not.
            self.held_bytes -= self._held.pop(oldest, 0)


def unread_chunks(transport: asyncio.BaseTransport) -> list[bytes]:
    """Return what arrived at a lost connection but was not delivered by its transport.

    A transport closes as soon as a write fails, although requests may still be in the socket's
    receive buffer. Linux keeps them readable, even after the peer's reset. With TLS, only what the
    transport has already read from the socket. Call it in ``connection_lost``, before the socket
    closes.
    """
    encrypted = transport.get_extra_info("ssl_object")
    plain = transport.get_extra_info("socket")
    if encrypted is not None:
        read: Callable[[], bytes] = lambda: encrypted.read(_UNREAD_PIECE_BYTES)  # noqa: E731
    elif plain is not None and plain.fileno() >= 0:
        read = lambda: os.read(plain.fileno(), _UNREAD_PIECE_BYTES)  # noqa: E731
    else:
        return []
    return list(islice(_pieces(read), _UNREAD_BYTES_MAX // _UNREAD_PIECE_BYTES))


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
