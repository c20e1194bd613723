"""Background work with one owner: named, restarted after errors, and counted.

Actions due at about the same time run in one turn of the loop; only those that wait have a task.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, TypeVar

from turbopump.errors import TurbopumpError
from turbopump.machine.timers import Repeated

T = TypeVar("T")

_log = logging.getLogger(__name__)

_TICKS_PER_S = 20
"""Timers due in the same tick fire together: an idle process wakes once, not six times."""

BACKOFF_FIRST_MS = 1000
BACKOFF_MAX_MS = 60_000
"""The pause after a failure; it doubles from the first to the longest while failures follow."""

FATAL_FAILURES = 6
"""Consecutive failures of essential work after which the owner cannot continue."""

CANCEL_WAIT_S = 1.0
"""How long a cancelled task of the application may take to end."""

Action = Callable[[], Awaitable[None] | None]

Interval = int | Callable[[], int]
"""Milliseconds; a function is asked again before each pause, as settings may change."""

OnFatal = Callable[[str, BaseException], None]
"""Called with the essential work that keeps failing, and its last error."""


class Watch:
    """The failures of one piece of background work: logged with its name, and counted.

    May be used from any thread. Work in a thread without a supervisor creates its own.
    """

    def __init__(
        self, name: str, supervisor: Supervisor | None = None, *, is_essential: bool = False
    ) -> None:
        self._supervisor = supervisor
        self._lock = threading.Lock()
        self._in_a_row = 0
        self.name = name
        self.is_essential = is_essential
        self.failures = 0
        """How often it has failed; each time it was started again."""
        self.last_error: BaseException | None = None

    def succeeded(self) -> None:
        """Note a success."""
        if self._in_a_row:
            _log.warning("%s works again after %d failures", self.name, self._in_a_row)
            self._in_a_row = 0

    def failed(self, error: BaseException, *, is_restarted: bool = True) -> int:
        """Note a failure; return the pause before the next attempt, in ms."""
        with self._lock:
            self.failures += 1
            self._in_a_row += 1
            self.last_error = error
            in_a_row = self._in_a_row
        what = "%s failed and is started again" if is_restarted else "%s failed"
        _log.error(what, self.name, exc_info=error)
        if self._supervisor is not None:
            self._supervisor.note_failure(self, error, in_a_row)
        return min(BACKOFF_FIRST_MS << min(in_a_row - 1, 16), BACKOFF_MAX_MS)

    def described(self) -> str:
        """Return its name, and its failures if there are any."""
        if self.last_error is None:
            return self.name
        return f"{self.name}: {self.failures} failures, the last {self.last_error!r}"


def summary(watches: Iterable[Watch]) -> dict[str, str]:
    """Describe background work for operators: all names, and all failures."""
    known = tuple(watches)
    return {
        "backgroundWork": ", ".join(watch.name for watch in known),
        "backgroundFailures": "; ".join(watch.described() for watch in known if watch.failures),
    }


async def wait_cancelled(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Wait for cancelled tasks that may call the application; abandon those that ignore it."""
    deaf = (await asyncio.wait(tasks, timeout=CANCEL_WAIT_S))[1] if tasks else ()
    for task in deaf:
        _log.warning("%r ignores cancellation and is abandoned", task)


def keep_in_thread(watch: Watch, work: Callable[[], None], is_over: threading.Event) -> None:
    """Do as `Supervisor.keep` in the calling thread; ``is_over`` ends the pauses too."""
    while not is_over.is_set():
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it was, the work must continue
            is_over.wait(watch.failed(error) / 1000)
        else:
            return


