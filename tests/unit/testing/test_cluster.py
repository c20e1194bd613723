"""The cluster that users test with: its clients, its state, time, and limits."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

import turbopump
from turbopump.aio import (
    Admin,
    ConsumeContext,
    ConsumeResult,
    LitePullConsumer,
    Message,
    MessageView,
    Producer,
    PullConsumer,
    PushConsumer,
)
from turbopump.errors import ClientError, InvalidArgument, NotRunning
from turbopump.testing import (
    Cluster,
    Deadlock,
    cluster,
    failing,
    running_cluster,
    virtual_loop,
    virtual_time,
)

TURNS_MAX = 11_000
TIMERS_MAX = 6_500
"""Loop iterations and timers in the 4 h 46 min of all retries: about 9,800 and 5,500."""

LADDER_S = [10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200]
"""How long a message waits before each of its sixteen retries."""

SHORT = {"messageDelayLevel": " ".join(["1s"] * 18)}


class Handled:
    """A listener with configured results, which records when it was called with what."""

    def __init__(self, world: Cluster, answer: ConsumeResult = ConsumeResult.SUCCESS) -> None:
        self._world = world
        self.answer = answer
        self.bodies: list[bytes] = []
        self.times_ms: list[int] = []

    async def __call__(
        self, messages: Sequence[MessageView], context: ConsumeContext
    ) -> ConsumeResult:
        self.bodies += [message.body for message in messages]
        self.times_ms.append(self._world.clock.monotonic_ms())
        return self.answer


def consumer_of(world: Cluster, listener: object, group: str = "billing") -> PushConsumer:
    """Create a consumer as applications do, which know only the address."""
    return PushConsumer(
        group,
        listener,  # type: ignore[arg-type]
        nameserver=world.nameserver,
        subscriptions={"orders": "*"},
        start_from="first",
    )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as made:
        yield made


def test_clients_that_know_the_address_only_are_part_of_the_cluster(world: Cluster) -> None:
    async def use() -> None:
        handled = Handled(world)
        async with (
            Producer("shop", nameserver=world.nameserver) as producer,
            consumer_of(world, handled),
        ):
            await producer.send(Message("orders", b"1", tags="created"))
            await world.until(lambda: handled.bodies == [b"1"])
            await world.until_consumed("billing")
        async with PullConsumer("audit", nameserver=world.nameserver) as pulling:
            assert len(await pulling.queues("orders")) == 4
        async with LitePullConsumer(
            "lite", nameserver=world.nameserver, subscriptions={"orders": "*"}, start_from="first"
        ) as lite:
            assert [each.body for each in await lite.poll()] == [b"1"]

    world.run(use())
    assert world.run(_elapsed_s()) < 60
    assert [session.config.host for session in world.clients][:2] == ["10.1.0.2", "10.1.0.3"]
    (message,) = world.messages("orders")
    assert (message.body, message.tags) == (b"1", "created")


async def _elapsed_s() -> float:
    return asyncio.get_running_loop().time()


def test_a_message_that_always_fails_becomes_a_dead_letter(tmp_path: Path) -> None:
    with running_cluster(tmp_path, settings=SHORT) as world:

        async def fail() -> None:
            handled = Handled(world, ConsumeResult.RETRY_LATER)
            async with consumer_of(world, handled):
                await world.send(Message("orders", b"bad"))
                await world.until(lambda: world.retrying("billing"))
                assert world.retrying("billing")[0].body == b"bad"
                await world.until_consumed("billing")
            assert handled.bodies == [b"bad"] * 17

        world.run(fail())
        assert [each.body for each in world.dead_letters("billing")] == [b"bad"]
        assert world.lag("billing") == 0
        assert not world.retrying("billing")


@pytest.mark.slow
def test_all_retries_take_hours_and_cost_the_same_each_time(tmp_path: Path) -> None:
    turns, timers_set = cost_of_all_retries(tmp_path / "first")
    assert turns < TURNS_MAX
    assert timers_set < TIMERS_MAX
    assert cost_of_all_retries(tmp_path / "second") == (turns, timers_set)


def cost_of_all_retries(directory: Path) -> tuple[int, int]:
    """Let a message fail until it is dead-lettered; return the loop's iterations and timers."""

    async def fail(world: Cluster) -> list[int]:
        handled = Handled(world, ConsumeResult.RETRY_LATER)
        async with consumer_of(world, handled):
            await world.send(Message("orders", b"bad"))
            await world.until_consumed("billing")
        return handled.times_ms

    async def cost() -> tuple[int, int]:
        return virtual_loop().turns, virtual_loop().timers_set

    with running_cluster(directory) as world:
        times_ms = world.run(fail(world))
        waits_s = [(after - before) / 1000 for before, after in itertools.pairwise(times_ms)]
        assert waits_s == pytest.approx(LADDER_S, abs=1.5)
        assert len(world.dead_letters("billing")) == 1
        return world.run(cost())


