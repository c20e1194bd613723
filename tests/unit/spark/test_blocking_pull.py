"""Pulling over a plain socket: from peers that answer like brokers, and from others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pull_peers import (
    COUNT,
    Replies,
    expected,
    found,
    in_order,
    matching,
    offset_of,
    peer,
    pull_of,
    pull_of_ranges,
    rows_in,
    rows_of,
    several,
)
from turbopump import Message, Producer
from turbopump.core import scan_records
from turbopump.spark.reading import blocking_pull, partition_reader, pull_responses
from turbopump.spark.reading.blocking_pull import BlockingPull
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.reading.partition_reader import PartitionReader, whole_table
from turbopump.spark.records.arrow_arrays import cells
from turbopump.spark.shared_session import shared_session
from turbopump.testing.cluster import BROKER
from turbopump.testing.server import RunningServer
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, Serialize, request
from turbopump.wire.framing import encode
from turbopump.wire.headers import PullMessage
from turbopump.wire.prepared_requests import pull_requests


def backwards(asked: list[Command]) -> list[bytes]:
    return in_order(asked)[::-1]


def cut_by_bytes(asked: list[Command]) -> list[bytes]:
    return [encode(found(each, bytes_max=1500)) for each in asked]


def cut_by_bytes_backwards(asked: list[Command]) -> list[bytes]:
    return cut_by_bytes(asked)[::-1]


def of_any_length(asked: list[Command]) -> list[bytes]:
    return [encode(found(each, Random(offset_of(each)).randint(1, 40))) for each in asked]


def of_any_length_backwards(asked: list[Command]) -> list[bytes]:
    return of_any_length(asked)[::-1]


def more_than_asked_for(asked: list[Command]) -> list[bytes]:
    return [encode(found(each, 40, is_generous=True)) for each in asked]


def in_binary(asked: list[Command]) -> list[bytes]:
    return [
        encode(Command(a.code, a.flag, a.opaque, ext_fields=a.ext_fields, body=a.body,
                       serialize=Serialize.ROCKETMQ))
        for a in map(found, asked)
    ]  # fmt: skip


@pytest.mark.parametrize("chunk_rows", [8192, 70, 1])
@pytest.mark.parametrize(
    ("replies", "options"),
    [
        (in_order, {}),
        (in_order, {"in_flight_max": 1}),
        (in_order, {"count_max": 3, "in_flight_max": 7}),
        (backwards, {"in_flight_max": 9}),
        (cut_by_bytes, {}),
        (cut_by_bytes_backwards, {"in_flight_max": 5}),
        (of_any_length, {}),
        (of_any_length_backwards, {"in_flight_max": 5}),
        (more_than_asked_for, {"count_max": 7}),
        (in_binary, {}),
    ],
)
def test_everything_is_read_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, replies: Replies, options: dict[str, Any], chunk_rows: int
) -> None:
    monkeypatch.setattr(blocking_pull, "CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr(blocking_pull, "ENOUGH_ROWS", 1 + chunk_rows // 2)
    with peer(replies) as connection:
        assert rows_of(pull_of(connection, 7, COUNT - 3, **options)) == expected(7, COUNT - 3)
        assert connection.is_usable(), "and everything requested has been read"


@pytest.mark.parametrize("replies", [in_order, backwards])
@pytest.mark.parametrize("piece_bytes", [3, 1000])
def test_frames_may_be_fragmented_and_larger_than_the_buffer(
    monkeypatch: pytest.MonkeyPatch, replies: Replies, piece_bytes: int
) -> None:
    monkeypatch.setattr(pull_responses, "BUFFER_BYTES", 300)
    with peer(replies, piece_bytes) as connection:
        assert rows_of(pull_of(connection, 0, 100, in_flight_max=3)) == expected(0, 100)


@pytest.mark.parametrize("chunk_rows", [8192, 70, 1])
@pytest.mark.parametrize(
    ("replies", "options"),
    [
        (in_order, {}),
        (in_order, {"in_flight_max": 1}),
        (in_order, {"count_max": 3, "in_flight_max": 7}),
        (backwards, {"in_flight_max": 9}),
        (cut_by_bytes_backwards, {"in_flight_max": 5}),
        (of_any_length, {"count_max": 40}),
    ],
)
def test_many_ranges_are_read_completely_and_in_order(
    monkeypatch: pytest.MonkeyPatch, replies: Replies, options: dict[str, Any], chunk_rows: int
) -> None:
    monkeypatch.setattr(blocking_pull, "CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr(blocking_pull, "ENOUGH_ROWS", 1 + chunk_rows // 2)
    with peer(replies) as connection:
        pull = pull_of_ranges(connection, several(), **options)
        assert rows_of(pull) == rows_in(several())
        assert pull.unread() == []


def test_small_ranges_are_requested_together_and_make_one_chunk() -> None:
    together: list[int] = []

    def replies(asked: list[Command]) -> list[bytes]:
        together.append(len(asked))
        return in_order(asked)

    ranges = [QueueRange("T", "a", 0, at, at + 2) for at in range(0, COUNT, 5)]
    with peer(replies) as connection:
        pull = pull_of_ranges(connection, ranges)
        chunk = pull.next_chunk()
        assert chunk is not None
        assert chunk.ranges == ranges
        assert max(together) == len(ranges)
        assert pull.next_chunk() is None
        pull.close()
        assert connection.is_usable()


def test_not_all_ranges_are_requested_ahead() -> None:
    waiting: list[int] = []

    def replies(asked: list[Command]) -> list[bytes]:
        waiting.append(len(asked))
        return in_order(asked)

    with peer(replies) as connection:
        assert rows_of(pull_of_ranges(connection, several(), in_flight_max=8)) == rows_in(several())
    assert max(waiting) <= 8


def test_an_unusual_response_leaves_its_range_and_later_ones_unread() -> None:
    def replies(asked: list[Command]) -> list[bytes]:
        return [
            frame
            for each in asked
            for frame in (other_code if offset_of(each) == 200 else lambda a: in_order([a]))(each)
        ]

    ranges = [QueueRange("T", "a", 0, at, at + 2) for at in range(100, 300, 10)]
    with peer(replies) as connection:
        pull = pull_of_ranges(connection, ranges)
        assert rows_of(pull) == rows_in(ranges[:10])
        assert pull.unread() == ranges[10:]
        assert not connection.is_open


def test_records_behind_a_range_are_left_out() -> None:
    def replies(asked: list[Command]) -> list[bytes]:
        return [encode(found(each, 3, is_generous=True)) for each in asked]

    ranges = [QueueRange("T", "a", 0, at, at + 2) for at in range(100, 300, 10)]
    with peer(replies) as connection:
        assert rows_of(pull_of_ranges(connection, ranges)) == rows_in(ranges)


def test_records_of_other_queues_are_not_accepted() -> None:
    ranges = [QueueRange("T", "a", 1, at, at + 2) for at in range(100, 300, 10)]
    with peer(in_order) as connection:
        pull = pull_of_ranges(connection, ranges)
        chunk = pull.next_chunk()
        assert chunk is not None
        assert whole_table(chunk) is None
        pull.close()


def other_code(asked: Command) -> list[bytes]:
    return [encode(asked.answer(ResponseCode.PULL_NOT_FOUND, remark="none"))]


def nothing_matched(asked: Command) -> list[bytes]:
    return [encode(matching(asked, COUNT + 1))]


def to_a_slave(asked: Command) -> list[bytes]:
    answer = found(asked)
    fields = {**(answer.ext_fields or {}), "suggestWhichBrokerId": "1"}
    return [encode(asked.answer(0, fields, body=answer.body))]


def test_suggestions_are_ignored_where_a_slave_is_read() -> None:
    def replies(asked: list[Command]) -> list[bytes]:
        return [frame for each in asked for frame in to_a_slave(each)]

    with peer(replies) as connection:
        pull = pull_of(connection, 0, COUNT, follows_suggestions=False)
        assert rows_of(pull) == expected(0, COUNT)
        assert rows_of(pull_of(connection, 0, COUNT)) == []


def nowhere(asked: Command) -> list[bytes]:
    fields = {**(found(asked).ext_fields or {}), "nextBeginOffset": "96"}
    return [encode(asked.answer(0, fields, body=b""))]


def without_fields(asked: Command) -> list[bytes]:
    return [encode(asked.answer(0, {}, body=b""))]


def unmatched(asked: Command) -> list[bytes]:
    return [encode(found(replace_opaque(asked, 12345)))]


def replace_opaque(command: Command, opaque: int) -> Command:
    return Command(command.code, opaque=opaque, ext_fields=command.ext_fields)


def a_request(_: Command) -> list[bytes]:
    return [encode(request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED))]


def garbage(_: Command) -> list[bytes]:
    return [b"\xff" * 100]


def half(asked: Command) -> list[bytes] | None:
    return [encode(found(asked))[:-5]]


def silence(_: Command) -> list[bytes]:
    return []


def close(_: Command) -> None:
    return None


@pytest.mark.parametrize(
    "unusual",
    [
        other_code,
        nothing_matched,
        to_a_slave,
        nowhere,
        without_fields,
        unmatched,
        a_request,
        garbage,
        close,
        # These take as long as the response timeout.
        pytest.param(half, marks=pytest.mark.slow),
        pytest.param(silence, marks=pytest.mark.slow),
    ],
)
def test_an_unusual_response_ends_the_read_after_the_last_good_one(
    unusual: Callable[[Command], list[bytes] | None],
) -> None:
    def replies(asked: list[Command]) -> list[bytes] | None:
        answers: list[bytes] = []
        for each in asked:
            if offset_of(each) < 96:
                answers += in_order([each])
            elif offset_of(each) == 96:
                answer = unusual(each)
                if answer is None:
                    return None
                return [*answers, *answer]
        return answers

    with peer(replies) as connection:
        timeout_ms = 500 if unusual in (half, silence) else 10_000
        pull = pull_of(connection, in_flight_max=2, timeout_ms=timeout_ms)
        assert rows_of(pull) == expected(0, 96)
        assert pull.next_chunk() is None, "it does not advance"
        assert not len(pull._pool)


def test_an_early_response_does_not_hide_an_unusual_one_before_it() -> None:
    def replies(asked: list[Command]) -> list[bytes]:
        answers = in_order(asked)
        if len(answers) < 3:
            return answers
        return [answers[0], answers[2], *other_code(asked[1])]

    with peer(replies) as connection:
        assert rows_of(pull_of(connection, in_flight_max=3)) == expected(0, 64)


def test_a_duplicate_response_is_unusual() -> None:
    def replies(asked: list[Command]) -> list[bytes]:
        first, *others = in_order(asked)
        return [*others, *others, first]

    with peer(replies) as connection:
        assert rows_of(pull_of(connection, in_flight_max=3)) == expected(0, 32)


class Signed:
    """A hook that signs each request with its parameters, and sees each response."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def before_request(self, address: str, command: Command) -> Command:
        fields = {**(command.ext_fields or {}), "signature": f"{address} {offset_of(command)}"}
        return msgspec.structs.replace(command, ext_fields=fields)

    def after_response(self, address: str, request: Command, response: Command) -> None:
        assert isinstance(response.body, bytes)
        self.seen.append((offset_of(request), len(response.body)))