class Supervisor:
    """Owns repeated work, work that runs for long and single tasks, until `stop` ends them.

    An unexpected error is logged with its traceback and the name of the work, and counted; the work
    is restarted with exponential backoff. When essential work keeps failing, ``on_fatal`` is
    called: its owner can no longer keep its guarantees.
    """

    def __init__(self, on_fatal: OnFatal | None = None) -> None:
        self._on_fatal = on_fatal
        self._tasks: dict[asyncio.Future[Any], None] = {}
        self._repeated: dict[_Repeated, None] = {}
        self._due: dict[int, list[_Repeated]] = {}
        """By due time, each with one timer."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._watches: dict[str, Watch] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where ``on_fatal`` is called, whichever thread fails."""

    @property
    def watches(self) -> tuple[Watch, ...]:
        """Running work, and work that has ever failed, by name."""
        return tuple(watch for _, watch in sorted(self._watches.items()))

    def watch(self, name: str, *, is_essential: bool = False) -> Watch:
        """Count the failures of work that has its own timer or thread."""
        found = self._watches.get(name)
        if found is None:
            found = self._watches[name] = Watch(name, self, is_essential=is_essential)
        if self._loop is None:
            self._loop = _running_loop()
        return found

    def every(
        self, name: str, interval: Interval, action: Action, *, first_ms: int | None = None
    ) -> None:
        """Repeat an action; each run, the first too, follows a pause after the last one ended."""
        pause_ms = _interval_ms(interval) if first_ms is None else first_ms
        repeated = _Repeated(self.watch(name), interval, action, pause_ms)
        self._repeated[repeated] = None
        self._set_timer(repeated, pause_ms)

    def keep(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run something until it returns or is cancelled; after an error it is run again."""
        return self.start(self._restart_on_error(self.watch(name), work))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a task once; an error that is a bug is logged and counted."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    async def wait(self) -> None:
        """Wait until all running tasks have ended, successfully or not."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """End all work, including what starts meanwhile, but not the calling task."""
        self.cancel()
        while tasks := self._others():
            await asyncio.gather(*tasks, return_exceptions=True)
            self.cancel()

    def cancel(self) -> None:
        """Cancel all work without waiting for it to end."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._due.clear()
        self._repeated.clear()
        for task in self._others():
            task.cancel()

    def _others(self) -> list[asyncio.Future[Any]]:
        """Return all tasks except the calling one."""
        current = asyncio.current_task() if self._tasks else None
        return [task for task in self._tasks if task is not current]

    def note_failure(self, watch: Watch, error: BaseException, in_a_row: int) -> None:
        """Note a failure that a watch reports."""
        self._watches[watch.name] = watch
        # A failing disk or peer may be repaired; callers that depend on it are refused until then.
        is_bug = not isinstance(error, OSError | TurbopumpError)
        if is_bug and watch.is_essential and in_a_row >= FATAL_FAILURES and self._on_fatal:
            if self._loop is None or self._loop is _running_loop():
                self._on_fatal(watch.name, error)
            else:
                self._loop.call_soon_threadsafe(self._on_fatal, watch.name, error)

    # --- tasks ------------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, TurbopumpError):
            name = getattr(task.get_coro(), "__qualname__", repr(task))
            self.watch(name).failed(error, is_restarted=False)

    async def _restart_on_error(self, watch: Watch, work: Callable[[], Awaitable[None]]) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        try:
            while True:
                began_s = loop.time()
                try:
                    await work()
                except asyncio.CancelledError as error:
                    if task.cancelling():
                        raise
                    # Not this task, but something that it waited for.
                    failure: BaseException = error
                except Exception as error:  # noqa: BLE001 - whatever it was, the work must continue
                    if task.cancelling():
                        # It was to end, and failed while it did: the waiter for that continues.
                        watch.failed(error, is_restarted=False)
                        return
                    failure = error
                else:
                    return
                if loop.time() - began_s > BACKOFF_MAX_MS / 1000:
                    watch.succeeded()
                await asyncio.sleep(watch.failed(failure) / 1000)
        finally:
            if not watch.failures:
                self._watches.pop(watch.name, None)

    # --- repeated actions -------------------------------------------------------------------------

    def _set_timer(self, repeated: _Repeated, pause_ms: int) -> None:
        loop = asyncio.get_running_loop()
        # Never early; rounded before, since seconds as floats may lie slightly before the deadline.
        self._set_at(math.ceil(round((loop.time() + pause_ms / 1000) * _TICKS_PER_S, 6)), repeated)

    def _set_at(self, tick: int, repeated: _Repeated) -> None:
        if repeated not in self._repeated:
            return
        together = self._due.get(tick)
        if together is None:
            together = self._due[tick] = []
            loop = asyncio.get_running_loop()
            act = Repeated(self._act_all)
            self._timers[tick] = loop.call_at(tick / _TICKS_PER_S, act, tick)
        together.append(repeated)

    def _act_all(self, tick: int) -> None:
        del self._timers[tick]
        together = self._due.pop(tick)
        now = math.floor(asyncio.get_running_loop().time() * _TICKS_PER_S)
        if now > tick + _TICKS_PER_S:
            # Do not make up for the time a machine was suspended.
            tick = now
        for repeated in together:
            pending = repeated.act()
            if pending is None:
                pause = repeated.pause_ms() * _TICKS_PER_S / 1000
                self._set_at(tick + math.ceil(pause), repeated)
            else:
                self._tasks[task := asyncio.ensure_future(pending)] = None
                task.add_done_callback(functools.partial(self._finished, repeated))

    def _finished(self, repeated: _Repeated, task: asyncio.Future[None]) -> None:
        self._tasks.pop(task, None)
        if repeated in self._repeated:
            repeated.finish(task)
            self._set_timer(repeated, repeated.pause_ms())


class _Repeated:
    """An action, and its pauses."""

    def __init__(self, watch: Watch, interval: Interval, action: Action, first_ms: int) -> None:
        self._watch = watch
        self._interval = interval
        self._action = action
        self._last_ms = first_ms
        self._backoff_ms = 0

    def act(self) -> Awaitable[None] | None:
        """Run the action once; a task is created only if it is not finished immediately."""
        try:
            pending = self._action()
        except Exception as error:  # noqa: BLE001 - no failure may end what is repeated
            self._failed(error)
            return None
        if pending is None:
            self._succeeded()
        return pending

    def finish(self, done: asyncio.Future[None]) -> None:
        """Record how it ended; a cancellation came from something that it awaited."""
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            self._succeeded()
        else:
            self._failed(error)

    def pause_ms(self) -> int:
        """Return the next pause; the last one if the interval cannot be read."""
        try:
            self._last_ms = _interval_ms(self._interval)
        except Exception:  # noqa: BLE001 - neither this action may end by it, nor those after it
            _log.exception("%s: keeping the interval of %d ms", self._watch.name, self._last_ms)
        return max(self._last_ms, self._backoff_ms)

    def _succeeded(self) -> None:
        if self._backoff_ms:
            self._backoff_ms = 0
            self._watch.succeeded()

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, TurbopumpError):
            # A peer that does not answer, or a full disk: no bug, so as often as ever.
            _log.warning("%s: %s", self._watch.name, error)
        else:
            self._backoff_ms = self._watch.failed(error)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _interval_ms(interval: Interval) -> int:
    return interval if isinstance(interval, int) else interval()