@pytest.mark.parametrize("is_async", [True, False])
def test_a_listener_fails_as_often_as_configured(world: Cluster, is_async: bool) -> None:
    calls: list[bytes] = []

    def handle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        calls.append(messages[0].body)
        return ConsumeResult.SUCCESS

    async def ahandle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        return handle(messages, context)

    async def consume() -> None:
        listener = failing(ahandle if is_async else handle, times=2)
        async with consumer_of(world, listener):
            await world.send(Message("orders", b"1"))
            await world.until(lambda: calls, minutes=5)
        assert asyncio.get_running_loop().time() == pytest.approx(40, abs=3)

    world.run(consume())
    assert calls == [b"1"]


def test_a_listener_can_fail_by_an_answer_or_an_error_of_its_own() -> None:
    context = ConsumeContext("g", None)  # type: ignore[arg-type]
    later = failing(lambda _m, _c: ConsumeResult.SUCCESS, 1, ConsumeResult.RETRY_LATER)
    assert [later([], context), later([], context)] == [
        ConsumeResult.RETRY_LATER,
        ConsumeResult.SUCCESS,
    ]
    raising = failing(lambda _m, _c: ConsumeResult.SUCCESS, 1, KeyError("price"))
    with pytest.raises(KeyError, match="price"):
        raising([], context)
    with pytest.raises(InvalidArgument, match="times must be at least 0, got -1"):
        failing(lambda _m, _c: ConsumeResult.SUCCESS, -1)


def test_time_passes_on_request(world: Cluster) -> None:
    async def wait() -> list[str]:
        done: list[str] = []
        asyncio.get_running_loop().call_later(3600, done.append, "an hour")
        await world.advance(minutes=59, seconds=59)
        assert done == []
        await world.advance(seconds=1)
        return done

    assert world.run(wait()) == ["an hour"]
    assert world.run(_elapsed_s()) == pytest.approx(3600)
    with pytest.raises(InvalidArgument, match="must not be negative"):
        world.run(world.advance(hours=-1))
    with pytest.raises(InvalidArgument, match="seconds must be finite, got inf"):
        world.run(world.advance(days=float("inf")))


@pytest.mark.slow
def test_requested_days_do_not_count_as_waiting(world: Cluster) -> None:
    async def wait() -> None:
        await world.advance(days=1, hours=7)

    world.run(wait())
    assert world.run(_elapsed_s()) == pytest.approx(31 * 3600, abs=1)


def test_a_wait_that_times_out_reports_the_current_state(world: Cluster) -> None:
    async def wait() -> None:
        async with consumer_of(world, Handled(world, ConsumeResult.RETRY_LATER)):
            await world.send(Message("orders", b"1"))
            await world.until(lambda: world.dead_letters("billing"), minutes=2)

    with pytest.raises(AssertionError) as caught:
        world.run(wait())
    text = str(caught.value)
    assert text.startswith(
        "not so within 2 min of virtual time: await world.until(lambda: world.dead"
    )
    assert "test_cluster.py:" in text
    assert "topic orders: 1 messages" in text
    assert "group billing: lag 0, 1 wait to be tried again, 0 dead letters" in text


def test_an_unknown_group_is_never_done(world: Cluster) -> None:
    with pytest.raises(AssertionError, match="within 10 s of virtual time: group nobody has"):
        world.run(world.until_consumed("nobody", seconds=10))


def test_an_exception_in_a_condition_is_raised(world: Cluster) -> None:
    tries: list[int] = []

    def fact() -> bool:
        tries.append(1)
        if len(tries) > 1:
            raise LookupError("no such price")
        return False

    with pytest.raises(LookupError, match="no such price"):
        world.run(world.until(fact))


def test_waiting_for_what_never_happens_fails(world: Cluster) -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(AssertionError, match=r"still waiting after 6 h of virtual time: .*test_cl"):
        world.run(wait())
    assert world.run(asyncio.sleep(1, "goes on")) == "goes on"


