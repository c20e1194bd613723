"""Every queue has one owner, the same that every other client computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbopump.client import allocation
from turbopump.client.allocation import (
    ConsistentHash,
    FixedQueues,
    MachineRoom,
    NearbyRoom,
    Strategy,
    allocated,
    average,
    average_by_circle,
)
from turbopump.errors import InvalidArgument
from turbopump.message import MessageQueue
from vectors import case, load

PLAIN: dict[str, Strategy] = {
    "AVG": average,
    "AVG_BY_CIRCLE": average_by_circle,
    "CONSISTENT_HASH": ConsistentHash(),
}
CASES = load("allocation.json")["cases"]


def room_of(text: str) -> str:
    return text.partition("-")[0]


def nearby(inner: Strategy) -> NearbyRoom:
    return NearbyRoom(inner, lambda queue: room_of(queue.broker), room_of)


def strategy_of(case: dict[str, Any]) -> Strategy:
    name = case["strategy"]
    if name.startswith("MACHINE_ROOM_NEARBY-"):
        return nearby(PLAIN[name.removeprefix("MACHINE_ROOM_NEARBY-")])
    if name == "MACHINE_ROOM":
        return MachineRoom(frozenset(case["consumerIdcs"]))
    if name == "CONFIG":
        return FixedQueues(tuple(MessageQueue(*queue) for queue in case["configured"]))
    if "virtualNodes" in case:
        return ConsistentHash(case["virtualNodes"])
    return PLAIN[name]


def test_shares_equal_those_of_apache_rocketmq() -> None:
    assert CASES
    for number, recorded in enumerate(CASES):
        with case(f"{number}: {recorded['strategy']}"):
            check_shares(recorded)


def check_shares(recorded: dict[str, Any]) -> None:
    strategy = strategy_of(recorded)
    queues = [MessageQueue(*queue) for queue in recorded["queues"]]
    if "keepOrder" not in recorded:
        queues, members = as_strategies_get(queues, recorded["consumers"])
        assert queues == [MessageQueue(*queue) for queue in recorded["sortedQueues"]]
        assert members == recorded["sortedConsumers"]
    for member, expected in recorded["result"].items():
        if isinstance(expected, dict):
            with pytest.raises(InvalidArgument):
                strategy(queues, recorded["sortedConsumers"], member)
        else:
            mine = strategy(queues, recorded["sortedConsumers"], member)
            assert mine == [MessageQueue(*queue) for queue in expected]


queues_of_topic = st.lists(
    st.builds(
        MessageQueue,
        st.just("T"),
        st.sampled_from(["hz-1", "hz-2", "sh-1", "gz-1"]),
        st.integers(0, 20),
    ),
    unique=True,
    min_size=1,
)
ids = st.builds(
    "{}-{}".format, st.sampled_from(["hz", "sh"]), st.text(st.characters(codec="utf-8"), max_size=5)
)
members_of_group = st.lists(ids, unique=True, min_size=1, max_size=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [*PLAIN.values(), *(nearby(inner) for inner in PLAIN.values())],
    ids=[*PLAIN, *(f"{name}-nearby" for name in PLAIN)],
)
@given(queues=queues_of_topic, members=members_of_group)
def test_every_queue_is_owned_exactly_once(
    strategy: Strategy, queues: list[MessageQueue], members: list[str]
) -> None:
    shares = [allocated(strategy, queues, members, member) for member in members]
    assert sorted(queue for share in shares for queue in share) == sorted(queues)


@pytest.mark.slow
@given(queues=queues_of_topic, members=members_of_group, data=st.data())
def test_a_member_that_leaves_moves_only_its_own_queues_on_the_ring(
    queues: list[MessageQueue], members: list[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(members))
    stay = [member for member in members if member != gone]
    for member in stay:
        before = allocated(ConsistentHash(), queues, members, member)
        after = allocated(ConsistentHash(), queues, stay, member)
        assert set(before) <= set(after)


def test_texts_sort_by_their_utf16_units() -> None:
    # The second one is beyond the basic plane: its surrogates sort before the first one.
    assert as_strategies_get([], ["\uff5e", "\U0001f600"])[1] == ["\U0001f600", "\uff5e"]


def as_strategies_get(
    queues: list[MessageQueue], members: list[str]
) -> tuple[list[MessageQueue], list[str]]:
    given: list[tuple[list[MessageQueue], list[str]]] = []

    def strategy(queues: Sequence[MessageQueue], members: Sequence[str], _: str) -> list[Any]:
        given.append((list(queues), list(members)))
        return []

    allocated(strategy, queues, members, "me")
    return given[0]


def test_a_user_defined_function_is_a_strategy() -> None:
    queues = [MessageQueue("T", "b", number) for number in range(4)]
    assert allocated(lambda queues, members, me: queues[:1], queues, ["a"], "a") == queues[:1]


def test_a_ring_without_nodes_assigns_nothing_and_a_negative_number_is_rejected() -> None:
    assert ConsistentHash(0)([MessageQueue("T", "b", 0)], ["a"], "a") == []
    with pytest.raises(InvalidArgument, match="virtual_nodes must be 0 or more, got -1"):
        ConsistentHash(-1)
    assert allocation.ring_hash("a-0") == allocation.ring_hash("a-0")
