"""Both cores take the same messages of units, and no others, whatever the input."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cores import both, exact, outcome
from turbopump.core import reference

UNIT = struct.Struct(">qiq")
TOPIC = b"T"
STORED_TOPIC = b"\x01T"
BASES = st.sampled_from([0, 4096, 2**62])
LIMITS = st.builds(
    reference.UnitLimits,
    st.sampled_from([0, 300, 4500, 2**62]),
    st.sampled_from([0, 300, 2000]),
    st.integers(0, 8),
    st.sampled_from([0, 300, 2000]),
    st.integers(0, 8),
)
HOSTS = st.sampled_from([bytes(8), bytes(20)])
MESSAGES = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.sampled_from([b"", b"TAGS\x01a", b"TAGS\x01b\x02K\x01v"]),
        HOSTS,
        HOSTS,
        st.sampled_from([TOPIC] * 9 + [b"U"]),
        st.sampled_from([3] * 9 + [4]),
    ),
    max_size=8,
)
ODD = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-200, 5000))
CHANGES = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from(["position", "size", "code"]), ODD), max_size=2
)
DAMAGES = st.lists(st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=8)), max_size=2)


def log_of(messages: list[Any], base: int, damages: list[tuple[int, bytes]]) -> tuple[bytes, bytes]:
    """Return records and the units of them all."""
    block = reference.Block(4096, 4096)
    for body_bytes, text, born, store, topic, queue_id in messages:
        block.add(topic, queue_id, bytes(body_bytes), text, 0, 0, 1, born, store)
    block.place(0, len(block), base, [7] * len(block.queues), 5)
    data = bytearray(block.place(len(block), 0, base, [], 0).obj)
    records = reference.find_records(data, 0, len(data), base)
    units = records.units()
    for at, damage in damages:
        data[at : at + len(damage)] = damage if at + len(damage) <= len(data) else b""
    return bytes(data), units


def changed(units: bytes, changes: list[tuple[int, str, int]]) -> bytes:
    rows = [list(row) for row in UNIT.iter_unpack(units)]
    for number, field, value in changes:
        if number < len(rows):
            at = ["position", "size", "code"].index(field)
            rows[number][at] = (value + 2**31) % 2**32 - 2**31 if field == "size" else value
    return b"".join(UNIT.pack(*row) for row in rows)


@given(
    MESSAGES,
    BASES,
    DAMAGES,
    CHANGES,
    LIMITS,
    st.booleans(),
    st.sampled_from([None, (), (97,), (97, 98), (0, 97, -1)]),
    st.one_of(st.none(), st.binary(min_size=8, max_size=8)),
    st.sampled_from([None, b"TAGS\x01a", b""]),
    st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 300), st.integers(0, 100)),
)
def test_both_take_the_same_messages(
    messages: list[Any],
    base: int,
    damages: list[tuple[int, bytes]],
    changes: list[tuple[int, str, int]],
    limits: reference.UnitLimits,
    is_shifted: bool,
    codes: tuple[int, ...] | None,
    mask: bytes | None,
    text: bytes | None,
    numbers: tuple[int, int, int, int],
) -> None:
    data, units = log_of(messages, base, damages)
    units = changed(units, changes)
    first, taken, taken_bytes, cost_max = numbers
    options: dict[str, Any] = {
        "is_shifted": is_shifted,
        "codes": None if codes is None else frozenset(codes),
        "mask": mask,
        "accepts": None if text is None else lambda given: given == text,
        "accept_cost": 10,
        "cost_max": cost_max,
        "taken": taken,
        "taken_bytes": taken_bytes,
    }

    def run(core: Any) -> Any:
        view = exact(data)
        return core.take_units(units, first, view, base, STORED_TOPIC, 3, 7, limits, **options)

    plain, compiled = (outcome(partial(run, core)) for core in both())
    assert plain == compiled
    assert sum(plain.sizes) == sum(map(len, plain.pieces))
    times = [
        core.unit_times(
            units, memoryview(data), base, STORED_TOPIC, [3] * count, range(7, 7 + count)
        )
        for core in both()
        for count in (len(units) // UNIT.size,)
    ]
    assert times[0] == times[1]


def test_all_messages_are_taken_in_one_piece() -> None:
    for core in both():
        data, units = log_of([(20, b"TAGS\x01a", bytes(8), bytes(20), TOPIC, 3)] * 5, 4096, [])
        limits = core.UnitLimits(0, 10_000, 4, 0, 0)
        view = memoryview(data)
        taken = core.take_units(units, 0, view, 4096, STORED_TOPIC, 3, 7, limits)
        size = len(data) // 5
        assert taken == (4, False, [7, 8, 9, 10], [size] * 4, [view[: 4 * size]], 0)
        none = core.take_units(units, 0, view, 4096, STORED_TOPIC, 3, 8, limits)
        assert none == (0, True, [], [], [], 0)
        assert (
            list(core.unit_times(units, view, 4096, STORED_TOPIC, [3] * 5, range(7, 12))) == [5] * 5
        )
