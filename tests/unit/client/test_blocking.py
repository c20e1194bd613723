"""The wrapper for threads: what a call carries over to the loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from turbopump import supervisor
from turbopump.client import background
from turbopump.client.blocking import Blocking, blocking, promising
from turbopump.client.life_cycle import LifeCycle, require_running
from turbopump.errors import NotRunning
from turbopump.machine.threads import DaemonThreads

_caller: contextvars.ContextVar[int] = contextvars.ContextVar("caller")


class Probe(LifeCycle):
    """An asynchronous client that reports the context it runs in."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def caller(self) -> int:
        return _caller.get()

    async def use_after_close(self) -> None:
        require_running(None, "probe", "p")

    async def promise(self) -> asyncio.Future[int]:
        return asyncio.ensure_future(self.caller())

    async def leave_behind(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.left = asyncio.create_task(work(), name="left behind")
        await asyncio.sleep(0)


class BlockingProbe(Blocking[Probe]):
    def __init__(self) -> None:
        self._hold(Probe())

    @property
    def _promises_max(self) -> int:
        return 1000

    caller = blocking(Probe.caller)
    use_after_close = blocking(Probe.use_after_close)
    leave_behind = blocking(Probe.leave_behind)
    promise = promising(Probe.promise)


def test_calls_run_in_the_context_of_their_thread() -> None:
    together = threading.Barrier(8)
    with BlockingProbe() as probe:

        def ask(number: int) -> bool:
            _caller.set(number)
            together.wait()
            promises = [probe.promise() for _ in range(100)]
            told = {probe.caller() for _ in range(100)}
            return told | {promise.result() for promise in promises} == {number}

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(ask, range(8)))


def interrupted(call: Callable[[], object], number: int) -> bool:
    """Interrupt a call at a step, as a signal does; return False if it has fewer steps."""
    left = number

    def trace(frame: FrameType, _event: str, _arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in (background.__file__, contextlib.__file__):
            return None
        left -= 1
        if left == -1:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


# The coroutine of a call that is interrupted before it begins.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_signal_at_any_step_of_a_call_blocks_no_later_call() -> None:
    with BlockingProbe() as probe:

        def ask() -> None:
            _caller.set(7)
            assert probe.caller() == 7

        steps = 0
        while interrupted(ask, steps):
            in_time(ask)
            steps += 1
    assert steps > 10


def test_errors_of_blocking_clients_name_no_async_with() -> None:
    probe = BlockingProbe()
    how = r"is not running: use it inside `with`, or call start\(\)"
    with pytest.raises(NotRunning, match=how):
        probe.caller()
    with probe, pytest.raises(NotRunning, match=f"probe 'p' {how}"):
        probe.use_after_close()


def test_clients_close_and_start_again_where_another_loop_runs() -> None:
    async def notebook() -> None:
        probe = BlockingProbe()
        for number in range(2):
            _caller.set(number)
            with probe:
                assert probe.caller() == number

    in_time(lambda: asyncio.run(notebook()))
    assert loop_threads() == 0


def test_closing_abandons_a_task_that_ignores_cancellation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "CANCEL_WAIT_S", 0.01)
    is_over = asyncio.Event()

    async def deaf() -> None:
        while not is_over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    probe = BlockingProbe()

    def block() -> None:
        with probe:
            probe.leave_behind(deaf)

    in_time(block)
    (line,) = [each for each in caplog.messages if "ignores cancellation" in each]
    assert "left behind" in line
    assert loop_threads() == 0


