from __future__ import annotations

import asyncio
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from turbopump.net.deadlines import GRANULARITY_MS, Deadline, Deadlines
from turbopump.testing import run_virtual, virtual_loop, virtual_time


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=30))
def test_never_early_late_by_the_granularity_at_most_and_never_when_cancelled(
    plan: list[tuple[int, bool]],
) -> None:
    async def main() -> None:
        clock = virtual_loop().clock
        clock.advance_ns(123_456_789)
        deadlines = Deadlines(clock)
        fired: dict[int, int] = {}
        start_ms = clock.monotonic_ms()

        def note(index: int) -> None:
            assert index not in fired
            fired[index] = clock.monotonic_ms() - start_ms

        added = [deadlines.add(timeout, partial(note, i)) for i, (timeout, _) in enumerate(plan)]
        for deadline, (_, is_cancelled) in zip(added, plan, strict=True):
            if is_cancelled:
                deadline.cancel()
        await asyncio.sleep(6)
        assert sorted(fired) == [i for i, (_, is_cancelled) in enumerate(plan) if not is_cancelled]
        for i, at_ms in fired.items():
            assert plan[i][0] < at_ms <= plan[i][0] + GRANULARITY_MS + 1
        assert len(deadlines) == 0

    run_virtual(main())


@virtual_time()
async def test_simultaneous_deadlines_are_called_in_the_order_they_were_added() -> None:
    deadlines = Deadlines(virtual_loop().clock)
    fired: list[int] = []
    for number in range(20):
        deadlines.add(100, partial(fired.append, number))
    await asyncio.sleep(1)
    assert fired == list(range(20))


@virtual_time()
async def test_one_may_cancel_another_of_the_same_deadline() -> None:
    deadlines = Deadlines(virtual_loop().clock)
    fired: list[str] = []
    others: list[Deadline] = []
    deadlines.add(10, lambda: others[0].cancel())
    others.append(deadlines.add(10, lambda: fired.append("cancelled")))
    await asyncio.sleep(1)
    assert fired == []


@virtual_time()
async def test_one_may_add_another() -> None:
    clock = virtual_loop().clock
    deadlines = Deadlines(clock)
    fired: list[int] = []

    def add_another() -> None:
        deadlines.add(1000, lambda: fired.append(clock.monotonic_ms()))

    deadlines.add(10, add_another)
    await asyncio.sleep(3)
    assert len(fired) == 1
    assert fired[0] >= 1010


@virtual_time()
async def test_an_earlier_deadline_moves_the_timer_forward() -> None:
    clock = virtual_loop().clock
    deadlines = Deadlines(clock)
    fired: list[int] = []
    deadlines.add(60_000, lambda: fired.append(60))
    deadlines.add(1000, lambda: fired.append(1))
    await asyncio.sleep(2)
    assert fired == [1]


@virtual_time()
async def test_finished_ones_leave_nothing_behind() -> None:
    deadlines = Deadlines(virtual_loop().clock)
    for _ in range(10_000):
        deadlines.add(3000, lambda: None).cancel()
        await asyncio.sleep(0.001)
    assert len(deadlines) == 0
    assert len(deadlines._buckets) <= 3000 // GRANULARITY_MS + 2
    assert len(deadlines._order) == len(deadlines._buckets)


@virtual_time()
async def test_there_is_one_timer_however_many_deadlines() -> None:
    loop = virtual_loop()
    deadlines = Deadlines(loop.clock)
    for timeout_ms in range(1, 5000, 7):
        deadlines.add(timeout_ms, lambda: None)
    assert loop.timers_pending == 1
    deadlines.close()
    assert len(deadlines) == 0


@virtual_time()
async def test_a_call_that_raises_does_not_prevent_others() -> None:
    loop = virtual_loop()
    deadlines = Deadlines(loop.clock)
    fired: list[int] = []
    errors: list[object] = []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    deadlines.add(10, lambda: fired.append(1))
    deadlines.add(10, lambda: fired.remove(99))
    deadlines.add(10, lambda: fired.append(2))
    deadlines.add(500, lambda: fired.append(3))
    await asyncio.sleep(1)
    assert fired == [1, 2, 3]
    assert [type(error) for error in errors] == [ValueError]


@virtual_time()
async def test_a_call_may_close_everything_and_start_again() -> None:
    deadlines = Deadlines(virtual_loop().clock)
    fired: list[str] = []

    def restart() -> None:
        deadlines.close()
        deadlines.add(100, lambda: fired.append("new"))

    deadlines.add(10, restart)
    deadlines.add(10, lambda: fired.append("old"))
    deadlines.add(20_000, lambda: fired.append("old"))
    await asyncio.sleep(30)
    assert fired == ["new"]
    assert len(deadlines) == 0
