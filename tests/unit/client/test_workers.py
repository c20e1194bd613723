"""Concurrent jobs: how many, their results, and what closing leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from turbopump import supervisor
from turbopump.client.delivery import workers as listener_workers
from turbopump.client.delivery.workers import TaskWorkers, ThreadWorkers, Workers
from turbopump.supervisor import Watch
from turbopump.testing import virtual_time, wait_until

WAIT_S = 10.0


def each(work: Callable[[Any], None]) -> Callable[[Iterator[Any]], None]:
    """Return what runs jobs with a function that runs one."""

    def run(jobs: Iterator[Any]) -> None:
        for job in jobs:
            work(job)

    return run


def each_awaited(
    work: Callable[[Any], Awaitable[None]],
) -> Callable[[Iterator[Any]], Awaitable[None]]:
    async def run(jobs: Iterator[Any]) -> None:
        for job in jobs:
            await work(job)

    return run


@virtual_time()
async def test_the_number_of_concurrent_tasks_is_bounded() -> None:
    running, most, done = 0, 0, list[int]()

    async def work(_: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1)
        running -= 1

    workers: TaskWorkers[int] = TaskWorkers(each_awaited(work), done.extend, (3, 3), Watch("calls"))
    workers.submit(range(10))
    await wait_until(lambda: len(done) == 10)
    assert most == 3
    most = 0
    workers.resize((1, 1))
    workers.submit(range(5))
    await wait_until(lambda: len(done) == 15)
    assert most == 1
    await workers.close(0)


class Calls:
    """Jobs that take a time of their own in seconds, and how many ran at once."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0

    async def __call__(self, spent_s: float) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(spent_s)
        self.running -= 1


@virtual_time()
async def test_the_size_grows_while_jobs_wait_and_shrinks_when_they_do_not() -> None:
    calls, done, watch = Calls(), list[float](), Watch("calls")
    workers: TaskWorkers[float] = TaskWorkers(each_awaited(calls), done.extend, (4, 10), watch)
    workers.submit([300] * 30)
    await asyncio.sleep(0.9)
    assert (workers.size, calls.running) == (4, 4), "nothing has waited for long"
    await asyncio.sleep(0.2)
    assert (workers.size, calls.running) == (8, 8)
    await asyncio.sleep(1)
    assert (workers.size, calls.running) == (10, 10)
    await asyncio.sleep(200)
    assert workers.size == 10, "all are busy"
    await wait_until(lambda: len(done) == 30, 1000)
    assert calls.most == 10
    # The last of them ran within the last minute, but not in the minute after it.
    await asyncio.sleep(125)
    assert workers.size == 4
    await workers.close(0)


@virtual_time()
async def test_the_size_shrinks_to_what_was_needed() -> None:
    calls, watch = Calls(), Watch("calls")
    workers: TaskWorkers[float] = TaskWorkers(each_awaited(calls), lambda _: None, (2, 16), watch)
    workers.submit([10] * 40)
    await wait_until(lambda: calls.running == 16)
    await wait_until(lambda: calls.running == 0, 60)
    for _ in range(300):
        workers.submit([0.9] * 5)
        await asyncio.sleep(1)
    assert workers.size == 5
    await workers.close(0)


@virtual_time()
async def test_jobs_that_wait_for_less_than_a_second_need_no_more_workers() -> None:
    calls, watch = Calls(), Watch("calls")
    workers: TaskWorkers[float] = TaskWorkers(each_awaited(calls), lambda _: None, (4, 10), watch)
    for _ in range(100):
        # They always wait, but each for less than 0.8 s.
        workers.submit([0.1] * 32)
        await asyncio.sleep(0.8)
    assert (workers.size, calls.most) == (4, 4)
    await workers.close(0)


@virtual_time()
async def test_the_limits_of_the_size_can_change() -> None:
    calls, watch = Calls(), Watch("calls")
    workers: TaskWorkers[float] = TaskWorkers(each_awaited(calls), lambda _: None, (2, 2), watch)
    workers.submit([50] * 40)
    await asyncio.sleep(10)
    assert calls.running == 2
    workers.resize((3, 6))
    await asyncio.sleep(0.5)
    assert calls.running == 3
    await asyncio.sleep(1)
    assert calls.running == 6
    workers.resize((2, 4))
    assert workers.size == 4
    await asyncio.sleep(60)
    assert calls.running == 4
    workers.resize((5, 20))
    await asyncio.sleep(0.5)
    assert calls.running == 5
    await workers.close(0)
    await asyncio.sleep(500)
    assert workers.size == 5, "closed ones neither grow nor shrink"


