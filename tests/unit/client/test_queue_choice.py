"""Which queue is next, and which brokers are avoided."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.client.queue_choice import BrokerFaults, QueueChoice, avoided_for_ms
from turbopump.client.routes import borrowed_route, route_of
from turbopump.message import MessageQueue
from turbopump.wire.bodies import BrokerData, QueueData, TopicRoute

queues_of_brokers = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda counts: [
        MessageQueue("T", f"b{broker}", number)
        for broker, count in enumerate(counts)
        for number in range(count)
    ]
)


@given(queues_of_brokers, st.integers(0, 1 << 32), st.integers(1, 5))
def test_every_queue_has_its_turn(queues: list[MessageQueue], seed: int, rounds: int) -> None:
    choice = QueueChoice(Random(seed))
    taken = Counter(choice.next(queues) for _ in range(rounds * len(queues)))
    assert taken == dict.fromkeys(queues, rounds)


@given(queues_of_brokers, st.integers(0, 1 << 32))
def test_the_avoided_broker_is_used_only_if_it_is_the_only_one(
    queues: list[MessageQueue], seed: int
) -> None:
    choice = QueueChoice(Random(seed))
    brokers = {queue.broker for queue in queues}
    for _ in range(20):
        avoided = choice.next(queues).broker
        assert (choice.next(queues, {avoided}).broker != avoided) == (len(brokers) > 1)


@pytest.mark.parametrize(
    ("latency_ms", "avoided_ms"),
    [
        (0, 0), (49, 0), (100, 0), (549, 0), (550, 30_000), (1000, 60_000), (2000, 120_000),
        (3000, 180_000), (15_000, 600_000), (30_000, 600_000),
    ],
)  # fmt: skip
def test_how_long_a_slow_broker_is_avoided(latency_ms: int, avoided_ms: int) -> None:
    assert avoided_for_ms(latency_ms) == avoided_ms


def test_when_all_are_slow_the_better_half_is_used() -> None:
    faults, queues = BrokerFaults(), [MessageQueue("T", name, 0) for name in "abcd"]
    for broker, latency_ms in (("a", 15_000), ("b", 3000), ("c", 600), ("d", 1000)):
        faults.note(broker, latency_ms, now_ms=0)
    choice = QueueChoice(Random(1), faults)
    assert {choice.next(queues, now_ms=1).broker for _ in range(50)} == {"c", "d"}
    assert {choice.next(queues, now_ms=30_001).broker for _ in range(50)} == {"c"}
    assert {choice.next(queues, now_ms=600_000).broker for _ in range(50)} == set("abcd")


# --- routes ---------------------------------------------------------------------------------------


def data(broker: str, perm: int = 6, read: int = 2, write: int = 2) -> QueueData:
    return QueueData(broker_name=broker, perm=perm, read_queue_nums=read, write_queue_nums=write)


def broker(name: str, *ids: int) -> BrokerData:
    addresses = {number: f"{name}:{number}" for number in ids}
    return BrokerData(broker_name=name, broker_addrs=addresses, cluster="c")


def test_which_queues_can_be_written_and_read() -> None:
    found = TopicRoute(
        broker_datas=[broker("b", 0, 1), broker("a", 0), broker("slave", 1), broker("ro", 0)],
        queue_datas=[data("b", read=3, write=1), data("a"), data("slave"), data("ro", perm=4)],
    )
    route = route_of("T", found)
    assert [str(queue) for queue in route.writable] == ["T@a:0", "T@a:1", "T@b:0"]
    assert {queue.broker for queue in route.readable} == {"a", "b", "ro", "slave"}
    assert sum(queue.broker == "b" for queue in route.readable) == 3
    shuffled = TopicRoute(
        broker_datas=found.broker_datas[::-1], queue_datas=found.queue_datas[::-1]
    )
    assert route_of("T", shuffled) == route, "the order of an answer means nothing"


def test_ordered_topics_have_fixed_queues() -> None:
    route = route_of("T", TopicRoute(order_topic_conf="b:2;a:1", queue_datas=[data("z")]))
    assert [str(queue) for queue in route.writable] == ["T@b:0", "T@b:1", "T@a:0"]


def test_a_new_topic_borrows_no_more_queues_than_requested() -> None:
    template = TopicRoute(broker_datas=[broker("a", 0)], queue_datas=[data("a", read=8, write=8)])
    assert len(borrowed_route("T", template, 4).writable) == 4
    assert len(borrowed_route("T", template, 16).writable) == 8
    assert borrowed_route("T", template, 4).is_borrowed
