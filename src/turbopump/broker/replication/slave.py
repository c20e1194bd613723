"""A slave's side of the HA port: keeps reconnecting to the master, and copies its log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import cast

from msgspec import Struct

from turbopump.broker.config import ReplicationConfig
from turbopump.broker.live_config import LiveConfig
from turbopump.broker.replication.copying import (
    COMPARED_BYTES,
    AskForLastFile,
    CompareMore,
    Copied,
    Copying,
    Diverged,
    StartOver,
    Step,
)
from turbopump.broker.replication.frames import TransferDecoder, encode_report, joined
from turbopump.clock import Clock
from turbopump.errors import (
    ConnectionLost,
    InvalidArgument,
    NetworkError,
    StoreError,
    TurbopumpError,
    WireError,
)
from turbopump.machine.timers import Repeated, set_within
from turbopump.message import PhysicalOffset
from turbopump.net.network import Network
from turbopump.net.turn_budget import LARGE_CHUNK_BYTES, TurnBudget
from turbopump.store.store import Store
from turbopump.supervisor import Watch
from turbopump.wire.hosts import split_address

_log = logging.getLogger(__name__)

RETRY_MS = 5000
RETRY_MAX_MS = 60_000
"""Pauses between attempts: always the first one while the master is unreachable, growing while its
log cannot be stored."""

_UNFLUSHED_BYTES_MAX = 64 * 1024 * 1024
"""With SYNC_FLUSH: bytes that may wait for the disk before receiving pauses."""


class LogsDiffer(TurbopumpError):
    """The logs have nothing in common: dropping the slave's would drop the only copy."""


class LinkState(Enum):
    """The state of a slave's link to its master."""

    NO_MASTER = "no master"
    """No address is configured, and no name server has reported one."""
    DISCONNECTED = "disconnected"
    """The last attempt failed, or the connection was lost; the next attempt follows."""
    COMPARING = "comparing"
    """Connected; the end of the slave's log is compared with the master's."""
    CATCHING_UP = "catching up"
    """Connected; the master has more than the slave has stored."""
    IN_SYNC = "in sync"
    """Connected; the slave has everything that the master had when it was last asked, at most 10 s
    ago. Apache's masters cannot be asked: there, everything that the master has sent."""


class MasterLink(Struct, frozen=True, kw_only=True):
    """The link of a slave to its master."""

    address: str
    """Of the master's HA port; empty if it is not known."""
    state: LinkState
    lag_bytes: int
    """Bytes that the master is known to have and this slave has not stored."""
    last_error: str
    """Why the last connection failed or ended; empty if none has since it is in sync."""
    cut_bytes: int
    """Bytes that differed from the master's log and were cut off since the start."""


