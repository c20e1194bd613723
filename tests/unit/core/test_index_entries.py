"""Both cores link the same entries of the key index, whatever crashes have left there."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cores import both
from turbopump.core.reference.index_entries import ENTRY

INTS = st.one_of(st.integers(-2, 12), st.integers(-(2**31), 2**31 - 1))
POSITIONS = st.one_of(st.integers(-1, 30), st.integers(-(2**63), 2**63 - 1))
ROWS = st.lists(st.tuples(INTS, POSITIONS, INTS, INTS), max_size=12)
SORTED_ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 9))).map(
    lambda rows: sorted(((*row, 0) for row in rows), key=lambda row: row[1])
)


@given(st.one_of(ROWS, SORTED_ROWS), st.integers(0, 40), st.booleans(), st.integers(0, 19))
def test_both_count_the_same_whole_entries(
    rows: list[Any], log_end: int, has_position_0: bool, rest: int
) -> None:
    data = b"".join(ENTRY.pack(*row) for row in rows) + bytes(rest)
    plain, compiled = (
        core.whole_entries(data, log_end, has_position_0=has_position_0) for core in both()
    )
    assert plain == compiled


@given(ROWS, st.lists(INTS, min_size=1, max_size=7), st.integers(1, 9))
def test_both_link_the_same(rows: list[Any], slots: list[int], first: int) -> None:
    results = []
    for core in both():
        entries = bytearray(b"".join(ENTRY.pack(*row) for row in rows))
        table = bytearray(b"".join(slot.to_bytes(4, "big", signed=True) for slot in slots))
        results.append((core.chain_entries(entries, table, first), entries, table))
    assert results[0] == results[1]
    for number, (_, _, _, previous) in enumerate(ENTRY.iter_unpack(results[0][1]), first):
        assert 0 <= previous < number, "chains lead backwards"


def test_entries_of_a_slot_form_a_chain() -> None:
    for core in both():
        entries = bytearray(b"".join(ENTRY.pack(key, 0, 0, 9) for key in (5, 6, 9, 5)))
        slots = bytearray(16)
        assert core.chain_entries(entries, slots, 1) == 2
        assert [row[3] for row in ENTRY.iter_unpack(entries)] == [0, 0, 1, 3]
        assert [slots[at] for at in (3, 7, 11, 15)] == [0, 4, 2, 0]
