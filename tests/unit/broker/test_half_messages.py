"""Decisions about half messages, and their bookkeeping."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from turbopump.broker.transactions.half import Half, Rules, Verdict, verdict
from turbopump.broker.transactions.ledger import CLOSED_MAX, Fate, Ledger, Progress
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.wire.hosts import host

RULES = Rules(timeout_ms=6000, checks_max=15, reserved_ms=72 * 3_600_000)
NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


def half(offset: int = 0, age_ms: int = 0, **changes: object) -> Half:
    made = Half(
        queue_offset=QueueOffset(offset),
        physical_offset=PhysicalOffset(offset * 300),
        group="pg",
        born_ms=NOW_MS - age_ms,
        stored_ms=NOW_MS - age_ms,
        checks=0,
        immunity_ms=None,
        identity=(f"key {offset}", 1, host("10.0.0.1", 1)),
        is_copy=False,
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("given", "has_producer", "is_crowded", "expected"),
    [
        (half(age_ms=0), True, False, Verdict.WAIT),
        (half(age_ms=5999), True, False, Verdict.WAIT),
        (half(age_ms=6000), True, False, Verdict.CHECK),
        (half(age_ms=6000), False, False, Verdict.WAIT),
        (half(age_ms=6000), False, True, Verdict.RENEW),
        (half(age_ms=6000), True, True, Verdict.CHECK),
        (half(age_ms=5999, immunity_ms=0), True, False, Verdict.CHECK),
        (half(age_ms=6000, immunity_ms=10_000), True, False, Verdict.WAIT),
        (half(age_ms=6000, immunity_ms=10_000), True, True, Verdict.RENEW),
        (half(age_ms=10_000, immunity_ms=10_000), True, False, Verdict.CHECK),
        (half(age_ms=60_000, checks=14), True, False, Verdict.CHECK),
        (half(age_ms=60_000, checks=15), True, False, Verdict.ABANDON),
        (half(age_ms=60_000, checks=15), False, False, Verdict.ABANDON),
        (half(age_ms=72 * HOUR_MS), False, False, Verdict.RENEW),
        (half(age_ms=72 * HOUR_MS + 1), True, False, Verdict.ABANDON),
        (half(age_ms=36 * HOUR_MS + 1), False, False, Verdict.RENEW),
        # A copy is young, its message is not.
        (half(age_ms=HOUR_MS, stored_ms=NOW_MS - 1), True, False, Verdict.CHECK),
        (half(age_ms=71 * HOUR_MS, stored_ms=NOW_MS), False, False, Verdict.WAIT),
        # The producer's clock is ahead, or this one was set back.
        (half(age_ms=-HOUR_MS, stored_ms=NOW_MS - 5000), True, False, Verdict.WAIT),
        (half(age_ms=-HOUR_MS, stored_ms=NOW_MS - 6000), True, False, Verdict.CHECK),
        (half(age_ms=-1), True, False, Verdict.CHECK),
    ],
)
def test_the_decision_for_a_half_message(
    given: Half, has_producer: bool, is_crowded: bool, expected: Verdict
) -> None:
    decided = verdict(given, NOW_MS, RULES, has_producer=has_producer, is_crowded=is_crowded)
    assert decided is expected


def ledger_of(count: int) -> Ledger:
    ledger = Ledger(QueueOffset(0), QueueOffset(0))
    for offset in range(count):
        ledger.add(half(offset))
    ledger.seen = QueueOffset(count)
    return ledger


def close(ledger: Ledger, operation: int, offset: int, fate: Fate = Fate.COMMITTED) -> None:
    ledger.note_operation(QueueOffset(operation), QueueOffset(offset))
    ledger.close(QueueOffset(offset), fate)


def test_progress_stops_at_the_oldest_open_one() -> None:
    ledger = ledger_of(4)
    close(ledger, 0, 2)
    assert ledger.advance() == Progress(QueueOffset(0), QueueOffset(0))
    close(ledger, 1, 0)
    # The operation of 2 is still needed: 1 is open, so 2 is read again after a restart.
    assert ledger.advance() == Progress(QueueOffset(1), QueueOffset(0))
    close(ledger, 2, 1)
    assert ledger.advance() == Progress(QueueOffset(3), QueueOffset(3))
    assert [ledger.is_open(QueueOffset(offset)) for offset in range(5)] == [
        *[False] * 3,
        True,
        True,
    ]


def test_unseen_half_messages_may_be_open() -> None:
    ledger = Ledger(QueueOffset(0), QueueOffset(0))
    ledger.add(half(7))
    assert ledger.advance().half == 0
    assert ledger.is_open(QueueOffset(3))


def test_a_copy_is_found_by_its_identity() -> None:
    ledger = ledger_of(2)
    identity = half(0).identity
    assert ledger.newest_copy(identity) is None
    copy = half(2, identity=identity, is_copy=True)
    assert ledger.add(copy) == 0
    ledger.close(QueueOffset(0), Fate.REPLACED)
    assert ledger.newest_copy(identity) == 2
    assert ledger.newest_copy(None) is None
    ledger.forget(QueueOffset(2))
    ledger.reopen(half(0))
    assert ledger.newest_copy(identity) is None
    assert ledger.is_open(QueueOffset(0))


def test_equal_messages_are_two_transactions() -> None:
    ledger = ledger_of(1)
    assert ledger.add(half(1, identity=half(0).identity)) is None
    assert set(ledger.open) == {0, 1}


def test_operations_that_are_lost_are_forgotten() -> None:
    ledger = ledger_of(3)
    close(ledger, 0, 0)
    close(ledger, 1, 1)
    ledger.forget_operations(QueueOffset(1))
    ledger.reopen(half(1))
    assert ledger.advance() == Progress(QueueOffset(1), QueueOffset(1))


def test_crowded_means_that_most_have_ended() -> None:
    ledger = ledger_of(1)
    ledger.seen = QueueOffset(CLOSED_MAX + 2)
    assert not ledger.is_crowded
    ledger.seen = QueueOffset(CLOSED_MAX + 3)
    assert ledger.is_crowded
    ledger.add(half(1))
    assert not ledger.is_crowded


def test_the_number_of_remembered_ended_transactions_is_bounded() -> None:
    ledger = Ledger(QueueOffset(0), QueueOffset(0))
    for offset in range(CLOSED_MAX + 10):
        close(ledger, offset, offset)
    assert ledger.advance().half == 0
    assert ledger.fate(QueueOffset(0)) is Fate.COMMITTED
    ledger.seen = QueueOffset(CLOSED_MAX + 10)
    ledger.advance()
    assert ledger.fate(QueueOffset(9)) is None
    assert not ledger.is_open(QueueOffset(9))
    assert ledger.fate(QueueOffset(10)) is Fate.COMMITTED
