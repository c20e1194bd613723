"""A master's side of the HA port: sends the log to slaves, and knows what they have stored."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import cast

from turbopump.broker.config import ReplicationConfig
from turbopump.broker.jobs import when_done
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.replication.frames import ReportDecoder, encode_header
from turbopump.clock import Clock
from turbopump.errors import FrameError, StoreError
from turbopump.machine.timers import Repeated
from turbopump.message import PhysicalOffset
from turbopump.net.network import address_text
from turbopump.net.outbox import write_parts
from turbopump.store.outcomes import Cold
from turbopump.store.store import Store
from turbopump.supervisor import Watch

_log = logging.getLogger(__name__)

SLAVES_MAX = 32
"""Connections at the HA port; more are closed when accepted."""

EVERYTHING = PhysicalOffset(1)
"""The first report of a Turbopump slave without a log: it wants everything. As always, report 0
means the last file only. No log ends at 1, so no other slave reports it."""

_UNSENT_BYTES_MAX = 1024 * 1024
"""Bytes that may wait in memory for a slave; mostly views of the log's memory map."""
_TICKS_PER_HEARTBEAT = 5
_STALE_MAX = 64
_TURN_BYTES_MAX = 4 * 1024 * 1024
"""Bytes sent to a slave before others get their turn of the loop."""


