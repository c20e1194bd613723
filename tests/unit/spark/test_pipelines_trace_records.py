"""Records of the message trace, as clients write them."""

from __future__ import annotations

import pytest

from turbopump.spark.pipelines.trace_records import Kind, TraceRecord, parsed

SENT = "Pub 1700000000123 DefaultRegion shop orders ID1 paid k1 127.0.0.1:10911 42 7 0 OFF1 true"
BEGUN = "SubBefore 1700000000200 DefaultRegion billing REQ1 ID1 2 k1"
DONE = "SubAfter REQ1 ID1 15 false k1 4 1700000000300 billing"
ENDED = (
    "EndTransaction 1700000000400 DefaultRegion shop orders ID1 paid k1 127.0.0.1:10911 2 TX1 "
    "COMMIT_MESSAGE false"
)


def body(*records: str) -> bytes:
    return "".join(record.replace(" ", "\x01") + "\x02" for record in records).encode()


def test_records_of_each_kind() -> None:
    sent, begun, done, ended = parsed(body(SENT, BEGUN, DONE, ENDED))
    assert sent == TraceRecord(
        Kind.SENT,
        msg_id="ID1",
        time_ms=1700000000123,
        group="shop",
        topic="orders",
        tags="paid",
        cost_ms=7,
        is_success=True,
        body_bytes=42,
    )
    assert begun == TraceRecord(
        Kind.BEGUN,
        msg_id="ID1",
        time_ms=1700000000200,
        group="billing",
        request_id="REQ1",
        retries=2,
    )
    assert done == TraceRecord(
        Kind.DONE,
        msg_id="ID1",
        time_ms=1700000000300,
        group="billing",
        request_id="REQ1",
        cost_ms=15,
        is_success=False,
    )
    assert (ended.kind, ended.topic, ended.tags) == (Kind.TRANSACTION_ENDED, "orders", "paid")


@pytest.mark.parametrize(
    "record",
    [
        SENT.replace(" OFF1 true", " true"),
        f"{SENT} 10.0.0.7:4711",
    ],
    ids=["old clients leave out the offset id", "new clients add their host"],
)
def test_sends_of_other_clients(record: str) -> None:
    (found,) = parsed(body(record))
    assert (found.kind, found.is_success, found.msg_id) == (Kind.SENT, True, "ID1")


@pytest.mark.parametrize(
    "record", ["SubAfter REQ1 ID1 15 true k1", "SubAfter REQ1 ID1 15 true k1 0"]
)
def test_ends_of_old_clients_are_short(record: str) -> None:
    (found,) = parsed(body(record))
    assert (found.is_success, found.time_ms, found.group) == (True, None, None)


def test_last_record_may_not_be_ended() -> None:
    assert len(list(parsed(body(BEGUN, DONE)[:-1]))) == 2


def test_missing_values_are_none() -> None:
    sent, done = parsed(
        body(SENT.replace(" paid ", " null "), DONE.replace("1700000000300", "null"))
    )
    assert sent.tags is None
    assert (done.kind, done.time_ms, done.group) == (Kind.DONE, None, "billing")


@pytest.mark.parametrize(
    "record",
    [
        "Unheard of",
        "Pub",
        "Pub x y",
        SENT.replace("1700000000123", "then"),
        SENT.replace(" 42 7 ", " null 7 "),
        SENT.replace(" 42 7 ", " 42 null "),
        SENT.replace(" 42 7 ", " 42  "),
        BEGUN.replace(" ID1 2 ", " ID1 null "),
        BEGUN.replace("1700000000200", "null"),
        ENDED.replace("1700000000400", "null"),
        "SubAfter REQ1 ID1 null true k1",
        "SubAfter REQ1 ID1 15 yes k1",
    ],
)
def test_invalid_records_are_counted_and_the_rest_is_read(record: str) -> None:
    found = [each.kind for each in parsed(body(record, BEGUN))]
    assert found == [Kind.UNREADABLE, Kind.BEGUN]


def test_bytes_that_are_no_text_are_unreadable() -> None:
    assert [each.kind for each in parsed(b"\xff\xfe\x02")] == [Kind.UNREADABLE]
    assert list(parsed(b"")) == []
