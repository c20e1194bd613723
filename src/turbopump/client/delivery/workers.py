"""Up to n concurrent jobs: in threads, or as tasks on the loop.

Waking a thread or starting a task costs more than a short job. So one worker runs all jobs that are
queued, and more workers join only while the running ones block in the middle of a job. Finished
jobs return to the loop in lists.

The limit n grows from a minimum to a maximum while all n workers are busy and jobs wait for longer
than `_GROW_AFTER_S`, and shrinks to what was needed in the last `_SHRINK_AFTER_S`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import copy_context
from typing import Generic, TypeVar

from turbopump.machine.threads import DaemonThreads
from turbopump.supervisor import Watch, wait_cancelled

J = TypeVar("J")

THREADS_LIMIT = 1000
_CHECK_AFTER_S = 0.001
_GROW_AFTER_S = 1.0
_SHRINK_AFTER_S = 60.0
_JOBS_PER_TURN = 64


class Taken(Generic[J]):
    """The job that one worker runs."""

    __slots__ = ("job",)

    def __init__(self) -> None:
        self.job: J | None = None


class Workers(ABC, Generic[J]):
    """Runs jobs; the creator defines how to run them and what to do when they are done.

    It runs them by iterating over them: taking the next one says that the last is done.

    ``limits`` are the minimum and maximum of jobs that run concurrently. A job that fails is a bug:
    it is logged, counted, and run again after a pause.
    """

    def __init__(
        self, done: Callable[[Sequence[J]], None], limits: tuple[int, int], watch: Watch
    ) -> None:
        self._size_min, self._size_max = limits
        self._size = self._size_min
        self._done = done
        self._watch = watch
        self._context = copy_context()
        """For what follows jobs: those of the application may leave variables behind."""
        self._jobs: deque[J] = deque()
        self._active: set[asyncio.Future[None]] = set()
        self._taken: set[Taken[J]] = set()
        self._submitted = 0
        self._waiting = 0
        """What ``_submitted`` was when the timer of growth began."""
        self._growth: asyncio.TimerHandle | None = None
        self._shrinking: asyncio.TimerHandle | None = None
        self._busy_max = 0
        """The most workers since the timer of shrinking began."""
        self._is_closed = False

    @property
    def size(self) -> int:
        """How many jobs may run concurrently now."""
        return self._size

    def submit(self, jobs: Sequence[J]) -> None:
        """Run jobs as soon as a worker is free; ignore them once closed."""
        if self._is_closed:
            return
        self._jobs.extend(jobs)
        self._submitted += len(jobs)
        self._start_waiting()
        self._grow_later()

    def resize(self, limits: tuple[int, int]) -> None:
        """Change how many jobs run concurrently, at least and at most."""
        self._size_min, self._size_max = limits
        self._size = min(max(self._size, self._size_min), self._size_max)
        self._shrink_later()
        self.submit(())

    @abstractmethod
    async def close(self, timeout_ms: int) -> None:
        """Start no further jobs, and wait for the running ones."""

    @abstractmethod
    def _start_waiting(self) -> None:
        """Start workers for waiting jobs, as far as the size permits."""

    @property
    def running(self) -> list[J]:
        """The jobs that run now."""
        # A copy: threads modify it.
        jobs = [taken.job for taken in tuple(self._taken)]
        return [job for job in jobs if job is not None]

    @property
    def _taken_count(self) -> int:
        return self._submitted - len(self._jobs)

    def _stop_submitting(self) -> None:
        self._is_closed = True
        self._jobs.clear()
        for timer in (self._growth, self._shrinking):
            if timer is not None:
                timer.cancel()

    def _grow_later(self) -> None:
        if self._growth is None and self._jobs and self._size < self._size_max:
            self._waiting = self._submitted
            loop = asyncio.get_running_loop()
            self._growth = loop.call_later(_GROW_AFTER_S, self._grow_size)

    def _grow_size(self) -> None:
        """Double the size if all workers are busy and a job has waited since the timer began."""
        self._growth = None
        if len(self._active) >= self._size and self._taken_count < self._waiting:
            self._size = min(2 * self._size, self._size_max)
            self._shrink_later()
            self._start_waiting()
        self._grow_later()

    def _shrink_later(self) -> None:
        if self._shrinking is None and self._size > self._size_min:
            self._busy_max = len(self._active)
            loop = asyncio.get_running_loop()
            self._shrinking = loop.call_later(_SHRINK_AFTER_S, self._shrink_size)

    def _shrink_size(self) -> None:
        # To what was needed, so that a steady load does not alternate between two sizes.
        self._shrinking = None
        self._size = min(max(self._busy_max, self._size_min), self._size)
        self._shrink_later()

    def _add(self, worker: asyncio.Future[None]) -> None:
        self._active.add(worker)
        self._busy_max = max(self._busy_max, len(self._active))
        worker.add_done_callback(self._ended)

    @abstractmethod
    def _ended(self, worker: asyncio.Future[None]) -> None:
        """Remove a worker, and start another if jobs are left."""

    def _run_again(self, job: J | None, error: Exception) -> None:
        jobs = () if job is None else (job,)
        pause_ms = self._watch.failed(error)
        asyncio.get_running_loop().call_later(pause_ms / 1000, self.submit, jobs)


class ThreadWorkers(Workers[J]):
    """Runs jobs in threads."""

    def __init__(
        self,
        run: Callable[[Iterator[J]], None],
        done: Callable[[Sequence[J]], None],
        limits: tuple[int, int],
        watch: Watch,
    ) -> None:
        super().__init__(done, limits, watch)
        self._run = run
        # Daemons: a listener that never returns must not keep the process from ending.
        self._threads = DaemonThreads(THREADS_LIMIT, "turbopump-listener")
        self._finished: deque[J] = deque()
        self._taken_before = 0
        self._check: asyncio.TimerHandle | None = None
        self._is_notified = False

    def resize(self, limits: tuple[int, int]) -> None:
        super().resize(limits)
        self._threads.trim(self._size)

    async def close(self, timeout_ms: int) -> None:
        self._stop_submitting()
        if self._check is not None:
            self._check.cancel()
        if self._active and timeout_ms:
            await asyncio.wait(self._active, timeout=timeout_ms / 1000)
        self._collect()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _shrink_size(self) -> None:
        super()._shrink_size()
        self._threads.trim(self._size)

    def _start_waiting(self) -> None:
        if not self._active and self._jobs:
            self._start(1)
        self._check_later()

    def _start(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            self._add(loop.run_in_executor(self._threads, self._work, loop))

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run jobs until none are left; in a thread."""
        while self._jobs and len(self._active) <= self._size:
            taken: Taken[J] = Taken()
            self._taken.add(taken)
            try:
                self._run(self._take(loop, taken))
            except Exception as error:  # noqa: BLE001 - a bug, but the job must still be finished
                if not self._is_closed:
                    loop.call_soon_threadsafe(self._run_again, taken.job, error)
            finally:
                self._taken.discard(taken)

    def _take(self, loop: asyncio.AbstractEventLoop, taken: Taken[J]) -> Iterator[J]:
        """Yield jobs until none are left; ``taken`` is the one being run."""
        while len(self._active) <= self._size:
            try:
                job = self._jobs.popleft()
            except IndexError:
                break
            taken.job = job
            yield job
            self._finished.append(job)
            if not self._is_notified and not self._is_closed:
                self._is_notified = True
                loop.call_soon_threadsafe(self._collect, context=self._context)
        taken.job = None

    def _collect(self) -> None:
        self._is_notified = False
        finished = []
        while self._finished:
            finished.append(self._finished.popleft())
        if finished:
            self._done(finished)

    def _ended(self, worker: asyncio.Future[None]) -> None:
        self._active.discard(worker)
        worker.result()
        self._collect()
        # A job may have arrived after this worker's last check, or the size has shrunk.
        self._start_waiting()

    def _check_later(self) -> None:
        """Check soon whether jobs need more workers, unless there are as many as may be."""
        if self._check is None and self._jobs and len(self._active) < self._size:
            self._taken_before = self._taken_count
            loop = asyncio.get_running_loop()
            self._check = loop.call_later(_CHECK_AFTER_S, self._check_stuck)

    def _check_stuck(self) -> None:
        """Double the workers while jobs wait and the running workers take none."""
        self._check = None
        if self._taken_count - self._taken_before < len(self._active):
            room = min(self._size - len(self._active), len(self._jobs))
            self._start(max(min(room, len(self._active)), 0))
        self._check_later()


