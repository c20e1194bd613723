"""An event loop in a separate thread, for callers without one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

from turbopump.clock import SYSTEM_CLOCK
from turbopump.errors import ClientError, NotRunning
from turbopump.machine.process import after_fork, process_id, start_thread
from turbopump.net.loop import fastest_loop
from turbopump.supervisor import wait_cancelled

T = TypeVar("T")

_log = logging.getLogger(__name__)

_CLOSED = "the client was closed before this was done"

_HEAR_SIGNALS_S = 0.5

_STOP_WAIT_S = 10.0
"""How long closing waits for the loop's thread, in which any function may block."""

_here = threading.local()


def is_loop_thread() -> bool:
    """Whether this is a thread of an event loop here, which must not wait for itself."""
    return getattr(_here, "is_loop_thread", False)


class LoopThread:
    """An event loop in a separate thread."""

    def __init__(self) -> None:
        self._adopt(fastest_loop()())
        # A daemon: a program that forgets to close its clients must be able to exit.
        self._thread = start_thread(self._main, "turbopump-client")

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = process_id()
        self.users = 0
        self._loop = loop
        self._inbox: deque[Callable[[], object]] = deque()
        self._is_woken = False
        self._is_stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: set[threading.Lock] = set()

    def _main(self) -> None:
        _here.is_loop_thread = True
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            # Even if the loop ended unexpectedly: no thread may wait for it any longer.
            self._is_stopped = True
            self._end()

    def _end(self) -> None:
        """End everything on the loop, and close it; the thread that closes may run another loop."""
        try:
            self._loop.run_until_complete(self._end_tasks())
        finally:
            self._release_waiting()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _release_waiting(self) -> None:
        for finished in list(self._waiting):
            with suppress(RuntimeError):
                # Already released: its work is done.
                finished.release()

    async def _end_tasks(self) -> None:
        self._take_posts()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await wait_cancelled(others)

    def post(self, call: Callable[[], object]) -> None:
        """Schedule a call on the loop, in the order of posting."""
        self._inbox.append(call)
        if self._is_stopped and call in self._inbox:
            # Too late: calls posted before the loop stopped have run, this one will not.
            raise NotRunning(_CLOSED)
        # Waking the loop is the most expensive part, so one wakeup serves many calls. Calls
        # appended before the flag is cleared are taken out after that.
        if not self._is_woken:
            try:
                self._is_woken = True
                self._loop.call_soon_threadsafe(self._take_posts)
            except BaseException as error:
                # A signal handler may raise before the loop is woken: then the next call wakes it.
                self._is_woken = False
                # If the loop has ended in the meantime, it has run this call before.
                if not isinstance(error, RuntimeError):
                    raise

    def _take_posts(self) -> None:
        self._is_woken = False
        while self._inbox:
            call = self._inbox.popleft()
            try:
                call()
            except Exception:  # noqa: BLE001 - a bug; the calls after it have other waiters
                _log.exception("%r failed", call)

    def run(self, work: Coroutine[Any, Any, T], end_s: float = math.inf) -> T:
        """Run a coroutine on the loop and wait for its result; cancel it if waiting ends.

        Raises TimeoutError soon after the monotonic time ``end_s``.
        """
        finished = threading.Lock()
        finished.acquire()
        tasks: list[asyncio.Task[T]] = []
        # The caller's context, not that of the thread that woke the loop: a send belongs to
        # the caller's trace.
        context = contextvars.copy_context()

        def begin() -> None:
            task = self._begin(work, context)
            tasks.append(task)
            task.add_done_callback(lambda _: finished.release())

        def abandon() -> None:
            if not tasks:
                # A signal came before `begin` was posted.
                work.close()
            for task in tasks:
                task.cancel()

        try:
            self.wait_for(finished, begin, abandon, end_s)
        except ClientError:
            # Not begun.
            work.close()
            raise
        if not tasks or not tasks[0].done() or tasks[0].cancelled():
            raise NotRunning(_CLOSED)
        return tasks[0].result()

    def wait_for(
        self,
        finished: threading.Lock,
        begin: Callable[[], object],
        abandon: Callable[[], object],
        end_s: float = math.inf,
    ) -> None:
        """Schedule a call, and wait until it, or the end of the loop, releases a lock.

        Uses a bare lock: a concurrent Future would be half the cost of a blocking call. Calls
        ``abandon`` if waiting ends early. Raises TimeoutError soon after ``end_s``.
        """
        self._waiting.add(finished)
        try:
            self.post(begin)
            # Wait in slices: a signal that arrives just before waiting begins does not interrupt
            # it, and Ctrl-C would have no effect.
            while not finished.acquire(timeout=_HEAR_SIGNALS_S):
                if SYSTEM_CLOCK.monotonic_ms() / 1000 >= end_s:
                    raise TimeoutError("not done in time")  # noqa: TRY301 - ends it below
        except ClientError:
            raise
        except BaseException:
            self.post(abandon)
            raise
        finally:
            self._waiting.discard(finished)

    def start(
        self,
        work: Coroutine[Any, Any, T],
        promise: concurrent.futures.Future[T],
        context: contextvars.Context,
    ) -> None:
        """Run a coroutine and return a future of its result; call on the loop only."""
        task = self._begin(work, context)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._keep, promise))

    def _begin(self, work: Coroutine[Any, Any, T], context: contextvars.Context) -> asyncio.Task[T]:
        return self._loop.create_task(work, context=context)

    def _keep(self, promise: concurrent.futures.Future[T], done: asyncio.Task[T]) -> None:
        self._tasks.discard(done)
        if done.cancelled():
            promise.set_exception(NotRunning(_CLOSED))
        elif (error := done.exception()) is not None:
            promise.set_exception(error)
        else:
            promise.set_result(done.result())

    def require_other(self) -> None:
        """Refuse the loop's own thread: waiting there for the loop would deadlock."""
        if threading.current_thread() is self._thread:
            raise ClientError(
                "a blocking client was called on its own event loop, where it would "
                "deadlock: use turbopump.aio in async functions and in callbacks"
            )

    def stop(self) -> None:
        """End the loop, its thread, and everything that other threads still wait for."""
        with suppress(RuntimeError):
            # The loop may have ended by itself.
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_WAIT_S)
        if self._thread.is_alive():
            _log.warning(
                "functions that clients run by asyncio.to_thread have not returned after %g s, and"
                " are abandoned",
                _STOP_WAIT_S,
            )


