"""Both ends of a connection in memory, with the behavior of a TCP socket.

A `Pipe` carries bytes one way: written bytes wait in the sender's buffer, travel for the latency of
their link, and wait at the receiver while that does not read. The receiver's side holds no more
than a window; when it is full, the sender's buffer grows, and the sender is asked to pause.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from turbopump.testing.idle_skipping import InFlight

if TYPE_CHECKING:
    from turbopump.testing.memory_net import MemoryNetwork

WINDOW_BYTES = 64 * 1024
HIGH_WATER_BYTES = 64 * 1024

Buffer = bytes | bytearray | memoryview
Address = tuple[str, int]


class Link:
    """The path from one host to another, in its current state."""

    def __init__(self, network: MemoryNetwork, source: str, target: str) -> None:
        self.network = network
        self._source = source
        self._target = target

    @property
    def is_down(self) -> bool:
        """Whether bytes cannot travel now; they wait."""
        network = self.network
        return network.has_partitions and network.is_partitioned(self._source, self._target)

    @property
    def loses_bytes(self) -> bool:
        """Whether bytes vanish unnoticed."""
        return self.network.is_losing(self._source, self._target)

    def delay_s(self) -> float:
        """Return how long the next bytes travel."""
        quality = self.network.quality
        if not quality.jitter_ms:
            return quality.latency_ms / 1000
        return (quality.latency_ms + self.network.random.random() * quality.jitter_ms) / 1000

    def cut(self, bytes_max: int) -> int:
        """Return how many of ``bytes_max`` bytes travel together."""
        random, chance = self.network.random, self.network.quality.cut_chance
        if chance and bytes_max > 1 and random.random() < chance:
            return random.randrange(1, bytes_max)
        return bytes_max


_END = b""
"""Follows the last bytes: the stream has ended."""


class Pipe:
    """One direction of a connection."""

    sender: MemoryTransport
    receiver: MemoryTransport

    def __init__(self, link: Link) -> None:
        self.link = link
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._end_is_unsent = False
        self._traveling: deque[tuple[float, bytes]] = deque()
        self._arrived: deque[bytes] = deque()
        self._window_used_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._arrives_at = 0.0

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    @property
    def is_sent(self) -> bool:
        """Whether everything written, including the end, is on its way."""
        return not self._unsent and not self._end_is_unsent

    def write(self, data: Buffer) -> None:
        if self.link.loses_bytes:
            self.link.network.note(f"lost {len(data)} bytes")
            return
        size = len(data)
        if not self._unsent and size <= WINDOW_BYTES - self._window_used_bytes:
            together = self.link.cut(size)
            self._depart(bytes(data[:together]))
            if together == size:
                # The usual case: nothing waits, so the sender need not be notified that it is sent.
                self._set_timer()
                return
            data = data[together:]
        self._unsent += data
        self.pump()

    def end(self) -> None:
        """Signal the end of the stream, after all bytes."""
        if not self.link.loses_bytes:
            self._end_is_unsent = True
            self.pump()

    def break_off(self) -> None:
        """Drop what is unsent; a reset follows what is on its way, if the link lets it pass."""
        self._unsent.clear()
        self._end_is_unsent = False
        if not self.link.is_down and not self.link.loses_bytes:
            self._arrives_at = max(self._arrives_at, self._loop.time() + self.link.delay_s())
            self._loop.call_at(self._arrives_at, InFlight(self._arrive_reset))

    def clear(self) -> None:
        """Drop everything that was written."""
        self._unsent.clear()
        self._end_is_unsent = False
        self._traveling.clear()
        self._arrived.clear()
        self._window_used_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pump(self) -> None:
        """Send what the window lets through; while the link is down, it waits on the way."""
        while self._unsent and self._window_used_bytes < WINDOW_BYTES:
            room = WINDOW_BYTES - self._window_used_bytes
            size = self.link.cut(min(room, len(self._unsent)))
            self._depart(bytes(self._unsent[:size]))
            del self._unsent[:size]
        if self._end_is_unsent and not self._unsent:
            self._end_is_unsent = False
            self._depart(_END)
        self._set_timer()
        self.sender.note_sent()

    def deliver(self) -> None:
        """Deliver what has arrived, while the receiver reads."""
        while self._arrived and self.receiver.takes_data:
            chunk = self._arrived.popleft()
            self._window_used_bytes -= len(chunk)
            self.receiver.take(chunk)
        if self._unsent:
            self.pump()

    def take_arrived(self) -> list[bytes]:
        """Return what arrived before a reset and was not delivered."""
        sent = [*self._arrived, *(chunk for _, chunk in self._traveling)]
        self.clear()
        return [chunk for chunk in sent if chunk != _END]

    def receiver_gone(self) -> None:
        """Drop what the receiver has not read; bytes in flight find no receiver."""
        if self._arrived:
            self._bounce()

    def _depart(self, chunk: bytes) -> None:
        # Later bytes never overtake earlier ones, however short their delay.
        arrives_at = self._loop.time() + self.link.delay_s()
        if arrives_at > self._arrives_at:
            self._arrives_at = arrives_at
        self._traveling.append((self._arrives_at, chunk))
        self._window_used_bytes += len(chunk)

    def _set_timer(self) -> None:
        # Bytes that wait for the link to come up are like those that TCP retransmits.
        if self._timer is None and self._traveling and not self.link.is_down:
            self._timer = self._loop.call_at(self._traveling[0][0], InFlight(self._arrive))

    def _arrive(self) -> None:
        self._timer = None
        if self.link.is_down:
            return
        if self.receiver.is_lost:
            self._bounce()
            return
        now, traveling = self._loop.time(), self._traveling
        while traveling and traveling[0][0] <= now:
            self._arrived.append(traveling.popleft()[1])
        if traveling:
            self._set_timer()
        self.deliver()

    def _arrive_reset(self) -> None:
        # Never retransmitted, so it is lost if the link went down meanwhile.
        if not self.link.is_down:
            self._arrive()
            self.receiver.reset(ConnectionResetError("connection reset by peer"))

    def _bounce(self) -> None:
        """Drop what was written, since the receiver is gone, and notify the sender."""
        had_bytes = any(self._arrived) or any(chunk for _, chunk in self._traveling)
        self.clear()
        if had_bytes:
            # The notice travels too, so what the receiver sent before it went arrives first.
            error = ConnectionResetError("connection reset by peer")
            reset = InFlight(self.sender.reset)
            self._loop.call_later(self.link.delay_s(), reset, error)


class MemoryTransport(asyncio.Transport):
    """One end of a connection in memory."""

    _protocol: asyncio.Protocol

    def __init__(self, here: Address, there: Address, outgoing: Pipe, incoming: Pipe) -> None:
        super().__init__({"sockname": here, "peername": there})
        self.is_frozen = False
        self._outgoing = outgoing
        self._incoming = incoming
        outgoing.sender = self
        incoming.receiver = self
        self._reading = True
        self._writing_paused = False
        self._high = HIGH_WATER_BYTES
        self._low = HIGH_WATER_BYTES // 4
        self._closing = False
        self._lost = False

    # --- what asyncio's transports offer ----------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        if not self._reading and not self._closing:
            self._reading = True
            asyncio.get_running_loop().call_soon(self._incoming.deliver)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol), "buffered protocols are not served"
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = (4 * low if low is not None else HIGH_WATER_BYTES) if high is None else high
        self._low = self._high // 4 if low is None else low
        self.note_sent()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return self._outgoing.unsent_bytes

    def write(self, data: Buffer) -> None:
        if not self._closing and data:
            self._outgoing.write(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        """Send what is unsent, then close."""
        if not self._closing:
            self._closing = True
            self._outgoing.end()
            self._lose_when_sent()

    def abort(self) -> None:
        """Close immediately; the peer sees a reset, when the link has let it through."""
        self._break_off(None)

    # --- what the pipes and the network call ------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether the connection is over on this side."""
        return self._lost

    @property
    def takes_data(self) -> bool:
        return self._reading and not self._closing and not self.is_frozen

    def take(self, chunk: bytes) -> None:
        network = self._incoming.link.network
        if network.trace is not None:
            network.note(f"{self._ends()} {len(chunk)} bytes")
        call = "data_received" if chunk else "eof_received"
        try:
            if chunk != _END:
                self._protocol.data_received(chunk)
            elif not self._protocol.eof_received():
                self.close()
        except Exception as error:  # noqa: BLE001 - as asyncio's transports do with any
            message = f"Fatal error: protocol.{call}() call failed."
            context = {"message": message, "exception": error, "transport": self}
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({**context, "protocol": self._protocol})
            self._break_off(error)

    def note_sent(self) -> None:
        """Pause or resume the protocol's writes, and finish closing once all is sent."""
        if self._lost:
            return
        unsent = self._outgoing.unsent_bytes
        if unsent > self._high and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()
        elif unsent <= self._low and self._writing_paused:
            self._writing_paused = False
            self._protocol.resume_writing()
        self._lose_when_sent()

    def catch_up(self) -> None:
        """Send and receive what was held up while the link was down or the host was frozen."""
        self._outgoing.pump()
        self._incoming.pump()
        self._incoming.deliver()

    def reset(self, error: Exception | None) -> None:
        """End this side immediately; what has arrived is still read, as from a socket's buffer."""
        if not self._lost:
            if not self.is_frozen and not self._closing:
                for chunk in self._incoming.take_arrived():
                    self._protocol.data_received(chunk)
            self._closing = True
            self._outgoing.clear()
            self._lose(error)

    def _break_off(self, error: Exception | None) -> None:
        if not self._lost:
            self._closing = True
            self._outgoing.break_off()
            self._lose(error)

    def _lose_when_sent(self) -> None:
        if self._closing and self._outgoing.is_sent:
            self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._outgoing.link.network.note(f"{self._ends()} closed")
            loop = asyncio.get_running_loop()
            loop.call_soon(self._protocol.connection_lost, error)
            loop.call_soon(self._incoming.receiver_gone)

    def _ends(self) -> str:
        here, there = self.get_extra_info("sockname"), self.get_extra_info("peername")
        return f"{here[0]}:{here[1]} from {there[0]}:{there[1]}"