def test_hooks_change_each_request_and_see_each_response() -> None:
    asked: list[int] = []

    def replies(commands: list[Command]) -> list[bytes]:
        for each in commands:
            asked.append(offset_of(each))
            assert (each.ext_fields or {})["signature"] == f"peer {asked[-1]}"
        return in_order(commands)

    hook = Signed()
    with peer(replies, hooks=[hook]) as connection:
        pull = pull_of_ranges(connection, several(), in_flight_max=8)
        assert rows_of(pull) == rows_in(several())
        assert connection.is_usable()
    assert sorted(offset for offset, _ in hook.seen) == sorted(asked)
    assert all(size > 0 for _, size in hook.seen)


# --- with a broker --------------------------------------------------------------------------------


@pytest.fixture
def direct_chunks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What has been read directly: where each chunk started and ended."""
    seen: list[tuple[int, int]] = []
    next_chunk = BlockingPull.next_chunk

    def noted(self: BlockingPull) -> blocking_pull.BufferedChunk | None:
        chunk = next_chunk(self)
        if chunk is not None:
            seen.append((chunk.ranges[0].start, chunk.ranges[-1].end))
        return chunk

    monkeypatch.setattr(BlockingPull, "next_chunk", noted)
    return seen


def filled(server: RunningServer, count: int = 400) -> PartitionReader:
    with Producer("pg", nameserver=server.nameserver) as producer:
        for start in range(0, count, 100):
            messages = [Message("T", b"%d" % n, keys=f"k{n}") for n in range(start, start + 100)]
            producer.send_batch(messages, to=lambda queues: queues[0])
    given = {"nameserver": server.nameserver, "topic": "T", "columns": "queueOffset,body,keys"}
    return PartitionReader(SourceOptions.for_batch(given))


WHOLE = (QueueRange("T", BROKER, 0, 0, 400),)


def bodies(reader: PartitionReader, partition: tuple[QueueRange, ...]) -> list[bytes]:
    return [body for batch in reader.read(partition) for body in cells(batch.column("body"))]


@pytest.mark.slow
def test_a_task_reads_directly_and_continues_when_the_connection_is_lost(
    turbopump_server: RunningServer,
    direct_chunks: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocking_pull, "CHUNK_ROWS", 64)
    monkeypatch.setattr(blocking_pull, "ENOUGH_ROWS", 32)
    reader = filled(turbopump_server)
    pulling = replace(reader.options.pulling, count_max=32, in_flight_max=2)
    reader.options = replace(reader.options, pulling=pulling)
    wanted = [b"%d" % n for n in range(400)]
    assert bodies(reader, WHOLE) == wanted
    assert direct_chunks[-1][1] == 400
    assert bodies(reader, WHOLE) == wanted, "over the pooled connection"

    direct_chunks.clear()
    found: list[bytes] = []
    for batch in reader.read(WHOLE):
        found += cells(batch.column("body"))
        if len(found) < 100:
            turbopump_server.cut()
    assert found == wanted
    assert direct_chunks[-1][1] < 400, "the rest was read by the retrying pull"

    beginning = reader.read(WHOLE)
    next(beginning)
    beginning.close()  # type: ignore[attr-defined]
    pool = shared_session(reader.options.client).session.blocking_pool()
    assert not len(pool), "it has requests in flight"


@pytest.mark.slow
def test_large_responses_are_requested(
    turbopump_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def noted(header: PullMessage) -> object:
        frame = pull_requests(header).frame

        def note(opaque: int, queue: int, offset: int, count: int) -> bytes:
            asked.append(offset)
            return frame(opaque, queue, offset, count)

        return SimpleNamespace(frame=note)

    monkeypatch.setattr(blocking_pull, "pull_requests", noted)
    assert len(bodies(filled(turbopump_server), WHOLE)) == 400
    assert asked == [0], "and not one request for each 32"


def leave_to_the_retrying_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all direct chunks look damaged."""

    def damaged(data: memoryview, spans: Sequence[tuple[int, int]] | None = None) -> object:
        table, damaged_at = scan_records(data, spans)
        return table, damaged_at if spans is None else 0

    monkeypatch.setattr(partition_reader, "scan_records", damaged)


@pytest.mark.slow
def test_damaged_and_missing_messages_are_left_to_the_retrying_pull(
    turbopump_server: RunningServer,
    direct_chunks: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = filled(turbopump_server)
    leave_to_the_retrying_pull(monkeypatch)
    assert len(bodies(reader, WHOLE)) == 400
    assert direct_chunks


@pytest.mark.slow
def test_many_ranges_of_several_topics_make_few_batches(
    turbopump_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = filled(turbopump_server)
    with Producer("pg", nameserver=turbopump_server.nameserver) as producer:
        messages = [Message("U", b"u%d" % n) for n in range(50)]
        producer.send_batch(messages, to=lambda queues: queues[1])
    ranges = (
        *(QueueRange("T", BROKER, 0, at, at + 3) for at in range(0, 300, 3)),
        *(QueueRange("U", BROKER, 1, at, at + 1) for at in range(50)),
    )
    wanted = [b"%d" % n for n in range(300)] + [b"u%d" % n for n in range(50)]
    batches = list(reader.read(ranges))
    assert [body for batch in batches for body in cells(batch.column("body"))] == wanted
    assert len(batches) == 1

    leave_to_the_retrying_pull(monkeypatch)
    assert bodies(reader, ranges) == wanted, "and one by one"
