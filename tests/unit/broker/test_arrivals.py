from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from example_counts import at_most
from turbopump.broker.arrivals import (
    RESUMED_PER_TURN,
    SWEEP_SLOW_MS,
    WHOLE_TOPIC,
    Arrivals,
    HeldPull,
    Holder,
)
from turbopump.broker.config import LongPollingConfig
from turbopump.message import QueueOffset
from turbopump.store.dispatch import ANY_TAG
from turbopump.store.outcomes import Arrival
from turbopump.testing import VirtualTimeLoop, virtual_loop, virtual_time


def arrival(topic: str = "T", queue_id: int = 0, offset: int = 0, tags_code: int = 0) -> Arrival:
    return Arrival(
        topic=topic,
        queue_id=queue_id,
        queue_offset=QueueOffset(offset),
        tags_code=tags_code,
        store_timestamp_ms=0,
        properties=b"",
    )


HOLDER = Holder("c", "g", "10.0.0.1")


class Held:
    """A held pull that counts its answers."""

    def __init__(self, queue_id: int = 0, tag: int | None = None, owner: str = "c") -> None:
        self.answers = 0
        self.tag = tag
        holder = Holder(owner, "g", "10.0.0.1")
        codes = None if tag is None else frozenset({tag})
        self.pull = HeldPull(("T", queue_id), 0, holder, self._answer, codes)

    def _answer(self) -> None:
        self.answers += 1


@virtual_time()
async def test_an_arrival_wakes_exactly_the_pulls_that_match() -> None:
    arrivals = Arrivals(virtual_loop().clock, LongPollingConfig(held_max=10))
    everything = Held()
    red = Held(tag=1)
    blue = Held(tag=2)
    elsewhere = Held(queue_id=1)
    for held in (everything, red, blue, elsewhere):
        arrivals.hold(held.pull, 15_000)
    arrivals.notify(arrival(tags_code=1))
    await asyncio.sleep(0)
    assert [held.answers for held in (everything, red, blue, elsewhere)] == [1, 1, 0, 0]
    assert len(arrivals) == 2
    arrivals.release_all()


@virtual_time()
async def test_any_arrival_in_a_topic_wakes_waiters_for_the_whole_topic() -> None:
    arrivals = Arrivals(virtual_loop().clock, LongPollingConfig(held_max=10))
    whole, red, other = Held(WHOLE_TOPIC), Held(tag=1), Held(queue_id=7, owner="d")
    for held in (whole, red, other):
        arrivals.hold(held.pull, 15_000)
    watched = arrivals.get(("T", 5))
    assert watched is not None
    assert ANY_TAG in watched.tags_codes
    assert watched is arrivals.get(("T", 0)), "all of its messages are reported"
    assert arrivals.get(("U", 5)) is None
    arrivals.notify(arrival(topic="U"))
    await asyncio.sleep(0)
    assert whole.answers == 0
    arrivals.notify(arrival(tags_code=2))
    await asyncio.sleep(0)
    assert [held.answers for held in (whole, red, other)] == [1, 0, 0]
    assert arrivals.get(("T", 5)) is None
    arrivals.notify(arrival(tags_code=1))
    await asyncio.sleep(0)
    assert red.answers == 1
    arrivals.forget("d")
    assert not len(arrivals)


@virtual_time()
async def test_messages_that_arrive_together_are_answered_together() -> None:
    arrivals = Arrivals(virtual_loop().clock, LongPollingConfig(held_max=10))
    held = Held()
    arrivals.hold(held.pull, 15_000)
    for offset in range(5):
        arrivals.notify(arrival(offset=offset))
    assert held.answers == 0, "the answer waits for the rest of the turn"
    await asyncio.sleep(0)
    assert held.answers == 1


@virtual_time()
async def test_a_pull_is_answered_at_its_deadline_and_never_before() -> None:
    clock = virtual_loop().clock
    arrivals = Arrivals(clock, LongPollingConfig(held_max=10))
    held = Held()
    arrivals.hold(held.pull, 15_000)
    await asyncio.sleep(14.999)
    assert held.answers == 0
    await asyncio.sleep(0.101)
    assert held.answers == 1
    assert len(arrivals) == 0