@dataclass(eq=False)
class Follower:
    """Keeps a slave's log the same as its master's; `run` until it is cancelled."""

    store: Store
    live: LiveConfig
    network: Network
    clock: Clock
    watch: Watch
    """Counts the failures of heartbeats to the master."""
    on_stored: Callable[[], None]

    def __post_init__(self) -> None:
        self._reported = ""
        self._address_changed = asyncio.Event()
        self._connection: MasterConnection | None = None
        self._compared_bytes = COMPARED_BYTES
        self._end_max: PhysicalOffset | None = None
        self._last_file_only = False
        self._state = LinkState.NO_MASTER
        self._last_error = ""
        self._cut_bytes = 0
        self._master_end = PhysicalOffset(0)
        """As of the last copy of a table: frames do not say how much more there is."""
        self._pause_ms = RETRY_MS
        self._has_agreed = False
        self.may_drop_all = False
        """Whether a log that has nothing in common with the master's may be dropped: set where the
        master's is known to be the valid one."""
        self.on_cut: Callable[[], None] = lambda: None

    @property
    def config(self) -> ReplicationConfig:
        return self.live.current.replication

    @property
    def address(self) -> str:
        """The master's HA port: as configured, or as a name server reports it; empty if unknown."""
        return self.config.master_address or self._reported

    def master_is_at(self, ha_address: str) -> None:
        """Note where name servers say the master is."""
        before, known, self._reported = self.address, self._reported, ha_address
        fixed = self.config.master_address
        if fixed and known and ha_address != known:
            _log.warning(
                "the master has moved to %s, but this slave follows haMasterAddress=%s: change or"
                " remove that setting if another broker was promoted",
                ha_address,
                fixed,
            )
        if self.address != before:
            self._master_end = PhysicalOffset(0)
            self._address_changed.set()
            if self._connection is not None:
                self._connection.close(f"the master is at {self.address} now")

    def master_was_promoted(self) -> None:
        """Permit dropping the whole log if it was copied from the old master since this start."""
        self.may_drop_all |= self._has_agreed

    def master_ends_at(self, end: PhysicalOffset) -> None:
        """Note the end of the master's log; 0 if it does not say."""
        self._master_end = end

    @property
    def status(self) -> MasterLink:
        connection = self._connection
        lag_bytes = 0 if connection is None else connection.lag_bytes(self._master_end)
        state = self._state
        if connection is not None:
            state = LinkState.CATCHING_UP if lag_bytes else LinkState.IN_SYNC
            state = LinkState.COMPARING if connection.copying.is_comparing else state
        return MasterLink(
            address=self.address,
            state=state,
            lag_bytes=lag_bytes,
            last_error=self._last_error,
            cut_bytes=self._cut_bytes,
        )

    async def run(self) -> None:
        """Follow the master through failures of it or of the connection."""
        while True:
            self._address_changed.clear()
            if not self.address:
                self._state = LinkState.NO_MASTER
                await self._address_changed.wait()
                continue
            try:
                self.store.reopen()
                again = await self._follow(self.address)
            except NetworkError as error:
                self._note_failure(error)
                self._pause_ms = RETRY_MS
            except (WireError, StoreError, InvalidArgument, LogsDiffer) as error:
                self._note_failure(error)
                self._pause_ms = min(2 * self._pause_ms, RETRY_MAX_MS)
            else:
                if again:
                    continue
            await set_within(self._address_changed, self._pause_ms)

    def _note_failure(self, error: TurbopumpError) -> None:
        """Log a failure, if it is new."""
        text = str(error)
        if text != self._last_error:
            _log.warning("replication from %s is interrupted: %s", self.address, text)
        self._state, self._last_error = LinkState.DISCONNECTED, text

    async def _follow(self, address: str) -> bool:
        """Connect and copy until the connection ends; True if the next attempt need not wait."""
        host, port = split_address(address)
        copying = Copying(
            self.store,
            self._compared_bytes,
            self._end_max,
            last_file_only=self._last_file_only,
        )
        connection = MasterConnection(self, copying)
        try:
            await self.network.connect(host, port, lambda: connection)
        except BaseException:
            connection.abandon()
            raise
        self._connection = connection
        try:
            step = await connection.ended
        finally:
            self._connection = None
            connection.close("this slave stops to follow")
            await connection.wait_flushed()
            self.store.drop_unfinished()
        return self._act(step)

    def _act(self, step: Step) -> bool:
        """Act on the step that ended a connection."""
        match step:
            case CompareMore(compared_bytes, end):
                self._compared_bytes, self._end_max = compared_bytes, end
            case AskForLastFile():
                text = "master %s has no log before its last file, or does not say where it begins"
                _log.warning(f"{text}: older messages are not copied", self.address)
                self._last_file_only = True
            case StartOver(position):
                self._drop(None, f"the master's log begins at {position}")
            case Diverged(position, master_ends):
                self._drop_tail(position, "ends at" if master_ends else "differs from")
            case _:
                return False
        return True

    def _drop_tail(self, position: PhysicalOffset, how: str) -> None:
        first = self.store.min_offset
        at = self.store.message_start(position) if position > first else first
        reason = f"the master's log {how} position {position}"
        if at > first:
            self._drop(at, reason)
        elif self.may_drop_all:
            self._drop(None, reason)
        else:
            raise LogsDiffer(
                f"{reason}, and has no message in common with this slave's: is it the right master?"
                " To copy its log anyway, empty this slave's storePathRootDir; to continue with"
                " this slave's messages, make it the master"
            )

    def _drop(self, at: PhysicalOffset | None, reason: str) -> None:
        end = self.store.written_end
        cut_bytes = end - (self.store.min_offset if at is None else at)
        kept = self.store.cut(at)
        self.on_cut()
        self._cut_bytes += cut_bytes
        self._settled()
        _log.error(
            "%s: the last %d bytes of this slave's log, which ended at %d, are cut off and kept in"
            " %s",
            reason,
            cut_bytes,
            end,
            kept,
        )

    # --- for the connection -----------------------------------------------------------------------

    def agreed(self) -> None:
        if self._state is not LinkState.IN_SYNC:
            _log.info("replication from %s continues at %d", self.address, self.store.written_end)
        self._state, self._last_error = LinkState.IN_SYNC, ""
        self._has_agreed, self.may_drop_all = True, False
        self._settled()

    def stored(self) -> None:
        self._pause_ms = RETRY_MS
        self.on_stored()

    def _settled(self) -> None:
        self._compared_bytes, self._end_max, self._last_file_only = COMPARED_BYTES, None, False


