"""An event loop that does not wait: it jumps to the next timer.

The loop is asyncio's own with another selector. Where the original would sleep until the next
timer, this one moves its `VirtualClock` there, so hours pass in the time that their work takes, and
nothing depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from concurrent.futures import Future as Job
from contextlib import contextmanager, suppress
from random import Random
from types import FrameType
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

from turbopump.net.threads import DaemonThreads, busy_threads
from turbopump.testing.clock import VirtualClock

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_GRACE_S = 2.0
_THREADS_MAX = 32
_LOOK_AGAIN_S = 0.0005
"""How long the loop waits, in real time, before it asks again whether others are busy."""

_OWN_FILES = 1
"""What the loop itself has in its selector: by this, threads and signals wake it."""

_CALLS_PER_ROUND = 32
"""How often the loop turns before it looks at what hardly ever changes."""

Question = Callable[[], bool]


class Deadlock(AssertionError):
    """Every task waits and nothing can wake any of them; the text names the tasks."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop in virtual time.

    ``clock`` is its time and ``random`` the one source of chance for what runs in it: the same seed
    gives the same run. While threads of `run_in_executor` or of `outside_work` are busy, time
    stands still and the loop waits for them.

    With `limit_real_time`, what never ends fails instead.
    """

    def __init__(self, seed: int = 0) -> None:
        self.clock = VirtualClock()
        self.random = Random(seed)  # noqa: S311 - chance for tests, not for secrets
        self.is_told = False
        """Whether a thread may have told something that the selector has not looked for yet."""
        self._outside = 0
        self._jobs: set[Job[Any]] = set()
        self._others: dict[Question, None] = {}
        self._watchers: dict[Question, None] = {}
        self._end_real_s = math.inf
        # Daemons: a listener that never returns must not keep pytest from ending.
        self._threads: Executor = DaemonThreads(_THREADS_MAX, "asyncio")
        self._has_lost_threads = False
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.clock.monotonic_s()

    @property
    def is_waited_for(self) -> bool:
        """Whether threads outside the loop are working for it, and will tell it when done."""
        return self._outside > 0 or bool(self._jobs)

    @property
    def are_others_busy(self) -> bool:
        """Whether threads are busy that were named by `waiting_for`."""
        for is_busy in self._others:  # noqa: SIM110 - at every step of time, so it has to be quick
            if is_busy():
                return True
        return False

    @contextmanager
    def waiting_for(self, is_busy: Question) -> Iterator[None]:
        """Let time stand still whenever others say that they are busy; asked again and again.

        What they want the loop to know has to be told before they say that they are not.
        """
        self._others[is_busy] = None
        try:
            yield
        finally:
            del self._others[is_busy]

    @contextmanager
    def watched(self, look: Question) -> Iterator[None]:
        """Have a function called whenever all is done that can be done at this moment.

        It returns whether it has woken anybody; if not, time goes on.
        """
        self._watchers[look] = None
        try:
            yield
        finally:
            del self._watchers[look]

    def look_around(self) -> bool:
        """Call all who watch; tell whether one of them has woken anybody."""
        return bool(self._watchers) and any(look() for look in tuple(self._watchers))

    def limit_real_time(self, seconds: float | None) -> None:
        """Raise `Deadlock` if the loop still runs after so many seconds of real time."""
        self._end_real_s = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def real_time_left_s(self) -> float | None:
        """How long the loop may still run; None when that is not limited."""
        left_s = self._end_real_s - time.monotonic()
        return None if left_s == math.inf else left_s

    @contextmanager
    def outside_work(self) -> Iterator[None]:
        """Let time stand still while a thread works that will call `call_soon_threadsafe`.

        To be entered and left on the loop's own thread.
        """
        self._outside += 1
        try:
            yield
        finally:
            self._outside -= 1

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        # Only now, when there is something to be found.
        self.is_told = True
        return handle

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        job = (executor or self._threads).submit(func, *args)
        future = asyncio.wrap_future(job, loop=self)
        self._jobs.add(job)
        # The job ends when its thread is done with it; the future would end with a cancellation.
        # Added after the future's own callback, so that time stands still until the result is set.
        job.add_done_callback(self._job_ended)
        return future

    def set_default_executor(self, executor: Executor) -> None:
        self._threads = executor

    def abandon_threads(self) -> None:
        """Wait no longer for the threads that are busy now: one of them may never come back."""
        self._has_lost_threads |= bool(self._jobs)
        self._jobs.clear()

    def _job_ended(self, job: Job[Any]) -> None:
        # In the job's own thread, which may outlive the loop: then nobody counts any more.
        with suppress(RuntimeError):
            self.call_soon_threadsafe(self._jobs.discard, job)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002, ASYNC109 - as asyncio has it
        """Wait for the loop's own threads, unless there are some that were abandoned."""
        helper = DaemonThreads(1, "asyncio-end")
        shut = functools.partial(self._threads.shutdown, wait=not self._has_lost_threads)
        ended = self.run_in_executor(helper, shut)
        helper.shutdown(wait=False)
        await ended

    def close(self) -> None:
        super().close()
        self._threads.shutdown(wait=False)


