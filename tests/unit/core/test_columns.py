"""Both cores return the same columns of stored records, whatever the input."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_messages import MESSAGES, stored_messages
from cores import BUFFERS, both, mutated, outcome
from turbopump.core import reference

NAMES = ("TAGS", "KEYS", "UNIQ_KEY", "x", "none")
SPANS = st.lists(st.integers(0, 1500), max_size=6).map(
    lambda ends: list(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


def columns(table: Any) -> list[Any]:
    count = len(table)
    return [
        table.spans(), table.starts(), table.sizes(), table.queue_ids(), table.queue_offsets(),
        table.physical_offsets(), table.sys_flags(), table.store_times_ms(),
        table.reconsume_times(), table.born_times(), table.store_times(), table.compressed(),
        table.damaged_bodies(), table.topics(), table.born_hosts(), table.store_hosts(),
        table.bodies({}), table.bodies({0: b"other", 1: None}), table.offset_ids(),
        table.message_ids(), table.properties(), *map(table.property_values, NAMES),
        [(table.record(row), table.body(row), table.text(row)) for row in range(count)],
    ]  # fmt: skip


def with_two_byte_topics(data: bytes) -> bytes:
    """Return every second record as release 5 stores it."""
    found, _ = reference.scan_records(data)
    parts = []
    for row in range(len(found)):
        record, text = found.record(row), found.text(row)
        ((topic,), _) = found[row : row + 1].topics()
        tail = len(topic) + 2 + len(text)
        if row % 2:
            head = (len(record) + 1).to_bytes(4, "big") + b"\xda\xa3\x20\xab"
            record = head + record[8 : -tail - 1] + b"\0" + record[-tail - 1 :]
        parts.append(record)
    return b"".join(parts)


DATA = (
    st.lists(MESSAGES, max_size=6)
    .map(stored_messages)
    .flatmap(lambda data: st.sampled_from([data, with_two_byte_topics(data)]))
    .flatmap(mutated)
)


@given(
    DATA, st.none() | SPANS, st.lists(st.booleans(), min_size=12, max_size=12), BUFFERS, st.data()
)
def test_columns_are_the_same(
    data: bytes, spans: Any, choices: list[bool], buffer: Any, drawn: st.DataObject
) -> None:
    plain, compiled = both()
    expected, damaged_at = plain.scan_records(buffer(data), spans)
    found, own_damaged_at = compiled.scan_records(buffer(data), spans)
    assert own_damaged_at == damaged_at
    assert columns(found) == columns(expected)
    count = len(expected)
    mask = bytes(choices[:count]).ljust(count, b"\1")
    first = drawn.draw(st.integers(0, count))
    wanted = [(first, 30)] * (len(spans or ()) + 1)
    for some, own in (
        (expected[first:], found[first:]),
        (expected[:-1], found[:-1]),
        (expected.where(mask), found.where(mask)),
        (expected.between(wanted), found.between(wanted)),
        (expected.where(mask)[1:], found.where(mask)[1:]),
    ):
        assert columns(own) == columns(some)


@pytest.mark.parametrize("spans", [[(5, 2)], [(-1, 3)]])
def test_parts_outside_the_buffer_are_rejected(spans: list[tuple[int, int]]) -> None:
    plain, compiled = both()
    assert outcome(lambda: compiled.scan_records(b"", spans)) == outcome(
        lambda: plain.scan_records(b"", spans)
    )
    assert compiled.scan_records(b"", [(0, 1)])[1] == plain.scan_records(b"", [(0, 1)])[1] == 0


def test_names_given_twice_count_once() -> None:
    message = [b"T", 0, b"", b"", 0, 0, 0, bytes(8), bytes(8), 0, 0]
    few = b"a\x01x\x02b\x01y\x02a\x01z\x02"
    many = b"".join(b"name%d\x01v\x02" % number for number in range(60)) + b"name7\x01last"
    data = stored_messages([(*message[:3], text, *message[4:]) for text in (few, many)], 16384)
    for core in both():
        table, damaged_at = core.scan_records(data)
        assert (len(table), damaged_at) == (2, None)
        firsts, names, values = table.properties()
        assert list(firsts) == [0, 2, 62]
        assert names.data.startswith(b"baname0")
        assert names.data.endswith(b"name59name7")
        assert values.data == b"yz" + b"v" * 59 + b"last"