@runtime_checkable
class ServesThreads(Protocol):
    """An event loop that must know which tasks threads wait for, as one in virtual time."""

    def serve_thread(self, task: asyncio.Task[Any]) -> None: ...


class CallersLoop(LoopThread):
    """The running event loop, for threads that work for it and call back; it is not ended here."""

    def __init__(self) -> None:
        self._adopt(asyncio.get_running_loop())
        self._thread = threading.current_thread()

    def post(self, call: Callable[[], object]) -> None:
        """Schedule a call; refuses the thread of the loop, which would wait for itself."""
        self.require_other()
        super().post(call)

    def _begin(self, work: Coroutine[Any, Any, T], context: contextvars.Context) -> asyncio.Task[T]:
        task = super()._begin(work, context)
        if isinstance(self._loop, ServesThreads):
            self._loop.serve_thread(task)
        return task

    def leave(self) -> None:
        """Refuse further calls, and let threads go that still wait."""
        self._is_stopped = True
        self._release_waiting()


class Background:
    """The loop that all clients of the process share; runs while any client is open."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may close a client while its thread is in here.
        self._lock = threading.RLock()
        self._current: LoopThread | None = None
        self._of_parents: list[LoopThread | None] = []

    def join(self) -> LoopThread:
        with self._lock:
            if self._current is None:
                self._current = LoopThread()
            self._current.users += 1
            return self._current

    def leave(self, thread: LoopThread) -> None:
        with self._lock:
            thread.users -= 1
            if thread.users:
                return
            if self._current is thread:
                self._current = None
        thread.stop()

    def after_fork(self) -> None:
        """Start over in a child process; leave the parent's loop alone: its sockets are shared."""
        self._lock = threading.RLock()
        self._of_parents.append(self._current)
        self._current = None


background = Background()
after_fork(background.after_fork)
