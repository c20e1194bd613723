"""Pulling filtered messages over a plain socket: gaps, overlaps, empty responses."""

from __future__ import annotations

from typing import Any

import pytest

from pull_peers import COUNT, matching, peer, pull_of, pull_of_ranges, rows_in, rows_of, several
from turbopump import Message, Producer
from turbopump.spark.reading import blocking_pull
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.reading.partition_reader import PartitionReader
from turbopump.spark.reading.retrying_pull import RetryingPull
from turbopump.spark.records.arrow_arrays import cells
from turbopump.testing.cluster import BROKER
from turbopump.testing.server import RunningServer
from turbopump.wire.command import Command
from turbopump.wire.framing import encode

FILTERED: dict[str, Any] = {"tags": frozenset({"t"})}


@pytest.mark.parametrize("chunk_rows", [8192, 70, 1])
@pytest.mark.parametrize("every", [1, 3, 97, COUNT + 1])
@pytest.mark.parametrize(
    "options", [{}, {"in_flight_max": 1}, {"count_max": 5, "in_flight_max": 7}]
)
@pytest.mark.parametrize("is_in_order", [True, False])
def test_matches_are_read_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    options: dict[str, Any],
    chunk_rows: int,
    *,
    is_in_order: bool,
) -> None:
    monkeypatch.setattr(blocking_pull, "CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr(blocking_pull, "ENOUGH_ROWS", 1 + chunk_rows // 2)

    def replies(asked: list[Command]) -> list[bytes]:
        frames = [encode(matching(each, every)) for each in asked]
        return frames if is_in_order else frames[::-1]

    ranges = [*several(), QueueRange("T", "a", 0, 7, COUNT - 3), *several(5)]
    with peer(replies) as connection:
        pull = pull_of_ranges(connection, ranges, **FILTERED, **options)
        assert rows_of(pull) == [row for row in rows_in(ranges) if not row[0] % every]
        assert pull.unread() == []
        assert connection.is_usable()


def test_small_filtered_ranges_are_requested_together_and_make_one_chunk() -> None:
    together: list[int] = []

    def replies(asked: list[Command]) -> list[bytes]:
        together.append(len(asked))
        return [encode(matching(each, 20)) for each in asked]

    ranges = [QueueRange("T", "a", 0, at, at + 2) for at in range(0, COUNT, 5)]
    with peer(replies) as connection:
        pull = pull_of_ranges(connection, ranges, **FILTERED)
        chunk = pull.next_chunk()
        assert chunk is not None
        assert chunk.ranges == ranges
        assert max(together) == len(ranges)
        assert pull.next_chunk() is None
        pull.close()


def test_messages_that_a_filtered_pull_finds_deleted_are_unusual() -> None:
    def replies(asked: list[Command]) -> list[bytes]:
        return [encode(matching(each, COUNT + 1, min_offset=90)) for each in asked]

    with peer(replies) as connection:
        pull = pull_of(connection, 100, 120, **FILTERED)
        assert (rows_of(pull), pull.unread()) == ([], [])
    with peer(replies) as connection:
        pull = pull_of(connection, 80, 120, **FILTERED)
        assert (rows_of(pull), pull.unread()) == ([], [QueueRange("T", "a", 0, 80, 120)])


@pytest.mark.parametrize("remark", ["MESSAGE_WAS_REMOVING", "MESSAGE_DAMAGED"])
def test_messages_that_the_broker_cannot_read_are_unusual(remark: str) -> None:
    def replies(asked: list[Command]) -> list[bytes]:
        return [encode(matching(each, COUNT + 1, remark=remark)) for each in asked]

    with peer(replies) as connection:
        pull = pull_of(connection, 100, 120, **FILTERED)
        assert (rows_of(pull), pull.unread()) == ([], [QueueRange("T", "a", 0, 100, 120)])


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"tags": "even"}, {"sql": "TAGS = 'even'"}])
def test_many_filtered_ranges_make_one_batch(
    turbopump_server: RunningServer, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    with Producer("pg", nameserver=turbopump_server.nameserver) as producer:
        messages = [Message("T", b"%d" % n, tags="odd" if n % 2 else "even") for n in range(400)]
        producer.send_batch(messages, to=lambda queues: queues[0])
    options = {"nameserver": turbopump_server.nameserver, "topic": "T", "columns": "body"}
    reader = PartitionReader(SourceOptions.for_batch({**options, **given}))
    ranges = tuple(QueueRange("T", BROKER, 0, at, at + 3) for at in range(0, 300, 3))
    wanted = [b"%d" % n for n in range(0, 300, 2)]
    monkeypatch.setattr(RetryingPull, "next_chunk", None)
    batches = list(reader.read(ranges))
    assert [body for batch in batches for body in cells(batch.column("body"))] == wanted
    assert len(batches) == 1