class TaskWorkers(Workers[J]):
    """Runs jobs on the loop."""

    def __init__(
        self,
        run: Callable[[Iterator[J]], Awaitable[None]],
        done: Callable[[Sequence[J]], None],
        limits: tuple[int, int],
        watch: Watch,
    ) -> None:
        super().__init__(done, limits, watch)
        self._run = run
        self._finished: list[J] = []

    async def close(self, timeout_ms: int) -> None:
        self._stop_submitting()
        if self._active and timeout_ms:
            await asyncio.wait(self._active, timeout=timeout_ms / 1000)
        for worker in self._active:
            worker.cancel()
        await wait_cancelled(self._active)
        self._collect()

    def _start(self, count: int) -> None:
        for _ in range(min(count, len(self._jobs), self._size - len(self._active))):
            self._add(asyncio.create_task(self._work()))

    def _start_waiting(self) -> None:
        """Double the workers if all of them are in the middle of a job; there may be none yet."""
        # From outside of a job, its listener is waiting for something.
        if len(self.running) >= len(self._active):
            self._start(max(len(self._active), 1))

    async def _work(self) -> None:
        while self._jobs and len(self._active) <= self._size:
            taken: Taken[J] = Taken()
            self._taken.add(taken)
            if len(self._jobs) > 1:
                # Once in a turn: between its jobs, a worker never counts as free.
                loop = asyncio.get_running_loop()
                loop.call_soon(self._start_waiting, context=self._context)
            try:
                await self._run(self._take(taken))
            except Exception as error:  # noqa: BLE001 - a bug, but the job must still be finished
                self._run_again(taken.job, error)
            finally:
                self._taken.discard(taken)
            if self._jobs:
                await asyncio.sleep(0)

    def _take(self, taken: Taken[J]) -> Iterator[J]:
        """Yield the jobs of one turn of the loop; ``taken`` is the one being run."""
        jobs, finished, active = self._jobs, self._finished, self._active
        for _ in range(_JOBS_PER_TURN):
            if not jobs or len(active) > self._size:
                break
            taken.job = job = jobs.popleft()
            yield job
            if not finished:
                asyncio.get_running_loop().call_soon(self._collect, context=self._context)
            finished.append(job)
        taken.job = None

    def _collect(self) -> None:
        if self._finished:
            finished = self._finished.copy()
            self._finished.clear()
            self._done(finished)

    def _ended(self, worker: asyncio.Future[None]) -> None:
        self._active.discard(worker)
        if not worker.cancelled():
            worker.result()
        # It counted as free until now, also for jobs that came meanwhile.
        self._start_waiting()
