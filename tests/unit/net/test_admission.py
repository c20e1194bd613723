from __future__ import annotations

import asyncio
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from example_counts import at_most
from turbopump.errors import ConnectionLost, NetworkError, Overloaded
from turbopump.net.admission import Admission
from turbopump.net.deadlines import Deadlines
from turbopump.testing import run_virtual, virtual_loop, virtual_time


class Crowd:
    """Many waiters for few slots, some of which time out or are cancelled."""

    def __init__(self, places: int, random: Random) -> None:
        self.places = places
        self.random = random
        self.deadlines = Deadlines(virtual_loop().clock)
        self.admission = Admission(places, self.deadlines)
        self.inside = 0
        self.outcomes: list[str] = []

    async def visit(self) -> None:
        await asyncio.sleep(self.random.randrange(300) / 1000)
        try:
            if not self.admission.try_enter():
                await self.admission.enter(self.random.randrange(1, 400), "peer:1")
        except NetworkError as error:
            self.outcomes.append(type(error).__name__)
            return
        self.inside += 1
        assert self.inside <= self.places
        try:
            await asyncio.sleep(self.random.randrange(60) / 1000)
        finally:
            self.inside -= 1
            self.admission.leave()
        self.outcomes.append("served")

    async def disturb(self, visits: list[asyncio.Task[None]]) -> None:
        for _ in range(20):
            await asyncio.sleep(self.random.randrange(40) / 1000)
            match self.random.randrange(3):
                case 0:
                    self.admission.writable = False
                case 1:
                    self.admission.resume()
                case _:
                    for visit in self.random.sample(visits, 3):
                        visit.cancel()
        self.admission.resume()


@settings(max_examples=at_most(40))
@given(st.integers(1, 5), st.integers(3, 40), st.integers(0, 10_000))
def test_no_slot_is_lost_or_granted_twice(places: int, visitors: int, seed: int) -> None:
    async def main() -> None:
        crowd = Crowd(places, virtual_loop().random)
        visits = [asyncio.create_task(crowd.visit()) for _ in range(visitors)]
        await crowd.disturb(visits)
        await asyncio.wait(visits)
        cancelled = sum(visit.cancelled() for visit in visits)
        assert len(crowd.outcomes) + cancelled == visitors
        assert all(visit.cancelled() or visit.exception() is None for visit in visits)
        assert crowd.admission.is_idle
        assert len(crowd.deadlines) == 0

    run_virtual(main(), seed)


@virtual_time()
async def test_slots_are_granted_in_request_order() -> None:
    admission = Admission(1, Deadlines(virtual_loop().clock))
    assert admission.try_enter()
    entered: list[int] = []

    async def visit(number: int) -> None:
        await admission.enter(1000, "peer:1")
        entered.append(number)
        admission.leave()

    visits = [asyncio.create_task(visit(number)) for number in range(10)]
    await asyncio.sleep(0)
    admission.leave()
    assert not admission.try_enter(), "no request overtakes the waiters"
    await asyncio.gather(*visits)
    assert entered == list(range(10))


@virtual_time()
async def test_closing_the_connection_fails_all_waiters() -> None:
    admission = Admission(1, Deadlines(virtual_loop().clock))
    admission.writable = False
    visits = [asyncio.create_task(admission.enter(1000, "peer:1")) for _ in range(3)]
    await asyncio.sleep(0)
    admission.fail_all(ConnectionLost("gone"))
    results = await asyncio.gather(*visits, return_exceptions=True)
    assert [type(result) for result in results] == [ConnectionLost] * 3
    assert admission.is_idle


@virtual_time()
async def test_the_error_names_what_blocked_the_request() -> None:
    admission = Admission(1, Deadlines(virtual_loop().clock))
    assert admission.try_enter()
    for pause, text in ((False, "no request in flight finished"), (True, "the peer read nothing")):
        if pause:
            admission.writable = False
        try:
            await admission.enter(100, "peer:1")
        except Overloaded as error:
            assert str(error) == f"peer:1: {text} for 100 ms"


@virtual_time()
async def test_no_waiter_overtakes_an_admitted_one() -> None:
    admission = Admission(2, Deadlines(virtual_loop().clock))
    order: list[str] = []

    async def enter(name: str) -> None:
        if not admission.try_enter():
            await admission.enter(1000, "peer:1")
        order.append(name)

    admission.writable = False
    first = asyncio.create_task(enter("first"))
    await asyncio.sleep(0)
    second = asyncio.create_task(enter("second"))
    # Admits the first one, which continues after the second one has started.
    admission.resume()
    await asyncio.gather(first, second)
    assert order == ["first", "second"]
