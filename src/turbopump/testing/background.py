"""Background jobs in virtual time: the event loop runs them, so that every run is the same.

A job that has to wait, for a slow or stalled disk, gets a thread, as the store's code cannot be
interrupted otherwise. But no two jobs ever run at the same time: the loop stops until the job waits
or ends, and resumes it when the virtual time has come.
"""

from __future__ import annotations

import _thread
import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from turbopump.testing.loop import VirtualTimeLoop

T = TypeVar("T")


class _Job:
    """A job that is submitted, running, or waiting."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._call = call
        self.has_begun = False
        """Whether it has a thread, on which it waits."""
        self.timer: asyncio.TimerHandle | None = None
        """What ends its wait; None if it does not wait, or waits without a time limit."""
        self.is_done = False

    def run(self) -> None:
        """Run to the end, on the calling thread."""
        if self.future.set_running_or_notify_cancel():
            try:
                result = self._call()
            except BaseException as error:  # noqa: BLE001 - the waiter for the job gets it
                self.future.set_exception(error)
            else:
                self.future.set_result(result)
        self.is_done = True

    def resume(self) -> None:
        """Run on its own thread until it waits or ends."""
        if not self.has_begun:
            # Each is acquired by one side and released by the other.
            self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
            self._go.acquire()
            self._back.acquire()
            self.has_begun = True
            # Not by `threading`, which waits until it has begun.
            _thread.start_new_thread(self._main, ())
        else:
            self._go.release()
        self._back.acquire()

    def wait(self) -> None:
        """Yield, on the job's own thread, until `resume`."""
        self._back.release()
        self._go.acquire()

    def _main(self) -> None:
        self.run()
        self._back.release()


class VirtualWorker:
    """Runs jobs in the order of submission, each in its own loop iteration."""

    def __init__(self, background: VirtualBackground) -> None:
        self._background = background
        self._jobs: deque[_Job] = deque()
        self._running: _Job | None = None
        self._is_scheduled = False
        self._is_closed = False

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job in the next loop iteration."""
        if self._is_closed:
            raise RuntimeError("the worker is closed")
        added = _Job(job)
        self._jobs.append(added)
        self._schedule()
        return added.future

    def wait_idle(self) -> None:
        """Run all jobs now, advancing the clock for those that wait."""
        while self._running is not None or self._jobs:
            if self._running is not None:
                self._background.hurry(self._running)
            else:
                self._begin()

    def close(self) -> None:
        """Accept no further jobs, and run the pending ones."""
        self.wait_idle()
        self._is_closed = True

    def go_on(self, job: _Job) -> None:
        """Run a job until it waits or ends, and then start the next."""
        self._background.run(job)
        if job.is_done:
            self._running = None
            self._schedule()

    def _schedule(self) -> None:
        if self._jobs and self._running is None and not self._is_scheduled:
            loop = self._background.loop
            if loop is None or loop.is_closed():
                self.wait_idle()
            else:
                self._is_scheduled = True
                loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        if self._running is None and self._jobs:
            self._begin()

    def _begin(self) -> None:
        job = self._running = self._jobs.popleft()
        self._background.owners[job] = self
        self.go_on(job)


class VirtualBackground:
    """Workers and locks of one machine in virtual time.

    Without a loop, jobs run as soon as they are submitted. ``may_wait`` returns whether jobs may
    have to wait at all: if not, they need no thread.
    """

    def __init__(
        self, loop: VirtualTimeLoop | None, may_wait: Callable[[], bool] = lambda: False
    ) -> None:
        self.loop = loop
        self.owners: dict[_Job, VirtualWorker] = {}
        """The worker of each job that has begun."""
        self._may_wait = may_wait
        self.current: _Job | None = None
        """The job that currently runs on its own thread."""
        self._stalled: dict[_Job, None] = {}

    def worker(self, name: str) -> VirtualWorker:  # noqa: ARG002 - it has no thread to be named
        """Return a new worker."""
        return VirtualWorker(self)

    def lock(self) -> VirtualLock:
        """Return a lock whose waiters hurry its holder."""
        return VirtualLock(self)

    @property
    def is_waiting(self) -> bool:
        """Whether a started job waits."""
        return bool(self.owners)

    # --- for disks --------------------------------------------------------------------------------

    def take_time(self, milliseconds: int) -> None:
        """Let virtual time pass: for the calling job or, outside of jobs, for all."""
        job = self.current
        if self.loop is None or milliseconds <= 0:
            return
        if job is None:
            # The loop's own thread waits for the disk: nothing else happens meanwhile.
            self.loop.clock.advance_ns(milliseconds * 1_000_000)
        else:
            owner = self.owners[job]
            job.timer = self.loop.call_later(milliseconds / 1000, owner.go_on, job)
            job.wait()

    def stall(self) -> None:
        """Block the calling job until `release`, or until another caller needs its result."""
        if self.current is not None:
            self._stalled[self.current] = None
            self.current.wait()

    def release(self) -> None:
        """Resume all waiting jobs, in the order in which they began to wait."""
        waiting = [*self._stalled, *(job for job in self.owners if job.timer is not None)]
        self._stalled.clear()
        for job in waiting:
            if job.timer is not None:
                job.timer.cancel()
            assert self.loop is not None, "without a loop nothing waits"
            job.timer = self.loop.call_later(0, self.owners[job].go_on, job)

    # --- for workers ------------------------------------------------------------------------------

    def run(self, job: _Job) -> None:
        """Run a job until it waits or ends; on the loop's thread, or on another job's."""
        job.timer = None
        before = self.current
        if job.has_begun or (self.loop is not None and self._may_wait()):
            self.current = job
            try:
                job.resume()
            finally:
                self.current = before
        else:
            job.run()
        if job.is_done:
            del self.owners[job]

    def hurry(self, job: _Job) -> None:
        """Resume a waiting job immediately: its time has come, or it is no longer stalled."""
        self._stalled.pop(job, None)
        timer = job.timer
        if timer is not None:
            assert self.loop is not None, "without a loop nothing waits"
            timer.cancel()
            left_s = max(0.0, timer.when() - self.loop.time())
            self.loop.clock.advance_ns(round(left_s * 1e9))
        self.owners[job].go_on(job)


class VirtualLock:
    """A lock that jobs may hold while they wait."""

    def __init__(self, background: VirtualBackground) -> None:
        self._background = background
        self._holder: _Job | None = None

    def __enter__(self) -> None:
        while self._holder is not None:
            self._background.hurry(self._holder)
        self._holder = self._background.current

    def __exit__(self, *_: object) -> None:
        self._holder = None
