"""Records that cannot be decoded: found, described, and handled as the option says."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import stored_rows
from stored_messages import stored as stored_in
from stored_rows import plain, stored
from turbopump.admin import Admin
from turbopump.client.blocking import Producer
from turbopump.client.calls import FoundRecords, RecordsOutcome
from turbopump.errors import DamagedMessage, InvalidArgument, SparkError
from turbopump.message import Message
from turbopump.spark.reading import partition_reader
from turbopump.spark.reading.dead_letters import DeadLetterTopic, letter_key
from turbopump.spark.reading.options import SourceOptions, columns_of
from turbopump.spark.reading.partition_planner import QueueRange
from turbopump.spark.reading.partition_reader import PartitionReader
from turbopump.spark.reading.retrying_pull import RetryingPull
from turbopump.spark.records import record_columns
from turbopump.spark.records.bad_records import BadRecord, BadRecords, OnBadRecord
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.spark.records.schema import COLUMNS
from turbopump.spark.stream_counts import counted_options
from turbopump.testing.cluster import BROKER
from turbopump.testing.server import RunningServer
from turbopump.wire.compression import deflate
from turbopump.wire.record import decode_record
from turbopump.wire.sysflag import Compression, with_compression

ZLIB = with_compression(0, Compression.ZLIB)
SHOWN = ("queueOffset", "body", "topic", "decodeError")
SERVER = {"nameserver": "127.0.0.1:9876", "topic": "orders"}


def damaged(record: bytes) -> bytes:
    return record[:88] + bytes([record[88] ^ 0x55]) + record[89:]


def some() -> bytes:
    """Five records: 1 has another body, 2 does not inflate, 3 has a topic that is not UTF-8."""
    inflating = plain(deflate(b"large" * 100, Compression.ZLIB), sys_flag=ZLIB)
    records = [
        stored(inflating, 0),
        damaged(stored(plain(b"one"), 1)),
        stored(plain(b"two", sys_flag=ZLIB), 2),
        stored(plain(b"three", topic=b"\xff"), 3),
        stored(plain(b"four"), 4),
    ]
    return b"".join(records)


def decoded(bad: BadRecords, columns: Sequence[str] = SHOWN) -> list[dict[str, Any]]:
    made = RecordColumns(columns, bad=bad)
    return [row for batch in stored_rows.decoded(made, some()) for row in batch.to_pylist()]


@pytest.mark.parametrize("bytes_max", [1, 1 << 20])
def test_rows_of_bad_records_have_what_can_be_decoded(
    bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_columns, "BATCH_BYTES", bytes_max)
    rows = decoded(BadRecords(OnBadRecord.NULL, keeps_rows=True))
    assert [row["queueOffset"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["body"] for row in rows] == [b"large" * 100, None, None, None, b"four"]
    assert [row["topic"] for row in rows] == ["T", "T", "T", "\N{REPLACEMENT CHARACTER}", "T"]
    reasons = [row["decodeError"] or "" for row in rows]
    for reason, words in zip(reasons, ["", "checksum", "ZLIB", "UTF-8", ""], strict=True):
        assert words in reason
        assert bool(words) == bool(reason)
    taken: list[BadRecord] = []
    left = decoded(BadRecords(OnBadRecord.DEAD_LETTER, taken.extend), ("queueOffset", "body"))
    assert left == [
        {"queueOffset": 0, "body": b"large" * 100},
        {"queueOffset": 3, "body": b"three"},
        {"queueOffset": 4, "body": b"four"},
    ], "a topic that is not read is not decoded"
    assert [(each.topic, each.queue_id, each.offset) for each in taken] == [
        ("T", 3, 1),
        ("T", 3, 2),
    ]
    assert decode_record(taken[0].raw).queue_offset == 1
    with pytest.raises(DamagedMessage, match=r"topic T, broker b, queue 3, offset 1: body .*null"):
        decoded(BadRecords(OnBadRecord.FAIL))


def test_thousands_of_bad_records_are_logged_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    bad = BadRecords(OnBadRecord.SKIP)
    one = BadRecord("orders", "broker-a", 2, 17, "body is torn", b"")
    with caplog.at_level(logging.WARNING):
        bad.take([one] * 15)
        bad.take([replace(one, offset=99)] * 3000)
        bad.close()
    assert bad.count == 3015
    assert len(caplog.records) == 21
    first, last = caplog.records[0].getMessage(), caplog.records[-1].getMessage()
    assert first == (
        "bad record, onBadRecord=skip: topic orders, broker broker-a, queue 2, offset 17: "
        "body is torn"
    )
    assert last == "2995 more bad records, onBadRecord=skip"


# --- options --------------------------------------------------------------------------------------


def test_the_error_column_exists_where_it_makes_sense() -> None:
    assert columns_of(SERVER) == COLUMNS
    for mode in ("fail", "skip", "DEADLETTER"):
        assert columns_of({**SERVER, "onBadRecord": mode}) == COLUMNS
    assert columns_of({**SERVER, "onBadRecord": "null"}) == (*COLUMNS, "decodeError")
    chosen = {**SERVER, "onBadRecord": "null", "columns": "body"}
    assert columns_of(chosen) == ("body",)
    assert columns_of({**SERVER, "columns": "body,decodeerror"}) == ("body", "decodeError")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"onBadRecord": "ignore"}, "must be fail or null or skip or deadLetter, got 'ignore'"),
        ({"onBadRecord": "skipp"}, r"got 'skipp' \(did you mean skip\?\)"),
        ({"onBadRecord": ""}, "onBadRecord must be fail or null"),
        ({"onBadRecord": "deadLetter"}, "needs a group or the option deadLetterTopic"),
        ({"deadLetterTopic": "bad"}, "deadLetterTopic needs onBadRecord=deadLetter"),
        ({"onBadRecord": "deadLetter", "deadLetterTopic": "a,b"}, "must be one topic"),
        ({"onBadRecord": "deadLetter", "deadLetterTopic": "a b"}, "'a b'"),
        ({"onBadRecord": "deadLetter", "deadLetterTopic": ""}, "deadLetterTopic must not be empty"),
        (
            {"onBadRecord": "deadLetter", "deadLetterTopic": "orders"},
            "deadLetterTopic must not be a topic that is read",
        ),
    ],
)
def test_invalid_options_are_named(options: dict[str, str], words: str) -> None:
    for parse in (SourceOptions.for_batch, SourceOptions.for_stream):
        with pytest.raises(InvalidArgument, match=words):
            parse({**SERVER, **options})


def test_where_dead_letters_go() -> None:
    def topic(**options: str) -> DeadLetterTopic | None:
        parsed = SourceOptions.for_batch({**SERVER, "onBadRecord": "deadLetter", **options})
        return DeadLetterTopic.of(parsed)

    of_group, named = topic(group="g", namespace="ns"), topic(deadLetterTopic="bad", group="g")
    assert of_group is not None
    assert (of_group.topic, of_group.is_of_group) == ("%DLQ%ns%g", True)
    assert named is not None
    assert (named.topic, named.is_of_group) == ("bad", False)
    assert DeadLetterTopic.of(SourceOptions.for_batch(SERVER)) is None


def test_readers_that_count_bad_records_get_them_as_rows() -> None:
    assert counted_options(SERVER) == (SERVER, False)
    null = {**SERVER, "onBadRecord": "null", "columns": "body"}
    assert counted_options(null) == ({**null, "columns": "body,decodeError"}, False)
    skipped, leaves_out = counted_options(
        {**SERVER, "onbadrecord": "skip", "includeproperties": "false"}
    )
    assert leaves_out
    wanted = [*(name for name in COLUMNS if name != "properties"), "decodeError"]
    assert skipped == {**SERVER, "onBadRecord": "null", "columns": ",".join(wanted)}
    sent, leaves_out = counted_options(
        {**SERVER, "onBadRecord": "deadLetter", "columns": "decodeError,body"}
    )
    assert leaves_out
    assert sent == {**SERVER, "onBadRecord": "deadLetter", "columns": "decodeError,body"}


# --- from a broker --------------------------------------------------------------------------------

MALFORMED = (2, 3, 7)


@pytest.fixture
def malformed(turbopump_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A topic of 10 messages that also returns three records without their magic numbers.

    Turbopump brokers omit such records; others send what is on their disks.
    """
    nameserver = turbopump_server.nameserver
    with Admin(nameserver) as admin:
        admin.topics.create("T", queues=1)
    with Producer("pg", nameserver=nameserver) as producer:
        for number in range(10):
            producer.send(Message("T", b"%d" % number))
    pull = RetryingPull._pull

    async def spoiled(self: RetryingPull, offset: int, count: int) -> RecordsOutcome:
        outcome = await pull(self, offset, count)
        assert isinstance(outcome, FoundRecords)
        return replace(outcome, records=_spoiled(outcome.records))

    monkeypatch.setattr(RetryingPull, "_pull", spoiled)
    monkeypatch.setattr(partition_reader, "start_blocking_pull", lambda *_: None)
    return nameserver


