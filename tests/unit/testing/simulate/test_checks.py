"""Each check fails on a history that violates its invariant, and accepts what is documented."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from turbopump.message import MessageQueue
from turbopump.testing.simulate.checks import all_checks
from turbopump.testing.simulate.events import (
    DAMAGED,
    US_PER_S,
    Acknowledged,
    Assigned,
    BitFlipped,
    BrokerDown,
    BrokerUp,
    Calm,
    ClockJumped,
    Committed,
    ConsumeBegan,
    ConsumeEnded,
    Down,
    Ended,
    Event,
    FaultBegan,
    FaultEnded,
    Joined,
    KeyValuesRead,
    KeyValueStored,
    Left,
    LogsCompared,
    Readable,
    Reopened,
    ReplicaHolds,
    Replicated,
    Result,
    SendBegan,
    SendTried,
    StaleWrite,
    Stored,
    TransactionDecided,
    TransactionsLeft,
    Unexpected,
)
from turbopump.testing.simulate.fault_plan import FaultKind
from turbopump.testing.simulate.history import History
from turbopump.testing.simulate.ledger import Ledger
from turbopump.testing.simulate.plan import Fate, FateKind, Group, GroupKind, Plan
from turbopump.testing.simulate.replica_plan import ReplicaPlan, Slave
from turbopump.testing.simulate.transaction_plan import Deed, Ending, TransactionPlan
from turbopump.wire.names import HALF_TOPIC

QUEUE = MessageQueue("plain", "a", 0)
RETRY = MessageQueue("%RETRY%g", "a", 0)
DEAD = MessageQueue("%DLQ%g", "a", 0)

FATES = {
    "m0": Fate(FateKind.SUCCEEDS, 0),
    "m1": Fate(FateKind.SUCCEEDS, 0),
    "bad": Fate(FateKind.ALWAYS_FAILS, 0),
    "late": Fate(FateKind.FAILS, 0, failures=1),
}


def group(kind: GroupKind = GroupKind.CONCURRENT) -> Group:
    return Group("g", kind, ("plain",), 1, 1, 1, 1, FATES)


NO_REPLICAS = ReplicaPlan()
NO_TRANSACTIONS = TransactionPlan()


def plan(
    *,
    is_sync: bool = True,
    groups: Sequence[Group] = (group(),),
    replicas: ReplicaPlan = NO_REPLICAS,
    transactions: TransactionPlan = NO_TRANSACTIONS,
) -> Plan:
    return Plan(
        seed=0,
        nameservers=1,
        brokers=("a",),
        queues={"plain": 1},
        is_sync=is_sync,
        settings={},
        latency_ms=0,
        jitter_ms=0,
        producers={},
        groups=tuple(groups),
        faults=(),
        load_s=1,
        sync_ms=0,
        keeps_some=False,
        last_restart=None,
        opens_twice=False,
        replicas=replicas,
        transactions=transactions,
    )


def violations(events: Sequence[Event], of: Plan | None = None) -> set[str]:
    """Return the names of the checks that a history violates."""
    history = History(all_checks(Ledger(of or plan())))
    for event in events:
        history.add(event)
    return {violation.check for violation in history.violations}


# --- pieces of histories --------------------------------------------------------------------------


def s(seconds: float) -> int:
    return round(seconds * US_PER_S)


def sent(key: str, at: float = 0, offset: int = 0, **more: int | bool) -> list[Event]:
    """Return the events of a message that is sent, stored and acknowledged."""
    began = SendBegan(s(at), "p", key, "plain", **more)  # type: ignore[arg-type]
    return [
        began,
        SendTried(s(at), "p", key),
        Readable(s(at), QUEUE, offset, Stored(key)),
        Acknowledged(s(at), "p", key, QUEUE, offset),
    ]


def up(at: float, *keys: str, committed: int | None = None) -> BrokerUp:
    contents = {QUEUE: (0, tuple(map(Stored, keys)))} if keys else {}
    return BrokerUp(s(at), "a", contents, {} if committed is None else {("g", QUEUE): committed})


def down(at: float, how: Down = Down.KILLED) -> BrokerDown:
    return BrokerDown(s(at), "a", how)


def began(
    key: str, at: float = 1, offset: int = 0, times: int = 0, member: str = "g.1", call: int = 1
) -> ConsumeBegan:
    return ConsumeBegan(s(at), "g", member, QUEUE, offset, key, times, call)


def consumed(
    key: str,
    at: float = 1,
    offset: int = 0,
    times: int = 0,
    result: Result = Result.SUCCESS,
    call: int = 1,
) -> list[Event]:
    ended = ConsumeEnded(s(at), "g", "g.1", QUEUE, offset, key, times, call, result)
    return [began(key, at, offset, times, call=call), ended]


def committed(offset: int, at: float = 2, before: int | None = None) -> Committed:
    return Committed(s(at), "g", QUEUE, offset, before)


GOOD = [*sent("m0"), *consumed("m0"), committed(1), Calm(s(9)), Ended(s(10))]


def test_a_good_history_violates_nothing() -> None:
    assert violations([up(0), *GOOD]) == set()


# --- durability -----------------------------------------------------------------------------------


def test_an_acknowledged_message_that_is_missing() -> None:
    lost = [event for event in sent("m0") if not isinstance(event, Readable)]
    assert "acknowledged messages are kept" in violations([up(0), *lost, Calm(s(9))])


def test_an_acknowledged_message_at_another_offset() -> None:
    events = [up(0), *sent("m0"), Acknowledged(s(1), "p", "m0", QUEUE, 1), Calm(s(9))]
    assert "acknowledged messages are kept" in violations(events)


def test_a_message_that_a_broker_stores_while_it_starts_and_loses_with_the_power() -> None:
    """It serves before name servers know it, and is not seen before they do."""
    unseen = [event for event in sent("m0", 3) if not isinstance(event, Readable)]
    events = [up(0), down(1), *unseen, down(4, Down.POWER_LOST), up(5)]
    assert violations(events, plan(is_sync=False)) == set()
    assert violations(events) == {"acknowledged messages are kept"}
    after = [up(0), down(1), down(2, Down.POWER_LOST), *unseen, up(5)]
    assert violations(after, plan(is_sync=False)) == {"acknowledged messages are kept"}


@pytest.mark.parametrize("how", list(Down))
def test_a_message_that_a_restart_loses_in_synchronous_mode(how: Down) -> None:
    found = violations([up(0), *sent("m0"), down(1, how), up(2)])
    assert {"readable messages stay", "acknowledged messages are kept"} <= found


def test_a_message_that_another_replaces() -> None:
    found = violations([up(0), *sent("m0"), *sent("m1", 0, 1), down(1), up(2, "m1", "m0")])
    assert "readable messages stay" in found


@pytest.mark.parametrize(
    ("how", "at", "is_kept"),
    [(Down.POWER_LOST, 5, True), (Down.POWER_LOST, 30, False), (Down.KILLED, 5, False)],
    ids=["not flushed yet", "flushed long ago", "only killed"],
)
def test_what_asynchronous_mode_may_lose(how: Down, at: float, is_kept: bool) -> None:
    events = [up(0), *sent("m0"), down(at, how), up(at + 1)]
    found = violations(events, plan(is_sync=False))
    assert found == (
        set() if is_kept else {"readable messages stay", "acknowledged messages are kept"}
    )


def test_time_in_which_a_broker_is_down_flushes_nothing() -> None:
    events = [up(0), *sent("m0"), down(1), down(30, Down.POWER_LOST), up(31)]
    assert violations(events, plan(is_sync=False)) == set()


def test_a_send_that_does_not_wait_may_be_lost_with_the_power() -> None:
    unread = [e for e in sent("m0", is_durable=False) if not isinstance(e, Readable)]
    assert violations([up(0), *unread, down(1, Down.POWER_LOST), up(2)]) == set()
    assert violations([up(0), *unread, down(1, Down.KILLED), up(2)]) != set()


# --- queues ---------------------------------------------------------------------------------------


def test_a_gap_between_offsets() -> None:
    assert "queues are dense" in violations([up(0), *sent("m0", 0, 1)])


def test_an_offset_that_is_given_twice() -> None:
    assert "queues are dense" in violations([up(0), *sent("m0"), *sent("m1")])


def test_a_body_that_was_never_sent() -> None:
    assert "queues are dense" in violations([up(0), Readable(0, QUEUE, 0, Stored(None))])
    whole = BrokerUp(0, "a", {QUEUE: (0, (Stored(None),))}, {})
    assert "queues are dense" in violations([whole])


def test_messages_of_a_producer_in_another_order() -> None:
    swapped = [
        SendBegan(0, "p", "m0", "plain"),
        SendBegan(1, "p", "m1", "plain"),
        Acknowledged(2, "p", "m0", QUEUE, 1),
        Acknowledged(3, "p", "m1", QUEUE, 0),
    ]
    assert "order of each producer" in violations(swapped)


@pytest.mark.parametrize(("how", "is_lossy"), [(Down.POWER_LOST, True), (Down.KILLED, False)])
def test_a_lost_message_whose_offset_is_reused_before_its_broker_is_seen_to_start(
    how: Down, is_lossy: bool
) -> None:
    """The response to the first is in flight when the power is lost."""
    events = [
        up(0),
        SendBegan(0, "p", "m0", "plain"),
        down(1, how),
        Acknowledged(s(1), "p", "m0", QUEUE, 0),
        SendBegan(s(2), "p", "m1", "plain"),
        Acknowledged(s(3), "p", "m1", QUEUE, 0),
    ]
    found = violations(events, plan(is_sync=False))
    assert ("order of each producer" in found) is not is_lossy


# --- outcomes -------------------------------------------------------------------------------------


def test_a_message_that_a_group_never_gets() -> None:
    assert "every message ends" in violations([up(0), *sent("m0"), Calm(s(9))])


def test_a_failed_message_that_is_neither_retried_nor_dead() -> None:
    failed = consumed("late", result=Result.FAILURE)
    assert "every message ends" in violations([up(0), *sent("late"), *failed, Calm(s(9))])


def test_a_delayed_message_that_is_never_delivered() -> None:
    events = [SendBegan(0, "p", "m0", "plain", s(1)), Acknowledged(1, "p", "m0", QUEUE, 0)]
    assert "every message ends" in violations([up(0), *events, Calm(s(9))])


def test_a_delayed_message_that_a_power_loss_takes_before_a_killed_broker_flushes_it() -> None:
    events = [
        up(0),
        SendBegan(0, "p", "m0", "plain", s(1)),
        down(0.5),
        Acknowledged(s(0.5), "p", "m0", QUEUE, 0),
    ]
    end = [up(8.1), Calm(s(9))]
    assert violations([*events, down(8, Down.POWER_LOST), *end], plan(is_sync=False)) == set()
    assert "every message ends" in violations([*events, *end], plan(is_sync=False))


def test_a_retry_that_a_power_loss_takes_in_asynchronous_mode() -> None:
    failed = consumed("late", result=Result.FAILURE)
    waiting = Readable(s(2), MessageQueue("SCHEDULE_TOPIC_XXXX", "a", 2), 0, Stored("late", 1))
    gone = [down(5, Down.POWER_LOST), up(6, "late"), Calm(s(9))]
    lost = [up(0), *sent("late"), *failed, waiting, *gone]
    assert violations(lost, plan(is_sync=False)) == set()
    assert "every message ends" in violations(lost)
    # Not lost, but never stored.
    forgotten = [up(0), *sent("late"), *failed, *gone]
    assert violations(forgotten, plan(is_sync=False)) == {"every message ends"}


def test_dead_letters_that_are_not_the_messages_that_fail() -> None:
    events = [*sent("m0"), *sent("bad", 0, 1)]
    dead = [Readable(s(2), DEAD, 0, Stored("bad", 1))]
    assert violations([up(0), *events, *dead]) == set()
    dead = [Readable(s(2), DEAD, 0, Stored("m0", 1))]
    assert violations([up(0), *events, *dead]) == {"dead letters are exact"}
    assert violations([up(0), *events, *consumed("bad", offset=1)]) == {"dead letters are exact"}


# --- damage ---------------------------------------------------------------------------------------


def flipped(key: str, queue: MessageQueue = QUEUE, offset: int = 0, topic: str = "") -> BitFlipped:
    return BitFlipped(s(1), "a", "log", 0, queue, offset, key, topic or queue.topic)


def test_a_damaged_message_is_skipped_and_no_other() -> None:
    events = [up(0), *sent("m0"), *sent("m1", 0, 1), flipped("m0")]
    end = [*consumed("m1", offset=1), committed(2), Calm(s(9))]
    assert violations([*events, *end]) == set()
    assert violations([*events, committed(2), Calm(s(9))]) == {
        "commits pass no unfinished message",
        "every message ends",
    }


def test_a_damaged_message_stays_where_it_is() -> None:
    events = [up(0), *sent("m0"), down(1), flipped("m0")]
    whole = BrokerUp(s(2), "a", {QUEUE: (0, (Stored("m0", is_damaged=True),))}, {})
    assert violations([*events, whole]) == set()
    assert "readable messages stay" in violations([*events, up(2)])


def test_only_dead_letters_are_copies_of_a_damaged_body() -> None:
    events = [up(0), *sent("m0"), flipped("m0")]
    damaged = Stored("m0", is_damaged=True)
    assert violations([*events, Readable(s(2), DEAD, 0, damaged)]) == set()
    assert "damage is contained" in violations([*events, Readable(s(2), RETRY, 0, damaged)])


def test_a_listener_that_gets_a_damaged_body() -> None:
    assert "damage is contained" in violations([up(0), *sent("m0"), flipped("m0"), began(DAMAGED)])


def test_a_damaged_delayed_message_or_retry_is_not_delivered() -> None:
    delayed = MessageQueue("SCHEDULE_TOPIC_XXXX", "a", 2)
    sending = [SendBegan(0, "p", "m0", "plain", s(1)), Acknowledged(1, "p", "m0", delayed, 0)]
    damaged = [flipped("m0", delayed, topic="plain"), Calm(s(9))]
    assert violations([up(0), *sending, *damaged]) == set()
    failing = [up(0), *sent("late"), *consumed("late", result=Result.FAILURE)]
    for topic in (RETRY.topic, "%DLQ%g"):
        assert violations([*failing, flipped("late", delayed, 0, topic), Calm(s(9))]) == set()
    other = flipped("late", delayed, 0, "%RETRY%other")
    assert violations([*failing, other, Calm(s(9))]) == {"every message ends"}


@pytest.mark.parametrize("broker", ["broker a, ", ""])
def test_errors_may_name_a_damaged_message(broker: str) -> None:
    ledger = Ledger(plan())
    history = History(all_checks(ledger))
    for event in [up(0), *sent("m0"), flipped("m0")]:
        history.add(event)
    assert ledger.knows_damage(f"damaged message: topic plain, {broker}queue 0, offset 0: its body")
    assert not ledger.knows_damage(f"damaged message: topic plain, {broker}queue 0, offset 1: x")


@pytest.mark.parametrize(("after", "expected"), [(1, set()), (0, {"commits do not go back"})])
def test_a_damaged_table_is_replaced_by_its_backup(after: int, expected: set[str]) -> None:
    events = [up(0), *sent("m0"), *sent("m1", 0, 1), *consumed("m0"), *consumed("m1", offset=1)]
    flip = BitFlipped(s(21), "a", "offsets", 0, committed={("g", QUEUE): 1})
    end = [committed(2), down(20), flip, up(22, "m0", "m1", committed=after)]
    assert violations([*events, *end]) == expected


# --- commits --------------------------------------------------------------------------------------


def test_a_commit_beyond_a_message_in_the_listener() -> None:
    events = [up(0), *sent("m0"), *sent("m1", 0, 1), began("m0"), *consumed("m1", offset=1, call=2)]
    assert violations([*events, committed(0)]) == set()
    assert violations([*events, committed(2)]) == {"commits pass no unfinished message"}


def test_a_message_that_takes_too_long_is_sent_back() -> None:
    events = [up(0), *sent("m0"), began("m0", at=1)]
    assert violations([*events, committed(1, at=62)]) == set()
    assert violations([*events, committed(1, at=60)]) == {"commits pass no unfinished message"}


def test_an_orderly_group_commits_no_failure_that_will_be_retried() -> None:
    orderly = plan(groups=[group(GroupKind.ORDERLY)])
    failed = consumed("late", result=Result.FAILURE)
    events = [up(0), *sent("late"), *failed, committed(1)]
    assert violations(events) == set()
    assert violations(events, orderly) == {"commits pass no unfinished message"}


@pytest.mark.parametrize(
    ("jumped_at", "by", "is_hidden"), [(2, -3600, True), (2, -50, False), (4, -3600, False)]
)
def test_a_clock_that_is_set_back_hides_what_has_the_offset_of_a_lost_message(
    jumped_at: float, by: float, is_hidden: bool
) -> None:
    """Consumers search for it by time, as the replication guide says."""
    jump = ClockJumped(s(jumped_at), s(by), "a")
    lost = [up(0), *sent("m0"), *consumed("m0"), down(1, Down.POWER_LOST), up(1.5)]
    again = [*sent("m1", 3), committed(1, at=5)]
    events = sorted([*lost, *again, jump], key=lambda event: event.at_us)
    found = violations([*events, Calm(s(9))], plan(is_sync=False))
    assert found == set() if is_hidden else "commits pass no unfinished message" in found


def test_a_commit_that_decreases() -> None:
    events = [up(0), *sent("m0"), *consumed("m0"), committed(1)]
    back = committed(0, at=200, before=1)
    assert violations([*events, back]) == {"commits do not go back"}
    # The previous owner had committed after the new owner started.
    assert violations([*events, Joined(s(190), "g", "g.2"), back]) == set()


def owns(at: float, member: str, *queues: MessageQueue) -> Assigned:
    return Assigned(s(at), "g", member, queues)


OWNED: list[Event] = [up(0), owns(0, "g.1", QUEUE), *sent("m0"), *consumed("m0"), committed(1)]
BACK = committed(0, at=30, before=1)


@pytest.mark.parametrize(
    "meanwhile",
    [
        [],
        [Joined(s(25), "g", "g.2"), owns(26, "g.2", RETRY)],
        [Left(s(25), "g", "g.2", is_crash=True)],
        [down(25), up(26, "m0", committed=1)],
        [FaultBegan(s(25), FaultKind.RESET.value, "a")],
    ],
    ids=["nothing", "join", "leave", "crash of the broker", "reset"],
)
def test_no_commit_decreases_while_a_queue_has_the_same_owner(meanwhile: list[Event]) -> None:
    assert violations([*OWNED, *meanwhile, BACK]) == {"commits do not go back"}


@pytest.mark.parametrize(
    "meanwhile",
    [
        [owns(25, "g.2", QUEUE)],
        [owns(25, "g.1")],
        [owns(24, "g.1"), owns(25, "g.1", QUEUE)],
        [began("m0", 25, member="g.2", call=2)],
    ],
    ids=["two owners", "no owner", "a new owner", "called by another"],
)
def test_a_commit_may_decrease_after_the_owner_has_changed(meanwhile: list[Event]) -> None:
    joined = Joined(s(23), "g", "g.2")
    assert violations([*OWNED, joined, *meanwhile, BACK]) == set()


def test_a_member_that_kept_a_queue_beside_its_new_owner_may_rewind_once() -> None:
    other = [Joined(s(5), "g", "g.2"), owns(5, "g.2", QUEUE), owns(6, "g.2")]
    events = [*OWNED, *other, BACK]
    assert violations(events) == set()
    again = [committed(1, at=31, before=0), committed(0, at=32, before=1)]
    assert violations([*events, *again]) == {"commits do not go back"}


@pytest.mark.parametrize("is_sync", [True, False])
def test_an_owner_that_finds_lost_messages_may_rewind_once(is_sync: bool) -> None:
    lost = [down(20, Down.POWER_LOST), up(21, "m0", committed=1)]
    events = [*OWNED, *lost, committed(0, at=24, before=1)]
    # Synchronous brokers lose nothing.
    expected = {"commits do not go back"} if is_sync else set()
    assert violations(events, plan(is_sync=is_sync)) == expected
    again = [committed(1, at=25, before=0), BACK]
    assert violations([*events, *again], plan(is_sync=False)) == {"commits do not go back"}


def test_an_owner_may_repeat_once_a_lower_commit_that_a_crash_has_lost() -> None:
    lowered = [owns(3, "g.1"), owns(4, "g.1", QUEUE), committed(0, at=5, before=1)]
    events = [*OWNED, *lowered, down(6), up(7, "m0", committed=1), BACK]
    assert violations(events) == set()
    again = [committed(1, at=31, before=0), committed(0, at=32, before=1)]
    assert violations([*events, *again]) == {"commits do not go back"}


@pytest.mark.parametrize(
    ("cut_s", "changed_s", "expected"),
    [(8, 10, set()), (22, 10, {"commits do not go back"})],
    ids=["cut when the owner changed", "cut later"],
)
def test_a_cut_of_the_network_delays_commits_of_the_previous_owner(
    cut_s: float, changed_s: float, expected: set[str]
) -> None:
    cut = FaultBegan(s(cut_s), FaultKind.ISOLATE.value, "a")
    changed = [owns(changed_s, "g.1"), owns(changed_s, "g.2", QUEUE)]
    end = [FaultEnded(s(29), FaultKind.ISOLATE.value, "a"), BACK]
    between = sorted([cut, *changed], key=lambda event: event.at_us)
    assert violations([*OWNED, *between, *end]) == expected


def test_an_owner_that_started_at_the_offset_of_a_slave_may_rewind_once() -> None:
    replicas = ReplicaPlan(slaves=(Slave("a-1", "a", 1),))
    events = [*OWNED, committed(0, at=20, before=1)]
    assert violations(events, plan(replicas=replicas)) == set()
    assert violations(events) == {"commits do not go back"}
    again = [committed(1, at=25, before=0), BACK]
    assert violations([*events, *again], plan(replicas=replicas)) == {"commits do not go back"}


def test_commits_that_a_crash_loses() -> None:
    def lost(down_at: float, how: Down, *faults: Event) -> set[str]:
        events = [up(0), *sent("m0"), *consumed("m0"), committed(1), *faults]
        return violations([*events, down(down_at, how), up(down_at + 1, "m0", committed=0)])

    assert lost(4, Down.KILLED) == set()
    assert lost(20, Down.KILLED) == {"commits do not go back"}
    assert lost(20, Down.POWER_LOST) == {"commits do not go back"}
    assert lost(4, Down.STOPPED) == {"commits do not go back"}
    full = FaultBegan(s(3), FaultKind.FULL_DISK.value, "a")
    assert lost(20, Down.KILLED, full) == set()
    lowered = committed(0, at=18, before=1)
    assert lost(20, Down.KILLED, lowered) == set()


# --- owners ---------------------------------------------------------------------------------------

ORDERLY = plan(groups=[group(GroupKind.ORDERLY)])


def test_two_members_in_one_orderly_queue() -> None:
    events = [up(0), *sent("m0"), began("m0"), began("m0", at=2, member="g.2")]
    assert violations(events, ORDERLY) == {"one call per orderly queue"}
    assert violations(events) == set()


def test_an_orderly_group_that_skips_a_message() -> None:
    events = [up(0), *sent("m0"), *sent("m1", 0, 1), began("m1", offset=1)]
    assert violations(events, ORDERLY) == {"orderly groups consume in order"}


def test_a_restart_that_moves_a_queue() -> None:
    owned = [Assigned(0, "g", "g.1", (QUEUE,)), Calm(s(1)), down(2), up(3)]
    moved = Assigned(s(4), "g", "g.2", (QUEUE,))
    assert violations([up(0), *owned, moved]) == {"a restart moves no queue"}
    assert violations([up(0), *owned, Left(s(4), "g", "g.1", is_crash=True), moved]) == set()


# --- delays ---------------------------------------------------------------------------------------


def delayed(at: float) -> list[Event]:
    return [
        SendBegan(0, "p", "m0", "plain", s(5)),
        SendTried(0, "p", "m0"),
        Readable(s(at), QUEUE, 0, Stored("m0")),
    ]


def test_a_delayed_message_that_is_early() -> None:
    assert violations([up(0), *delayed(4.9)]) == {"delays are not cut short"}
    assert violations([up(0), *delayed(5)]) == set()


def test_a_clock_that_is_set_forward_makes_delays_short_only_across_a_restart() -> None:
    begin, tried, readable = delayed(3)
    jump = ClockJumped(s(1), s(60))
    assert violations([up(0), begin, tried, jump, readable]) == {"delays are not cut short"}
    assert violations([up(0), begin, tried, jump, down(2), up(2.5), readable]) == set()
    # What was set before the message was sent explains nothing.
    events = [jump, begin, tried, down(2), up(2.5), readable]
    late = [SendBegan(s(1.5), "p", "m0", "plain", s(5)) if e is begin else e for e in events]
    assert violations([up(0), *late]) == {"delays are not cut short"}


def test_a_retry_that_is_early() -> None:
    events = [up(0), *sent("late"), *consumed("late", result=Result.FAILURE)]

    def retried(at: float) -> set[str]:
        return violations([*events, Readable(s(at), RETRY, 0, Stored("late", 1))])

    assert retried(3.9) == {"delays are not cut short"}
    assert retried(4) == set()


# --- the rest -------------------------------------------------------------------------------------


def test_a_message_that_is_stored_more_often_than_sent() -> None:
    twice = [*sent("m0"), Readable(s(1), QUEUE, 1, Stored("m0"))]
    assert violations([up(0), *twice]) == {"duplicates are bounded"}
    tried = [*twice[:2], SendTried(0, "p", "m0"), *twice[2:]]
    assert violations([up(0), *tried]) == set()


def test_a_delayed_message_redelivered_because_power_loss_took_it() -> None:
    events = [
        up(0),
        SendBegan(0, "p", "m0", "plain", s(1)),
        SendTried(0, "p", "m0"),
        Readable(s(1), QUEUE, 0, Stored("m0")),
        down(2, Down.POWER_LOST),
    ]
    again = Readable(s(4), QUEUE, 0, Stored("m0"))
    assert violations([*events, up(3), again], plan(is_sync=False)) == set()
    kept = [*events, up(3, "m0"), Readable(s(4), QUEUE, 1, Stored("m0"))]
    assert violations(kept, plan(is_sync=False)) == {"duplicates are bounded"}
    # Messages first seen after a start count too.
    twice = [*events[:3], events[4], up(3, "m0"), Readable(s(4), QUEUE, 1, Stored("m0"))]
    assert violations(twice, plan(is_sync=False)) == {"duplicates are bounded"}


def test_a_message_that_is_consumed_twice_without_a_cause() -> None:
    events = [up(0), *sent("m0", 100), *consumed("m0", 101), *consumed("m0", 102, call=2)]
    assert violations(events) == {"duplicates are bounded"}
    caused = [*events[:-2], FaultEnded(s(101), "x", "a"), FaultBegan(s(101), "x", "a")]
    assert violations([*caused, *events[-2:]]) == set()


def retried(key: str, at: float, offset: int, times: int) -> Readable:
    return Readable(s(at), RETRY, offset, Stored(key, times, (offset, s(at))))


def test_a_retry_that_is_stored_more_often_than_its_message_failed() -> None:
    failed = consumed("late", 101, result=Result.FAILURE)
    events = [up(0), *sent("late", 100), *failed, retried("late", 104, 0, 1)]
    assert violations(events) == set()
    twice = [*events, retried("late", 104, 1, 1)]
    assert violations(twice) == {"duplicates are bounded"}
    lost = FaultBegan(s(103), "x", "a")
    assert violations([*events, lost, retried("late", 104, 1, 1)]) == set()


def test_copies_for_retries_explain_further_calls() -> None:
    """Two owners of a queue both send back failed messages: each copy reaches both."""
    fault = FaultBegan(s(100), "x", "a")
    events: list[Event] = [up(0), fault, *sent("late", 100)]
    for call in (1, 2):
        events += consumed("late", 101, result=Result.FAILURE, call=call)
    copies = [retried("late", 105, offset, 1) for offset in range(2)]

    def succeeded(count: int) -> list[Event]:
        return [
            event
            for call in range(count)
            for event in consumed("late", 106, times=1, call=10 + call)
        ]

    assert violations([*events, *copies, *succeeded(6)]) == set()
    assert violations([*events, *copies, *succeeded(7)]) == {"duplicates are bounded"}
    assert violations([*events, *copies[:1], *succeeded(5)]) == {"duplicates are bounded"}


def test_a_failure_that_is_repeated_without_a_cause() -> None:
    failed = [*consumed("late", 101, result=Result.FAILURE)] * 9
    assert violations([up(0), *sent("late", 100), *failed]) == {"duplicates are bounded"}
    # The broker rejects the send-back.
    full = FaultBegan(s(100), FaultKind.FULL_DISK.value, "a")
    assert violations([up(0), full, *sent("late", 100), *failed]) == set()


def test_a_message_that_is_late_in_the_calm() -> None:
    def got(at: float) -> set[str]:
        events = [Calm(0), *sent("m0", 1), *consumed("m0", at), Ended(s(20))]
        return violations([up(0), *events])

    assert got(2) == set()
    assert got(4) == {"calm deliveries are prompt"}


def test_a_message_that_is_never_delivered_in_the_calm() -> None:
    events = [up(0), Calm(0), *sent("m0", 1), Ended(s(20))]
    assert violations(events) == {"calm deliveries are prompt"}


def test_a_recovery_that_differs_the_second_time() -> None:
    assert violations([Reopened(0, "a", ())]) == set()
    assert violations([Reopened(0, "a", ("plain@a:0",))]) == {"recovery is idempotent"}


def test_an_unexpected_error() -> None:
    assert violations([Unexpected(0, "a task died")]) == {"nothing unexpected"}


# --- slaves ---------------------------------------------------------------------------------------

SYNC_MASTER = ReplicaPlan((Slave("a-1", "a", 1),), is_sync_master=True)
ASYNC_MASTER = ReplicaPlan((Slave("a-1", "a", 1),))


def copied(key: str, at: float = 0, offset: int = 0, slave: str = "a-1") -> Replicated:
    return Replicated(s(at), slave, QUEUE, offset, Stored(key))


def holds(at: float, *keys: str, is_start: bool = True) -> ReplicaHolds:
    contents = {QUEUE: (0, tuple(map(Stored, keys)))} if keys else {}
    return ReplicaHolds(s(at), "a-1", contents, is_start)


@pytest.mark.parametrize(("sent_at", "is_excused"), [(1, True), (9, True), (20, False)])
def test_a_master_cannot_know_that_a_slave_lies(sent_at: float, is_excused: bool) -> None:
    lies = FaultKind.LYING_SLAVE.value
    events = [up(0), FaultBegan(s(0), lies, "a"), *sent("m0", sent_at), FaultEnded(s(3), lies, "a")]
    events.sort(key=lambda event: event.at_us)
    found = violations(events, plan(replicas=SYNC_MASTER))
    assert found == (set() if is_excused else {"acknowledged messages have a copy"})


def slave_down(at: float, how: Down) -> BrokerDown:
    return BrokerDown(s(at), "a-1", how)


@pytest.mark.parametrize(
    ("copies", "replicas", "is_kept"),
    [
        ([copied("m0")], SYNC_MASTER, True),
        ([], SYNC_MASTER, False),
        ([copied("m0", offset=1)], SYNC_MASTER, False),
        ([copied("m0", slave="b-1")], SYNC_MASTER, False),
        ([], ASYNC_MASTER, True),
    ],
    ids=["copied", "not copied", "at another offset", "by a slave of another", "asynchronous"],
)
def test_what_a_sync_master_acknowledges_has_a_copy(
    copies: list[Event], replicas: ReplicaPlan, is_kept: bool
) -> None:
    found = violations([up(0), *copies, *sent("m0")], plan(replicas=replicas))
    assert found == (set() if is_kept else {"acknowledged messages have a copy"})


def test_a_delayed_message_has_its_copy_in_a_topic_of_the_broker() -> None:
    schedule = MessageQueue("SCHEDULE_TOPIC_XXXX", "a", 2)
    events = [
        up(0),
        SendBegan(s(0), "p", "m0", "plain", delay_us=s(1)),
        Replicated(s(0), "a-1", schedule, 0, Stored("m0")),
        Acknowledged(s(0), "p", "m0", schedule, 0),
    ]
    replicated = plan(replicas=SYNC_MASTER)
    assert violations(events, replicated) == set()
    assert violations([*events[:2], events[3]], replicated) == {"acknowledged messages have a copy"}


def test_messages_that_do_not_wait_need_no_copy() -> None:
    events = [up(0), *sent("m0", is_durable=False)]
    assert violations(events, plan(replicas=SYNC_MASTER)) == set()


@pytest.mark.parametrize("is_start", [True, False], ids=["restart", "cut"])
def test_a_slave_that_loses_what_its_master_has(is_start: bool) -> None:
    events = [up(0), holds(0), *sent("m0"), copied("m0"), holds(3, is_start=is_start)]
    assert violations(events, plan(replicas=ASYNC_MASTER)) == {"copies stay"}


@pytest.mark.parametrize(
    ("is_sync", "how", "at", "is_kept"),
    [
        (False, Down.POWER_LOST, 5, True),
        (False, Down.POWER_LOST, 30, False),
        (False, Down.KILLED, 5, False),
        (True, Down.POWER_LOST, 5, False),
    ],
    ids=["not flushed yet", "flushed long ago", "only killed", "synchronous"],
)
def test_what_a_slave_may_lose(is_sync: bool, how: Down, at: float, is_kept: bool) -> None:
    events = [up(0), holds(0), *sent("m0"), copied("m0"), slave_down(at, how), holds(at + 1)]
    found = violations(events, plan(is_sync=is_sync, replicas=ASYNC_MASTER))
    assert found == (set() if is_kept else {"copies stay"})


def test_a_slave_truncates_what_its_master_has_lost() -> None:
    events = [
        up(0),
        holds(0),
        *sent("m0"),
        copied("m0"),
        down(1, Down.POWER_LOST),
        up(2),
        holds(3, is_start=False),
    ]
    assert violations(events, plan(is_sync=False, replicas=ASYNC_MASTER)) == set()


AGAIN = Stored("m0", record=(0, 2))
"""The same message as another record."""


def test_a_slave_truncates_what_its_master_has_lost_and_stored_again() -> None:
    """Its own power loss does not show when it copied what it still has."""
    events = [
        up(0),
        holds(0),
        *sent("m0"),
        copied("m0"),
        down(1, Down.POWER_LOST),
        BrokerUp(s(2), "a", {QUEUE: (0, (AGAIN,))}, {}),
        slave_down(5, Down.POWER_LOST),
        holds(6, "m0"),
        holds(7, is_start=False),
    ]
    replicated = plan(is_sync=False, replicas=ASYNC_MASTER)
    assert violations(events, replicated) == set()
    kept = [
        up(2, "m0") if isinstance(event, BrokerUp) and event.at_us else event for event in events
    ]
    assert violations(kept, replicated) == {"copies stay"}


def test_a_slave_truncates_what_it_has_from_a_replaced_master() -> None:
    """The promoted one may have stored the same message itself, as delayed ones are."""
    late = Replicated(s(2), "a-2", QUEUE, 0, Stored("m0"))
    events = [
        up(0),
        *sent("m0"),
        BrokerUp(s(1), "a", {QUEUE: (0, (AGAIN,))}, {}, promoted="a-1"),
        late,
        ReplicaHolds(s(3), "a-2", {}, is_start=False),
    ]
    slaves = ReplicaPlan((Slave("a-1", "a", 1), Slave("a-2", "a", 2)))
    assert violations(events, plan(replicas=slaves)) == set()
    same = [
        promoted(1, "m0") if isinstance(event, BrokerUp) and event.at_us else event
        for event in events
    ]
    assert violations(same, plan(replicas=slaves)) == {"copies stay"}


def test_a_slave_with_a_new_disk_has_lost_everything() -> None:
    new = FaultBegan(s(1), FaultKind.NEW_DISK.value, "a-1")
    events = [up(0), holds(0), *sent("m0"), copied("m0"), slave_down(1, Down.KILLED), new, holds(2)]
    assert violations(events, plan(replicas=ASYNC_MASTER)) == set()


def test_logs_that_differ() -> None:
    assert violations([LogsCompared(s(0), "a-1", "")]) == set()
    assert violations([LogsCompared(s(0), "a-1", "differs at 7")]) == {"replicas agree"}


# --- promotions -----------------------------------------------------------------------------------


def promoted(at: float, *keys: str) -> BrokerUp:
    contents = {QUEUE: (0, tuple(map(Stored, keys)))} if keys else {}
    return BrokerUp(s(at), "a", contents, {}, promoted="a-1")


def test_a_promoted_slave_has_what_the_master_has_lost_and_stored_again() -> None:
    """As a retry: the slave has the first record, and never had the second."""
    retried = Stored("m0", 2, record=(0, 2))
    events = [
        up(0),
        holds(0),
        *sent("m0"),
        copied("m0"),
        down(1, Down.POWER_LOST),
        BrokerUp(s(2), "a", {QUEUE: (0, (retried,))}, {}),
    ]
    replicated = plan(is_sync=False, replicas=ASYNC_MASTER)
    assert violations([*events, promoted(3, "m0")], replicated) == set()
    copied_again = Replicated(s(2), "a-1", QUEUE, 0, retried)
    changed = violations([*events, copied_again, promoted(3, "m0")], replicated)
    assert changed == {"readable messages stay"}


def test_a_delayed_message_that_was_not_copied_before_its_master_was_replaced() -> None:
    events = [
        up(0),
        SendBegan(0, "p", "m0", "plain", s(1)),
        down(1),
        Acknowledged(s(1), "p", "m0", QUEUE, 0, "a"),
    ]
    replicated = plan(replicas=ASYNC_MASTER)
    copy = Replicated(s(1), "a-1", MessageQueue("SCHEDULE_TOPIC_XXXX", "a", 0), 0, Stored("m0"))
    assert violations([*events, promoted(2), Calm(s(9))], replicated) == set()
    assert "every message ends" in violations([*events, copy, promoted(2), Calm(s(9))], replicated)


def test_a_promoted_slave_that_was_long_up_since_it_lost_messages_with_the_power() -> None:
    def after_loss_at(at: float) -> set[str]:
        begin = [up(0), holds(0), copied("m0"), *sent("m0")]
        loss = [slave_down(at, Down.POWER_LOST), holds(at + 1), promoted(at + 20)]
        return violations([*begin, *loss], plan(is_sync=False, replicas=SYNC_MASTER))

    assert after_loss_at(9) == set()
    assert "acknowledged messages are kept" in after_loss_at(20)


@pytest.mark.parametrize(("followed", "expected"), [("a", set()), ("a-1", {"copies stay"})])
def test_a_slave_truncates_what_a_replaced_master_that_it_still_follows_lost(
    followed: str, expected: set[str]
) -> None:
    copies = [copied("m0"), copied("m0", slave="a-2")]
    cut = ReplicaHolds(s(3), "a-2", {}, is_start=False, followed=followed)
    events = [up(0), holds(0), *copies, *sent("m0"), promoted(2, "m0"), cut]
    assert violations(events, plan(replicas=SYNC_MASTER)) == expected


def test_a_promoted_slave_whose_power_failed_again_after_it_had_lost_messages() -> None:
    first = [slave_down(6, Down.POWER_LOST), holds(7)]
    second = [slave_down(30, Down.POWER_LOST), holds(31), promoted(32)]
    events = [up(0), holds(0), copied("m0"), *sent("m0"), *first, *second]
    assert violations(events, plan(is_sync=False, replicas=ASYNC_MASTER)) == set()


@pytest.mark.parametrize("replicas", [SYNC_MASTER, ASYNC_MASTER])
def test_a_promoted_slave_has_what_it_had(replicas: ReplicaPlan) -> None:
    events = [up(0), holds(0), copied("m0"), *sent("m0"), down(1)]
    assert violations([*events, promoted(2, "m0")], plan(replicas=replicas)) == set()
    lost = violations([*events, promoted(2)], plan(replicas=replicas))
    assert lost == {"readable messages stay", "acknowledged messages are kept"}


def test_what_a_slave_never_had_is_left_behind() -> None:
    events = [up(0), holds(0), *sent("m0"), down(1), promoted(2), *sent("m1", 3)]
    assert violations(events, plan(replicas=ASYNC_MASTER)) == set()
    assert violations(events[:6], plan(replicas=SYNC_MASTER)) == {
        "acknowledged messages have a copy"
    }


def test_a_loss_of_power_excuses_promoted_slaves() -> None:
    events = [up(0), holds(0), copied("m0"), *sent("m0")]
    lost = [*events, slave_down(1, Down.POWER_LOST), holds(2), promoted(3)]
    assert violations(lost, plan(is_sync=False, replicas=SYNC_MASTER)) == set()
    assert "copies stay" in violations(lost, plan(is_sync=True, replicas=SYNC_MASTER))


def test_after_a_promotion_the_other_machine_counts() -> None:
    events = [up(0), holds(0), copied("m0"), *sent("m0"), promoted(1, "m0")]
    old_fails = [*events, down(2, Down.POWER_LOST), up(3)]
    assert "readable messages stay" in violations(old_fails, plan(is_sync=False))
    new_fails = [*events, slave_down(2, Down.POWER_LOST), up(3)]
    assert violations(new_fails, plan(is_sync=False)) == set()


def test_what_a_replaced_master_acknowledges_is_left_behind() -> None:
    stale = Acknowledged(s(2), "p", "m0", QUEUE, 0, machine="a")
    events = [up(0), holds(0), promoted(1), SendBegan(s(1), "p", "m0", "plain"), stale]
    assert violations([*events, Calm(s(9))], plan(replicas=ASYNC_MASTER)) == set()
    own = Acknowledged(s(2), "p", "m0", QUEUE, 0, machine="a-1")
    found = violations([*events[:-1], own, Calm(s(9))], plan(replicas=ASYNC_MASTER))
    assert found == {"acknowledged messages are kept"}


@pytest.mark.parametrize(
    ("must_know", "at", "is_kept"), [("", 5, True), ("", 60, False), ("it was told", 5, False)]
)
def test_a_replaced_master_that_writes(must_know: str, at: float, is_kept: bool) -> None:
    events = [up(0), holds(0), promoted(1), StaleWrite(s(at), "a", must_know)]
    found = violations(events, plan(replicas=ASYNC_MASTER))
    assert found == (set() if is_kept else {"replaced masters are silent"})


def test_a_retry_that_only_a_replaced_master_has_is_left_behind() -> None:
    events = [up(0), holds(0), *sent("late"), copied("late"), promoted(1, "late")]
    events += consumed("late", result=Result.FAILURE)
    stale = StaleWrite(s(5), "a", "", ("late",))
    assert violations([*events, stale, Calm(s(9))], plan(replicas=ASYNC_MASTER)) == set()
    found = violations([*events, Calm(s(9))], plan(replicas=ASYNC_MASTER))
    assert found == {"every message ends"}


def test_what_was_left_behind_may_be_stored_again() -> None:
    events = [up(0), *sent("m0"), promoted(1), Readable(s(2), QUEUE, 0, Stored("m0"))]
    assert violations(events, plan(replicas=ASYNC_MASTER)) == set()
    twice = [up(0), *sent("m0"), Readable(s(2), QUEUE, 1, Stored("m0"))]
    assert violations(twice) == {"duplicates are bounded"}


# --- transactions ---------------------------------------------------------------------------------

HALF = MessageQueue(HALF_TOPIC, "a", 0)
TELLER = TransactionPlan({"t": (Deed(0, "m0", 20, 0, Ending.COMMITS),)})
AS_DECIDED = "transactions end as decided"


def half(at: float = 0) -> list[Event]:
    return [
        SendBegan(s(at), "t", "m0", "plain"),
        SendTried(s(at), "t", "m0"),
        Readable(s(at), HALF, 0, Stored("m0")),
        Acknowledged(s(at), "t", "m0", HALF, 0),
    ]


def decided(*, commits: bool, at: float = 1) -> TransactionDecided:
    return TransactionDecided(s(at), "t", "m0", commits)


def visible(at: float = 2, offset: int = 0) -> Readable:
    return Readable(s(at), QUEUE, offset, Stored("m0"))


def found_in(events: Sequence[Event], *, is_sync: bool = True) -> set[str]:
    return violations(events, plan(is_sync=is_sync, transactions=TELLER))


def test_a_transaction_is_visible_if_it_has_committed() -> None:
    good = [*half(), decided(commits=True), visible(), *consumed("m0", 3), Calm(s(9))]
    assert found_in(good) == set()
    assert found_in([*half(), decided(commits=False), Calm(s(9))]) == set()
    assert found_in([*half(), decided(commits=False), visible()]) == {AS_DECIDED}
    assert found_in([*half(), visible()]) == {AS_DECIDED}
    assert found_in([*half(), decided(commits=False), began("m0", 3)]) == {AS_DECIDED}
    assert found_in([*half(), decided(commits=True), Calm(s(9))]) == {AS_DECIDED}


def test_a_committed_message_is_stored_once() -> None:
    events = [*half(), decided(commits=True), visible(), visible(3, 1)]
    assert found_in(events) == {"duplicates are bounded"}


def test_a_copy_that_existed_after_a_crash_counts() -> None:
    contents = {HALF: (0, (Stored("m0"),)), QUEUE: (0, (Stored("m0"), Stored("m0")))}
    twice = [*half(), decided(commits=True), down(2), BrokerUp(s(3), "a", contents, {})]
    assert found_in([*twice, *consumed("m0", 4), Calm(s(9))]) == {AS_DECIDED}


def test_no_transaction_stays_open() -> None:
    assert found_in([*half(), TransactionsLeft(s(9), "a", ("m0",))]) == {AS_DECIDED}


def test_a_committed_transaction_before_the_progress_needs_no_operation() -> None:
    passed = TransactionsLeft(s(9), "a", (), ("m0",))
    assert found_in([*half(), decided(commits=True), visible(), passed]) == set()
    assert found_in([*half(), decided(commits=True), passed]) == {AS_DECIDED}
    assert found_in([*half(), decided(commits=False), passed]) == {AS_DECIDED}


def test_a_half_message_lost_with_the_power_is_excused_as_the_mode_promises() -> None:
    lost = [up(0), *half(), decided(commits=True), down(2, Down.POWER_LOST), up(3), Calm(s(9))]
    assert found_in(lost, is_sync=False) == set()
    assert "acknowledged messages are kept" in found_in(lost)


def test_a_lost_part_of_a_transaction_is_committed_again() -> None:
    contents = {HALF: (0, (Stored("m0"),))}
    again = BrokerUp(s(4), "a", contents, {})
    events = [up(0), *half(), decided(commits=True), visible(), down(3, Down.POWER_LOST), again]
    assert found_in([*events, visible(5)], is_sync=False) == set()


# --- machines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "is_kept"), [("", True), ("a", True), ("b", False)])
def test_only_the_clock_of_its_own_machine_excuses_an_early_message(
    machine: str, is_kept: bool
) -> None:
    send = [SendBegan(s(0), "p", "m0", "plain", delay_us=s(10)), SendTried(s(0), "p", "m0")]
    jump = ClockJumped(s(1), s(60), machine)
    events = [up(0), *send, jump, down(2), up(3), Readable(s(4), QUEUE, 0, Stored("m0"))]
    assert violations(events) == (set() if is_kept else {"delays are not cut short"})


def test_a_name_server_retains_what_it_has_acknowledged() -> None:
    stored = [KeyValueStored(s(1), "ns0", key) for key in ("k0", "k1")]
    assert violations([*stored, KeyValuesRead(s(9), "ns0", ("k0", "k1", "k2"))]) == set()
    assert violations([*stored, KeyValuesRead(s(9), "ns1", ())]) == set()
    lost = violations([*stored, KeyValuesRead(s(9), "ns0", ("k1",))])
    assert lost == {"name servers keep values"}