class MasterConnection(asyncio.Protocol):
    """One connection to the master."""

    _transport: asyncio.Transport

    def __init__(self, follower: Follower, copying: Copying) -> None:
        loop = asyncio.get_running_loop()
        self._follower = follower
        self._store = follower.store
        self._file_bytes = follower.store.config.segment_bytes
        self._clock = follower.clock
        self.copying = copying
        self._transfers = TransferDecoder()
        self._turn = TurnBudget(loop, self._adjust_reading)
        self._loop = loop
        self._flush: Future[None] | None = None
        self._reported = PhysicalOffset(-1)
        self._heard_ms = self._reported_ms = self._clock.monotonic_ms()
        self._timer: asyncio.TimerHandle | None = None
        self._master_end = PhysicalOffset(0)
        self._is_reading = True
        self._has_agreed = False
        self.ended: asyncio.Future[Step] = loop.create_future()

    def lag_bytes(self, master_end: PhysicalOffset) -> int:
        """Return how many bytes are missing of what the master had, or has sent since."""
        return max(0, max(master_end, self._master_end) - self._store.readable_end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not a subclass of it in uvloop.
        self._transport = cast(asyncio.Transport, transport)
        if self.ended.done():
            self._transport.close()
            return
        self._report(self.copying.request)
        # Repeated as a heartbeat, when it must not request anything.
        self._reported = min(self.copying.request, self._store.readable_end)
        self._set_timer()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(ConnectionLost(str(error) if error is not None else "closed by the master"))

    def close(self, reason: str) -> None:
        self._end(ConnectionLost(reason))

    def abandon(self) -> None:
        """Ignore all events: it may still connect after the timeout."""
        self.ended.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, result: Step | Exception) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.ended.done():
            if isinstance(result, Exception):
                self.ended.set_exception(result)
            else:
                self.ended.set_result(result)
        self._transport.close()

    async def wait_flushed(self) -> None:
        """Wait for the disk, so that all that is stored can be compared with the master's log."""
        if self._flush is not None and not self._flush.done():
            flushed = asyncio.wrap_future(self._flush)
            # A failure is the store's: the next connection reports it.
            flushed.add_done_callback(asyncio.Future.exception)
            await asyncio.wait([flushed])

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        if len(data) >= LARGE_CHUNK_BYTES:
            self._turn.note_large()
        self._heard_ms = self._clock.monotonic_ms()
        has_copied = False
        try:
            for transfer in joined(self._transfers.feed(data), self._file_bytes):
                self._master_end = PhysicalOffset(transfer.position + len(transfer.data))
                step = self.copying.take(transfer)
                if isinstance(step, Copied):
                    has_copied = True
                    self._await_flush(step.durable)
                elif step is not None:
                    self._end(step)
                    return
        except (WireError, StoreError, InvalidArgument) as error:
            self._end(error)
            return
        if has_copied:
            self._follower.stored()
        self._note_stored()

    def _note_stored(self) -> None:
        """Report what is stored, now or when the disk has it."""
        if self.copying.is_comparing:
            return
        if not self._has_agreed:
            self._has_agreed = True
            self._follower.agreed()
        if self._flush is None:
            self._report_stored()
        else:
            self._adjust_reading()

    def _await_flush(self, flush: Future[None]) -> None:
        """Report what is stored when the disk has it; with ASYNC_FLUSH, nothing waits for it."""
        if not flush.done() and flush is not self._flush:
            self._flush = flush
            flush.add_done_callback(self._flushed)

    def _flushed(self, flush: Future[None]) -> None:
        """Runs on the flusher's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._after_flush, flush)

    def _after_flush(self, flush: Future[None]) -> None:
        if self.ended.done():
            return
        if self._flush is flush:
            self._flush = None
        error = flush.exception()
        if error is not None:
            self._end(error if isinstance(error, StoreError) else ConnectionLost(str(error)))
            return
        self._store.dispatch()
        self._adjust_reading()
        self._report_stored()

    def _report_stored(self) -> None:
        end = self._store.readable_end
        if end != self._reported:
            self._report(end)

    def _report(self, position: PhysicalOffset) -> None:
        self._reported, self._reported_ms = position, self._clock.monotonic_ms()
        self._transport.write(encode_report(position))

    def _adjust_reading(self) -> None:
        """Pause receiving while others have their turn, or the disk does not keep up."""
        unflushed = self._store.written_end - self._store.readable_end
        reads = not self._turn.is_over and unflushed < _UNFLUSHED_BYTES_MAX
        if reads != self._is_reading and not self._transport.is_closing():
            self._is_reading = reads
            if reads:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _set_timer(self) -> None:
        wait_ms = min(self._follower.config.heartbeat_ms, 1000)
        self._timer = self._loop.call_later(wait_ms / 1000, Repeated(self._tick))

    def _tick(self) -> None:
        self._timer = None
        watch = self._follower.watch
        try:
            self._beat()
        except Exception as error:  # noqa: BLE001 - a dead master would not be noticed any more
            watch.failed(error)
        else:
            watch.succeeded()
        if not self.ended.done():
            # No backoff after a failure: the master would close the connection as idle.
            self._set_timer()

    def _beat(self) -> None:
        """Send a heartbeat, or close the connection of a silent master."""
        now_ms, config = self._clock.monotonic_ms(), self._follower.config
        if now_ms - self._heard_ms > config.idle_max_ms and self._is_reading:
            idle_ms = now_ms - self._heard_ms
            self.close(f"nothing came from the master for {idle_ms} ms (haHousekeepingInterval)")
        elif now_ms - self._reported_ms >= config.heartbeat_ms:
            self._report(self._reported)