@virtual_time()
async def test_tasks_that_never_wait_yield_to_others() -> None:
    turns, done = 0, list[int]()

    async def work(_: int) -> None:
        pass

    async def other() -> None:
        nonlocal turns
        while len(done) < 1000:
            turns += 1
            await asyncio.sleep(0)

    workers: TaskWorkers[int] = TaskWorkers(each_awaited(work), done.extend, (4, 4), Watch("calls"))
    workers.submit(range(1000))
    await other()
    assert turns > 5
    await workers.close(0)


@virtual_time()
async def test_one_task_runs_jobs_that_never_wait() -> None:
    tasks, done = set[asyncio.Task[None] | None](), list[int]()

    async def work(job: int) -> None:
        tasks.add(asyncio.current_task())
        if job == 60:
            await asyncio.sleep(1)

    workers: TaskWorkers[int] = TaskWorkers(each_awaited(work), done.extend, (4, 4), Watch("calls"))
    workers.submit(range(60))
    await wait_until(lambda: len(done) == 60)
    assert len(tasks) == 1
    workers.submit(range(60, 100))
    await wait_until(lambda: len(done) == 99)
    assert len(tasks) == 3
    await workers.close(2000)
    assert len(done) == 100


@pytest.mark.parametrize("turns", range(4))
def test_a_job_submitted_while_a_worker_ends_is_run(turns: int) -> None:
    @virtual_time()
    async def run() -> None:
        held, ends, begun = asyncio.Event(), asyncio.Event(), list[str]()

        async def work(job: str) -> None:
            begun.append(job)
            if job != "new":
                await (held if job == "long" else ends).wait()

        workers: TaskWorkers[str] = TaskWorkers(
            each_awaited(work), lambda _: None, (4, 4), Watch("calls")
        )
        workers.submit(["long", "short"])
        await wait_until(lambda: len(begun) == 2)
        ends.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        workers.submit(["new"])
        await wait_until(lambda: begun[-1] == "new")
        held.set()
        await workers.close(1000)

    run()


@pytest.mark.parametrize("wait_ms", [0, 2000])
@virtual_time()
async def test_closing_waits_for_tasks_that_run_and_starts_no_more(wait_ms: int) -> None:
    done: list[int] = []

    async def work(_: int) -> None:
        await asyncio.sleep(1)

    workers: TaskWorkers[int] = TaskWorkers(each_awaited(work), done.extend, (2, 2), Watch("calls"))
    workers.submit(range(6))
    await asyncio.sleep(0.5)
    await workers.close(wait_ms)
    assert done == ([0, 1] if wait_ms else [])
    workers.submit([7])
    await asyncio.sleep(5)
    assert len(done) <= 2


