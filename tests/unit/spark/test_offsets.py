"""Offsets of checkpoints: always the same text, no unnoticed loss, fair shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from example_counts import at_most
from turbopump.errors import DataLost, InvalidArgument
from turbopump.message import MessageQueue
from turbopump.spark.reading.offsets import (
    NO_QUEUES,
    NOTHING_BELOW,
    Limits,
    backlog,
    first_texts,
    flat,
    flat_marks,
    forward,
    inside,
    inside_for_group,
    losses,
    moved_past,
    nested,
    shares,
)
from turbopump.spark.reading.positions import Explicit, offsets_named
from turbopump.spark.reading.queue_selection import Assigned, assigned, assigned_among

QUICKLY = settings(max_examples=at_most(50), deadline=None)

A0, A1, B0 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1), MessageQueue("t", "b", 0)

QUEUES = st.builds(MessageQueue, st.sampled_from("tuv"), st.sampled_from("ab"), st.integers(0, 12))
OFFSETS = st.dictionaries(QUEUES, st.integers(0, 1 << 60), max_size=6)


@given(OFFSETS, st.randoms())
@QUICKLY
def test_equal_offsets_are_equal_text(offsets: dict[MessageQueue, int], random: object) -> None:
    shuffled = list(offsets.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    text = json.dumps(nested(offsets))
    assert json.dumps(nested(dict(shuffled))) == text
    assert flat(json.loads(text)) == offsets
    assert json.dumps(nested(flat(json.loads(text)))) == text


def test_queues_are_written_by_number() -> None:
    offsets = {MessageQueue("t", "a", number): number for number in (10, 2, 0)}
    assert json.dumps(nested(offsets)) == '{"t": {"a": {"0": 0, "2": 2, "10": 10}}}'


@pytest.mark.parametrize("written", [{"t": 3}, {"t": {"a": 3}}, {"t": {"a": {"x": 1}}}, 7, None])
def test_the_offsets_of_another_source_are_rejected(written: object) -> None:
    with pytest.raises(InvalidArgument, match="belongs to another source"):
        flat(written)


def test_missing_messages_are_noticed() -> None:
    limits = {A0: Limits(5, 10), A1: Limits(0, 3), B0: Limits(0, 9)}
    start = {A0: 2, A1: 7, B0: 9}
    expired, made_anew = losses(start, limits)
    assert "a:0 starts at offset 5: 3 messages from offset 2 expired" in str(expired)
    assert "a:1 ends at offset 3 but was read to 7" in str(made_anew)
    assert moved_past(start, limits) == {A0: 5, A1: 0, B0: 9}
    assert losses({A0: 5, A1: 3}, limits) == []


def test_queues_of_unresponsive_brokers_are_carried_forward() -> None:
    assert moved_past({A0: 2, B0: 4}, {A0: Limits(0, 9)}) == {A0: 2, B0: 4}
    assert backlog({A0: 2, B0: 4}, {A0: 9}) == {A0: 7}


def test_a_queue_that_was_not_read_before_waits_for_its_beginning() -> None:
    assert backlog({A0: 2}, {A0: 3, A1: 100}) == {A0: 1}


BACKLOGS = st.dictionaries(QUEUES, st.integers(1, 10_000), max_size=6)


@given(BACKLOGS, st.integers(1, 20_000))
@example({MessageQueue("t", "a", n): rows for n, rows in enumerate([1, 1, 5, 4, 1])}, 6)
@QUICKLY
def test_shares_are_fair(backlogs: dict[MessageQueue, int], rows_max: int) -> None:
    found = shares(backlogs, rows_max)
    assert found.keys() == backlogs.keys()
    assert all(1 <= found[queue] <= backlogs[queue] for queue in backlogs)
    total = sum(backlogs.values())
    assert sum(found.values()) == min(total, max(rows_max, len(backlogs)))
    for one in backlogs:
        for other in backlogs:
            if backlogs[one] > backlogs[other]:
                assert found[one] >= found[other]


def test_shares_move_forward() -> None:
    assert forward({A0: 5, B0: 1}, {A0: 2}) == {A0: 7, B0: 1}


def test_offsets_of_options_lie_inside_their_queues() -> None:
    limits = {A0: Limits(5, 10)}
    assert inside("startingOffsets", {A0: 7}, limits, fail_on_data_loss=True) == {A0: 7}
    with pytest.raises(InvalidArgument, match="startingOffsets: t@a:0 ends at offset 10, got 11"):
        inside("startingOffsets", {A0: 11}, limits, fail_on_data_loss=True)
    with pytest.raises(DataLost, match="starts at offset 5"):
        inside("startingOffsets", {A0: 4}, limits, fail_on_data_loss=True)
    assert inside("x", {A0: 11}, limits, fail_on_data_loss=False) == {A0: 10}
    assert inside("x", {A0: 4}, limits, fail_on_data_loss=False) == {A0: 5}


def test_a_slave_does_not_know_which_offsets_exist() -> None:
    limits = {A0: Limits(5, 10, is_certain=False)}
    for fails in (False, True):
        for at in (2, 7, 40):
            assert inside("x", {A0: at}, limits, fail_on_data_loss=fails) == {A0: at}
            assert losses({A0: at}, limits) == []


def test_offsets_of_groups_lie_inside_their_queues() -> None:
    limits = {A0: Limits(5, 10), A1: Limits(0, 3, is_certain=False)}
    with pytest.raises(DataLost) as raised:
        inside_for_group("billing", {A0: 25}, limits, fail_on_data_loss=True)
    assert (
        "group 'billing' cannot resume from its committed offsets: t@a:0 ends at offset 10"
        in str(raised.value)
    )
    assert "option" not in str(raised.value)
    assert "failOnDataLoss=false" in str(raised.value)
    assert "turbopump offset reset" in str(raised.value)
    with pytest.raises(DataLost, match=r"group 'billing' .*starts at offset 5: 1 messages"):
        inside_for_group("billing", {A0: 4}, limits, fail_on_data_loss=True)
    found = inside_for_group("billing", {A0: 25, A1: 9}, limits, fail_on_data_loss=False)
    assert found == {A0: 5, A1: 9}, "a slave may lag"


def test_assigned_queues_stay_with_their_broker() -> None:
    b1 = MessageQueue("t", "b", 1)
    chosen = Assigned((("t", "", 0), ("t", "", 1)))
    with pytest.raises(InvalidArgument, match="is on several brokers"):
        assigned(chosen.queues, [A0, A1, B0])
    assert assigned_among(chosen, [A0, A1, B0, b1], {A0, A1}) == (A0, A1)
    assert assigned_among(chosen, [A0, A1, B0, b1], {A0}) == (A0, A1), "the broker of the others"
    assert assigned_among(chosen, [B0, b1], {A0, A1}) == (), "it is only down"
    assert assigned_among(chosen, [A0, b1], {A0}) == (A0, b1), "there is no other"
    assert assigned_among(chosen, [A0, B0], None) == (A0, B0)
    assert assigned_among(Assigned((("t", "b", 0),)), [A0, B0], {A0}) == (B0,)
    with pytest.raises(InvalidArgument, match="is on several brokers"):
        assigned_among(chosen, [A0, B0], ())


def test_thousands_of_losses_are_shortened() -> None:
    start = {MessageQueue("t", "a", number): 9 for number in range(3000)}
    lost = losses(start, dict.fromkeys(start, Limits(10, 20)))
    assert len(first_texts(lost)) < 500
    assert first_texts(lost).endswith("; and 2995 more queues")
    assert first_texts(lost[:2]) == f"{lost[0]}; {lost[1]}"


def test_a_broker_need_not_be_named_if_there_is_one() -> None:
    named = Explicit((("t", "", 0, 5), ("t", "a", 1, 6)))
    assert offsets_named("x", named, [A0, A1]) == {A0: 5, A1: 6}
    with pytest.raises(InvalidArgument, match="queue 0 of topic 't' is on several brokers"):
        offsets_named("x", named, [A0, A1, B0])
    with pytest.raises(InvalidArgument, match=r"queue 1 of topic 't' on 'a' does not exist.*t@b:0"):
        offsets_named("x", Explicit((("t", "a", 1, 6),)), [B0])


def test_marks_lie_beside_the_offsets() -> None:
    queue, other = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1)
    written = nested({queue: 5, other: 0}, {queue: (1700000000000, 42)})
    text = '{"": {"t": {"a": {"0": "1700000000000@42"}}}, "t": {"a": {"0": 5, "1": 0}}}'
    assert json.dumps(written) == text
    assert flat(written) == {queue: 5, other: 0}
    assert flat_marks(written) == {queue: (1700000000000, 42)}
    assert flat_marks({"t": {"a": {"0": 5}}}) == {}
    assert flat(NO_QUEUES) == {}
    assert flat_marks(NO_QUEUES) == {}
    assert flat_marks(nested({queue: 5}, {queue: NOTHING_BELOW})) == {queue: NOTHING_BELOW}


def test_checkpoints_of_0_1_open_and_are_written_the_same() -> None:
    data = Path(__file__).parents[2] / "data" / "spark" / "checkpoint-0.1.jsonl"
    for line in data.read_text().splitlines():
        written = json.loads(line)
        assert flat_marks(written) == {}
        if any(written.values()):
            assert json.dumps(nested(flat(written), flat_marks(written))) == line
        else:
            assert flat(written) == {}
