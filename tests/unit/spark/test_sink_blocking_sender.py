"""Rows sent from a task's own thread: the responses of brokers, and what happens to rows then."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from scripted_broker import Batch, ScriptedBroker, refused, scripted_broker, taken
from turbopump.client.background import background
from turbopump.client.selectors import by_hash
from turbopump.client.session import Session
from turbopump.clock import SYSTEM_CLOCK, Clock
from turbopump.errors import InvalidArgument, SparkError
from turbopump.machine import Machine
from turbopump.message import MessageQueue
from turbopump.spark.shared_session import SharedSession
from turbopump.spark.writing.blocking_sender import in_turn
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.row_encoder import Origin
from turbopump.spark.writing.send_planner import Send
from turbopump.spark.writing.writer import Written, send_rows
from turbopump.wire.codes import ResponseCode
from turbopump.wire.command import Command

ORIGIN = Origin("query", "0", 3)


def bodies(count: int, first: int = 0) -> list[bytes]:
    return [str(first + n).encode() for n in range(count)]


def batch(count: int, first: int = 0, **columns: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": bodies(count, first), **columns})


class CoarseClock:
    """Moves rarely, so that events in quick succession have the same time."""

    TICK_MS = 50

    def now_ms(self) -> int:
        return SYSTEM_CLOCK.now_ms()

    def monotonic_ms(self) -> int:
        return -(-SYSTEM_CLOCK.monotonic_ms() // self.TICK_MS) * self.TICK_MS

    def uptime_ms(self) -> int:
        return -(-SYSTEM_CLOCK.monotonic_ms() // self.TICK_MS) * self.TICK_MS


@contextmanager
def linked(broker: ScriptedBroker, clock: Clock = SYSTEM_CLOCK) -> Iterator[SharedSession]:
    thread = background.join()
    session = Session(SinkOptions(nameserver=broker.address).client(), machine=Machine(clock=clock))
    shared = SharedSession(thread, session)
    shared.run(lambda session: session.start())
    try:
        yield shared
    finally:
        shared.run(lambda session: session.close())
        background.leave(thread)


def written(
    broker: ScriptedBroker,
    batches: Sequence[pa.RecordBatch],
    *,
    clock: Clock = SYSTEM_CLOCK,
    **more: Any,
) -> Written:
    given = {"topic": "t", "batch_size": 10, "max_in_flight": 8, **more}
    options = SinkOptions(nameserver=broker.address, **given)
    columns = frozenset(batches[0].schema.names)
    with linked(broker, clock) as shared:
        return send_rows(shared, iter(batches), columns, options, ORIGIN)


# --- without failures -----------------------------------------------------------------------------


def test_every_row_is_stored_once_in_batches_that_take_turns() -> None:
    with scripted_broker(taken) as broker:
        done = written(broker, [batch(95), batch(5, 95), batch(100, 100)])
    assert (done.rows, done.sends, done.repeated) == (200, 21, 0)
    assert done.body_bytes == sum(map(len, bodies(200)))
    assert sorted(broker.stored, key=int) == bodies(200)
    assert {each.queue_id for each in broker.batches} == set(range(4))
    assert len({each.peer for each in broker.batches}) == 1


def test_responses_in_another_order_are_matched() -> None:
    held: list[Batch] = []

    def decide(each: Batch) -> Command | None:
        held.append(each)
        if len(held) == 4:
            for one in reversed(held):
                one.peer.answer(one.request, taken(one))
            held.clear()
        return None

    with scripted_broker(decide) as broker:
        done = written(broker, [batch(160)])
    assert (done.rows, done.sends, done.repeated) == (160, 16, 0)


def test_the_number_of_sends_in_flight_is_bounded() -> None:
    waiting: set[int] = set()
    most = 0

    def answer(each: Batch) -> None:
        waiting.remove(each.number)
        each.peer.answer(each.request, taken(each))

    def decide(each: Batch) -> None:
        nonlocal most
        waiting.add(each.number)
        most = max(most, len(waiting))
        asyncio.get_running_loop().call_later(0.001, answer, each)

    with scripted_broker(decide) as broker:
        written(broker, [batch(400)], max_in_flight=3)
    assert most == 3


def test_a_status_other_than_ok_still_counts_as_stored() -> None:
    with scripted_broker(lambda each: taken(each, ResponseCode.FLUSH_DISK_TIMEOUT)) as broker:
        done = written(broker, [batch(20)])
    assert (done.rows, done.repeated, len(broker.batches)) == (20, 0, 2)


def test_connections_are_reused_across_tasks() -> None:
    with scripted_broker(taken) as broker, linked(broker) as shared:
        options = SinkOptions(nameserver=broker.address, topic="t")
        for first in (0, 10):
            rows = iter([batch(10, first)])
            send_rows(shared, rows, frozenset({"body"}), options, ORIGIN)
    assert len(broker.batches) == 2
    assert len({each.peer for each in broker.batches}) == 1


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_of_one_key_keep_their_order_when_a_batch_is_rejected() -> None:
    keys = [f"k{n % 5}" for n in range(300)]

    def decide(each: Batch) -> Command:
        return refused(each, ResponseCode.SYSTEM_BUSY) if each.number in {3, 7} else taken(each)

    with scripted_broker(decide) as broker:
        done = written(broker, [batch(300, shardingKey=keys)])
    assert (done.rows, done.repeated) == (300, 2)
    of_queue: dict[int, list[bytes]] = defaultdict(list)
    refusals = {3, 7}
    for each in broker.batches:
        if each.number not in refusals:
            of_queue[each.queue_id] += each.bodies
    queues = [MessageQueue("t", "a", n) for n in range(4)]
    expected: dict[int, list[bytes]] = defaultdict(list)
    for body, key in zip(bodies(300), keys, strict=True):
        expected[by_hash(key)(queues).queue_id].append(body)
    assert of_queue == expected


def test_an_ordered_queue_has_one_batch_in_flight() -> None:
    waiting: dict[int, Batch] = {}

    def decide(each: Batch) -> Command | None:
        assert each.queue_id not in waiting
        waiting[each.queue_id] = each
        if len(waiting) == 2:
            for one in tuple(waiting.values()):
                del waiting[one.queue_id]
                one.peer.answer(one.request, taken(one))
        return None

    with scripted_broker(decide) as broker:
        # Both queues are always in flight together: otherwise the first one would wait forever.
        rows = batch(80, queueId=[n % 2 for n in range(80)])
        assert written(broker, [rows]).rows == 80


def part(first: int, delay: int) -> pa.RecordBatch:
    """Return rows of one queue; delayed ones are sent one by one."""
    return batch(20, first, delayLevel=[delay] * 20, queueId=[2] * 20)


def test_rows_sent_one_by_one_keep_their_place() -> None:
    with scripted_broker(taken) as broker:
        done = written(broker, [part(0, 0), part(20, 3), part(40, 0)])
    assert (done.rows, done.sends) == (60, 2 + 20 + 2)
    assert broker.stored == bodies(60)
    assert len({each.peer for each in broker.batches}) == 1


def test_rows_before_an_invalid_one_are_stored() -> None:
    with scripted_broker(taken) as broker:
        wrong = pa.RecordBatch.from_pydict({"body": [b"x", b"y"], "keys": ["good", "a\x01b"]})
        with pytest.raises(InvalidArgument, match="row 31 of partition 3, column keys"):
            written(broker, [batch(30, keys=["k"] * 30), wrong])
    assert sorted(broker.stored, key=int) == bodies(30)


def test_lanes_take_turns_and_keep_their_order() -> None:
    def send(destination: str, row: int) -> Send:
        return Send(destination, "", memoryview(b""), 0, [row])

    mixed = [send("a", 0), send("a", 1), send("a", 2), send("b", 3), send("b", 4)]
    assert [each.rows[0] for each in in_turn(mixed)] == [0, 3, 1, 4, 2]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_busy_broker_gets_rejected_batches_again() -> None:
    def decide(each: Batch) -> Command:
        return refused(each, ResponseCode.SYSTEM_BUSY) if each.number == 2 else taken(each)

    with scripted_broker(decide) as broker:
        done = written(broker, [batch(100)])
    assert (done.rows, done.sends, done.repeated) == (100, 10, 1)
    assert sorted(broker.stored, key=int) == bodies(100)


def test_a_permanent_rejection_fails_the_task_with_the_brokers_message() -> None:
    def decide(each: Batch) -> Command:
        return refused(each, ResponseCode.NO_PERMISSION) if each.number == 2 else taken(each)

    with scripted_broker(decide) as broker, pytest.raises(SparkError) as raised:
        written(broker, [batch(200)])
    text = str(raised.value)
    assert "10 rows, 20 to 29, of partition 3 could not be sent to t@a:" in text
    assert "code 16: in the broker's words (group spark-sink, retries 10)" in text
    # Nothing was retried, and nothing new was started.
    assert len(broker.batches) <= 2 + 8


def test_the_last_batch_may_fail_too() -> None:
    def decide(each: Batch) -> Command:
        return refused(each, ResponseCode.NO_PERMISSION) if each.number == 9 else taken(each)

    with scripted_broker(decide) as broker, pytest.raises(SparkError, match="90 to 99"):
        written(broker, [batch(100)])


@pytest.mark.slow
def test_a_lost_connection_is_reestablished_and_its_batches_are_resent() -> None:
    def decide(each: Batch) -> Command | None:
        if each.number == 3:
            each.peer.abort("cut by the test")
            return None
        return taken(each)

    with scripted_broker(decide) as broker:
        done = written(broker, [batch(200)])
    assert done.rows == 200
    assert done.repeated >= 1
    assert set(broker.stored) == set(bodies(200))


@pytest.mark.slow
@pytest.mark.parametrize("is_cut", [False, True])
def test_rows_sent_one_by_one_are_retried_in_their_order(*, is_cut: bool) -> None:
    def decide(each: Batch) -> Command | None:
        if each.number != 10:
            return taken(each)
        if not is_cut:
            return refused(each, ResponseCode.SYSTEM_BUSY)
        each.peer.abort("cut by the test")
        return None

    with scripted_broker(decide) as broker:
        done = written(broker, [part(0, 0), part(20, 3), part(40, 0)])
    assert (done.rows, done.sends, done.repeated) == (60, 2 + 20 + 2, 1)
    assert broker.stored == bodies(60)


@pytest.mark.slow
def test_a_broker_that_is_down_costs_one_pause_if_there_is_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = "{}:{}".format(*closed.getsockname())
    with scripted_broker(taken) as broker:
        broker.others["b"] = gone
        done = written(broker, [batch(200), batch(200, 200)])
    assert done.rows == 400
    assert sorted(broker.stored, key=int) == bodies(400)
    # The retrying sender may try it once more, by chance, before it is avoided.
    assert 1 <= done.repeated <= 2


@pytest.mark.slow
def test_a_timeout_is_retried() -> None:
    def decide(each: Batch) -> Command | None:
        return None if each.number == 1 else taken(each)

    with scripted_broker(decide) as broker:
        done = written(broker, [batch(60)], send_timeout_ms=100)
    # Others on the same connection were answered, so the connection is not lost.
    assert (done.rows, done.repeated) == (60, 1)
    assert sorted(broker.stored, key=int) == bodies(60)


@pytest.mark.slow
def test_everything_unanswered_on_a_silent_connection_is_retried() -> None:
    def decide(each: Batch) -> Command | None:
        is_silent = each.peer is broker.batches[0].peer and each.number > 0
        return None if is_silent else taken(each)

    with scripted_broker(decide) as broker:
        rows = [batch(10), batch(80, 10)]
        done = written(broker, rows, clock=CoarseClock(), send_timeout_ms=100)
    assert (done.rows, done.sends) == (90, 9)
    assert done.repeated == len(broker.batches) - 9 >= 3
    assert sorted(broker.stored, key=int) == bodies(90)


def test_a_silent_broker_fails_the_task_after_all_retries() -> None:
    with (
        scripted_broker(lambda _: None) as broker,
        pytest.raises(SparkError, match=r"within 50 ms .group spark-sink, retries 0"),
    ):
        written(broker, [batch(5)], send_timeout_ms=50, retries=0)


@pytest.mark.slow
def test_a_flush_timeout_is_retried_if_configured() -> None:
    def decide(each: Batch) -> Command:
        slow = each.number == 0
        return taken(each, ResponseCode.FLUSH_DISK_TIMEOUT if slow else ResponseCode.SUCCESS)

    with scripted_broker(decide) as broker:
        done = written(broker, [batch(10)], retry_unless_ok=True)
    assert (done.rows, done.repeated, len(broker.batches)) == (10, 1, 2)


def test_batches_are_no_larger_than_a_body_may_be() -> None:
    rows = pa.RecordBatch.from_pydict({"body": [b"x" * 200] * 20})
    with scripted_broker(taken) as broker:
        done = written(broker, [rows], body_bytes_max=1000, batch_size=2000)
    assert done.rows == 20
    assert max(each.request.body_length for each in broker.batches) <= 1000


def test_a_batch_larger_than_allowed_names_its_row() -> None:
    """A body within the limit, but not together with its properties."""
    rows = pa.RecordBatch.from_pydict({"body": [b"x", b"y" * 199]})
    with (
        scripted_broker(taken) as broker,
        pytest.raises(
            InvalidArgument, match=r"row 1 of partition 3: a batch must have at most 200 bytes"
        ),
    ):
        written(broker, [rows], body_bytes_max=200, batch_bytes=190, stamp="false")