def test_closing_abandons_a_thread_that_does_not_return(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_STOP_WAIT_S", 0.01)
    gate = threading.Event()

    async def block() -> None:
        await asyncio.to_thread(gate.wait, 30)

    probe = BlockingProbe()
    with probe:
        probe.leave_behind(block)
        (left,) = (each for each in threading.enumerate() if each.name == "turbopump-client")
    assert "have not returned after 0.01 s, and are abandoned" in caplog.text
    gate.set()
    left.join(30)
    assert loop_threads() == 0


class Fatal(Probe):
    async def end_the_loop(self) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(60)


class BlockingFatal(Blocking[Fatal]):
    def __init__(self) -> None:
        self._hold(Fatal())

    end_the_loop = blocking(Fatal.end_the_loop)


def test_no_caller_waits_for_a_stopped_loop() -> None:
    program = """
from unit.client.test_blocking import BlockingFatal
from turbopump.errors import NotRunning
from turbopump.machine.threads import DaemonThreads
fatal = BlockingFatal()
fatal.__enter__()
for _ in range(2):
    try:
        fatal.end_the_loop()
    except NotRunning:
        print("not running")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout.splitlines() == ["not running"] * 2, done.stderr


class Calling(Probe):
    """A client with callbacks on the loop, which closing waits for."""

    def __init__(self) -> None:
        self.is_closed = False
        self.called = 0

    async def __aexit__(self, *error: object) -> None:
        await asyncio.sleep(0)
        self.is_closed = True

    async def call(self, callback: Callable[[], object]) -> None:
        callback()
        self.called += 1

    async def call_later(self, callback: Callable[[], object]) -> asyncio.Future[None]:
        return asyncio.ensure_future(self.call(callback))


class BlockingCalling(Blocking[Calling]):
    def __init__(self) -> None:
        self.inner = Calling()
        self._hold(self.inner)

    call = blocking(Calling.call)
    call_later = promising(Calling.call_later)


def in_time(action: Callable[[], None]) -> None:
    """Run something that might block forever, and fail if it does."""
    DaemonThreads(1, "in-time").submit(action).result(30)


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Record the clients that earlier tests have left running in this process."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())
    yield
    OTHERS.clear()


OTHERS: set[threading.Thread] = set()


def loop_threads() -> int:
    """Count the threads of clients that the test itself has started."""
    own = set(threading.enumerate()) - OTHERS
    return sum(each.name.startswith("turbopump-c") for each in own)


def test_closing_inside_a_callback_begins_and_does_not_wait() -> None:
    client = BlockingCalling()

    def block() -> None:
        with client:
            client.call_later(client.close).result(30)

    in_time(block)
    # The end of the block has waited for what the callback started.
    assert client.inner.is_closed
    assert client.inner.called == 1
    assert loop_threads() == 0
    with pytest.raises(NotRunning):
        client.call(print)
    client.start()
    client.call(client.close)
    in_time(client.close)
    assert client.inner.called == 2
    assert loop_threads() == 0


def test_closing_inside_a_callback_while_the_client_starts() -> None:
    client = BlockingCalling()

    async def start() -> None:
        client.close()

    client.inner.start = start  # type: ignore[method-assign]
    in_time(client.start)
    in_time(client.close)
    assert client.inner.is_closed
    for thread in threading.enumerate():
        if thread.name == "turbopump-close":
            thread.join(30)
    assert loop_threads() == 0


def test_closing_in_the_callback_of_a_promise_and_in_several_threads() -> None:
    client = BlockingCalling()
    client.start()
    gate = threading.Event()
    promise = client.call_later(lambda: gate.wait(30))
    promise.add_done_callback(lambda _: client.close())
    with ThreadPoolExecutor(4) as threads:
        closing = [threads.submit(client.close) for _ in range(4)]
        gate.set()
        for each in closing:
            each.result(30)
    assert client.inner.is_closed
    assert loop_threads() == 0


def test_a_signal_handler_may_close_while_its_thread_starts_or_closes() -> None:
    client = BlockingCalling()

    async def start() -> None:
        # The main thread keeps its locks while it starts.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        await asyncio.sleep(0.05)

    client.inner.start = start  # type: ignore[method-assign]
    heard: list[int] = []

    def close(number: int, _: object) -> None:
        client.close()
        heard.append(number)

    before = signal.signal(signal.SIGUSR1, close)
    try:
        client.start()
        client.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]
    assert client.inner.is_closed
    assert loop_threads() == 0
