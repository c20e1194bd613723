"""Both cores find, read and encode the same records, whatever the input."""

from __future__ import annotations

import json
import pickle
from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_messages import BODIES, HOSTS, INTS, LONGS, MESSAGES, NAMES, TEXTS, TOPICS
from cores import BUFFERS, VERSIONS, attributes, exact, mutated, needs_both, outcome
from turbopump.core import reference
from turbopump.errors import InvalidArgument
from vectors import case, load, logs

WIDE = st.one_of(INTS, INTS, st.integers(-(2**64), 2**64))
ODD_HOSTS = st.one_of(HOSTS, st.binary(max_size=21))
ODD_MESSAGES = st.one_of(
    MESSAGES,
    st.tuples(TOPICS, WIDE, BODIES, TEXTS, WIDE, WIDE, WIDE, ODD_HOSTS, ODD_HOSTS, WIDE, WIDE),
)


def batch_of(entries: list[tuple[bytes, bytes, int]]) -> bytes:
    return b"".join(
        (22 + len(body) + len(text)).to_bytes(4, "big")
        + bytes(8)
        + (flag & 0xFFFF_FFFF).to_bytes(4, "big")
        + len(body).to_bytes(4, "big")
        + body
        + len(text).to_bytes(2, "big")
        + text
        for body, text, flag in entries
    )


BATCHES = st.lists(st.tuples(BODIES, TEXTS, INTS), max_size=5).map(batch_of)


CLUSTER = b"CLUSTER\x01c"


HOST = bytes(8)


def sent(
    core: Any, queue: int, sys_flag: int, born: int, flag: int, text: bytes | None, body: bytes
) -> Any:
    """Return a producer's request as a broker reads it; None if it cannot be sent."""
    fields: dict[str, Any] = {"a": "group", "b": "topic", "c": "TBW102", "d": 4, "e": queue}
    fields |= {"f": sys_flag, "g": born, "h": flag}
    try:
        fields |= {} if text is None else {"i": text.decode()}
    except UnicodeDecodeError:
        return None
    members = {"code": 310, "extFields": {name: str(each) for name, each in fields.items()}}
    header = json.dumps(members, separators=(",", ":"), ensure_ascii=len(body) % 2 == 0).encode()
    start = (4 + len(header) + len(body)).to_bytes(4, "big") + len(header).to_bytes(4, "big")
    (frame,) = core.FrameDecoder(typed_requests=True).feed(start + header + body)
    return frame if isinstance(frame, core.SendFrame) else None


def filled(
    core: Any, messages: list[tuple[Any, ...]], batches: list[bytes], buffer: Any = bytes
) -> tuple[Any, list[Any]]:
    """Return a block of everything that is not refused, and the outcomes of adding it."""
    block = core.Block(4096, 1500)
    results: list[Any] = []
    for topic, queue, body, text, flag, sys_flag, born, host, store, again, prepared in messages:
        rest = text, flag, sys_flag, born, host, store, again, prepared
        results.append(outcome(block.add, topic, queue, buffer(body), *rest))
        send = sent(core, queue, sys_flag, born, flag, text or None, body)
        # Which queue is chosen is not the producer's decision alone.
        if send is not None and -(2**31) <= queue < 2**31:
            hosts = CLUSTER, host, store
            results.append(outcome(block.add_send, send, topic, queue, 1, *hosts))
        common = text, sys_flag, born, host, store, again, 4
        results += [
            outcome(block.add_batch, topic, queue, buffer(data), *common) for data in batches
        ]
        results.append((block.size, len(block), block.queues))
    return block, results


def placed(block: Any, position: int, now_ms: int) -> tuple[Any, ...]:
    offsets = list(range(5, 5 + len(block.queues)))
    fitting = block.fitting(0, 900)
    too_early = outcome(block.place, fitting + 1, 1, position, offsets, now_ms)
    first = bytes(block.place(0, fitting, position, offsets, now_ms))
    again = outcome(block.place, 0, max(1, fitting), position, offsets, now_ms) if fitting else 0
    rest = bytes(block.place(fitting, len(block), position + 5000, offsets, now_ms + 1))
    groups = [
        (block.positions(n), block.queue_offset(n), block.group_size(n)) for n in range(len(block))
    ]
    beyond = [
        outcome(method, len(block))
        for method in (block.positions, block.queue_offset, block.group_size)
    ]
    sizes = block.queues, block.size, len(block)
    return first, rest, offsets, groups, sizes, too_early, again, beyond