def test_a_test_that_cannot_be_cancelled_is_named_and_abandoned(world: Cluster) -> None:
    ended: list[bool] = []

    async def wait() -> None:
        while not ended:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    with pytest.raises(AssertionError, match=r"6 h .*, and does not let itself be cancelled: .*"):
        world.run(wait())
    ended.append(True)


def test_an_endless_loop_fails(world: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "REAL_LIMIT_S", 0.1)

    async def spin() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="no end in sight"):
        world.run(spin())


def test_a_thread_that_never_ends_fails(world: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "REAL_LIMIT_S", 0.1)
    let_go = threading.Event()
    try:
        with pytest.raises(Deadlock, match="no end in sight"):
            world.run(asyncio.to_thread(let_go.wait))
    finally:
        let_go.set()


def test_two_brokers_share_a_topic(tmp_path: Path) -> None:
    with running_cluster(tmp_path, ["broker-a", "broker-b"], nameservers=2) as world:

        async def use() -> None:
            await world.make_topic("orders", queues=2)
            await world.send(*(Message("orders", b"%d" % number) for number in range(8)))

        world.run(use())
        assert len(world.messages("orders")) == 8
        assert {name: broker.queue_end("orders", 0) for name, broker in world.brokers.items()} == {
            "broker-a": 2,
            "broker-b": 2,
        }


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    def trace(directory: Path) -> list[str]:
        with running_cluster(directory, seed=7) as world:

            async def use() -> None:
                world.network.trace = []
                handled = Handled(world)
                async with consumer_of(world, handled):
                    await world.send(*(Message("orders", b"%d" % each) for each in range(5)))
                    await world.advance(minutes=1)
                    await world.crash()
                    await world.start_broker()
                    await world.advance(minutes=1)

            world.run(use())
            assert world.network.trace is not None
            return world.network.trace

    first, second = trace(tmp_path / "1"), trace(tmp_path / "2")
    assert len(first) > 50
    assert first == second


def test_settings_are_the_brokers_and_wrong_ones_are_named(tmp_path: Path) -> None:
    with running_cluster(tmp_path, settings={"maxMessageSize": "1000"}) as world:
        assert world.broker().config.store.record_bytes_max < 100_000
    wrong = running_cluster(tmp_path, settings={"maxMesageSize": "1000"})
    with pytest.raises(InvalidArgument, match="maxMesageSize"), wrong:
        pass


@virtual_time()
async def test_a_cluster_in_the_tests_own_loop(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as world:
        await world.send(Message("orders", b"1"))
        assert len(world.messages("orders")) == 1
        with pytest.raises(NotRunning, match="await it there"):
            world.run(world.advance(hours=1))


@virtual_time()
async def test_two_clusters_in_one_loop_have_each_its_own_clients(tmp_path: Path) -> None:
    async with Cluster(tmp_path / "first") as first:
        async with Cluster(tmp_path / "second", nameservers=2) as second:
            assert set(first.nameserver.split(";")).isdisjoint(second.nameserver.split(";"))
            for each, body in ((first, b"1"), (second, b"2"), (first, b"3")):
                async with Producer("shop", nameserver=each.nameserver) as producer:
                    await producer.send(Message("orders", body))
            with pytest.raises(InvalidArgument, match=r"several clusters .*: ns0:9876, ns0-2:9876"):
                await Producer("shop", nameserver="elsewhere:9876").start()
        with pytest.raises(NotRunning, match="ns0-2:9876;ns1-2:9876: this cluster is closed"):
            await Producer("shop", nameserver=second.nameserver).start()
        await first.send(Message("orders", b"4"))
        assert [message.body for message in first.messages("orders")] == [b"1", b"3", b"4"]
    with pytest.raises(NotRunning, match="ns0:9876: this cluster is closed"):
        await Producer("shop", nameserver=first.nameserver).start()


@virtual_time()
async def test_a_blocking_client_in_the_clusters_loop_is_refused(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as world:
        producer = turbopump.Producer("shop", nameserver=world.nameserver)
        how = "a blocking Producer would block this event loop.*turbopump.aio.*turbopump_server"
        with pytest.raises(ClientError, match=how):
            producer.start()


@pytest.mark.parametrize("is_made_outside", [True, False])
def test_administration_is_part_of_the_cluster(world: Cluster, is_made_outside: bool) -> None:
    made = Admin(world.nameserver) if is_made_outside else None

    async def main() -> None:
        async with made or Admin(world.nameserver) as admin:
            await admin.topics.create("orders", queues=2)
            assert "orders" in {topic.name for topic in await admin.topics.list()}

    world.run(main())
