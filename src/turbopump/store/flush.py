"""The flusher: one thread that forces written bytes to disk, for everyone who waits at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from turbopump.errors import WriteFailed
from turbopump.message import PhysicalOffset

_log = logging.getLogger(__name__)


def done() -> Future[None]:
    """Return a future that needs no waiting."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _broken(error: WriteFailed) -> Future[None]:
    future: Future[None] = Future()
    future.set_exception(error)
    return future


class Flusher:
    """Group commit: whoever joins while a flush runs shares the next one, and its future.

    After a failed flush every group fails that was begun before `reset`: the operating system
    reports lost pages once only, so a second try that succeeds proves nothing, and by then the
    messages of those who wait may have been dropped from the log.
    """

    def __init__(self, sync_log: Callable[[], PhysicalOffset]) -> None:
        self._sync_log = sync_log
        self._wake = threading.Condition()
        self._group: Future[None] | None = None
        self._jobs: list[Callable[[], None]] = []
        self._running: Future[None] | None = None
        self._busy = False
        self._dead = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.failure: WriteFailed | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="store-flusher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish what was asked for and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def join(self) -> Future[None]:
        """Return the future of a flush that covers everything written so far."""
        with self._wake:
            if self._dead and self.failure is not None:
                return _broken(self.failure)
            if self._group is None:
                self._group = Future()
                # Shared by many: one who loses interest must not be able to cancel it.
                self._group.set_running_or_notify_cancel()
                self._wake.notify_all()
            return self._group

    def submit(self, job: Callable[[], None]) -> None:
        """Have something else done on this thread, after the flushes asked for before."""
        with self._wake:
            if not self._dead:
                self._jobs.append(job)
                self._wake.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether anything is left to do; when not, all who waited have been told.

        Without the lock, as it is asked often: what is taken is busy before it is taken, so whoever
        asks for that last overlooks nothing that was asked for on the same thread.
        """
        return self._group is not None or bool(self._jobs) or self._busy

    def wait_idle(self) -> None:
        """Return when nothing is left to do."""
        with self._wake:
            self._wake.wait_for(lambda: not (self._busy or self._group or self._jobs))

    def reset(self) -> None:
        """Flush again: what could not be flushed has been written anew or dropped."""
        with self._wake:
            failure, self.failure = self.failure, None
            group, self._group = self._group, None
            was_dead, self._dead = self._dead, False
            self._wake.notify_all()
        if group is not None:
            group.set_exception(failure or WriteFailed("the commit log was mended"))
        if was_dead:
            self.start()

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except BaseException as error:  # noqa: BLE001 - nobody may wait for ever because of a bug
            _log.critical(
                "the flusher failed: messages are refused until it is started again", exc_info=error
            )
            self._die(error)

    def _serve(self) -> bool:
        """Do what is asked for; False when there will be nothing more."""
        with self._wake:
            self._running = None
            self._busy = False
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._group or self._jobs or self._stopping)
            if self._group is None and not self._jobs:
                return False
            self._busy = True
            self._running, self._group = self._group, None
            # Together with the taking: a `reset` in between would not know of this group.
            failure = self.failure
            jobs, self._jobs = self._jobs, []
        if self._running is not None:
            self._flush(self._running, failure)
        for job in jobs:
            job()
        return True

    def _flush(self, group: Future[None], failure: WriteFailed | None) -> None:
        if failure is None:
            try:
                self._sync_log()
            except OSError as error:
                failure = self.failure = _failed(error)
        if failure is None:
            group.set_result(None)
        else:
            group.set_exception(failure)

    def _die(self, error: BaseException) -> None:
        with self._wake:
            self._dead = True
            self._busy = False
            self.failure = _failed(error)
            groups, self._group = (self._running, self._group), None
            self._jobs.clear()
            self._wake.notify_all()
        for group in groups:
            if group is not None and not group.done():
                group.set_exception(self.failure)


def _failed(error: BaseException) -> WriteFailed:
    failure = WriteFailed(f"flushing the commit log failed: {error}")
    failure.__cause__ = error
    return failure