class Slaves:
    """All slaves of a master.

    Call `note_written` when the log has grown.
    """

    def __init__(self, store: Store, live: LiveConfig, clock: Clock, watch: Watch) -> None:
        self.store = store
        self.clock = clock
        self._live = live
        self._watch = watch
        self.throttle = Throttle(clock)
        self._connected: dict[SlaveConnection, None] = {}
        self._waiting: dict[int, Callable[[bool], None]] = {}
        """By number, in the order of the calls."""
        self._order: list[tuple[PhysicalOffset, int]] = []
        """A heap of positions and numbers, some of which may not wait any more."""
        self._numbers = itertools.count()
        self._pump_is_due = False
        self._timer: asyncio.TimerHandle | None = None
        """Runs while there are connections."""
        self.on_following: Callable[[], None] = lambda: None
        """Called when a slave has reported for the first time."""
        self.accepts = False
        """Whether slaves are served; set when the broker is ready, and reset on a slave."""

    @property
    def config(self) -> ReplicationConfig:
        return self._live.current.replication

    @property
    def frame_bytes_max(self) -> int:
        """Largest frame: each slave gets one every second, whatever the limit.

        No heartbeats are sent between frames, as two of them tell a slave that compares the logs
        that this one ends there.
        """
        size, rate = self.config.transfer_bytes, self.config.transfer_bytes_per_s
        return min(size, max(1, rate // len(self._connected))) if rate else size

    @property
    def following(self) -> list[SlaveConnection]:
        """The connections of slaves that have reported their position."""
        return [slave for slave in self._connected if slave.has_reported]

    def is_copied(self) -> bool:
        """Whether a slave has the whole log, or none follows."""
        end, following = self.store.readable_end, self.following
        return not following or any(slave.acknowledged >= end for slave in following)

    # --- for the acknowledgement gate -------------------------------------------------------------

    @property
    def acknowledged(self) -> PhysicalOffset:
        """Position up to which at least one connected slave has the log."""
        return max((slave.acknowledged for slave in self._connected), default=PhysicalOffset(0))

    def is_available(self, end: PhysicalOffset) -> bool:
        """Whether a slave is close enough to be waited for up to a position."""
        if not any(slave.has_reported for slave in self._connected):
            return False
        return end - self.acknowledged < self.config.fall_behind_max_bytes

    def when_stored(
        self, end: PhysicalOffset, on_stored: Callable[[bool], None]
    ) -> Callable[[], None] | None:
        """Call a function with True once a slave has the log up to a position, perhaps now.

        It is called with False once no slave is connected, and may still be called with True after
        that. Returns what ends the wait and releases the function; None if it was called already.
        """
        # With SYNC_FLUSH, a slave gets the bytes, and may report them, before this is called.
        if end <= self._confirmed:
            on_stored(True)
            return None
        number = next(self._numbers)
        self._waiting[number] = on_stored
        heapq.heappush(self._order, (end, number))
        return partial(self._forget, number)

    def _forget(self, number: int) -> None:
        self._waiting.pop(number, None)
        if len(self._order) > _STALE_MAX + 2 * len(self._waiting):
            self._order = [each for each in self._order if each[1] in self._waiting]
            heapq.heapify(self._order)

    @property
    def waiting(self) -> int:
        """How many functions wait to be called."""
        return len(self._waiting)

    @property
    def _confirmed(self) -> PhysicalOffset:
        return max((slave.confirmed for slave in self._connected), default=PhysicalOffset(0))

    # --- connections ------------------------------------------------------------------------------

    def add(self, slave: SlaveConnection) -> bool:
        """Add a connection; False if there are too many, or none are served."""
        if not self.accepts or len(self._connected) >= SLAVES_MAX:
            return False
        self._connected[slave] = None
        if self._timer is None:
            self._set_timer()
        return True

    def _set_timer(self) -> None:
        interval_s = self.config.heartbeat_ms / 1000 / _TICKS_PER_HEARTBEAT
        self._timer = asyncio.get_running_loop().call_later(interval_s, Repeated(self.tick))

    def remove(self, slave: SlaveConnection) -> None:
        self._connected.pop(slave, None)
        if not any(other.has_reported for other in self._connected):
            for on_stored in tuple(self._waiting.values()):
                on_stored(False)

    def note_acknowledged(self) -> None:
        """Notify those waiting of what a slave has stored now."""
        stored = self._confirmed
        while self._order and self._order[0][0] <= stored:
            on_stored = self._waiting.pop(heapq.heappop(self._order)[1], None)
            if on_stored is not None:
                on_stored(True)

    def note_written(self) -> None:
        """Send what was written in this loop iteration at its end."""
        if self._connected and not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        for slave in tuple(self._connected):
            slave.pump()

    def tick(self) -> None:
        """Send heartbeats, and close silent connections."""
        self._timer = None
        has_failed = False
        for slave in tuple(self._connected):
            try:
                slave.tick()
            except Exception as error:  # noqa: BLE001 - one slave must not silence the others
                has_failed = True
                self._watch.failed(error)
        if not has_failed:
            self._watch.succeeded()
        if self._connected:
            # No backoff after a failure: the other slaves would miss their heartbeats.
            self._set_timer()

    def close(self) -> None:
        """Close all connections, and accept no further ones."""
        self.accepts = False
        if self._timer is not None:
            self._timer.cancel()
        for slave in tuple(self._connected):
            slave.close("the master is closing", logging.INFO)


class SlaveConnection(asyncio.Protocol):
    """One connected slave."""

    _transport: asyncio.Transport

    def __init__(self, slaves: Slaves) -> None:
        self._slaves = slaves
        self._store = slaves.store
        self._clock = slaves.clock
        self._reports = ReportDecoder()
        self._position: PhysicalOffset | None = None
        """Where the next frame begins; None before the first report."""
        self._is_paused = False
        self._is_fetching = False
        self._fetched = PhysicalOffset(0)
        """Position up to which the log has been read into memory."""
        self._reserved_bytes = 0
        """Bytes that the rate limit permits for the next frame."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.address = "unknown"
        self.acknowledged = PhysicalOffset(0)
        self.confirmed = PhysicalOffset(0)
        """As `acknowledged`, except for the first report: where a slave begins to compare does not
        mean yet that its log is the same up to there."""
        self._heard_ms = self._sent_ms = self._clock.monotonic_ms()

    @property
    def has_reported(self) -> bool:
        return self._position is not None

    @property
    def is_in_sync(self) -> bool:
        """Whether a SYNC_MASTER waits for it: it lacks less than ``haSlaveFallbehindMax``."""
        lag_bytes = self._store.readable_end - self.acknowledged
        return lag_bytes < self._slaves.config.fall_behind_max_bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not a subclass of it in uvloop.
        self._transport = cast(asyncio.Transport, transport)
        self.address = address_text(transport.get_extra_info("peername"))
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_MAX)
        if not self._slaves.add(self):
            reason = f"{SLAVES_MAX} are connected already" if self._slaves.accepts else "no master"
            self.close(f"not accepted here: {reason}")

    def connection_lost(self, error: Exception | None) -> None:
        self.close(str(error) if error is not None else "closed by the slave", logging.INFO)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self.pump()

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        try:
            report = self._reports.feed(data)
        except FrameError as error:
            self.close(f"not a slave: {error}")
            return
        if report is None:
            return
        self._heard_ms = self._clock.monotonic_ms()
        end = self._store.readable_end
        if self._position is None:
            self._begin(report, end)
        elif report > end and report != EVERYTHING:
            self.close(f"it reports position {report}, but the log ends at {end}")
        elif report != self.acknowledged:
            self.acknowledged = self.confirmed = report
            self._slaves.note_acknowledged()

    def _begin(self, report: PhysicalOffset, end: PhysicalOffset) -> None:
        """Start sending where a slave requests, or as near to it as possible."""
        first = self._store.min_offset
        if report > end and report != EVERYTHING:
            # A Turbopump slave learns from this where to compare the logs; others close the link.
            self._write(end, None)
            self.close(f"its log ends at {report}, this master's at {end}")
            return
        if report == 0:
            self._position = max(
                first, PhysicalOffset(end - end % self._store.config.segment_bytes)
            )
        elif report < first or report == EVERYTHING:
            self._position = first
        else:
            self._position = self.acknowledged = report
        _log.info("slave %s follows from %d, it asked for %d", self.address, self._position, report)
        self._slaves.on_following()
        self.pump()

    def pump(self) -> None:
        """Send until the log ends, the slave does not keep up, or others get their turn."""
        if self._position is None or self._timer is not None or self._is_fetching:
            return
        limit = self._position + _TURN_BYTES_MAX
        while not self._is_paused and not self._is_closed:
            if self._position >= self._store.readable_end:
                return
            if self._position >= limit:
                self._pump_later(0)
                return
            if not self._reserved_bytes:
                wait_ms = self._slaves.throttle.wait_ms(self._slaves.config.transfer_bytes_per_s)
                if wait_ms:
                    # Before the wait: after it, another slave could always be just ahead.
                    self._reserved_bytes = self._slaves.frame_bytes_max
                    self._slaves.throttle.note_sent(self._reserved_bytes)
                    self._pump_later(wait_ms)
                    return
            if not self._send(self._position, self._reserved_bytes or self._slaves.frame_bytes_max):
                return

    def _send(self, position: PhysicalOffset, size_max: int) -> bool:
        """Send what follows; False if it has to be read first, or cannot be."""
        try:
            is_fetched = min(position + size_max, self._store.readable_end) <= self._fetched
            cold = None if is_fetched else self._store.cold_part(position, size_max)
            if cold is not None:
                self._fetch(position, cold)
                return False
            data = self._store.raw(position, size_max)
        except StoreError as error:
            self.close(f"the log cannot be read: {error}")
            return False
        if data is None:
            first = self._store.min_offset
            self.close(
                f"position {position} was deleted, the log begins at {first}: it is too slow"
            )
            return False
        self._slaves.throttle.note_sent(len(data) - self._reserved_bytes)
        self._reserved_bytes = 0
        self._position = PhysicalOffset(position + len(data))
        self._write(position, data)
        return True

    def _fetch(self, position: PhysicalOffset, cold: Cold) -> None:
        """Have the disk read what comes next, and continue then."""
        self._is_fetching = True
        # At least once, or it would not end where memory is too scarce to keep it.
        self._fetched = PhysicalOffset(position + sum(part.size for part in cold.parts))
        when_done(self._store.fetch(cold), self._continue)

    def _continue(self, fetched: Future[None]) -> None:
        self._is_fetching = False
        error = fetched.exception()
        if error is not None:
            self.close(f"the log cannot be read: {error}")
        self.pump()

    def _pump_later(self, wait_ms: int) -> None:
        self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._pump_again)

    def _pump_again(self) -> None:
        self._timer = None
        self.pump()

    def _write(self, position: PhysicalOffset, data: memoryview | None) -> None:
        self._sent_ms = self._clock.monotonic_ms()
        if data is None:
            self._transport.write(encode_header(position, 0))
        else:
            header = encode_header(position, len(data))
            write_parts(self._transport, (header, data), len(header) + len(data))

    def tick(self) -> None:
        now_ms, config = self._clock.monotonic_ms(), self._slaves.config
        if now_ms - self._heard_ms > config.idle_max_ms:
            self.close(f"no report for {now_ms - self._heard_ms} ms (haHousekeepingInterval)")
        elif self._position is None or now_ms - self._sent_ms < config.heartbeat_ms:
            return
        elif self._position >= self._store.readable_end:
            self._write(self._position, None)

    def close(self, reason: str, level: int = logging.WARNING) -> None:
        """Close the connection; what was sent still arrives."""
        if self._is_closed:
            return
        self._is_closed = True
        _log.log(level, "connection of slave %s ends: %s", self.address, reason)
        if self._timer is not None:
            self._timer.cancel()
        self._slaves.throttle.note_sent(-self._reserved_bytes)
        self._reserved_bytes = 0
        self._transport.close()
        self._slaves.remove(self)


_BURST_MS = 100
"""Unused rate is carried over for up to this time."""


class Throttle:
    """Lets bytes through at a rate, in small bursts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._allowed_bytes = 0.0
        self._counted_ms = clock.monotonic_ms()

    def wait_ms(self, bytes_per_s: int) -> int:
        """Return how long to wait before more may be sent; 0 for no wait, as without a limit."""
        if not bytes_per_s:
            self._allowed_bytes = 0
            return 0
        now_ms = self._clock.monotonic_ms()
        per_ms = bytes_per_s / 1000
        gained = (now_ms - self._counted_ms) * per_ms
        self._counted_ms = now_ms
        self._allowed_bytes = min(self._allowed_bytes + gained, _BURST_MS * per_ms)
        if self._allowed_bytes > 0:
            return 0
        return max(1, -int(self._allowed_bytes // per_ms))

    def note_sent(self, size: int) -> None:
        self._allowed_bytes -= size
