from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.testing import (
    Deadlock,
    VirtualClock,
    VirtualTimeLoop,
    run_virtual,
    virtual_loop,
    virtual_time,
    wait_until,
)
from turbopump.testing.clock import START_EPOCH_MS


def test_days_pass_in_milliseconds() -> None:
    async def main() -> float:
        await asyncio.sleep(30 * 24 * 3600)
        return virtual_loop().time()

    start = time.perf_counter()
    assert run_virtual(main()) == pytest.approx(30 * 24 * 3600)
    assert time.perf_counter() - start < 1


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=20))
def test_timers_fire_in_order_and_at_their_time(delays: list[float]) -> None:
    async def main() -> list[tuple[float, float]]:
        fired: list[tuple[float, float]] = []
        loop = virtual_loop()

        def note(due: float) -> None:
            fired.append((due, loop.time()))

        for delay in delays:
            loop.call_later(delay, note, delay)
        await asyncio.sleep(1e5 + 1)
        return fired

    fired = run_virtual(main())
    assert [due for due, _ in fired] == sorted(delays)
    for due, at in fired:
        assert at == pytest.approx(due, abs=1e-6)


@virtual_time()
async def test_clock_and_timers_agree() -> None:
    clock = virtual_loop().clock
    for step_ms in (1, 7, 50, 120_000, 3_600_000):
        before_ms, wall_ms = clock.monotonic_ms(), clock.now_ms()
        await asyncio.sleep(step_ms / 1000)
        assert clock.monotonic_ms() == before_ms + step_ms
        assert clock.now_ms() == wall_ms + step_ms


@virtual_time()
async def test_the_wall_clock_jumps_without_the_timers() -> None:
    clock = virtual_loop().clock
    assert clock.now_ms() == START_EPOCH_MS
    clock.jump_wall(-60)
    await asyncio.sleep(1)
    assert clock.now_ms() == START_EPOCH_MS - 59_000
    assert clock.monotonic_ms() == 1000
    clock.jump_wall(3600)
    assert clock.now_ms() == START_EPOCH_MS + 3_541_000
    assert clock.monotonic_ms() == 1000


def test_a_clock_may_start_at_any_epoch() -> None:
    assert VirtualClock(5).now_ms() == 5


@pytest.mark.slow
def test_a_deadlock_names_the_tasks_and_where_they_wait() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await asyncio.create_task(waits_for_nobody(), name="the lonely one")

    with pytest.raises(Deadlock) as deadlock:
        run_virtual(main())
    assert "the lonely one: " in str(deadlock.value)
    assert f"waits_for_nobody at {__file__}:" in str(deadlock.value)


@virtual_time()
async def test_time_stands_still_while_a_thread_works() -> None:
    release = threading.Event()
    ticks: list[float] = []
    loop = virtual_loop()
    loop.call_later(0.001, lambda: ticks.append(loop.time()))
    job = loop.run_in_executor(None, release.wait, 10)
    # Real time passes here; the timer of one virtual millisecond must not fire meanwhile.
    threading.Timer(0.05, release.set).start()
    assert await job
    assert ticks == []
    assert loop.time() == 0
    await asyncio.sleep(0.01)
    assert ticks == [pytest.approx(0.001)]


