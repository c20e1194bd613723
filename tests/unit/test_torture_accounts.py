"""The accounting of `scripts/torture`: each kind of violated guarantee is noticed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from torture.accounts import Accounts
from torture.messages import body_of, identity_of, is_intact

MS = 1_000_000


class Journals:
    """Writes journals directly, with times in ms."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def sent(self, identity: str, at_ms: int = 0, *, acknowledged: bool = True) -> None:
        lines = [f"try\t{at_ms * MS}\t{identity}\n"]
        if acknowledged:
            lines.append(f"ack\t{(at_ms + 1) * MS}\t{identity}\t0\t0\n")
        self._append("sender-0", *lines)

    def call(
        self,
        identity: str,
        begin_ms: int,
        end_ms: int | None,
        *,
        member: str = "member-1",
        offset: int = 0,
        topic: str = "",
        outcome: str = "done",
    ) -> None:
        topic = topic or identity.partition("/")[0]
        fields = f"{identity}\t{topic}\t0\t{offset}\t0"
        self._append(member, f"begin\t{begin_ms * MS}\t{fields}\n")
        if end_ms is not None:
            self._append(member, f"{outcome}\t{end_ms * MS}\t{fields}\n")

    def _append(self, name: str, *lines: str) -> None:
        with (self.directory / f"{name}.journal").open("a") as file:
            file.writelines(lines)

    def read(self) -> Accounts:
        accounts = Accounts(self.directory)
        accounts.read()
        return accounts


@pytest.fixture
def journals(tmp_path: Path) -> Journals:
    return Journals(tmp_path)


def test_acknowledged_messages_that_no_consumer_finished_are_missing(journals: Journals) -> None:
    for number in (2, 3, 25, 50):
        journals.sent(f"work/s/{number}")
    journals.sent("work/s/4", acknowledged=False)
    journals.call("work/s/2", 5, 6)
    journals.call("work/s/3", 5, 6, outcome="failed")
    accounts = journals.read()
    assert accounts.missing(Counter({"work/s/25": 1})) == ["work/s/3", "work/s/50"]
    assert accounts.must_die() == {"work/s/25", "work/s/50"}


def test_lines_appended_later_are_read_once(journals: Journals) -> None:
    journals.sent("work/s/2")
    accounts = journals.read()
    journals.call("work/s/2", 5, 6)
    accounts.read()
    accounts.read()
    assert (len(accounts.calls), accounts.missing(Counter())) == (1, [])


def test_redeliveries_are_counted_by_place(journals: Journals) -> None:
    journals.call("work/s/2", 1, 2)
    journals.call("work/s/2", 3, 4)
    journals.call("work/s/2", 5, 6, topic="%RETRY%work")
    journals.call("work/s/2", 7, 8, offset=9)
    accounts = journals.read()
    assert (accounts.redelivered(), accounts.stored_twice()) == (1, 1)


@pytest.mark.parametrize(("begin_ms", "is_early"), [(900, True), (1000, False)])
def test_a_delayed_message_before_its_time(
    journals: Journals, begin_ms: int, is_early: bool
) -> None:
    journals.sent("delayed/s/0")
    journals.call("delayed/s/0", begin_ms, begin_ms + 1)
    assert bool(journals.read().early()) == is_early


def test_how_late_a_delayed_message_was_delivered(journals: Journals) -> None:
    journals.sent("delayed/s/0")
    journals.call("delayed/s/0", 1251, 1252)
    assert journals.read().latest_ms() == 250


@pytest.mark.parametrize(
    ("second_begin_ms", "first_end_ms", "expected"), [(5, 10, 1), (10, 10, 0), (5, None, 0)]
)
def test_two_calls_at_the_same_time_on_an_ordered_queue(
    journals: Journals, second_begin_ms: int, first_end_ms: int | None, expected: int
) -> None:
    """A call whose process was killed has no end, and is not an overlap."""
    journals.call("ordered/s/0", 1, first_end_ms, member="member-1")
    journals.call("ordered/s/1", second_begin_ms, 20, member="member-2", offset=1)
    assert len(journals.read().overlaps()) == expected


@pytest.mark.parametrize(
    ("members", "expected"), [("1122", 0), ("121", 1), ("1212", 2), ("1221", 1), ("123", 0)]
)
def test_an_ordered_queue_with_two_owners_in_turn(
    journals: Journals, members: str, expected: int
) -> None:
    for offset, member in enumerate(members):
        begin_ms = 10 * offset
        identity = f"ordered/s/{offset}"
        journals.call(identity, begin_ms, begin_ms + 1, member=f"member-{member}", offset=offset)
    assert len(journals.read().returns()) == expected


@pytest.mark.parametrize(("offsets", "expected"), [((0, 1, 0, 1, 2), 0), ((0, 2, 1), 1)])
def test_messages_out_of_order(journals: Journals, offsets: tuple[int, ...], expected: int) -> None:
    """Earlier ones may be redelivered; a later one may not precede them."""
    for place, offset in enumerate(offsets):
        journals.call(f"ordered/s/{offset}", place * 10, place * 10 + 1, offset=offset)
    assert len(journals.read().out_of_order()) == expected


def test_times_of_acknowledgements(journals: Journals) -> None:
    for number, at_ms in enumerate((0, 100, 700)):
        journals.sent(f"work/s/{number}", at_ms)
    accounts = journals.read()
    assert (accounts.slowest_ack_ms(), accounts.longest_silence_ms()) == (1, 600)


def test_an_altered_body_is_noticed() -> None:
    body = body_of("work/s/7")
    assert identity_of(body) == "work/s/7"
    assert is_intact(body)
    assert not is_intact(body + b"x")
