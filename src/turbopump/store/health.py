"""Whether the store accepts messages, and how it recovers from failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from turbopump.clock import Clock
from turbopump.errors import DiskFailed, DiskFull, WriteFailed, WriteRefused
from turbopump.message import PhysicalOffset
from turbopump.store.commit_log import CommitLog
from turbopump.store.config import FlushMode, StoreConfig
from turbopump.store.deferred_steps import DeferredSteps, is_full
from turbopump.store.dispatch import Dispatcher
from turbopump.store.flush import Flusher
from turbopump.store.queues import Queues
from turbopump.store.write_behind import WriteBehind

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False)
class Health:
    """Records failures; refuses messages until a probe shows that writing works again.

    The probe runs at most once in ``heal_interval_ms``, on appends and maintenance: it drops or
    rewrites what could not be made durable, and flushes that.
    """

    config: StoreConfig
    clock: Clock
    log: CommitLog
    queues: Queues
    dispatcher: Dispatcher
    flusher: Flusher
    behind: WriteBehind
    deferred: DeferredSteps

    def __post_init__(self) -> None:
        self._torn: tuple[PhysicalOffset, OSError] | None = None
        self._blocked: OSError | None = None
        self._probed_ms = 0
        self._disk_used_ratio: float | None = None
        self.untroubled = True
        """False once anything but a flush has failed; a cheap first check."""

    def reason(self) -> WriteRefused | None:
        """Return why messages are refused now; None if they are accepted."""
        if self._disk_used_ratio is not None:
            return DiskFull(f"{self._disk_used_ratio:.0%} of the disk is used")
        if self.deferred.error is not None:
            return refusal(self.deferred.error, "opening the store could not be completed")
        if self._torn is not None:
            return refusal(self._torn[1], "an incomplete write could not be undone")
        failure = self.flusher.failure
        if failure is not None:
            refused = WriteFailed(str(failure))
            refused.__cause__ = failure.__cause__
            return refused
        if self._blocked is not None:
            return refusal(self._blocked, "queues and index cannot be written")
        return None

    def is_writable(self) -> bool:
        """Whether messages are accepted; retries repairs at intervals."""
        troubles = self.flusher.failure, self.deferred.error, self._torn, self._blocked
        sick = any(trouble is not None for trouble in troubles)
        interval_ms = self.config.flush.heal_interval_ms
        if sick and self.clock.monotonic_ms() - self._probed_ms >= interval_ms:
            sick = not self.probe()
        return not sick and self._disk_used_ratio is None

    def probe(self) -> bool:
        """Try all repairs now; return whether they succeeded."""
        self._probed_ms = self.clock.monotonic_ms()
        try:
            self.deferred.finish()
            if self._torn is not None:
                self.log.truncate(self._torn[0])
                self._torn = None
            if self.flusher.failure is not None:
                self._repair_log()
            if self._blocked is not None:
                self.behind.try_again()
                self._blocked = None
        except OSError:
            return False
        finally:
            self.look()
        return True

    def torn(self, at: PhysicalOffset, error: OSError) -> None:
        """Record that bytes after a position could not be erased."""
        self._torn = at, error
        self.look()
        self._probed_ms = self.clock.monotonic_ms()

    def blocked(self, error: OSError) -> None:
        """Record that queues or index cannot be written; they must not pile up in memory."""
        self._blocked = error
        self.look()
        self._probed_ms = self.clock.monotonic_ms()

    def disk_is_full(self, used_ratio: float | None) -> None:
        """Refuse messages because the disk is too full, or accept them again."""
        self._disk_used_ratio = used_ratio
        self.look()

    def look(self) -> None:
        """Collect the failures of the other parts."""
        troubles = (self._torn, self._blocked, self._disk_used_ratio, self.deferred.error)
        self.untroubled = all(trouble is None for trouble in troubles)

    def _repair_log(self) -> None:
        if self.config.flush.mode is FlushMode.SYNC:
            # What lies after the last flush was neither acknowledged nor readable.
            self.dispatcher.advance(self.log.flushed)
            self.dispatcher.forget()
            self.log.truncate(self.log.flushed)
            self.queues.removed.fit(self.log.min_offset, self.log.written)
            for queue in self.queues:
                queue.next_offset = queue.max_offset
        else:
            self.log.rewrite_unflushed()
        self.log.sync()
        self.flusher.reset()


def refusal(error: OSError, what: str) -> WriteRefused:
    """Return the error for a message that could not be written."""
    refused = (DiskFull if is_full(error) else WriteFailed)(f"{what}: {error}")
    refused.__cause__ = error
    return refused


def translate_disk_errors(call: Callable[P, T]) -> Callable[P, T]:
    """Make a method raise `DiskFailed` in place of OSError."""

    @wraps(call)
    def named(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except OSError as error:
            raise disk_failed(error) from error

    return named


def disk_failed(error: OSError) -> DiskFailed:
    """Return the error for callers of the store."""
    return DiskFailed(f"the store's files cannot be read or deleted: {error}")
