"""Threads for what blocks, which do not keep the process from ending."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

Job = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(Executor):
    """An executor whose threads may be left behind.

    The interpreter waits at its end for all threads of a `ThreadPoolExecutor`, so a single job that
    never returns would keep the process alive for ever. These it does not wait for.
    """

    def __init__(self, count_max: int, name: str) -> None:
        self._count_max = count_max
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError(f"no job is taken any more: the threads {self._name} are shut")
            self._jobs.put((future, functools.partial(fn, *args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._count_max:
                self._start_thread()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs; threads end when there are none left."""
        with self._lock:
            self._is_shut = True
            if cancel_futures:
                self._cancel_waiting()
            self._jobs.put(None)
        if wait:
            self.join()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the threads to end after `shutdown`; tell whether all of them have."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if end_s is None else max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=self._work, name=f"{self._name}_{len(self._threads)}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _cancel_waiting(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            if job is not None:
                job[0].cancel()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                self._idle.release()
                job = self._jobs.get()
            if job is None:
                # For the next thread, which is to end too.
                self._jobs.put(None)
                return
            _do(job)
            # Not kept while it waits: it may hold what others want to be rid of.
            del job


def _do(job: Job) -> None:
    future, call = job
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the job is to see it
        future.set_exception(error)
    else:
        future.set_result(result)


def busy_threads() -> dict[str, FrameType]:
    """Return where those threads of the process are that have a job, by their names."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): frame
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - the only way to see them
        if any(each.f_code is _do.__code__ for each in _outwards(frame))
    }


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