LIMITS = (-(2**63), -(2**63) + 200, -1, 0, 1000, 1400, 10**6, 2**63 - 200, 2**63 - 1)


def summary(records: Any) -> tuple[Any, ...]:
    """Return all that is known of records."""
    count = len(records)
    queues = [
        (topic, queue, attributes(list(some)), some.follow(some[0].queue_offset), some.units())
        for topic, queue, some in records.by_queue()
    ]
    ends = [
        (each.end, each.end_at, each.newest_ms, each.physical_offset, each.store_timestamp_ms)
        for each in (records, records[1:], records[: count // 2])
        if len(each)
    ]
    numbers = [
        records.positions(), records.sizes(), records.queue_offsets(),
        records.store_timestamps_ms(), records.tags_codes(), *records.keys(),
    ]  # fmt: skip
    return (
        attributes(list(records)),
        queues,
        ends,
        [(column.typecode, column) for column in numbers],
        records.units(range(count)),
        outcome(records.units, [2**63 - 1, -(2**63)][:count]) if count <= 2 else None,
        [records.properties(number) for number in range(count)],
        [records.count_before(end) for end in LIMITS],
        [records.follow(offset) for offset in LIMITS],
        [attributes(outcome(records.__getitem__, at)) for at in (count, -1, -count, -count - 1)],
        outcome(records.properties, count),
        attributes(list(records[-2:])),
    )


def found(core: Any, data: Any, *place: Any, **options: Any) -> Any:
    return summary(core.find_records(data, *place, **options))


def same(*results: Any) -> Any:
    """Demand that both versions have the same result, and return it."""
    assert all(result == results[0] for result in results)
    return results[0]


@needs_both
@given(
    st.lists(ODD_MESSAGES, max_size=5),
    st.lists(BATCHES.flatmap(mutated), max_size=2),
    st.integers(0, 2**62),
    LONGS,
    BUFFERS,
)
def test_blocks_are_the_same(
    messages: Any, batches: list[bytes], position: int, now_ms: int, buffer: Any
) -> None:
    results = [filled(core, messages, batches, buffer) for core in VERSIONS]
    same(*(added for _, added in results))
    now_ms = min(now_ms, 2**63 - 2)
    same(*(placed(block, position, now_ms) for block, _ in results))


def stored(messages: list[tuple[Any, ...]], position: int) -> bytes:
    block, _ = filled(reference, messages, [])
    return bytes(block.place(0, len(block), position, [0] * len(block.queues), 1_700_000_000_000))


STORED = st.lists(MESSAGES, max_size=6).map(lambda some: stored(some, 1000)).flatmap(mutated)
PLACES = st.one_of(st.sampled_from([0, 0, 0, -1, -(2**63), 2**63 - 1]), st.integers(-3, 300))
OPTIONS = st.fixed_dictionaries(
    {
        "check_crc": st.booleans(),
        "stop_at_zero": st.booleans(),
        "count_max": st.sampled_from([0, 1, 3, 8, -1, 2**31 - 1]),
    }
)
BASES = st.sampled_from([1000, 1000, None, 7, -(2**63), 2**63 - 1])


@needs_both
@given(STORED, BASES, OPTIONS, PLACES, BUFFERS)
def test_found_records_are_the_same(
    data: bytes, base: int | None, options: dict[str, Any], at: int, buffer: Any
) -> None:
    for place, end in ((0, len(data)), (0, len(data) + 100), (at, len(data) // 2), (at, 2**63 - 1)):
        same(*(found(core, buffer(data), place, end, base, **options) for core in VERSIONS))


def check_read(data: bytes, places: tuple[int, ...], buffer: Any, *, check_crc: bool) -> None:
    """Demand that both versions read the same, one by one and all together."""
    same(*(attributes(core.read_records(buffer(data), check_crc=check_crc)) for core in VERSIONS))
    for at in places:
        for name in ("read_record", "read_entry"):
            same(
                *(
                    attributes(outcome(getattr(core, name), buffer(data), at, check_crc=check_crc))
                    for core in VERSIONS
                )
            )


@needs_both
@given(STORED, st.booleans(), PLACES, BUFFERS)
def test_records_that_are_read_are_the_same(
    data: bytes, check_crc: bool, at: int, buffer: Any
) -> None:
    check_read(data, (0, at), buffer, check_crc=check_crc)


def test_records_of_a_kind_are_pickled() -> None:
    data = stored([(b"t", 1, b"body", b"a\x01b", 0, 0, 5, HOST, HOST, 0, 0)], 0)
    for core in VERSIONS:
        record = core.read_record(data)
        names = ("size", "topic", "stored_body", "stored_properties")
        arguments = record.__reduce__()[1]
        again = core.StoredRecord(*arguments)
        assert attributes(again) == attributes(record)
        assert [getattr(again, name) for name in names] == [99, "t", b"body", b"a\x01b"]
        if core is not VERSIONS[-1] or core is reference:
            assert attributes(pickle.loads(pickle.dumps(record))) == attributes(record)


# --- recorded data --------------------------------------------------------------------------------


def test_recorded_records() -> None:
    for each in load("codecs.json")["records"]:
        data = bytes.fromhex(each["hex"])
        with case(each["topic"]):
            for core in VERSIONS:
                record = core.read_record(exact(data), check_crc=True)
                assert record.topic == each["topic"]
                assert record.body_length == len(record.stored_body)
                assert record.queue_offset == each["queueOffset"]
                assert record.physical_offset == each["physicalOffset"]


def test_recorded_batches() -> None:
    for each in load("codecs.json")["batches"]:
        for core in VERSIONS:
            block = core.Block(4096, 4096)
            data = exact(bytes.fromhex(each["hex"]))
            assert block.add_batch(b"T", 0, data, b"", 0, 0, HOST, HOST) == len(each["messages"])


def test_recorded_logs() -> None:
    count = 0
    for position, data in logs():
        results = [
            found(core, exact(data), 0, len(data), position, check_crc=True) for core in VERSIONS
        ]
        count += len(same(*results)[0])
    assert count > 500


def windows() -> list[bytes]:
    """Return a few records each, as they are in the recorded logs."""
    pieces = []
    for position, data in logs():
        records = reference.find_records(data, 0, len(data), position)
        edges = [record.physical_offset - position for record in records]
        pieces += [data[start:end] for start, end in pairwise(edges[::3])]
    return pieces


WINDOWS = windows()


@needs_both
@given(st.sampled_from(WINDOWS).flatmap(mutated), OPTIONS, st.booleans(), BUFFERS)
def test_damaged_recorded_records(
    data: bytes, options: dict[str, Any], check_crc: bool, buffer: Any
) -> None:
    same(*(found(core, buffer(data), 0, len(data), None, **options) for core in VERSIONS))
    check_read(data, (0,), buffer, check_crc=check_crc)


RECORDED_BATCHES = [bytes.fromhex(each["hex"]) for each in load("codecs.json")["batches"]]


@needs_both
@given(st.sampled_from(RECORDED_BATCHES).flatmap(mutated), TEXTS, BUFFERS)
def test_damaged_recorded_batches(data: bytes, shared: bytes, buffer: Any) -> None:
    results = []
    for core in VERSIONS:
        block = core.Block(4096, 4096)
        added = outcome(block.add_batch, b"T", 0, buffer(data), shared, 0, 0, HOST, HOST)
        results.append((added, placed(block, 0, 0)))
    same(*results)


@needs_both
@pytest.mark.slow
def test_a_record_that_ends_anywhere() -> None:
    """Truncated at every byte, and with every length at its limits."""
    data = WINDOWS[0]
    records = reference.read_records(data)[0]
    record = data[: records[0].size]
    lengths = (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\0")
    damaged = [record[:end] for end in range(len(record))]
    for at in range(len(record)):
        damaged += [record[:at] + each + record[at + 4 :] for each in lengths]
        damaged += [record[:at] + each[:2] + record[at + 2 :] for each in lengths]
    for each in damaged:
        with case(each.hex()):
            same(*(found(core, exact(each), 0, len(each), None) for core in VERSIONS))
            check_read(each, (0,), exact, check_crc=False)


# --- properties -----------------------------------------------------------------------------------


def test_recorded_properties() -> None:
    for each in load("codecs.json")["propertiesDecode"]:
        if each["text"] is not None:
            for core in VERSIONS:
                assert core.parse_properties(each["text"].encode()) == each["properties"]


@needs_both
@given(TEXTS, NAMES)
def test_properties_are_the_same(text: bytes, name: str) -> None:
    same(
        *(
            (
                core.property_value(text, name.encode()),
                core.pop_property(text, name.encode()),
                core.parse_properties(text),
                list(core.parse_properties(text)),
                core.is_topic_name(text),
            )
            for core in VERSIONS
        )
    )


# --- single cases ---------------------------------------------------------------------------------


@needs_both
def test_many_queues_are_told_apart() -> None:
    messages = [
        (b"t%d" % (number % 7), number % 31, b"", b"", 0, 0, 0, HOST, HOST, 0, 0)
        for number in range(2000)
    ]
    block = reference.Block(4096, 1500)
    for message in messages:
        block.add(*message)
    data = block.place(0, len(block), 1000, [0] * len(block.queues), 5)
    expected = same(*(found(core, data, 0, len(data), 1000) for core in VERSIONS))
    assert len(expected[1]) == 7 * 31


@pytest.mark.parametrize("core", VERSIONS)
def test_what_is_refused_leaves_the_block_unchanged(core: Any) -> None:
    block = core.Block(300, 500)
    block.add(b"t", 0, b"1", b"", 0, 0, 0, HOST, HOST)
    before = block.size, len(block), block.queues
    with pytest.raises(InvalidArgument, match="a message must be at most 300 bytes, got"):
        block.add(b"u", 0, bytes(400), b"", 0, 0, 0, HOST, HOST)
    with pytest.raises(InvalidArgument, match="must be able to name a directory"):
        block.add(b"../x", 0, b"1", b"", 0, 0, 0, HOST, HOST)
    with pytest.raises(InvalidArgument, match="must not be negative"):
        block.add(b"t", -1, b"1", b"", 0, 0, 0, HOST, HOST)
    with pytest.raises(InvalidArgument, match="a zero byte"):
        block.add(b"u", 0, b"", b"a\x01\0", 0, 0, 0, HOST, HOST)
    with pytest.raises(InvalidArgument, match="a batch must be at most 500 bytes"):
        block.add_batch(b"u", 0, batch_of([(b"1", b"", 0)] * 9), b"", 0, 0, HOST, HOST)
    assert (block.size, len(block), block.queues) == before
    delayed = sent(core, 0, 0, 0, 0, b"DELAY\x013", b"")
    assert block.add_send(delayed, b"t", 0, 0, CLUSTER, HOST, HOST) is None
    assert block.place(0, 1, 0, [7], 0)[20:28] == (7).to_bytes(8, "big")
    assert block.positions(0) == array("q", [0])


@pytest.mark.parametrize("core", VERSIONS)
def test_a_send_without_properties_is_added(core: Any) -> None:
    block = core.Block(300, 500)
    bare = sent(core, 0, 0, 0, 0, None, b"body")
    assert bare.properties == b""
    assert block.add_send(bare, b"t", 0, 0, CLUSTER, HOST, HOST) is True
    entry = core.read_entry(block.place(0, 1, 0, [0], 0))
    assert entry.properties == CLUSTER


@pytest.mark.parametrize("core", VERSIONS)
def test_too_few_offsets_are_an_error(core: Any) -> None:
    block = core.Block(300, 500)
    block.add(b"t", 0, b"1", b"", 0, 0, 0, HOST, HOST)
    with pytest.raises(IndexError):
        block.place(0, 1, 0, [], 0)
    assert block.place(0, 1, 0, [7], 0)[20:28] == (7).to_bytes(8, "big")


@needs_both
def test_none_is_no_text() -> None:
    """Pointers into None would lead anywhere."""
    core = VERSIONS[1]
    block = core.Block(300, 500)
    message = (b"t", 0, b"1", b"", 0, 0, 0, HOST, HOST)
    for place in (0, 2, 3, 7, 8):
        with pytest.raises(TypeError):
            block.add(*(None if at == place else each for at, each in enumerate(message)))
    send = sent(core, 0, 0, 0, 0, None, b"body")
    for place in (0, 3, 4, 5):
        some = (b"t", 0, 0, CLUSTER, HOST, HOST)
        with pytest.raises(TypeError):
            block.add_send(send, *(None if at == place else each for at, each in enumerate(some)))
    for function, arguments in (
        (block.place, (0, 1, 0, None, 0)),
        (core.property_value, (None, b"")),
        (core.property_value, (b"", None)),
        (core.pop_property, (None, b"")),
        (core.parse_properties, (None,)),
        (core.SendResponses({}, bytes(4), 0).frames, ([None], [0], [0], [0])),
    ):
        with pytest.raises(TypeError):
            function(*arguments)
    data = stored([(*message, 0, 0)], 0)
    with pytest.raises(TypeError):
        core.read_record(data, kind=type(None))
