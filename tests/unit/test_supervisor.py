"""Background work: pauses, failures, backoff, stray cancellations, and what stopping leaves."""

from __future__ import annotations

import asyncio
import threading

import pytest

from turbopump.errors import NetworkError
from turbopump.supervisor import (
    BACKOFF_MAX_MS,
    FATAL_FAILURES,
    Supervisor,
    Watch,
    keep_in_thread,
    summary,
)
from turbopump.testing import virtual_loop, virtual_time


@virtual_time()
async def test_the_pause_begins_when_an_action_is_done() -> None:
    times: list[float] = []

    async def act() -> None:
        times.append(virtual_loop().time())
        await asyncio.sleep(1)

    supervisor = Supervisor()
    supervisor.every("work 1", 5000, act, first_ms=500)
    supervisor.every("work 2", 5000, lambda: times.append(-virtual_loop().time()))
    await asyncio.sleep(13)
    await supervisor.stop()
    assert times == pytest.approx([0.5, -5, 6.5, -10, 12.5], abs=1e-6)
    await asyncio.sleep(60)
    assert len(times) == 5, "stopped, one of them in the middle"


class Failing:
    """Fails until disabled, and records when it was called."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.at_s: list[float] = []

    def act(self) -> None:
        self.at_s.append(round(virtual_loop().time(), 1))
        if self.error is not None:
            raise self.error

    async def act_later(self) -> None:
        await asyncio.sleep(0)
        self.act()


@pytest.mark.parametrize("is_later", [False, True])
def test_repeated_work_continues_after_a_bug_with_backoff(
    caplog: pytest.LogCaptureFixture, is_later: bool
) -> None:
    @virtual_time()
    async def check() -> None:
        supervisor, work = Supervisor(), Failing(LookupError("a bug"))
        supervisor.every("tidying", 2000, work.act_later if is_later else work.act)
        await asyncio.sleep(20)
        assert work.at_s == pytest.approx([2, 4, 6, 10, 18], abs=0.2)
        work.error = None
        await asyncio.sleep(23)
        assert work.at_s[5:] == pytest.approx([34, 36, 38, 40, 42], abs=0.3)
        await supervisor.stop()
        (watch,) = supervisor.watches
        assert (watch.name, watch.failures) == ("tidying", 5)
        assert watch.described() == "tidying: 5 failures, the last LookupError('a bug')"

    check()
    assert caplog.text.count("tidying failed") == 5
    assert "Traceback" in caplog.text
    assert caplog.text.count("tidying works again after 5 failures") == 1


@virtual_time()
async def test_expected_errors_change_no_pause_and_need_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor, work = Supervisor(), Failing(NetworkError("nobody there"))
    supervisor.every("commits", 1000, work.act_later)
    await asyncio.sleep(4.5)
    await supervisor.stop()
    assert work.at_s == pytest.approx([1, 2, 3, 4], abs=0.2)
    assert caplog.text.count("commits: nobody there") == 4
    assert "Traceback" not in caplog.text
    assert supervisor.watches[0].failures == 0


@pytest.mark.parametrize("error", [LookupError("a bug"), asyncio.CancelledError("another's")])
def test_long_running_work_is_restarted_after_any_error(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    @virtual_time()
    async def check() -> None:
        supervisor, work = Supervisor(), Failing(error)
        task = supervisor.keep("heartbeat", work.act_later)
        await asyncio.sleep(10)
        assert work.at_s == pytest.approx([0, 1, 3, 7], abs=0.1)
        work.error = None
        await task
        assert [watch.failures for watch in supervisor.watches] == [4]

    check()
    assert caplog.text.count("heartbeat failed and is started again") == 4


@virtual_time()
async def test_after_a_long_time_without_errors_the_pause_is_short_again() -> None:
    began_s: list[float] = []

    async def work() -> None:
        began_s.append(virtual_loop().time())
        await asyncio.sleep(2 * BACKOFF_MAX_MS / 1000)
        raise LookupError

    supervisor = Supervisor()
    supervisor.keep("seldom", work)
    await asyncio.sleep(5 * BACKOFF_MAX_MS / 1000)
    await supervisor.stop()
    assert began_s == pytest.approx([0, 121, 242], abs=0.1)


@virtual_time()
async def test_work_that_succeeds_or_is_cancelled_leaves_no_trace() -> None:
    supervisor = Supervisor()
    supervisor.keep("short", lambda: asyncio.sleep(1))
    cancelled = supervisor.keep("long", lambda: asyncio.sleep(99))
    assert [watch.name for watch in supervisor.watches] == ["long", "short"]
    await asyncio.sleep(2)
    cancelled.cancel()
    await supervisor.wait()
    assert cancelled.cancelled()
    assert supervisor.watches == ()


@virtual_time()
async def test_a_task_that_fails_by_a_bug_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor = Supervisor()
    for error in (LookupError("a bug"), NetworkError("told to whoever waits")):
        with pytest.raises(type(error)):
            await supervisor.start(Failing(error).act_later())
    assert [watch.described() for watch in supervisor.watches] == [
        "Failing.act_later: 1 failures, the last LookupError('a bug')"
    ]
    assert caplog.text.count("Failing.act_later failed") == 1


@virtual_time()
async def test_stopping_ends_work_started_meanwhile_but_not_the_caller() -> None:
    supervisor, started = Supervisor(), list[asyncio.Task[None]]()

    async def start_another() -> None:
        try:
            await asyncio.sleep(99)
        finally:
            started.append(supervisor.start(asyncio.sleep(99)))

    async def ask() -> None:
        await supervisor.stop()

    supervisor.start(start_another())
    await asyncio.sleep(0)
    await supervisor.start(ask())
    assert started[0].cancelled()
    assert virtual_loop().time() < 1


@virtual_time()
async def test_essential_work_that_keeps_failing_is_fatal() -> None:
    fatal: list[str] = []
    supervisor = Supervisor(lambda name, error: fatal.append(f"{name}: {error}"))
    for error in (LookupError("a bug"), OSError("the disk is full")):
        watch = supervisor.watch(f"flush ({error})", is_essential=True)
        for _ in range(FATAL_FAILURES - 1):
            watch.failed(error)
        watch.succeeded()
        for _ in range(FATAL_FAILURES - 1):
            watch.failed(error)
        assert not fatal
        watch.failed(error)
        assert len(fatal) == isinstance(error, LookupError)
        fatal.clear()


@virtual_time()
async def test_an_interval_that_cannot_be_computed_keeps_its_last_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known_ms = [1000, 2000]
    done: list[tuple[str, float]] = []

    def unknown() -> int:
        raise LookupError("no such setting")

    async def later() -> None:
        done.append(("later", virtual_loop().time()))

    supervisor = Supervisor()
    supervisor.every(
        "work 5", lambda: known_ms.pop(0), lambda: done.append(("odd", virtual_loop().time()))
    )
    supervisor.every("work 6", unknown, later, first_ms=3000)
    supervisor.every("work 7", 1000, lambda: done.append(("even", virtual_loop().time())))
    await asyncio.sleep(7.5)
    await supervisor.stop()
    assert [round(time) for name, time in done if name == "odd"] == [1, 3, 5, 7]
    assert [round(time) for name, time in done if name == "later"] == [3, 6]
    assert [round(time) for name, time in done if name == "even"] == list(range(1, 8))
    assert "keeping the interval of 2000 ms" in caplog.text
    assert "keeping the interval of 3000 ms" in caplog.text


@virtual_time()
async def test_an_interval_may_change_between_runs() -> None:
    pause_ms = 1000
    times: list[float] = []
    supervisor = Supervisor()
    supervisor.every("work 8", lambda: pause_ms, lambda: times.append(virtual_loop().time()))
    await asyncio.sleep(1.5)
    pause_ms = 10_000
    await asyncio.sleep(20)
    await supervisor.stop()
    assert times == pytest.approx([1, 2, 12], abs=1e-6)


@virtual_time()
async def test_actions_due_together_run_in_one_turn() -> None:
    loop, done = virtual_loop(), []
    supervisor = Supervisor()
    await asyncio.sleep(0.0123)
    for interval_ms in (5000, 5000, 10_000):
        supervisor.every("work 9", interval_ms, lambda: done.append(loop.time()))
    timers = loop.timers_set
    await asyncio.sleep(60)
    await supervisor.stop()
    assert len(done) == 11 + 11 + 5
    assert all(round(time * 1000) % 50 == 0 for time in done), "late by up to 50 ms, never early"
    assert loop.timers_set - timers <= 13


def test_essential_work_in_a_thread_is_fatal_on_the_loop() -> None:
    async def main() -> None:
        fatal: asyncio.Queue[tuple[str, threading.Thread]] = asyncio.Queue()
        supervisor = Supervisor(
            lambda name, _: fatal.put_nowait((name, threading.current_thread()))
        )
        watch = supervisor.watch("flusher", is_essential=True)

        def fail() -> None:
            for _ in range(FATAL_FAILURES):
                watch.failed(LookupError("a bug"))

        await asyncio.to_thread(fail)
        assert await fatal.get() == ("flusher", threading.current_thread())
        assert fatal.empty()

    asyncio.run(main())


def test_work_in_a_thread_is_tracked_and_its_failures_are_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turbopump.supervisor.BACKOFF_FIRST_MS", 1)
    bugs, watch = [LookupError("one"), LookupError("two")], Watch("looking")

    def work() -> None:
        if bugs:
            raise bugs.pop(0)

    keep_in_thread(watch, work, threading.Event())
    assert summary([watch, Watch("other")]) == {
        "backgroundWork": "looking, other",
        "backgroundFailures": "looking: 2 failures, the last LookupError('two')",
    }
    assert caplog.text.count("looking failed and is started again") == 2


def test_stopping_does_not_wait_for_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbopump.supervisor.BACKOFF_FIRST_MS", 3_600_000)
    is_over, failed = threading.Event(), threading.Event()

    def work() -> None:
        failed.set()
        raise LookupError("a bug")

    thread = threading.Thread(target=keep_in_thread, args=(Watch("looking"), work, is_over))
    thread.start()
    assert failed.wait(30)
    is_over.set()
    thread.join(30)
    assert not thread.is_alive()


@virtual_time()
async def test_work_that_fails_while_it_is_stopped_is_not_started_again() -> None:
    starts = 0

    async def act() -> None:
        nonlocal starts
        starts += 1
        try:
            await asyncio.sleep(60)
        finally:
            raise RuntimeError("could not let go")

    supervisor = Supervisor()
    supervisor.keep("work", act)
    await asyncio.sleep(1)
    async with asyncio.timeout(1):
        await supervisor.stop()
    assert starts == 1
    assert "could not let go" in summary(supervisor.watches)["backgroundFailures"]
