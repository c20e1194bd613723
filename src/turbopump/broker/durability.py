"""The gate of acknowledgements: decides when whoever stored a message may be told so.

Nothing else in the broker reports that a message is stored, or knows what a mode promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from typing import TypeAlias, TypeVarTuple

from msgspec import Struct

from turbopump.errors import RemoteError, StoreClosed
from turbopump.net.deadlines import Deadline, Deadlines
from turbopump.store.config import FlushMode
from turbopump.store.outcomes import Appended
from turbopump.store.store import Store
from turbopump.wire.codes import ResponseCode

_log = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")


class Promise(Enum):
    """What must be true before a message is acknowledged."""

    WRITTEN = "written"
    """The operating system has it, so it survives the end of the process. For senders that do not
    wait for the disk (``WAIT=false``)."""
    DURABLE = "durable"
    """What the broker's mode promises: on disk with SYNC_FLUSH, else `WRITTEN`. Reported as `Late`
    after ``syncFlushTimeout``. Callers name no mode: what another one promises, such as a copy on a
    slave, is one more thing for `Durability.acknowledge` to wait for."""
    DURABLE_EVENTUALLY = "durable eventually"
    """The same without a time limit: for the broker's own work, which no peer waits for."""


class Late(Struct, frozen=True):
    """Stored, but the promise was not kept in time. It may still be, or the message may be lost."""

    appended: Appended
    code: ResponseCode
    remark: str

    def as_failure(self) -> RemoteError:
        """Return what a consumer is told, who would commit the original of a retried message.

        Should the flush fail in the end, the message would be lost. If it succeeds, there are two
        copies, because the consumer tries again.
        """
        return RemoteError(ResponseCode.SYSTEM_ERROR, self.remark)


Outcome: TypeAlias = Appended | Late | RemoteError
"""The message is stored as promised, or not yet, or not at all."""

OnOutcome = Callable[[Outcome, *Ts], None]
"""Called once, on the loop, with the outcome and the arguments that were given along with it."""


class Limits(Struct, frozen=True):
    """How long a promise may take, and how much may wait for the disk in synchronous mode."""

    timeout_ms: int
    sends_max: int
    bytes_max: int


class _Waiter:
    """One report that waits for a flush."""

    __slots__ = ("_appended", "_args", "_on_outcome", "deadline")

    def __init__(
        self, appended: Appended, on_outcome: Callable[..., None], args: tuple[object, ...]
    ) -> None:
        self._appended = appended
        self._on_outcome: Callable[..., None] | None = on_outcome
        self._args = args
        self.deadline: Deadline | None = None

    def settle(self, error: BaseException | None) -> None:
        """Report that the flush is done or has failed."""
        if self.deadline is not None:
            self.deadline.cancel()
        self._report(self._appended if error is None else _not_stored(error))

    def expire(self) -> None:
        """Report that the flush takes too long."""
        remark = "FLUSH_DISK_TIMEOUT: stored, but not on disk within syncFlushTimeout"
        self._report(Late(self._appended, ResponseCode.FLUSH_DISK_TIMEOUT, remark))

    def _report(self, outcome: Outcome) -> None:
        on_outcome, self._on_outcome = self._on_outcome, None
        if on_outcome is not None:
            on_outcome(outcome, *self._args)


class _Flush:
    """What waits for one flush."""

    __slots__ = ("sends", "waiters")

    def __init__(self) -> None:
        self.sends = 0
        self.waiters: list[_Waiter] = []


class Durability:
    """Acknowledges what is stored: at once, or when the flush that it shares with others is done.

    In asynchronous mode the operating system's word is enough. It bounds its dirty pages itself and
    then slows down writes. In synchronous mode each unflushed message also has an entry in memory,
    whether its sender waits or not, so these are bounded here: `busy` returns the refusal once the
    limit is reached.
    """

    def __init__(self, store: Store, deadlines: Deadlines, limits: Limits) -> None:
        self._store = store
        self._deadlines = deadlines
        self._limits = limits
        self._is_synchronous = store.config.flush.mode is FlushMode.SYNC
        self._by_flush: dict[Future[None], _Flush] = {}
        self._unflushed = 0
        self._settled = asyncio.Event()

    def __len__(self) -> int:
        """Return how many sends wait for the disk; 0 in asynchronous mode."""
        return self._unflushed

    def busy(self) -> RemoteError | None:
        """Return why nothing more should be stored now; None if the disk keeps up."""
        if not self._unflushed:
            return None
        unflushed_bytes = self._store.written_end - self._store.readable_end
        if self._unflushed < self._limits.sends_max and unflushed_bytes < self._limits.bytes_max:
            return None
        return RemoteError(
            ResponseCode.SYSTEM_BUSY,
            f"[OVERLOAD]{self._unflushed} messages of {unflushed_bytes} bytes wait for the disk"
            " already: start flow control for a while",
        )

    async def settle(self, timeout_ms: int) -> None:
        """Wait until no flush is outstanding, for up to ``timeout_ms``."""
        if self._by_flush:
            self._settled.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), timeout_ms / 1000)

    def acknowledge(
        self,
        appended: Appended,
        promise: Promise,
        on_outcome: OnOutcome[*Ts],
        *args: *Ts,
        sends: int = 1,
    ) -> None:
        """Report the outcome as soon as the promise is kept, or cannot be.

        ``sends`` is how many sends ``appended`` stands for, being the last of them.
        """
        if not self._is_synchronous:
            on_outcome(appended, *args)
            return
        flush = self._outstanding(appended.durable)
        flush.sends += sends
        self._unflushed += sends
        if promise is Promise.WRITTEN:
            on_outcome(appended, *args)
            return
        waiter = _Waiter(appended, on_outcome, args)
        flush.waiters.append(waiter)
        if promise is Promise.DURABLE:
            waiter.deadline = self._deadlines.add(self._limits.timeout_ms, waiter.expire)

    def _outstanding(self, durable: Future[None]) -> _Flush:
        flush = self._by_flush.get(durable)
        if flush is None:
            flush = self._by_flush[durable] = _Flush()
            loop = asyncio.get_running_loop()
            durable.add_done_callback(lambda done: _tell(loop, self._done, done))
        return flush

    def _done(self, durable: Future[None]) -> None:
        flush = self._by_flush.pop(durable)
        self._unflushed -= flush.sends
        error = durable.exception()
        if error is None:
            # Readable before anybody is told. After the store is closed, nobody is left to read.
            with contextlib.suppress(StoreClosed):
                self._store.dispatch()
        for waiter in flush.waiters:
            try:
                waiter.settle(error)
            except Exception:  # noqa: BLE001 - one broken answer must not keep the others waiting
                _log.exception("answering after a flush failed")
        if not self._by_flush:
            self._settled.set()


def _not_stored(error: BaseException) -> RemoteError:
    return RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, f"not stored: {error}")


def _tell(
    loop: asyncio.AbstractEventLoop, done: Callable[[Future[None]], None], flush: Future[None]
) -> None:
    # The loop may be gone when a flush ends after the broker: then nobody waits any more.
    if not loop.is_closed():
        loop.call_soon_threadsafe(done, flush)