def threads_with(size: int, jobs: int, meet: int) -> tuple[list[int], int]:
    """Run jobs in which groups of ``meet`` wait for each other; return them, and how many ran."""
    barrier, lock = threading.Barrier(meet, timeout=WAIT_S), threading.Lock()
    running = most = 0
    done: list[int] = []

    def work(_: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait()
        with lock:
            running -= 1

    def collect(finished: Sequence[int]) -> None:
        done.extend(finished)

    async def main() -> None:
        workers: ThreadWorkers[int] = ThreadWorkers(
            each(work), collect, (size, size), Watch("calls")
        )
        workers.submit(range(jobs))
        await wait_until(lambda: len(done) == jobs, WAIT_S)
        await workers.close(1000)
        workers.submit([99])

    asyncio.run(main())
    return done, most


def test_threads_join_while_others_are_stuck() -> None:
    done, most = threads_with(size=8, jobs=16, meet=8)
    assert sorted(done) == list(range(16))
    assert most == 8


def test_quick_jobs_are_run_by_one_thread() -> None:
    names: set[str] = set()
    done: list[int] = []

    def work(_: int) -> None:
        names.add(threading.current_thread().name)

    async def main() -> None:
        workers: ThreadWorkers[int] = ThreadWorkers(
            each(work), done.extend, (20, 20), Watch("calls")
        )
        workers.submit(range(500))
        await wait_until(lambda: len(done) == 500, WAIT_S)
        await workers.close(1000)

    asyncio.run(main())
    assert len(names) <= 3, "a busy machine may make one look stuck"


@pytest.mark.slow
def test_four_threads_stay_four_however_many_jobs_run() -> None:
    done: list[int] = []

    async def main() -> None:
        workers: ThreadWorkers[int] = ThreadWorkers(
            each(lambda _: None), done.extend, (4, 4), Watch("calls")
        )
        for number in range(1000):
            workers.submit([number])
            # No pause: the worker that has finished a job is about to end at the next submission.
            while len(done) <= number:  # noqa: ASYNC110
                await asyncio.sleep(0)
        names = [each.name for each in threading.enumerate()]
        await workers.close(1000)
        assert sum(name.startswith("turbopump-listener") for name in names) <= 4

    asyncio.run(main())


def test_the_number_of_threads_can_be_reduced() -> None:
    lock, gate = threading.Lock(), threading.Event()
    running = most = 0
    done: list[int] = []

    def work(number: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            if number >= 100:
                most = max(most, running)
        gate.wait(WAIT_S)
        with lock:
            running -= 1

    async def main() -> None:
        workers: ThreadWorkers[int] = ThreadWorkers(each(work), done.extend, (6, 6), Watch("calls"))
        workers.submit(range(6))
        await wait_until(lambda: running == 6, WAIT_S)
        workers.resize((2, 2))
        gate.set()
        await wait_until(lambda: len(done) == 6, WAIT_S)
        workers.submit(range(100, 120))
        await wait_until(lambda: len(done) == 26, WAIT_S)
        await workers.close(1000)

    asyncio.run(main())
    assert most <= 2


def test_threads_grow_while_jobs_wait_and_end_when_they_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener_workers, "_GROW_AFTER_S", 0.01)
    monkeypatch.setattr(listener_workers, "_SHRINK_AFTER_S", 0.05)
    # All six wait for each other: two would never end.
    barrier, done = threading.Barrier(6, timeout=WAIT_S), list[int]()
    others = set(threading.enumerate())

    def threads() -> int:
        return len(set(threading.enumerate()) - others)

    def is_done(count: int) -> bool:
        return len(done) == count

    def work(_: int) -> None:
        barrier.wait()

    async def main() -> None:
        workers: ThreadWorkers[int] = ThreadWorkers(each(work), done.extend, (2, 6), Watch("calls"))
        for count in (12, 24):
            workers.submit(range(12))
            await wait_until(partial(is_done, count), WAIT_S)
            assert threads() <= 6
            await wait_until(lambda: (workers.size, threads()) == (2, 2), WAIT_S)
        await workers.close(1000)

    asyncio.run(main())


def test_no_timer_runs_while_all_threads_are_busy() -> None:
    gate, running = threading.Barrier(4, timeout=WAIT_S), list[int]()
    done: list[int] = []

    def work(number: int) -> None:
        running.append(number)
        gate.wait()

    async def main() -> None:
        loop, timers = asyncio.get_running_loop(), 0
        call_later = loop.call_later

        def counted(*arguments: Any, **options: Any) -> asyncio.TimerHandle:
            nonlocal timers
            timers += 1
            return call_later(*arguments, **options)

        workers: ThreadWorkers[int] = ThreadWorkers(each(work), done.extend, (2, 2), Watch("calls"))
        with patch.object(loop, "call_later", counted):
            workers.submit(range(4))
            await wait_until(lambda: len(running) == 2, WAIT_S)
            timers = 0
            for _ in range(20):
                await asyncio.sleep(0.002)
            assert timers <= 21, "those of the sleeps, and one that was set before"
            # More threads take the jobs that wait for one.
            workers.resize((4, 4))
            await wait_until(lambda: len(done) == 4, WAIT_S)
        await workers.close(1000)

    asyncio.run(main())


@pytest.mark.parametrize("in_threads", [True, False])
def test_a_job_that_fails_is_counted_and_run_again(
    in_threads: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_MS", 1)
    done, bugs, watch = list[int](), [LookupError("a bug")], Watch("calls")

    def work(number: int) -> None:
        if number == 3 and bugs:
            raise bugs.pop()

    async def awork(number: int) -> None:
        work(number)

    async def main() -> None:
        workers: Workers[int] = (
            ThreadWorkers(each(work), done.extend, (2, 2), watch)
            if in_threads
            else TaskWorkers(each_awaited(awork), done.extend, (2, 2), watch)
        )
        workers.submit(range(10))
        await wait_until(lambda: len(done) == 10, WAIT_S)
        await workers.close(1000)

    asyncio.run(main())
    assert sorted(done) == list(range(10))
    assert done[-1] == 3
    assert watch.described() == "calls: 1 failures, the last LookupError('a bug')"
    assert "calls failed and is started again" in caplog.text
