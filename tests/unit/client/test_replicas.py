"""Which replica to read from, and what a slave's answers mean."""

from __future__ import annotations

import pytest

from turbopump.client.calls import (
    Found,
    FoundRecords,
    NothingMatched,
    NothingNew,
    OffsetIllegal,
    PullOutcome,
    RecordsOutcome,
)
from turbopump.client.replicas import Replica, first_slave_id, lacks_offset, replica_to_read
from turbopump.message import QueueOffset
from turbopump.wire.bodies import Subscription


@pytest.mark.parametrize(
    ("ids", "wanted", "found"),
    [
        ([0, 1], 0, 0),
        ([0, 1], 1, 1),
        ([0, 2], 1, 2),
        ([0], 1, 0),
        ([3], 0, 3),
        ([1, 2], 0, 1),
        ([0, 1], 5, 0),
        ([], 0, None),
    ],
)
def test_where_to_read(ids: list[int], wanted: int, found: int | None) -> None:
    addresses = {each: f"10.0.0.{each}:10911" for each in ids}
    expected = None if found is None else Replica(found, addresses[found])
    assert replica_to_read(addresses, wanted) == expected
    assert expected is None or expected.is_master is (found == 0)


def test_the_first_slave() -> None:
    assert first_slave_id({0: "a", 3: "b", 2: "c"}) == 2
    assert first_slave_id({0: "a"}) == 0
    assert first_slave_id({}) == 0


def limits(following: int) -> tuple[QueueOffset, QueueOffset, QueueOffset, int]:
    return QueueOffset(following), QueueOffset(5), QueueOffset(50), 0


@pytest.mark.parametrize(
    ("outcome", "asked", "lacks"),
    [
        (OffsetIllegal(*limits(50)), 60, True),
        (OffsetIllegal(*limits(5)), 2, True),
        (NothingMatched(*limits(60)), 60, True),
        (NothingMatched(*limits(40)), 30, False),
        (NothingNew(*limits(50)), 50, False),
        (Found(*limits(31), messages=()), 30, False),
        (FoundRecords(*limits(31), records=b""), 30, False),
    ],
)
def test_a_slave_without_an_offset(
    outcome: PullOutcome | RecordsOutcome, asked: int, *, lacks: bool
) -> None:
    some = Subscription(topic="T", sub_string="a || b")
    assert lacks_offset(outcome, asked, some) is lacks


def test_a_slave_skips_nothing_for_consumers_without_a_filter() -> None:
    everything = Subscription(topic="T", sub_string="*")
    assert lacks_offset(NothingMatched(*limits(40)), 30, everything)
    assert not lacks_offset(Found(*limits(40), messages=()), 30, everything)
