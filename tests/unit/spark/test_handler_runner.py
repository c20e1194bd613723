"""The executor's side of a consumer, on rows of the source and without a broker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from stored_rows import one_batch
from turbopump import GiveUp, RetryLater
from turbopump.errors import SparkError
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.spark.consuming.handler_runner import (
    COUNTS_SCHEMA,
    DEAD,
    Counts,
    HandlerConfig,
    HandlerRunner,
    Returned,
    counts_batch,
)
from turbopump.spark.consuming.message_rows import delivered, split_by_queue, with_original_topic
from turbopump.spark.records.bad_records import BadRecords, OnBadRecord
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.spark.records.schema import COLUMNS, KNOWN_COLUMNS
from turbopump.wire import properties
from turbopump.wire.compression import deflate
from turbopump.wire.hosts import host
from turbopump.wire.names import retry_topic
from turbopump.wire.record import MessageView, Record, decode_record
from turbopump.wire.sysflag import Compression, with_compression

GROUP = "billing"
GROUP_LIMIT = 5


def record(
    body: bytes,
    offset: int,
    *,
    topic: str = "orders",
    queue_id: int = 0,
    times: int = 0,
    named: dict[str, str] | None = None,
    sys_flag: int = 0,
) -> bytes:
    made = Record(
        topic=topic.encode(),
        queue_id=queue_id,
        body=body,
        properties=properties.encode(
            {properties.TAGS: "paid", properties.KEYS: "k1 k2", **(named or {})}
        ).encode(),
        sys_flag=sys_flag,
        born_timestamp_ms=1_700_000_000_123,
        born_host=host("10.0.0.7", 4321),
        store_host=host("10.0.0.9", 10911),
        reconsume_times=times,
    )
    return made.encode(QueueOffset(offset), PhysicalOffset(1000 + offset), 1_700_000_000_456)


def rows(*records: bytes) -> pa.RecordBatch:
    return one_batch(RecordColumns(COLUMNS), b"".join(records), "broker-a")


def batch(bodies: Iterable[bytes], times: int = 0) -> pa.RecordBatch:
    return rows(*(record(body, at, times=times) for at, body in enumerate(bodies)))


class Desk:
    """Runs a handler, and records what it sends back and how long it pauses."""

    def __init__(self, handler: Callable[[Any], object], **plan: Any) -> None:
        self.returned: list[Returned] = []
        self.pauses: list[float] = []
        self._handling = HandlerRunner(
            handler,
            HandlerConfig(GROUP, **plan),
            self.returned.extend,
            self.pauses.append,
            self._group_limit,
        )
        self.limits_asked = 0

    def _group_limit(self) -> int:
        self.limits_asked += 1
        return GROUP_LIMIT

    def run(self, *batches: pa.RecordBatch) -> Counts:
        total = Counts()
        for counts in self._handling.all(batches):
            total = total.plus(counts)
        return total

    @property
    def went_back(self) -> list[tuple[bytes, int]]:
        return [(each.delivered.message.body, each.delay_level) for each in self.returned]


# --- rows as messages -----------------------------------------------------------------------------


def test_message_equals_what_other_consumers_get() -> None:
    packed = record(
        deflate(b"hello" * 50, Compression.ZLIB),
        7,
        queue_id=3,
        times=2,
        named={"shop": "7", properties.UNIQUE_KEY: "ABCD"},
        sys_flag=with_compression(0, Compression.ZLIB),
    )
    (made,) = delivered(rows(packed))
    message, view = made.message, decode_record(packed)
    same = (
        "size queue_id queue_offset physical_offset born_timestamp_ms born_host "
        "store_timestamp_ms store_host reconsume_times topic properties body tags keys unique_key "
        "offset_id message_id transaction"
    )
    for name in same.split():
        assert getattr(message, name) == getattr(view, name), name
    assert made.broker == "broker-a"
    # A resent message is sent as it is here: inflated, and marked so.
    assert message.stored_body == b"hello" * 50
    assert message.sys_flag == 0


def test_redelivered_messages_show_their_original_topic() -> None:
    named = {properties.RETRY_TOPIC: "shop%payments"}
    read = rows(
        record(b"new", 0, topic="shop%orders"),
        record(b"again", 0, topic=retry_topic("shop%billing"), named=named),
        # The source may already have removed the namespace.
        record(b"again", 1, topic=retry_topic("billing"), named=named),
        record(b"odd", 1, topic=retry_topic("shop%billing")),
    )
    with_names = with_original_topic(read, "shop%billing", "shop")
    names = ["orders", "payments", "payments", "%RETRY%billing"]
    assert with_names.column("topic").to_pylist() == names
    assert with_names.schema == read.schema
    without = with_original_topic(read, "shop%billing", "")
    assert without.column("topic").to_pylist()[1] == "shop%payments"
    plain = batch([b"a"])
    assert with_original_topic(plain, GROUP, "") is plain


def test_rows_are_divided_where_the_queue_changes() -> None:
    read = rows(
        record(b"a", 0),
        record(b"b", 1),
        record(b"c", 0, queue_id=1),
        record(b"d", 0, topic="payments", queue_id=1),
    )
    runs = [run.column("body").to_pylist() for run in split_by_queue(read)]
    assert runs == [[b"a", b"b"], [b"c"], [b"d"]]
    assert [run.num_rows for run in split_by_queue(batch([b"a"]))] == [1]


# --- without order --------------------------------------------------------------------------------


def test_row_by_row_each_answer_is_for_its_message() -> None:
    def handle(message: MessageView) -> object:
        match message.body:
            case b"later":
                return RetryLater(delay_level=4)
            case b"never":
                return GiveUp()
            case b"raised later":
                raise RetryLater(30)
            case b"raised never":
                raise GiveUp("no such customer")
            case b"raises":
                raise ValueError("no such order")
            case b"odd":
                return None
            case b"exits":
                raise SystemExit(3)
        return True

    desk = Desk(handle)
    bodies = [b"good", b"later", b"never", b"raised later", b"raised never"]
    bodies += [b"raises", b"odd", b"exits", b"good"]
    counts = desk.run(batch(bodies))
    assert counts == Counts(2, 5, 2, "ValueError: no such order")
    assert counts.received == len(bodies)
    assert desk.went_back == [
        (b"later", 4),
        (b"never", DEAD),
        (b"raised later", 4),
        (b"raised never", DEAD),
        (b"raises", 0),
        (b"odd", 0),
        (b"exits", 0),
    ]
    assert not desk.pauses


@pytest.mark.parametrize(("times", "dead"), [(1, 0), (2, 1), (3, 1)])
def test_the_last_attempt_dead_letters_the_message(times: int, dead: int) -> None:
    desk = Desk(lambda _: False, max_attempts=2)
    assert desk.run(batch([b"a"], times)) == Counts(0, 1 - dead, dead)
    # Whether it is the last attempt is the broker's decision, which gets the limit.
    assert desk.went_back == [(b"a", 0)]


@pytest.mark.parametrize(("times", "dead"), [(GROUP_LIMIT - 1, 0), (GROUP_LIMIT, 1)])
def test_the_limit_of_the_group_holds_unless_the_consumer_has_one(times: int, dead: int) -> None:
    desk = Desk(lambda _: False)
    assert desk.run(batch([b"a"], times)) == Counts(0, 1 - dead, dead)
    ordered = Desk(lambda _: False, orderly=True)
    assert ordered.run(batch([b"a"], times)) == Counts(0, 0, 1)
    assert len(ordered.pauses) == 1 - dead
    for successful in (Desk(lambda _: True), Desk(lambda _: True, orderly=True)):
        successful.run(batch([b"a"], times))
        assert not successful.limits_asked


def test_the_function_is_not_called_without_rows() -> None:
    desk = Desk(lambda _: pytest.fail("called"), mode="arrow")
    assert desk.run(batch([])) == Counts()


def test_batches_have_a_largest_size() -> None:
    calls: list[list[bytes]] = []

    def handle(messages: Sequence[MessageView]) -> object:
        calls.append([message.body for message in messages])
        return [message.body != b"c" for message in messages]

    desk = Desk(handle, mode="batch", batch_size=2)
    assert desk.run(batch([b"a", b"b", b"c"]), batch([b"d"])) == Counts(3, 1, 0)
    assert calls == [[b"a", b"b"], [b"c"], [b"d"]]
    assert desk.went_back == [(b"c", 0)]


def test_a_handler_may_change_its_list_of_messages() -> None:
    def handle(messages: list[MessageView]) -> object:
        calls.append([messages.pop(0).body for _ in range(len(messages))])
        return b"b" not in calls[-1] or len(calls) > 2

    calls: list[list[bytes]] = []
    desk = Desk(handle, mode="batch", batch_size=2)
    assert desk.run(batch([b"a", b"b", b"c"])) == Counts(1, 2, 0)
    assert desk.went_back == [(b"a", 0), (b"b", 0)]

    calls = []
    desk = Desk(handle, mode="batch", orderly=True)
    assert desk.run(batch([b"a", b"b"])).handled == 2
    assert calls == [[b"a", b"b"]] * 3
    assert len(desk.pauses) == 2


def test_exception_in_a_batch_is_for_all_its_messages() -> None:
    def handle(messages: Sequence[MessageView]) -> object:
        if len(messages) == 2:
            raise KeyError("b")
        return True

    desk = Desk(handle, mode="batch", batch_size=2)
    assert desk.run(batch([b"a", b"b", b"c"])) == Counts(1, 2, 0, "KeyError: 'b'")


def test_arrow_batch_answers_with_a_column() -> None:
    def handle(read: pa.RecordBatch) -> object:
        assert read.schema.names == list(COLUMNS)
        return [body != b"bad" for body in read.column("body").to_pylist()]

    desk = Desk(handle, mode="arrow")
    assert desk.run(batch([b"a", b"bad", b"c"])) == Counts(2, 1, 0)
    (back,) = desk.returned
    assert back.delivered.message.offset_id == decode_record(record(b"bad", 1)).offset_id


def test_data_frame_answers_with_a_column() -> None:
    def handle(frame: Any) -> object:
        assert list(frame.columns) == list(COLUMNS)
        assert frame["properties"][0] == {"TAGS": "paid", "KEYS": "k1 k2"}
        return frame["queueOffset"] > 0

    desk = Desk(handle, mode="pandas")
    assert desk.run(batch([b"a", b"b", b"c"])) == Counts(2, 1, 0)
    assert desk.went_back == [(b"a", 0)]


def test_a_message_that_no_broker_takes_back_fails_the_task() -> None:
    def refuse(_: Sequence[Returned]) -> None:
        raise SparkError("nobody there")

    for ordered in (False, True):
        handling = HandlerRunner(
            lambda _: GiveUp(), HandlerConfig(GROUP, orderly=ordered), refuse, print, lambda: 16
        )
        with pytest.raises(SparkError, match="nobody there"):
            list(handling.all([batch([b"a"])]))


def test_failures_of_a_call_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(lambda message: message.body == b"good")
    with caplog.at_level(logging.WARNING):
        desk.run(batch([b"good", b"bad", b"bad"]))
    failed = decode_record(record(b"bad", 1)).offset_id
    (log,) = caplog.records
    assert log.getMessage() == (
        f"billing: 2 of 3 messages failed, the first is {failed} of topic 'orders' "
        "(queue 0, offset 1)"
    )


# --- in order -------------------------------------------------------------------------------------


def test_in_order_a_failed_message_is_retried_before_the_next() -> None:
    calls: list[tuple[bytes, int]] = []

    def handle(message: MessageView) -> bool:
        calls.append((message.body, message.reconsume_times))
        return message.body != b"b" or message.reconsume_times == 2

    desk = Desk(handle, orderly=True, suspend_ms=250)
    assert desk.run(batch([b"a", b"b", b"c"])) == Counts(3, 0, 0)
    assert calls == [(b"a", 0), (b"b", 0), (b"b", 1), (b"b", 2), (b"c", 0)]
    assert desk.pauses == [0.25, 0.25]
    assert not desk.returned


@pytest.mark.parametrize(("delay", "pause_s"), [(5, 5), (0, 0.01), (3600, 30)])
def test_in_order_the_queue_pauses_as_long_as_a_retry_asks_for(
    delay: float, pause_s: float
) -> None:
    def handle(message: MessageView) -> object:
        return bool(message.reconsume_times) or RetryLater(delay)

    desk = Desk(handle, orderly=True, suspend_ms=250)
    assert desk.run(batch([b"a"])) == Counts(1, 0, 0)
    assert desk.pauses == [pause_s]


def test_in_order_the_queue_continues_after_a_dead_letter() -> None:
    def handle(message: MessageView) -> object:
        if message.body == b"never":
            return GiveUp()
        if message.body == b"bad":
            raise ValueError("bad")
        return True

    desk = Desk(handle, orderly=True, max_attempts=2)
    counts = desk.run(batch([b"bad", b"a", b"never", b"b"]))
    assert counts == Counts(2, 0, 2, "ValueError: bad")
    assert desk.went_back == [(b"bad", DEAD), (b"never", DEAD)]
    assert desk.returned[0].delivered.message.reconsume_times == 2
    assert len(desk.pauses) == 2


def test_in_order_the_query_can_stop_instead() -> None:
    calls: list[bytes] = []

    def handle(message: MessageView) -> object:
        calls.append(message.body)
        raise ValueError("no such order")

    desk = Desk(handle, orderly=True, max_attempts=1, exhausted="fail")
    with pytest.raises(SparkError, match=r"'orders' \(queue 0, offset 0\) failed 2 times \(ValueE"):
        desk.run(batch([b"a", b"b"]))
    assert calls == [b"a", b"a"]
    assert not desk.returned


@pytest.mark.parametrize("mode", ["batch", "arrow"])
def test_in_order_a_batch_is_retried_from_the_first_failure(mode: str) -> None:
    calls: list[list[tuple[bytes, int]]] = []

    def handle(given: Any) -> object:
        if isinstance(given, pa.RecordBatch):
            columns = (given.column(name).to_pylist() for name in ("body", "reconsumeTimes"))
            seen: list[tuple[bytes, int]] = list(zip(*columns, strict=True))
        else:
            seen = [(message.body, message.reconsume_times) for message in given]
        calls.append(seen)
        return [body != b"bad" for body, _ in seen]

    desk = Desk(handle, orderly=True, mode=mode, max_attempts=1)
    assert desk.run(batch([b"a", b"bad", b"c"])) == Counts(2, 0, 1)
    assert calls == [[(b"a", 0), (b"bad", 0), (b"c", 0)], [(b"bad", 1), (b"c", 0)]]
    assert desk.went_back == [(b"bad", DEAD)]


def test_in_order_calls_never_mix_queues() -> None:
    calls: list[list[bytes]] = []

    def handle(messages: Sequence[MessageView]) -> bool:
        calls.append([message.body for message in messages])
        return True

    read = rows(record(b"a", 0), record(b"b", 1), record(b"c", 0, queue_id=1))
    Desk(handle, orderly=True, mode="batch").run(read)
    assert calls == [[b"a", b"b"], [b"c"]]


def test_counts_are_reported_as_one_row() -> None:
    row = counts_batch(Counts(1, 2, 3, "ValueError", 4))
    assert row.to_pylist() == [
        {"handled": 1, "retried": 2, "dead": 3, "error": "ValueError", "bad": 4}
    ]
    assert COUNTS_SCHEMA.names == row.schema.names


# --- records that could not be decoded ------------------------------------------------------------


def with_bad(*bodies: bytes) -> pa.RecordBatch:
    """Return rows of which those with an exclamation mark do not inflate."""
    flag = with_compression(0, Compression.ZLIB)
    data = [record(each, at, sys_flag=flag * (b"!" in each)) for at, each in enumerate(bodies)]
    made = RecordColumns(KNOWN_COLUMNS, bad=BadRecords(OnBadRecord.NULL, keeps_rows=True))
    return one_batch(made, b"".join(data), "broker-a")


@pytest.mark.parametrize("ordered", [False, True])
def test_bad_records_are_counted_and_skipped(*, ordered: bool) -> None:
    seen: list[bytes] = []

    def handle(message: MessageView) -> bool:
        seen.append(message.body)
        return True

    desk = Desk(handle, leaves_out_bad=True, orderly=ordered)
    counts = desk.run(with_bad(b"a", b"b!", b"c"), with_bad(b"d!"), batch([b"e"]))
    assert counts == Counts(handled=3, bad=2)
    assert seen == [b"a", b"c", b"e"]


def test_table_handlers_see_bad_records_but_cannot_have_them_redelivered() -> None:
    seen: list[Any] = []

    def handle(rows: pa.RecordBatch) -> bool:
        seen.append(rows.column("body").to_pylist())
        return True

    desk = Desk(handle, mode="arrow")
    assert desk.run(with_bad(b"a", b"b!")) == Counts(handled=2, bad=1)
    assert seen == [[b"a", None]]
    failing = Desk(lambda rows: [False] * len(rows), mode="arrow")
    with pytest.raises(SparkError, match="queue 0, offset 1 could not be decoded, so it cannot"):
        failing.run(with_bad(b"a", b"b!"))
