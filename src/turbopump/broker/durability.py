"""The acknowledgement gate: decides when a stored message may be acknowledged.

Nothing else in the broker reports that a message is stored, or knows what a mode promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol, TypeAlias

from msgspec import Struct

from turbopump.broker.config import OverloadConfig
from turbopump.broker.jobs import when_done
from turbopump.broker.replication.master import Slaves
from turbopump.errors import RemoteError, StoreClosed
from turbopump.net.deadlines import Deadline, Deadlines
from turbopump.store.config import FlushMode
from turbopump.store.outcomes import Appended
from turbopump.store.store import Store
from turbopump.wire.codes import ResponseCode

_log = logging.getLogger(__name__)


class Promise(Enum):
    """What must be true before a message is acknowledged."""

    WRITTEN = "written"
    """The operating system has it, so it survives the end of the process. For senders that do not
    wait for the disk (``WAIT=false``)."""
    DURABLE = "durable"
    """What the broker's mode promises: on disk with SYNC_FLUSH, and then on a slave with
    SYNC_MASTER, else `WRITTEN`. Reported as `Late` after ``syncFlushTimeout`` or ``slaveTimeout``,
    and if no slave is in sync. Callers name no mode."""
    DURABLE_EVENTUALLY = "durable eventually"
    """On disk, however long that takes: for the broker's own work, which no peer waits for. It
    waits for slaves too, but only while one is in sync, and no longer than ``slaveTimeout``."""


class Late(Struct, frozen=True):
    """Stored, but not durable before the timeout; the message may become durable or be lost."""

    appended: Appended
    code: ResponseCode
    remark: str

    def for_consumer(self) -> Appended | RemoteError:
        """Return the answer to a send-back; on success the consumer commits the original message.

        If the flush failed after a success, the message would be lost. After an error the consumer
        tries again, so there are two copies if the flush succeeds. But a message that waits for a
        slave is already stored here: another copy would not make it safer, and would delay a slow
        slave further.
        """
        if self.code == ResponseCode.FLUSH_DISK_TIMEOUT:
            return RemoteError.system(self.remark)
        return self.appended


_REMARKS = {
    ResponseCode.FLUSH_DISK_TIMEOUT: "stored, but not on disk within syncFlushTimeout",
    ResponseCode.FLUSH_SLAVE_TIMEOUT: "stored, but not on a slave within slaveTimeout",
    ResponseCode.SLAVE_NOT_AVAILABLE: "stored, but no slave is in sync",
}


def _late(appended: Appended, code: ResponseCode) -> Late:
    return Late(appended, code, f"{code.name}: {_REMARKS[code]}")


Outcome: TypeAlias = Appended | Late | RemoteError
"""The message is stored as promised, or not yet, or not at all."""


class Pending(Protocol):
    """A message whose sender waits for the outcome."""

    promise: Promise

    def report(self, outcome: Outcome) -> None:
        """Take the outcome; called once, on the loop."""


OnOutcome = Callable[[Outcome], None]


class Report(Struct, eq=False):
    """Passes an outcome to a function."""

    promise: Promise
    on_outcome: OnOutcome

    def report(self, outcome: Outcome) -> None:
        self.on_outcome(outcome)


class _Waiter:
    """One message that waits for a flush, or for a slave."""

    __slots__ = ("_appended", "_code", "_pending", "deadline", "release")

    def __init__(self, appended: Appended, code: ResponseCode, pending: Pending) -> None:
        self._appended = appended
        self._code = code
        self._pending: Pending | None = pending
        self.deadline: Deadline | None = None
        self.release: Callable[[], None] | None = None
        """Ends the wait for a slave; otherwise it would keep this in memory after a timeout."""

    def settle(self, error: BaseException | None) -> None:
        """Report that the wait has ended or failed."""
        if self.deadline is not None:
            self.deadline.cancel()
        self._report(self._appended if error is None else _not_stored(error))

    def expire(self) -> None:
        """Report a timeout."""
        self._report(_late(self._appended, self._code))

    def _report(self, outcome: Outcome) -> None:
        pending, self._pending = self._pending, None
        if self.release is not None:
            self.release()
        if pending is not None:
            pending.report(outcome)


class _Flush(Struct):
    """The waiters of one flush."""

    sends: int = 0
    waiters: list[_Waiter] = []


@dataclass(eq=False)
class Durability:
    """Acknowledges what is stored: immediately, or when the shared flush is done.

    With ``slaves``, which a SYNC_MASTER has, one of them must have it too.

    In asynchronous mode a write to the operating system is enough. It bounds its dirty pages itself
    and then slows down writes. In synchronous mode each unflushed message also has an entry in
    memory, whether its sender waits or not, so these are bounded here: `busy` returns the refusal
    once the limit is reached.
    """

    store: Store
    deadlines: Deadlines
    limits: OverloadConfig
    slaves: Slaves | None = None

    def __post_init__(self) -> None:
        self._replicating = 0
        self._is_synchronous = self.store.config.flush.mode is FlushMode.SYNC
        self._by_flush: dict[Future[None], _Flush] = {}
        self._unflushed = 0
        self._settled = asyncio.Event()

    def __len__(self) -> int:
        """Return how many sends wait for the disk or for a slave; 0 in asynchronous mode."""
        return self._unflushed + self._replicating

    def busy(self) -> RemoteError | None:
        """Return why nothing more should be stored now; None if the disk keeps up."""
        waiting = self._unflushed + self._replicating
        if not waiting:
            return None
        unflushed_bytes = self.store.written_end - self.store.readable_end
        limits = self.limits
        if waiting < limits.sends_waiting_max and unflushed_bytes < limits.unflushed_bytes_max:
            return None
        what = f"{self._unflushed} messages of {unflushed_bytes} bytes wait for the disk already"
        if self._replicating:
            what += f", {self._replicating} for a slave"
        text = f"[OVERLOAD]{what}: start flow control for a while"
        return RemoteError(ResponseCode.SYSTEM_BUSY, text)

    async def settle(self, timeout_ms: int) -> None:
        """Wait until no flush or slave is waited for, for up to ``timeout_ms``."""
        if self._by_flush or self._replicating:
            self._settled.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), timeout_ms / 1000)

    def acknowledge(self, appended: Appended, pending: Pending, sends: int = 1) -> None:
        """Report the outcome as soon as the promise is kept, or cannot be.

        ``appended`` is the last of ``sends`` sends.
        """
        promise = pending.promise
        if self.slaves is not None and promise is not Promise.WRITTEN:
            copied = Report(promise, partial(self._copy, pending))
            if self._is_synchronous:
                self._flush(appended, copied, sends)
            else:
                copied.report(appended)
        elif self._is_synchronous:
            self._flush(appended, pending, sends)
        else:
            pending.report(appended)

    def acknowledge_all(self, appended: Iterable[Appended], pending: Iterable[Pending]) -> None:
        """Acknowledge several sends."""
        is_simple = self.slaves is None and not self._is_synchronous
        for stored, each in zip(appended, pending, strict=True):
            if is_simple:
                each.report(stored)
            else:
                self.acknowledge(stored, each)

    def _flush(self, appended: Appended, pending: Pending, sends: int) -> None:
        """Report when the flush is done."""
        flush = self._outstanding(appended.durable)
        flush.sends += sends
        self._unflushed += sends
        if pending.promise is Promise.WRITTEN:
            pending.report(appended)
            return
        waiter = _Waiter(appended, ResponseCode.FLUSH_DISK_TIMEOUT, pending)
        flush.waiters.append(waiter)
        if pending.promise is Promise.DURABLE:
            timeout_ms = self.limits.sync_flush_timeout_ms
            waiter.deadline = self.deadlines.add(timeout_ms, waiter.expire)

    def _copy(self, pending: Pending, outcome: Outcome) -> None:
        """Report when a slave has what is on disk here, if one is in sync."""
        slaves, is_limited = self.slaves, pending.promise is Promise.DURABLE
        if not isinstance(outcome, Appended) or slaves is None:
            pending.report(outcome)
            return
        end = outcome.end_offset
        if not slaves.is_available(end):
            missing = _late(outcome, ResponseCode.SLAVE_NOT_AVAILABLE)
            pending.report(missing if is_limited else outcome)
            return
        self._replicating += 1
        copied = Report(pending.promise, partial(self._copied, pending))
        waiter = _Waiter(outcome, ResponseCode.FLUSH_SLAVE_TIMEOUT, copied)
        # A slave that stores nothing may stay connected: no waiter may wait without limit.
        expire = waiter.expire if is_limited else partial(waiter.settle, None)
        waiter.deadline = self.deadlines.add(slaves.config.timeout_ms, expire)

        def on_stored(is_stored: bool) -> None:
            if is_stored or not is_limited:
                waiter.settle(None)

        waiter.release = slaves.when_stored(end, on_stored)

    def _copied(self, pending: Pending, outcome: Outcome) -> None:
        self._replicating -= 1
        self._note_settled()
        pending.report(outcome)

    def _outstanding(self, durable: Future[None]) -> _Flush:
        flush = self._by_flush.get(durable)
        if flush is None:
            flush = self._by_flush[durable] = _Flush()
            when_done(durable, self._done)
        return flush

    def _done(self, durable: Future[None]) -> None:
        flush = self._by_flush.pop(durable)
        self._unflushed -= flush.sends
        error = durable.exception()
        if error is None:
            # Make it readable before notifying anyone. A closed store has no readers.
            with contextlib.suppress(StoreClosed):
                self.store.dispatch()
        for waiter in flush.waiters:
            try:
                waiter.settle(error)
            except Exception:  # noqa: BLE001 - one broken answer must not keep the others waiting
                _log.exception("answering after a flush failed")
        self._note_settled()

    def _note_settled(self) -> None:
        if not self._by_flush and not self._replicating:
            self._settled.set()


def set_outcome(outcome: Outcome, future: asyncio.Future[Outcome]) -> None:
    """Complete a future, unless its waiter is gone, as when a connection closes meanwhile."""
    if not future.done():
        future.set_result(outcome)


def _not_stored(error: BaseException) -> RemoteError:
    return RemoteError(ResponseCode.SERVICE_NOT_AVAILABLE, f"not stored: {error}")
