"""The flusher: one fsync for all waiters at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from turbopump.errors import WriteFailed
from turbopump.machine.background import Worker
from turbopump.message import PhysicalOffset

_log = logging.getLogger(__name__)


def done() -> Future[None]:
    """Return a completed future."""
    return _answered(Future(), None)


def _answered(future: Future[None], failure: WriteFailed | None) -> Future[None]:
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)
    return future


class Flusher:
    """Group commit: callers that join while a flush runs share the next one, and its future.

    After a failed flush, every group that was begun before `reset` fails: the operating system
    reports lost pages only once, so a successful retry proves nothing, and by then the waiters'
    messages may have been dropped from the log.
    """

    def __init__(self, sync_log: Callable[[], PhysicalOffset], worker: Worker) -> None:
        self._sync_log = sync_log
        self._worker = worker
        # Between the owner and the worker; never held while anything waits for the disk.
        self._lock = threading.Lock()
        self._group: Future[None] | None = None
        self._dead = False
        self.failure: WriteFailed | None = None

    def stop(self) -> None:
        """Finish requested flushes, then stop."""
        self._worker.close()

    def join(self) -> Future[None]:
        """Return the future of a flush that covers everything written so far."""
        with self._lock:
            if self._dead and self.failure is not None:
                return _answered(Future(), self.failure)
            if self._group is not None:
                return self._group
            group = self._group = Future()
            # Shared by many: one caller's cancellation must not cancel it.
            group.set_running_or_notify_cancel()
        self._worker.submit(self._flush)
        return group

    def submit(self, job: Callable[[], None]) -> None:
        """Run another job on the worker, after the flushes requested before."""
        if not self._dead:
            self._worker.submit(lambda: self._run(job))

    def wait_idle(self) -> None:
        """Return when nothing is left to do."""
        self._worker.wait_idle()

    def reset(self) -> None:
        """Resume flushing after unflushed bytes were rewritten or dropped."""
        with self._lock:
            failure, self.failure = self.failure, None
            group, self._group = self._group, None
            self._dead = False
        if group is not None:
            group.set_exception(failure or WriteFailed("the commit log was repaired"))

    def _flush(self) -> None:
        with self._lock:
            group, self._group = self._group, None
            # Atomic with taking the group: a `reset` in between would miss it.
            failure = self.failure
        if group is None:
            # A `reset` has answered it, or the flusher has failed.
            return
        try:
            if failure is None:
                self._sync_log()
        except OSError as error:
            failure = self.failure = _failed(error)
        except BaseException as error:  # noqa: BLE001 - a bug must not leave waiters hanging
            failure = self._die(error)
        _answered(group, failure)

    def _run(self, job: Callable[[], None]) -> None:
        if self._dead:
            return
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - what it stands for is not done
            self._die(error)

    def _die(self, error: BaseException) -> WriteFailed:
        _log.critical(
            "the flusher failed: messages are refused until it is started again", exc_info=error
        )
        failure = _failed(error)
        with self._lock:
            self._dead = True
            self.failure = failure
            group, self._group = self._group, None
        if group is not None:
            group.set_exception(failure)
        return failure


def _failed(error: BaseException) -> WriteFailed:
    failure = WriteFailed(f"flushing the commit log failed: {error}")
    failure.__cause__ = error
    return failure
