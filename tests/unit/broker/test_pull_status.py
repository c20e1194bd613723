"""Which broker a poller is redirected to, and a slave's answers for offsets that it lacks."""

from __future__ import annotations

import pytest

from turbopump.broker.pull_status import STATUS, ReadRules, Status
from turbopump.message import QueueOffset
from turbopump.store import outcomes
from turbopump.store.outcomes import ReadOutcome
from turbopump.wire.bodies import GroupConfig

MASTER = ReadRules()
SUGGESTING = ReadRules(suggests_slaves=True)
SLAVE = ReadRules(corrects_offsets=False)
CORRECTING_SLAVE = ReadRules(corrects_offsets=True)

LIMITS = {"min_offset": QueueOffset(10), "max_offset": QueueOffset(20)}


def outcome(kind: type[ReadOutcome], following: int, *, is_slow: bool = False) -> ReadOutcome:
    fields: dict[str, object] = {**LIMITS, "next_offset": QueueOffset(following)}
    if kind is outcomes.Found:
        fields |= {"pieces": [], "sizes": [], "queue_offsets": [], "size": 0}
    if "suggest_slave" in kind.__struct_fields__:
        fields["suggest_slave"] = is_slow
    return kind(**fields)  # type: ignore[arg-type]


SLOWABLE = (outcomes.Found, outcomes.NoMatch, outcomes.MessagesRemoved)


@pytest.mark.parametrize("kind", STATUS)
@pytest.mark.parametrize("is_slow", [False, True])
def test_the_broker_suggested_follows_the_group_only_where_slaves_may_be_read(
    kind: type[ReadOutcome], *, is_slow: bool
) -> None:
    group = GroupConfig(group_name="g", broker_id=3, which_broker_when_consume_slowly=7)
    read = outcome(kind, 15, is_slow=is_slow)
    assert MASTER.suggested_broker_id(group, read, 15) == 0
    expected = 7 if is_slow and kind in SLOWABLE else 3
    assert SUGGESTING.suggested_broker_id(group, read, 15) == expected


def test_groups_read_the_master_first_and_the_first_slave_when_they_are_slow() -> None:
    group = GroupConfig(group_name="g")
    assert SUGGESTING.suggested_broker_id(group, outcome(outcomes.Found, 9), 8) == 0
    slow = outcome(outcomes.Found, 9, is_slow=True)
    assert SUGGESTING.suggested_broker_id(group, slow, 8) == 1


@pytest.mark.parametrize(
    ("kind", "asked", "following"),
    [
        (outcomes.OffsetTooSmall, 3, 10),
        (outcomes.OffsetTooLarge, 25, 20),
        (outcomes.QueueEmpty, 5, 0),
        (outcomes.QueueUnknown, 5, 0),
    ],
)
def test_a_slave_sends_offsets_it_does_not_have_back_to_the_master(
    kind: type[ReadOutcome], asked: int, following: int
) -> None:
    read = outcome(kind, following)
    group = GroupConfig(group_name="g", broker_id=0, which_broker_when_consume_slowly=1)
    for master in (MASTER, CORRECTING_SLAVE):
        assert master.status_of(read, asked) is Status.MOVED
        assert master.reported(read, asked) is read
    assert SLAVE.status_of(read, asked) is Status.RETRY
    assert SLAVE.reported(read, asked).next_offset == asked
    assert SLAVE.suggested_broker_id(group, read, asked) == 0
    both = ReadRules(suggests_slaves=True, corrects_offsets=False)
    assert both.suggested_broker_id(group, read, asked) == 0


def test_a_slave_keeps_the_offset_where_it_cannot_read_a_queue_file() -> None:
    missing = outcome(outcomes.UnitsMissing, 300_000)
    assert MASTER.reported(missing, 15).next_offset == 300_000
    assert SLAVE.reported(missing, 15).next_offset == 15
    assert SLAVE.status_of(missing, 15) is Status.NOT_FOUND


@pytest.mark.parametrize("kind", [outcomes.MessagesRemoved, outcomes.MessageDamaged])
def test_a_slave_skips_no_message_that_the_master_may_have(kind: type[ReadOutcome]) -> None:
    read = outcome(kind, 18, is_slow=True)
    group = GroupConfig(group_name="g", broker_id=0, which_broker_when_consume_slowly=1)
    both = ReadRules(suggests_slaves=True, corrects_offsets=False)
    assert MASTER.reported(read, 12) is read
    assert SLAVE.reported(read, 12).next_offset == 12
    assert SLAVE.status_of(read, 12) is Status.RETRY
    assert both.suggested_broker_id(group, read, 12) == 0


@pytest.mark.parametrize("kind", [outcomes.Found, outcomes.NoMatch])
def test_a_slave_advances_past_what_it_has_read(kind: type[ReadOutcome]) -> None:
    read = outcome(kind, 18)
    assert SLAVE.reported(read, 12) is read
    assert SLAVE.status_of(read, 12) is MASTER.status_of(read, 12)