@virtual_time()
async def test_the_sweep_wakes_what_an_arrival_missed() -> None:
    arrivals = Arrivals(virtual_loop().clock, LongPollingConfig(held_max=10))
    behind, up_to_date = Held(queue_id=0), Held(queue_id=1)
    arrivals.hold(behind.pull, 15_000)
    arrivals.hold(up_to_date.pull, 15_000)
    arrivals.sweep(lambda topic, queue_id: 1 if queue_id == 0 else 0)
    await asyncio.sleep(0)
    assert (behind.answers, up_to_date.answers) == (1, 0)
    arrivals.release_all()


@virtual_time()
async def test_the_sweep_skips_pulls_that_did_not_match() -> None:
    arrivals = Arrivals(virtual_loop().clock, LongPollingConfig(held_max=10))
    held = Held(tag=1)
    arrivals.hold(held.pull, 15_000)
    watch = arrivals.get(held.pull.queue)
    assert watch is not None
    watch.seen = 1  # as the store does with every message
    arrivals.sweep(lambda *_: 1)
    await asyncio.sleep(0)
    assert held.answers == 0
    arrivals.sweep(lambda *_: 2)
    await asyncio.sleep(0)
    assert held.answers == 1, "no pull was notified of the second message"


@virtual_time()
async def test_a_sweep_that_takes_long_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = virtual_loop().clock
    arrivals = Arrivals(clock, LongPollingConfig(held_max=10))
    for queue_id in range(2):
        arrivals.hold(Held(queue_id).pull, 15_000)

    def sweep(read_ms: int) -> str:
        def end(*_: object) -> int:
            clock.advance_ns(read_ms * 1_000_000)
            return 0

        arrivals.sweep(end)
        return caplog.text

    assert sweep(SWEEP_SLOW_MS // 2) == ""
    assert f"checking 2 waiting long polls took {2 * SWEEP_SLOW_MS} ms" in sweep(SWEEP_SLOW_MS)
    arrivals.release_all()


@virtual_time()
async def test_many_are_answered_over_several_turns() -> None:
    arrivals = Arrivals(virtual_loop().clock, LongPollingConfig(held_max=1000))
    pulls = [Held() for _ in range(RESUMED_PER_TURN + 1)]
    for held in pulls:
        arrivals.hold(held.pull, 15_000)
    arrivals.notify(arrival())
    await asyncio.sleep(0)
    assert sum(held.answers for held in pulls) == RESUMED_PER_TURN
    await asyncio.sleep(0)
    assert sum(held.answers for held in pulls) == RESUMED_PER_TURN + 1


@virtual_time()
async def test_pulls_of_a_disconnected_peer_are_dropped() -> None:
    arrivals = Arrivals(virtual_loop().clock, LongPollingConfig(held_max=10))
    gone, here = Held(owner="gone"), Held(owner="here")
    arrivals.hold(gone.pull, 1000)
    arrivals.hold(here.pull, 1000)
    arrivals.notify(arrival())
    arrivals.forget("gone")
    arrivals.forget("never seen")
    await asyncio.sleep(5)
    assert (gone.answers, here.answers) == (0, 1)


@virtual_time()
async def test_deadlines_of_dropped_pulls_keep_no_memory() -> None:
    arrivals = Arrivals(virtual_loop().clock, LongPollingConfig(held_max=1000))
    held = [Held(owner="c") for _ in range(1000)]
    for each in held:
        arrivals.hold(each.pull, 60_000)
    bucket = held[0].pull.bucket
    assert bucket is not None
    assert len(bucket) == 1000
    arrivals.forget("c")
    assert sys.getsizeof(bucket) == sys.getsizeof({})


@virtual_time()
async def test_one_broken_answer_does_not_stop_the_others() -> None:
    arrivals = Arrivals(virtual_loop().clock, LongPollingConfig(held_max=10))

    def broken() -> None:
        raise RuntimeError("broken")

    held = Held()
    arrivals.hold(HeldPull(("T", 0), 0, HOLDER, broken), 1000)
    arrivals.hold(held.pull, 1000)
    arrivals.notify(arrival())
    await asyncio.sleep(0)
    assert held.answers == 1


@virtual_time()
async def test_a_closer_look_and_several_tags() -> None:
    arrivals = Arrivals(virtual_loop().clock, LongPollingConfig(held_max=10))
    answered: list[str] = []
    arrivals.hold(
        HeldPull(
            ("T", 0),
            0,
            HOLDER,
            lambda: answered.append("picky"),
            wants=lambda message: message.properties == b"wanted",
        ),
        15_000,
    )
    arrivals.hold(
        HeldPull(("T", 0), 0, HOLDER, lambda: answered.append("two tags"), frozenset({1, 2})),
        15_000,
    )
    arrivals.notify(arrival(tags_code=2))
    arrivals.notify(arrival(tags_code=1))
    await asyncio.sleep(0)
    assert answered == ["two tags"]
    arrivals.release_all()


@virtual_time()
async def test_pulls_of_a_deleted_topic_are_answered() -> None:
    arrivals = Arrivals(virtual_loop().clock, LongPollingConfig(held_max=10))
    held = Held()
    arrivals.hold(held.pull, 15_000)
    arrivals.release_topic("other")
    await asyncio.sleep(0)
    assert held.answers == 0
    arrivals.release_topic("T")
    await asyncio.sleep(0)
    assert held.answers == 1


class ArrivalsMachine(RuleBasedStateMachine):
    """In any order of events, each pull is answered once or dropped with its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.arrivals = Arrivals(self.loop.clock, LongPollingConfig(held_max=1000))
        self.held: list[Held] = []
        self.gone: set[str] = set()

    def run(self, action: Callable[[], None], seconds: float = 0) -> None:
        async def act() -> None:
            action()
            await asyncio.sleep(seconds)

        self.loop.run_until_complete(act())

    @rule(queue_id=st.integers(0, 2), tag=st.integers(0, 2), wait_ms=st.integers(0, 300))
    def hold(self, queue_id: int, tag: int, wait_ms: int) -> None:
        owner = f"owner-{len(self.held) % 3}"
        self.gone.discard(owner)
        held = Held(queue_id, tag or None, owner)
        self.held.append(held)
        self.run(lambda: self.arrivals.hold(held.pull, wait_ms))

    @rule(queue_id=st.integers(0, 2), tag=st.integers(1, 2))
    def arrive(self, queue_id: int, tag: int) -> None:
        before = {held: held.answers for held in self.held}
        waiting = [held for held in self.held if held.pull in self.waiting()]
        self.run(lambda: self.arrivals.notify(arrival(queue_id=queue_id, tags_code=tag)))
        for held in waiting:
            wanted = held.pull.queue == ("T", queue_id) and held.tag in (None, tag)
            assert held.answers == before[held] + wanted

    @rule(number=st.integers(0, 2))
    def leave(self, number: int) -> None:
        self.run(lambda: self.arrivals.forget(f"owner-{number}"))
        assert not [held for held in self.waiting() if held.holder.connection == f"owner-{number}"]

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0]))
    def pass_time(self, seconds: float) -> None:
        self.run(lambda: None, seconds)
        if seconds == 1.0:
            assert len(self.arrivals) == 0

    def waiting(self) -> set[HeldPull]:
        return {
            pull
            for queues in self.arrivals._by_topic.values()
            for queue in queues.values()
            for pull in queue.all
        }

    @invariant()
    def answered_at_most_once_and_tables_agree(self) -> None:
        waiting = self.waiting()
        assert all(held.answers <= 1 for held in self.held)
        assert not [held for held in self.held if held.answers and held.pull in waiting]
        owned = {pull for held in self.arrivals._by_connection.values() for pull in held}
        assert waiting == owned
        assert len(self.arrivals) == len(waiting)

    def teardown(self) -> None:
        self.run(self.arrivals.release_all)
        self.loop.close()


TestArrivalsMachine = ArrivalsMachine.TestCase
TestArrivalsMachine.settings = settings(
    max_examples=at_most(25), stateful_step_count=30, deadline=None
)
