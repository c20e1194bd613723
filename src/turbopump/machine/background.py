"""Background jobs: workers do what takes long, such as waiting for the disk.

A worker runs its jobs one after the other. Here it is a thread; in virtual time
(`turbopump.testing`) the event loop runs the jobs, in an order that only depends on the seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from turbopump.machine.threads import DaemonThreads

T = TypeVar("T")


class Worker(Protocol):
    """Runs jobs one after the other, in the order in which they were submitted."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job; raises RuntimeError after `close`."""
        ...

    def wait_idle(self) -> None:
        """Return when all jobs submitted so far are done."""
        ...

    def close(self) -> None:
        """Refuse further jobs, and return when all are done."""
        ...


class Background(Protocol):
    """Creates workers, and locks between them and the callers that submit jobs."""

    def worker(self, name: str) -> Worker:
        """Return a new worker; its thread gets the name."""
        ...

    def lock(self) -> AbstractContextManager[Any]:
        """Return a lock that jobs may hold while they wait for the disk."""
        ...


class ThreadWorker:
    """A worker that is a daemon thread."""

    def __init__(self, name: str) -> None:
        self._threads = DaemonThreads(1, name)
        self._is_closed = False

    def submit(self, job: Callable[[], T]) -> Future[T]:
        return self._threads.submit(job)

    def wait_idle(self) -> None:
        if not self._is_closed:
            self._threads.submit(lambda: None).result()

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown()


class Threads:
    """The real background."""

    def worker(self, name: str) -> Worker:
        return ThreadWorker(name)

    def lock(self) -> AbstractContextManager[Any]:
        return threading.Lock()
