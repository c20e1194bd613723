"""An event loop that does not wait: it jumps to the next timer.

The loop is asyncio's own with another selector and other timers. Where asyncio would sleep until
the next timer, this one moves its `VirtualClock` there, so hours pass in the time that their work
takes, and nothing depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from concurrent.futures import Future as Job
from contextlib import contextmanager, suppress
from random import Random
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, TypeVarTuple

from turbopump.durations import Duration, seconds
from turbopump.machine.threads import DaemonThreads
from turbopump.testing.clock import VirtualClock
from turbopump.testing.idle_skipping import IdleSkipping, Timer, kind_of_timer
from turbopump.testing.stack_dump import described, tasks_text, threads_lines

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_GRACE_S = 2.0
_THREADS_MAX = 32
_POLL_PAUSES_S = (0.00002, 0.001)
"""How long the loop waits, in real time, before it checks again whether others are busy.

First the shortest, then twice as long each time up to the longest: most are done immediately.
"""

_OWN_FILES = 1
"""What the loop itself registers in its selector: by this, threads and signals wake it."""

_TICK_S = 1e-9
"""The unit of the virtual clock."""

_TURNS_PER_ROUND = 256
"""Loop iterations between two checks of what hardly ever changes."""

_CANCELLED_MIN = 256
"""This many cancelled timers are kept until due, before it pays to remove them."""

_UNCHECKED_MAX_S = 0.1
"""The longest pause between two checks of a condition in virtual time."""

Question = Callable[[], bool]
_Events = list[tuple[selectors.SelectorKey, int]]


class Deadlock(AssertionError):
    """Every task waits and nothing can wake any of them; the text names the tasks."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop in virtual time.

    ``clock`` is its time and ``random`` the only source of chance for what runs in it: the same
    seed gives the same run. While threads of `run_in_executor` or of `outside_work` are busy, time
    stands still and the loop waits for them.

    With `limit_real_time`, a run that never ends fails instead.
    """

    # asyncio's own, for all loops that derive from its base.
    _ready: deque[asyncio.Handle]
    _closed: bool
    _thread_id: int | None
    _stopping: bool
    if TYPE_CHECKING:

        def _process_events(self, event_list: _Events) -> None: ...

    def __init__(self, seed: int = 0) -> None:
        self.clock = VirtualClock()
        self.turns = 0
        """How many iterations the loop has run: what a test costs, whatever the machine."""
        self.timers_set = 0
        """How many timers have been set since the start."""
        # With numbers, so that equal times keep their order and no timer need be compared.
        self._timers: list[Timer] = []
        self._skipping: list[IdleSkipping | None] = []
        self._idle: IdleSkipping | None = None
        """The only one of them."""
        self._cancelled_count = 0
        self.random = Random(seed)  # noqa: S311 - chance for tests, not for secrets
        self.is_notified = False
        """Whether a thread may have reported something that the selector has not checked for
        yet."""
        self._outside = self._served = 0
        self._jobs: set[Job[Any]] = set()
        self._others: dict[Question, None] = {}
        self._watchers: dict[Question, float] = {}
        """With the pauses that they accept."""
        self._looks: tuple[Question, ...] = ()
        self._look_pause_s = self._poll_from_s = math.inf
        self._end_real_s = math.inf
        # Daemons: a listener that never returns must not keep pytest from ending.
        self._threads: Executor = DaemonThreads(_THREADS_MAX, "asyncio")
        self._has_threads = self._has_lost_threads = False
        self._waited_s, self._waited_turn = 0.0, -1
        self._files = _Files()
        super().__init__(self._files)

    def time(self) -> float:
        return self.clock.elapsed_s

    def set_debug(self, enabled: bool) -> None:
        super().set_debug(enabled)
        # asyncio asks whenever it makes a handle or a future, so the answer must not cost a frame.
        vars(self)["get_debug"] = functools.partial(bool, enabled)

    # --- timers -----------------------------------------------------------------------------------

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        kind: type[asyncio.TimerHandle] = asyncio.TimerHandle
        if self._idle is not None:
            kind = kind_of_timer(callback, when - self.clock.elapsed_s)
        timer = kind(when, callback, args, self, context)
        self.timers_set = number = self.timers_set + 1
        heapq.heappush(self._timers, (when, number, timer))
        return timer

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        when = self.clock.elapsed_s + delay
        return self.call_at(when, callback, *args, context=context)

    @property
    def next_timer_s(self) -> float | None:
        """When the next timer is due; None when none is set."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:  # noqa: SLF001 - as asyncio's own loop does
            heapq.heappop(timers)
            self._cancelled_count -= 1
        return timers[0][0] if timers else None

    @property
    def idle_s(self) -> float:
        """How long nothing can happen, if the caller is the only one that runs; 0 if unknown."""
        is_busy = self._ready or self.is_notified or self.is_waited_for or self._others
        # Skipped time would be unknown, and files are ready whenever others want them to be.
        if is_busy or self._idle is not None or not self._files.is_alone:
            return 0.0
        next_s = self.next_timer_s
        return math.inf if next_s is None else next_s - self.clock.elapsed_s

    @property
    def timers_pending(self) -> int:
        """How many timers are set and not cancelled."""
        return sum(not timer.cancelled() for _, _, timer in self._timers)

    def _timer_handle_cancelled(self, _: asyncio.TimerHandle) -> None:
        """Count a cancelled timer; asyncio also reports called ones, so the count is rough."""
        self._cancelled_count += 1
        if self._cancelled_count > max(_CANCELLED_MIN, len(self._timers) // 2):
            # In place: a caller may be using it.
            self._timers[:] = [each for each in self._timers if not each[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled_count = 0

    # --- iterations -------------------------------------------------------------------------------

    def _run_once(self) -> None:
        """Run one iteration, as asyncio's own does: check for events, then call all that is ready.

        Most iterations have no outside events to check, and then cost next to nothing: a system
        call costs more, so it is skipped when it is certain that nothing is ready.
        """
        self.turns += 1
        ready, timers = self._ready, self._timers
        is_check_due = not self._files.is_alone or self.turns % _TURNS_PER_ROUND == 0
        if ready or self._stopping:
            if self.is_notified or is_check_due:
                self._process_events(self._look_at_files())
        elif is_check_due or not self._jump():
            self._process_events(self._wait())
        if timers:
            # A timer less than a clock tick away is due, or time might not reach it.
            end_s, idle = self.clock.elapsed_s + _TICK_S, self._idle
            while timers and timers[0][0] < end_s:
                timer = heapq.heappop(timers)[2]
                ready.append(timer)
                if idle is not None and type(timer) is asyncio.TimerHandle:
                    idle.note_event(end_s)
        # What they make ready is called in the next iteration.
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:  # noqa: SLF001 - as asyncio's own loop does
                handle._run()  # noqa: SLF001 - likewise

    def _jump(self) -> bool:
        """Jump to the next timer, if it is certain that nothing can happen before."""
        if self._others and self._are_others_busy():
            return False
        # Checked last: others that are no longer busy have notified the loop by then.
        return not self.is_notified and not self.is_waited_for and self._advance()

    def _advance(self) -> bool:
        """Advance time to the next timer, unless a watcher wakes a task; False if there is none."""
        if self.clock.elapsed_s >= self._poll_from_s and self._look_around():
            return True
        if self._idle is not None and (skip_ms := self._idle.skip_ms(self.time(), self._timers)):
            heapq.heapify(self._timers)
            self.clock.advance_ns(skip_ms * 1_000_000)
            return True
        next_s = self.next_timer_s
        if next_s is None:
            return False
        self.clock.advance_ns(math.ceil(max(0.0, next_s - self.clock.elapsed_s) * 1e9))
        return True

    def _wait(self) -> _Events:
        """Wait for threads that are busy, in real time; if none is, advance time."""
        # Asked before checking: others that are no longer busy have notified the loop by then.
        are_others_busy = self._are_others_busy()
        if found := self._look_at_files():
            return found
        if self.is_waited_for:
            return self._files.select(self._real_time_left_s)
        if are_others_busy:
            self._wait_for_others()
        elif not self._advance() and not self._look_around():
            return self._wait_for_threads()
        return []

    def _look_at_files(self) -> _Events:
        self._require_time_left()
        self.is_notified = False
        return self._files.select(0)

    def _wait_for_others(self) -> None:
        """Wait briefly, and longer if the last iteration has waited too."""
        # Not in the selector, which waits for a millisecond at least.
        first_s, longest_s = _POLL_PAUSES_S
        is_again = self.turns == self._waited_turn + 1
        self._waited_s = min(2 * self._waited_s, longest_s) if is_again else first_s
        self._waited_turn = self.turns
        time.sleep(self._waited_s)

    def _require_time_left(self) -> None:
        left_s = self._real_time_left_s
        if left_s is not None and left_s <= 0:
            # Tasks are cancelled and files closed after this, which takes some time too.
            self.limit_real_time(_GRACE_S)
            text = tasks_text(self, "no end in sight, while these tasks wait or run:")
            if self.is_waited_for:
                text = "\n".join([text, *threads_lines()])
                self._abandon_threads()
            raise Deadlock(text)

    def _wait_for_threads(self) -> _Events:
        """Let unregistered threads wake the loop; the executor's shutdown is one of them."""
        # Checks once more even if no thread is left: the last one may just have woken the loop.
        ready = self._files.select(_GRACE_S if threading.active_count() > 1 else 0)
        if not ready:
            text = "nothing is ready and no timer is set, but these tasks wait:"
            raise Deadlock(tasks_text(self, text))
        return ready

    # --- others -----------------------------------------------------------------------------------

    @property
    def is_waited_for(self) -> bool:
        """Whether threads outside the loop are working for it, and will notify it when done."""
        return self._outside > 0 or len(self._jobs) > self._served

    def _are_others_busy(self) -> bool:
        """Return whether threads registered with `waiting_for` are busy."""
        return any(is_busy() for is_busy in self._others)

    @contextmanager
    def waiting_for(self, is_busy: Question) -> Iterator[None]:
        """Stop time whenever others report that they are busy; polled repeatedly.

        They must notify the loop of their results before they report that they are not busy.
        """
        self._others[is_busy] = None
        try:
            yield
        finally:
            del self._others[is_busy]

    @contextmanager
    def watched(self, look: Question, pause_s: float = 0) -> Iterator[None]:
        """Call a function whenever all work at the current time is done.

        It returns whether it has woken a task; if not, time advances. A function that needs only
        one call per pause says so, but may be called earlier.
        """
        self._watchers[look] = pause_s
        self._note_watchers()
        try:
            yield
        finally:
            del self._watchers[look]
            self._note_watchers()

    def _note_watchers(self) -> None:
        self._looks = tuple(self._watchers)
        self._look_pause_s = min(self._watchers.values(), default=math.inf)
        self._poll_from_s = 0

    def _look_around(self) -> bool:
        """Call all watchers; return whether one of them has woken a task."""
        self._poll_from_s = self.clock.elapsed_s + self._look_pause_s
        has_woken = False
        for look in self._looks:
            has_woken = look() or has_woken
        return has_woken

    @contextmanager
    def skipping(self, idle: IdleSkipping | None) -> Iterator[None]:
        """Skip time in which nothing happens; not while there are others, or with None."""
        self._skipping.append(idle)
        self._note_skipping()
        try:
            yield
        finally:
            self._skipping.remove(idle)
            self._note_skipping()

    def _note_skipping(self) -> None:
        self._idle = self._skipping[0] if len(self._skipping) == 1 else None
        if self._idle is not None:
            self._idle.note_event(self.time())

    def limit_real_time(self, seconds: float | None) -> None:
        """Raise `Deadlock` if the loop still runs after this many seconds of real time."""
        self._end_real_s = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def _real_time_left_s(self) -> float | None:
        """How long the loop may still run; None if that is not limited."""
        left_s = self._end_real_s - time.monotonic()
        return None if left_s == math.inf else left_s

    @contextmanager
    def outside_work(self) -> Iterator[None]:
        """Stop time while a thread works that will call `call_soon_threadsafe`.

        Enter and leave it on the loop's own thread.
        """
        self._outside += 1
        try:
            yield
        finally:
            self._outside -= 1

    def serve_thread(self, task: asyncio.Task[Any]) -> None:
        """Let time pass until a task is done, although the job of a thread waits for it."""
        self._served += 1
        task.add_done_callback(self._note_served)

    def _note_served(self, _: asyncio.Task[Any]) -> None:
        self._served -= 1

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if threading.get_ident() == self._thread_id:
            # No task has to be woken.
            return self.call_soon(callback, *args, context=context)
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        # Only now, when there is something to be found.
        self.is_notified = True
        return handle

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        self._has_threads |= executor is None
        job = (executor or self._threads).submit(functools.partial(func, *args))
        future = asyncio.wrap_future(job, loop=self)
        self._jobs.add(job)
        # The job ends when its thread is done with it; the future would end with a cancellation.
        # Added after the future's own callback, so that time stands still until the result is set.
        job.add_done_callback(self._job_ended)
        return future

    def set_default_executor(self, executor: Executor) -> None:
        self._threads, self._has_threads = executor, True

    def _abandon_threads(self) -> None:
        """Stop waiting for the threads that are busy now: one of them may never return."""
        self._has_lost_threads |= bool(self._jobs)
        self._jobs.clear()

    def _job_ended(self, job: Job[Any]) -> None:
        # In the job's own thread, which may outlive the loop: then the count is unused.
        with suppress(RuntimeError):
            self.call_soon_threadsafe(self._jobs.discard, job)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ARG002 - as asyncio has it
        """Wait for the loop's own threads, unless there are none or some were abandoned."""
        if not self._has_threads:
            return
        helper = DaemonThreads(1, "asyncio-end")
        shut = functools.partial(self._threads.shutdown, wait=not self._has_lost_threads)
        ended = self.run_in_executor(helper, shut)
        helper.shutdown(wait=False)
        await ended

    def close(self) -> None:
        super().close()
        self._timers.clear()
        self._threads.shutdown(wait=False)


class _Files(selectors.DefaultSelector):
    """The files of a loop, which it never waits for unless a thread works for it."""

    is_alone = True
    """Whether only the loop's own file is registered."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        self.is_alone = len(self.get_map()) <= _OWN_FILES
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = super().unregister(fileobj)
        self.is_alone = len(self.get_map()) <= _OWN_FILES
        return key


def run_virtual(main: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(main)


def virtual_time(
    seed: int = 0,
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, T]]:
    """Turn an async test into a plain one that runs in virtual time; fixtures work as usual."""

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
    predicate: Callable[[], object], timeout: Duration = 10, *, interval: Duration = 0.005
) -> None:
    """Wait for a condition, in virtual or real time; raises AssertionError on timeout.

    In virtual time, checks are skipped while nothing can happen, but not for longer than 100 ms:
    the condition may be one of time.
    """
    loop = asyncio.get_running_loop()
    timeout_s, interval_s = seconds(timeout), seconds(interval, "interval")
    end = loop.time() + timeout_s
    while not predicate():
        if loop.time() >= end:
            raise AssertionError(f"not true within {timeout_s:g} s: {described(predicate)}")
        pause_s = interval_s
        if isinstance(loop, VirtualTimeLoop):
            idle_s = min(loop.idle_s, _UNCHECKED_MAX_S, end - loop.time())
            pause_s *= max(1, math.ceil(idle_s / interval_s))
        await asyncio.sleep(pause_s)
