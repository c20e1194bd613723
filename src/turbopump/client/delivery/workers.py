"""Up to n concurrent jobs: in threads, or as tasks on the loop.

Waking a thread or starting a task costs more than a short job. So one worker runs all jobs that are
queued, and more workers join only while the running ones block in the middle of a job. Finished
jobs return to the loop in lists.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

from turbopump.machine.threads import DaemonThreads
from turbopump.supervisor import Watch, wait_cancelled

J = TypeVar("J")

THREADS_LIMIT = 1000
_CHECK_AFTER_S = 0.001
_JOBS_PER_TURN = 64


class Workers(ABC, Generic[J]):
    """Runs jobs; the creator defines how to run one and what to do when it is done.

    A job that fails is a bug: it is logged, counted, and run again after a pause.
    """

    def __init__(self, done: Callable[[Sequence[J]], None], size: int, watch: Watch) -> None:
        self._size = size
        self._done = done
        self._watch = watch
        self._jobs: deque[J] = deque()
        self._is_closed = False

    @property
    def size(self) -> int:
        """How many jobs run concurrently."""
        return self._size

    @abstractmethod
    def submit(self, jobs: Iterable[J]) -> None:
        """Run jobs as soon as a worker is free; ignore them once closed."""

    def resize(self, size: int) -> None:
        """Change how many jobs run concurrently."""
        self._size = size
        self.submit(())

    @abstractmethod
    async def close(self, timeout_ms: int) -> None:
        """Start no further jobs, and wait for the running ones."""

    def _run_again(self, job: J, error: Exception) -> None:
        pause_ms = self._watch.failed(error)
        asyncio.get_running_loop().call_later(pause_ms / 1000, self.submit, [job])


class ThreadWorkers(Workers[J]):
    """Runs jobs in threads."""

    def __init__(
        self, run: Callable[[J], None], done: Callable[[Sequence[J]], None], size: int, watch: Watch
    ) -> None:
        super().__init__(done, size, watch)
        self._run = run
        # Daemons: a listener that never returns must not keep the process from ending.
        self._threads = DaemonThreads(THREADS_LIMIT, "turbopump-listener")
        self._finished: deque[J] = deque()
        self._active: set[asyncio.Future[None]] = set()
        self._taken = 0
        self._taken_before = 0
        self._check: asyncio.TimerHandle | None = None
        self._is_notified = False

    def submit(self, jobs: Iterable[J]) -> None:
        if self._is_closed:
            return
        self._jobs.extend(jobs)
        if not self._active and self._jobs:
            self._start(1)
        self._check_later()

    async def close(self, timeout_ms: int) -> None:
        self._is_closed = True
        self._jobs.clear()
        if self._check is not None:
            self._check.cancel()
        if self._active and timeout_ms:
            await asyncio.wait(self._active, timeout=timeout_ms / 1000)
        self._collect()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            worker = loop.run_in_executor(self._threads, self._work, loop)
            self._active.add(worker)
            worker.add_done_callback(self._ended)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run jobs until none are left; in a thread."""
        while len(self._active) <= self._size:
            try:
                job = self._jobs.popleft()
            except IndexError:
                return
            self._taken += 1
            try:
                self._run(job)
            except Exception as error:  # noqa: BLE001 - a bug, but the job must still be finished
                if not self._is_closed:
                    loop.call_soon_threadsafe(self._run_again, job, error)
                continue
            self._finished.append(job)
            if not self._is_notified and not self._is_closed:
                self._is_notified = True
                loop.call_soon_threadsafe(self._collect)

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
        if self._jobs and not self._active:
            # A job arrived after this worker's last check, or the size has shrunk.
            self._start(1)
        self._check_later()

    def _check_later(self) -> None:
        """Check soon whether jobs need more workers, unless there are as many as may be."""
        if self._check is None and self._jobs and len(self._active) < self._size:
            self._taken_before = self._taken
            loop = asyncio.get_running_loop()
            self._check = loop.call_later(_CHECK_AFTER_S, self._check_stuck)

    def _check_stuck(self) -> None:
        """Double the workers while jobs wait and the running workers take none."""
        self._check = None
        if self._taken - self._taken_before < len(self._active):
            room = min(self._size - len(self._active), len(self._jobs))
            self._start(max(min(room, len(self._active)), 0))
        self._check_later()


class TaskWorkers(Workers[J]):
    """Runs jobs on the loop."""

    def __init__(
        self,
        run: Callable[[J], Awaitable[None]],
        done: Callable[[Sequence[J]], None],
        size: int,
        watch: Watch,
    ) -> None:
        super().__init__(done, size, watch)
        self._run = run
        self._finished: list[J] = []
        self._active: set[asyncio.Task[None]] = set()
        self._in_jobs = 0
        """Workers in the middle of a job; from outside, their listener is waiting for something."""
        self._is_growth_due = False

    def submit(self, jobs: Iterable[J]) -> None:
        if self._is_closed:
            return
        self._jobs.extend(jobs)
        self._grow()

    async def close(self, timeout_ms: int) -> None:
        self._is_closed = True
        self._jobs.clear()
        if self._active and timeout_ms:
            await asyncio.wait(self._active, timeout=timeout_ms / 1000)
        for task in self._active:
            task.cancel()
        await wait_cancelled(self._active)
        self._collect()

    def _start(self, count: int) -> None:
        for _ in range(min(count, len(self._jobs), self._size - len(self._active))):
            task = asyncio.create_task(self._work())
            self._active.add(task)
            task.add_done_callback(self._ended)

    def _grow_now(self) -> None:
        self._is_growth_due = False
        self._grow()

    def _grow(self) -> None:
        """Double the workers if all of them are in the middle of a job; there may be none yet."""
        if self._in_jobs >= len(self._active):
            self._start(max(len(self._active), 1))

    async def _work(self) -> None:
        turns = 0
        while self._jobs and len(self._active) <= self._size:
            job = self._jobs.popleft()
            # Once in a turn: a call for each job would cost more than the check.
            if self._jobs and not self._is_growth_due:
                self._is_growth_due = True
                asyncio.get_running_loop().call_soon(self._grow_now)
            self._in_jobs += 1
            try:
                await self._run(job)
            except Exception as error:  # noqa: BLE001 - a bug, but the job must still be finished
                self._run_again(job, error)
                continue
            finally:
                self._in_jobs -= 1
            if not self._finished:
                asyncio.get_running_loop().call_soon(self._collect)
            self._finished.append(job)
            turns += 1
            if turns % _JOBS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _collect(self) -> None:
        finished, self._finished = self._finished, []
        if finished:
            self._done(finished)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._active.discard(task)
        if not task.cancelled():
            task.result()
        # It counted as free until now, also for jobs that came meanwhile.
        self._grow()
