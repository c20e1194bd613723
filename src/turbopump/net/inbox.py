"""Frames on their way in: chunks are cut into frames and handed on, unless reading pauses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from turbopump.errors import WireError
from turbopump.net.outbox import Outbox
from turbopump.net.receive_budget import ReceiveBudget
from turbopump.net.request_row import RequestRow
from turbopump.net.turn import LARGE_CHUNK_BYTES, Turn
from turbopump.wire.command import Command
from turbopump.wire.framing import FrameDecoder

_REASON_CHARS_MAX = 200
_NO_FRAMES: Iterator[Command] = iter(())


@dataclass(frozen=True, slots=True)
class Reader:
    """What a connection does with frames."""

    take: Callable[[Command], None]
    settle: Callable[[], None]
    """Called after the frames of a chunk."""
    may_read: Callable[[], bool]
    """Whether frames are wanted, as far as this peer alone is concerned."""
    on_resumed: Callable[[], None]
    """Called after frames were served that had to wait."""
    give_up: Callable[[str], None]
    """Closes the connection, for a reason."""


class Inbox:
    """The frames of the chunk being served, chunks that came while reading paused, half a frame."""

    _loop: asyncio.AbstractEventLoop
    _transport: asyncio.Transport
    _outbox: Outbox
    turn: Turn
    row: RequestRow

    def __init__(
        self, decoder: FrameDecoder, reader: Reader, budget: ReceiveBudget | None = None
    ) -> None:
        self.decoder = decoder
        self.is_reading = True
        self._frames_taken = 0
        self.give_up = reader.give_up
        self._reader = reader
        self._budget = budget
        self._is_noted = False
        self._frames = _NO_FRAMES
        self._chunks: deque[bytes] = deque()
        self._on_finished: Callable[[], None] | None = None

    def open(self, transport: asyncio.Transport, outbox: Outbox, turn: Turn) -> None:
        """Say where chunks come from, and where answers go."""
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._outbox = outbox
        self.turn = turn

    @property
    def held_bytes(self) -> int:
        """Bytes received and not served."""
        held_bytes = self.decoder.held_bytes
        return held_bytes + sum(map(len, self._chunks)) if self._chunks else held_bytes

    @property
    def is_finishing(self) -> bool:
        """Whether the peer is gone, and frames are left that it sent before."""
        return self._on_finished is not None

    def receive(self, data: bytes) -> int:
        """Serve what came, or keep it until reading goes on; return the number of frames."""
        self._frames_taken = 0
        if self.is_reading and not self._chunks:
            self._frames = self.decoder.feed(data)
            self._read()
        else:
            # Reading paused, yet the transport had this in hand already.
            self._chunks.append(data)
            self._note(0)
        taken = self._frames_taken
        if len(data) >= LARGE_CHUNK_BYTES:
            self.turn.note_large()
        return taken

    def adjust(self) -> None:
        """Pause reading at once, or resume it soon, when it is time to."""
        should_read = self._should_read()
        if self.is_reading and not should_read:
            self.is_reading = False
            if not self._transport.is_closing():
                self._transport.pause_reading()
        elif should_read and not self.is_reading:
            # Not from here: the transport or a handler may be in the middle of something.
            self._loop.call_soon(self._resume)

    def finish(self, unread: Iterable[bytes], on_finished: Callable[[], None]) -> None:
        """Serve what a closed peer has sent, yielding to others, then call a function."""
        self._on_finished = on_finished
        self._chunks.extend(unread)
        self.is_reading = False
        self._resume()

    def clear(self) -> None:
        """Free everything, without waiting for the garbage collector: connections are in cycles."""
        self.is_reading = False
        self._frames = _NO_FRAMES
        self._chunks.clear()
        self.decoder.clear()
        self._note(0)

    def _should_read(self) -> bool:
        return not self.turn.is_over and self._reader.may_read()

    def _resume(self) -> None:
        """Go on with frames that were left, then let new ones come."""
        if self.is_reading or not self._should_read():
            return
        self.is_reading = True
        self._read()
        if self._on_finished is not None:
            if self.is_reading or not self.held_bytes:
                on_finished, self._on_finished = self._on_finished, None
                on_finished()
        elif self.is_reading and not self._transport.is_closing():
            self._transport.resume_reading()
        self._reader.on_resumed()

    def _read(self) -> None:
        """Act on the frames that came, until there are no more or reading must pause."""
        self._outbox.hold()
        try:
            self._take_chunks()
        except WireError as error:
            self.give_up(f"malformed frame: {error}")
        except Exception as error:  # noqa: BLE001 - the transport does not know what to do with it
            self.give_up(f"reading failed: {error!r}"[:_REASON_CHARS_MAX])
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
                    # Nothing is written that would end the turn.
                    self.turn.note_large()
        finally:
            # Also when the next frame cannot be read: those before it are answered.
            self._reader.settle()

    def _take_frames(self) -> None:
        taken, row, take = 0, self.row, self._reader.take
        for command in self._frames:
            taken += 1
            take(command)
            while row.begun is not None and self.is_reading:
                taken += row.take(self._outbox.room_bytes)
            if not self.is_reading:
                # What is left of the chunk stays in the iterator.
                row.end()
                break
        self._frames_taken = taken

    def _note(self, frames_taken: int) -> None:
        """Tell the budget what is left after frames were taken."""
        if self._budget is None:
            return
        held_bytes = self.held_bytes
        if held_bytes or self._is_noted:
            self._is_noted = held_bytes > 0
            self._budget.note(self, held_bytes, has_begun_another=frames_taken > 0)