class _JumpingSelector(selectors.BaseSelector):
    """Looks for what is ready, as the real one does, but never waits for a time to come."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self._real = selectors.DefaultSelector()
        self._calls = 0
        self._is_alone = True

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self._loop
        self._calls += 1
        is_round = self._calls % _CALLS_PER_ROUND == 0
        # Asking the system costs more than all the rest here, so not when it is certain that
        # nothing is ready.
        is_needless = self._is_alone and not (is_round or loop.is_told)
        if timeout == 0 and is_needless:
            return []
        is_waited_for = loop.is_waited_for
        if is_round or is_waited_for:
            self._require_time_left()
        # Asked before looking: who was busy and is not any more has told the loop by then.
        are_others_busy = timeout != 0 and loop.are_others_busy
        if not is_needless or are_others_busy or is_waited_for or loop.is_told:
            loop.is_told = False
            ready = self._real.select(0)
            if ready or timeout == 0:
                return ready
        if is_waited_for:
            return self._real.select(loop.real_time_left_s)
        if are_others_busy:
            return self._real.select(_LOOK_AGAIN_S)
        if loop.look_around():
            return []
        if timeout is None:
            return self._wait_for_threads()
        loop.clock.advance_ns(math.ceil(timeout * 1e9))
        return []

    def _require_time_left(self) -> None:
        left_s = self._loop.real_time_left_s
        if left_s is not None and left_s <= 0:
            # Tasks are cancelled and files closed after this, which needs a moment too.
            self._loop.limit_real_time(_GRACE_S)
            text = _tasks_text(self._loop, "no end in sight, while these tasks wait or run:")
            if self._loop.is_waited_for:
                text = "\n".join([text, *_threads_lines()])
                self._loop.abandon_threads()
            raise Deadlock(text)

    def _wait_for_threads(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Let threads nobody told of wake the loop; the executor's shutdown is one of them."""
        # Looks once more even if no thread is left: the last one may just have woken the loop.
        ready = self._real.select(_GRACE_S if threading.active_count() > 1 else 0)
        if not ready:
            raise Deadlock(
                _tasks_text(
                    self._loop, "nothing is ready and no timer is set, but these tasks wait:"
                )
            )
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._real.register(fileobj, events, data)
        self._is_alone = len(self._real.get_map()) <= _OWN_FILES
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = self._real.unregister(fileobj)
        self._is_alone = len(self._real.get_map()) <= _OWN_FILES
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


def _tasks_text(loop: asyncio.AbstractEventLoop, title: str) -> str:
    tasks = sorted(
        asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name())
    )
    return "\n".join([title, *(f"  {task.get_name()}: {where(task)}" for task in tasks)])


def _threads_lines() -> list[str]:
    places = [f"  {name}: {_place(frame)}" for name, frame in busy_threads().items()]
    return ["time stands still, and is no longer waited for, while these threads work:", *places]


def _place(frame: FrameType) -> str:
    frame = _own_frame(frame)
    return f"{frame.f_code.co_qualname} at {frame.f_code.co_filename}:{frame.f_lineno}"


def _own_frame(frame: FrameType) -> FrameType:
    """Return the innermost place that is not inside the waiting of `threading` itself."""
    while frame.f_code.co_filename == threading.__file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def where(task: asyncio.Task[Any]) -> str:
    """Return at which line of which function a task waits."""
    name = getattr(task.get_coro(), "__qualname__", "?")
    frames = task.get_stack(limit=1)
    return f"{name} at {frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else str(name)


def run_virtual(main: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """Run to the end in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(main)


def virtual_time(
    seed: int = 0,
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, T]]:
    """Make an async test an ordinary one that runs in virtual time; fixtures work as ever."""

    def decorate(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        @functools.wraps(test)
        def run_test(*args: P.args, **kwargs: P.kwargs) -> T:
            return run_virtual(test(*args, **kwargs), seed)

        return run_test

    return decorate


def virtual_loop() -> VirtualTimeLoop:
    """Return the running loop, which must be one in virtual time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop), "not in virtual time: use @virtual_time()"
    return loop


async def wait_until(
    predicate: Callable[[], object], timeout_s: float = 10.0, *, check_every_s: float = 0.005
) -> None:
    """Wait for a fact, in virtual time or real; raises AssertionError when it does not come."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not predicate():
        if loop.time() >= end:
            raise AssertionError(f"not so within {timeout_s} s: {_described(predicate)}")
        await asyncio.sleep(check_every_s)


def _described(predicate: Callable[[], object]) -> str:
    code = getattr(predicate, "__code__", None)
    name = getattr(predicate, "__qualname__", repr(predicate))
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"