@virtual_time()
async def test_time_continues_after_a_thread_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(lambda: 1 // 0)
    await asyncio.sleep(5)
    assert virtual_loop().time() == pytest.approx(5)


@virtual_time()
async def test_time_stands_still_until_the_thread_of_a_cancelled_job_ends() -> None:
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait(10)
        ended.set()

    job = virtual_loop().run_in_executor(None, work)
    # A job that no thread has taken yet would be cancelled permanently.
    assert started.wait(10)
    job.cancel()
    threading.Timer(0.05, release.set).start()
    await asyncio.sleep(3600)
    assert ended.is_set()


@virtual_time()
async def test_time_continues_after_a_job_is_cancelled_before_it_starts() -> None:
    release = threading.Event()
    ran: list[str] = []
    with ThreadPoolExecutor(1) as executor:
        first = virtual_loop().run_in_executor(executor, release.wait, 10)
        second = virtual_loop().run_in_executor(executor, ran.append, "second")
        second.cancel()
        threading.Timer(0.02, release.set).start()
        assert await first
        await asyncio.sleep(3600)
    assert not virtual_loop().is_waited_for
    assert ran == []


@virtual_time()
async def test_the_default_executor_may_be_custom() -> None:
    executor = ThreadPoolExecutor(1, thread_name_prefix="own")
    virtual_loop().set_default_executor(executor)
    assert (await asyncio.to_thread(lambda: threading.current_thread().name)).startswith("own")


def test_a_thread_may_outlive_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    async def main() -> None:
        virtual_loop().run_in_executor(executor, release.wait, 10).cancel()

    with ThreadPoolExecutor(1) as executor:
        run_virtual(main())
        release.set()
    assert caplog.text == ""


def test_a_thread_that_never_returns_is_named_and_abandoned() -> None:
    release, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait()

    async def wait() -> None:
        await asyncio.to_thread(work)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.limit_real_time(0.05)
        with pytest.raises(Deadlock, match=r"asyncio_0: .*\.work at .*test_virtual_loop\.py:\d+"):
            runner.run(wait())
        assert begun.is_set()
        loop.limit_real_time(10)
        # Time continues without it.
        runner.run(asyncio.sleep(3600))
        assert loop.time() >= 3600
    release.set()


@virtual_time()
async def test_a_custom_thread_may_wake_the_loop() -> None:
    loop = virtual_loop()
    woken = asyncio.Event()
    loop.call_later(60, lambda: None)
    with loop.outside_work():
        thread = threading.Timer(0.02, lambda: loop.call_soon_threadsafe(woken.set))
        thread.start()
        await woken.wait()
    assert loop.time() == 0
    thread.join()


@pytest.fixture
def number() -> int:
    return 41


@pytest.mark.parametrize("more", [1])
@virtual_time(seed=7)
async def test_fixtures_and_parameters_work(number: int, more: int, tmp_path: Path) -> None:
    assert number + more == 42
    assert tmp_path.is_absolute()
    await asyncio.sleep(3600)


def test_the_seed_decides_the_chance() -> None:
    async def draw() -> list[int]:
        return [virtual_loop().random.randrange(1000) for _ in range(5)]

    assert run_virtual(draw(), seed=1) == run_virtual(draw(), seed=1)
    assert run_virtual(draw(), seed=1) != run_virtual(draw(), seed=2)


@virtual_time()
async def test_time_passes_while_a_job_waits_for_a_task() -> None:
    loop = virtual_loop()

    def job() -> None:
        slept = threading.Event()

        def begin() -> None:
            task = loop.create_task(asyncio.sleep(3600))
            loop.serve_thread(task)
            task.add_done_callback(lambda _: slept.set())

        loop.call_soon_threadsafe(begin)
        slept.wait()

    async with asyncio.timeout(3601):
        await asyncio.to_thread(job)
    assert loop.time() == pytest.approx(3600)


@virtual_time()
async def test_waiting_for_a_condition_ends_when_it_holds() -> None:
    facts: list[int] = []
    virtual_loop().call_later(5, facts.append, 1)
    await wait_until(lambda: facts)
    assert 5 <= virtual_loop().time() < 5.01


@virtual_time()
async def test_a_condition_is_checked_rarely_while_nothing_happens() -> None:
    loop, checks, facts = virtual_loop(), list[float](), list[int]()
    loop.call_later(0.25, facts.append, 1)
    loop.call_later(0.257, facts.append, 2)

    def fact() -> bool:
        checks.append(loop.time())
        return len(facts) == 2

    await wait_until(fact)
    assert checks == pytest.approx([0, 0.1, 0.2, 0.25, 0.26], abs=0.0001)


@virtual_time()
async def test_a_condition_on_time_is_noticed_soon() -> None:
    loop = virtual_loop()
    await wait_until(lambda: loop.time() > 1.55)
    assert loop.time() < 1.66


@virtual_time()
async def test_a_condition_may_be_set_by_a_thread() -> None:
    loop, facts = virtual_loop(), list[int]()
    job = loop.run_in_executor(None, lambda: loop.call_soon_threadsafe(facts.append, 1))
    await wait_until(lambda: facts)
    await job
    assert loop.time() < 0.02


@virtual_time()
async def test_waiting_for_a_condition_that_never_holds_names_it() -> None:
    with pytest.raises(AssertionError, match=r"not true within 2 s: .*lambda.*\.py:\d+"):
        await wait_until(lambda: False, 2)


def test_virtual_helpers_raise_when_used_in_real_time() -> None:
    async def main() -> None:
        virtual_loop()

    with pytest.raises(AssertionError, match="not in virtual time"):
        asyncio.run(main())


@virtual_time()
async def test_time_stands_still_while_others_are_busy_and_continues_afterwards() -> None:
    loop = virtual_loop()
    told = asyncio.Event()
    busy = threading.Event()
    busy.set()

    def work() -> None:
        time.sleep(0.02)
        loop.call_soon_threadsafe(told.set)
        busy.clear()

    thread = threading.Thread(target=work)
    with loop.waiting_for(busy.is_set):
        thread.start()
        await asyncio.wait_for(told.wait(), 60)
        assert loop.time() == 0
        await asyncio.sleep(60)
    assert loop.time() == 60
    thread.join()


@virtual_time()
async def test_watchers_are_called_when_all_tasks_wait_and_may_wake_one() -> None:
    loop = virtual_loop()
    done: list[str] = []
    seen_at: list[float] = []
    woken = asyncio.Event()

    def look() -> bool:
        seen_at.append(loop.time())
        if len(done) == 2 and not woken.is_set():
            woken.set()
            return True
        return False

    for delay_s in (10, 20, 30):
        loop.call_later(delay_s, done.append, f"after {delay_s} s")
    with loop.watched(look):
        await woken.wait()
    assert loop.time() == 20, "not later than the condition"
    assert seen_at == [0, 10, 20]


def test_a_run_that_does_not_end_fails_in_real_time() -> None:
    async def main() -> None:
        virtual_loop().limit_real_time(0.05)
        for _ in itertools.count():
            await asyncio.sleep(1)

    with pytest.raises(Deadlock, match=r"no end in sight(.|\n)*test_virtual_loop.py:\d+"):
        run_virtual(main())