def _spoiled(records: Any) -> bytes:
    data, at = bytearray(records), 0
    while at < len(data):
        view = decode_record(bytes(data), at)
        if view.queue_offset in MALFORMED:
            data[at + 4] ^= 0xFF
        at += view.size
    return bytes(data)


@pytest.mark.slow
def test_malformed_records_are_read_one_by_one(malformed: str) -> None:
    def rows(**options: str) -> list[dict[str, Any]]:
        given = {"nameserver": malformed, "topic": "T", **options}
        reader = PartitionReader(SourceOptions.for_batch(given))
        partition = (QueueRange("T", BROKER, 0, 0, 10),)
        return [row for batch in reader.read(partition) for row in batch.to_pylist()]

    with pytest.raises(DamagedMessage, match=r"topic T, .*, queue 0, offset 2: .*onBadRecord"):
        rows()
    kept = rows(onBadRecord="null")
    assert [row["queueOffset"] for row in kept] == list(range(10))
    bad = [row for row in kept if row["decodeError"]]
    assert [row["queueOffset"] for row in bad] == list(MALFORMED)
    known = {"topic", "broker", "queueId", "queueOffset", "size", "decodeError"}
    assert all({n for n, cell in row.items() if cell is not None} == known for row in bad)
    good = [b"%d" % number for number in range(10) if number not in MALFORMED]
    assert [row["body"] for row in rows(onBadRecord="skip")] == good
    letters = []
    for _ in range(2):
        # The second time, as in a repeated task, nothing is sent.
        assert [row["body"] for row in rows(onBadRecord="deadLetter", group="g")] == good
        letters = stored_in(malformed, "%DLQ%g")
        places = [letter.properties["ORIGIN_QUEUE_OFFSET"] for letter in letters]
        assert sorted(places) == [str(offset) for offset in MALFORMED]
    first = min(letters, key=lambda letter: letter.properties["ORIGIN_QUEUE_OFFSET"])
    record = BadRecord("T", first.properties["ORIGIN_BROKER"], 0, 2, "", first.body)
    assert first.keys == [letter_key(record)]
    assert first.properties["DECODE_ERROR"] == bad[0]["decodeError"]
    with Admin(malformed) as admin:
        admin.topics.create("closed", queues=1, permission="r")
    with pytest.raises(
        SparkError, match=r"offset 2: .*not be stored in dead-letter topic 'closed'"
    ):
        rows(onBadRecord="deadLetter", deadLetterTopic="closed", retries="0")
