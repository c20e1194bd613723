"""Threads for what blocks, which do not keep the process from ending."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from enum import Enum, auto
from queue import Empty, SimpleQueue
from traceback import walk_stack
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

Job = tuple[Future[Any], Callable[[], Any]]


class _End(Enum):
    """Ends threads that take it instead of a job."""

    ONE = auto()
    ALL = auto()


class DaemonThreads(Executor):
    """An executor whose threads may be left behind.

    At exit, the interpreter waits for all threads of a `ThreadPoolExecutor`, so a single job that
    never returns would keep the process alive forever. It does not wait for these.
    """

    def __init__(self, count_max: int, name: str) -> None:
        self._count_max = count_max
        self._name = name
        self._jobs: SimpleQueue[Job | _End] = SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        """Jobs submitted and not done. Idle threads cannot be counted instead: one that has just
        finished may take a job meant for another."""
        self._threads: list[threading.Thread] = []
        self._numbers = itertools.count()
        self._surplus = 0
        """Threads that end when they are idle; `_threads` has them until then."""
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError(f"thread pool {self._name} is shut down")
            if len(self._threads) - self._surplus < min(self._unfinished + 1, self._count_max):
                self._start_thread()
            self._unfinished += 1
            self._jobs.put((future, functools.partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further jobs; threads end when none are left."""
        with self._lock:
            self._is_shut = True
            if cancel_futures:
                self._cancel_waiting()
            self._jobs.put(_End.ALL)
        if wait:
            for thread in list(self._threads):
                thread.join()

    def trim(self, count: int) -> None:
        """End the threads beyond a number as soon as they are idle."""
        with self._lock:
            surplus = len(self._threads) - self._surplus - count
            for _ in range(0 if self._is_shut else surplus):
                self._surplus += 1
                self._jobs.put(_End.ONE)

    def _start_thread(self) -> None:
        name = f"{self._name}_{next(self._numbers)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system refuses another thread: those that exist do the job later.
            if not self._threads:
                raise
            return
        self._threads.append(thread)

    def _cancel_waiting(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            if isinstance(job, tuple):
                job[0].cancel()

    def _work(self) -> None:
        while not isinstance(job := self._jobs.get(), _End):
            _do(job, self._note_done)
            # Released while it waits: it may reference large objects.
            del job
        if job is _End.ALL:
            # For the next thread, which is to end too.
            self._jobs.put(job)
            return
        with self._lock:
            self._surplus -= 1
            self._threads.remove(threading.current_thread())

    def _note_done(self) -> None:
        with self._lock:
            self._unfinished -= 1


def _do(job: Job, note_done: Callable[[], None]) -> None:
    """Run a job; it counts as done before its waiters know, as they may submit the next one."""
    future, call = job
    if not future.set_running_or_notify_cancel():
        note_done()
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - the waiter of the job gets it
        note_done()
        future.set_exception(error)
    else:
        note_done()
        future.set_result(result)


def busy_threads() -> dict[str, FrameType]:
    """Return the current frames of the threads that run a job, by thread name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): frame
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - the only way to see them
        if any(each.f_code is _do.__code__ for each, _ in walk_stack(frame))
    }
