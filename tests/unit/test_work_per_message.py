"""How much work each message takes, counted and not timed: the same on any machine.

Counted are calls of Python functions, calls of C functions from Python, loop iterations and
writes to connections, on both sides together, in a cluster in memory. Of a blocking producer only
the caller's thread is counted, with its system calls. One-time work is excluded: each count is
the difference between many messages and few, after a first round that imports and caches what is
needed. There is one figure for each main path and core, with room for a quarter more: a change that
doubles the work is found, one that adds a call is not. The core that is active is counted: a full
run of the tests repeats the quick ones with the plain core.

Allocations are not counted: the interpreter reports only how many blocks are in use.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import select
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

import turbopump
from scripted_broker import scripted_broker, taken
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.outgoing import split_batch
from turbopump.client.producer import Producer
from turbopump.client.pull_consumer import PullConsumer
from turbopump.client.push_consumer import PushConsumer
from turbopump.clock import SYSTEM_CLOCK
from turbopump.core import CORE_NAME, scan_records
from turbopump.message import Message, MessageQueue, PhysicalOffset, QueueOffset
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.spark.records.schema import COLUMNS
from turbopump.spark.writing.options import SinkOptions
from turbopump.spark.writing.row_encoder import Origin, RowEncoder
from turbopump.spark.writing.send_planner import BatchLimits
from turbopump.spark.writing.send_planner import sends as planned_sends
from turbopump.testing import Cluster, running_cluster, virtual_loop
from turbopump.testing.memory_transport import Pipe
from turbopump.wire.hosts import host
from turbopump.wire.ids import UniqueIds
from turbopump.wire.record import MessageView, Record

FEW, MANY = 64, 576
BY_COLUMN_TIMES = 16
NOW_MS = 1_700_000_000_000
BODY = b"x" * 128
_SYSTEM_CALLS = {"send", "sendmsg", "sendall", "recv", "recv_into", "poll"}
_SYSTEM_OBJECTS = (socket.socket, type(select.poll()))


Scene = Callable[[Path, int], "Work"]
"""Handles a number of messages, with an empty directory to work in, and counts the work."""

ClusterScene = Callable[[Cluster, int], Awaitable["Work"]]


@dataclass(frozen=True, slots=True)
class Work:
    """What was done, or what may be done at most, for each message."""

    calls: float
    c_calls: float
    turns: float = 0
    writes: float = 0
    system_calls: float = 0

    def __sub__(self, other: Work) -> Work:
        return Work(*(one - two for one, two in zip(self.values, other.values, strict=True)))

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def for_each(self, count: int) -> Work:
        return Work(*(value / count for value in self.values))


class Counter:
    """Counts what is done within its context."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("call", "c_call", "write", "system_call"), 0)
        self._turns = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count calls, and what the loop and the network in memory do."""
        counts, write, loop = self.counts, Pipe.write, virtual_loop()

        def counted_write(pipe: Pipe, data: bytes) -> None:
            counts["write"] += 1
            write(pipe, data)

        turns = loop.turns
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pipe, "write", counted_write)
            with self.profiling():
                yield
        self._turns = loop.turns - turns

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """Count calls."""
        counts = self.counts

        def profile(_: FrameType, event: str, called: Any) -> None:
            # Called very often: whatever is not counted costs as little as possible.
            if event == "call":
                counts["call"] += 1
            elif event == "c_call":
                counts["c_call"] += 1
                if called.__name__ in _SYSTEM_CALLS:
                    counts["system_call"] += isinstance(called.__self__, _SYSTEM_OBJECTS)

        # What a collection finalizes depends on what ran before.
        gc.collect()
        gc.disable()
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()

    @property
    def work(self) -> Work:
        counts = self.counts
        calls, c_calls = counts["call"], counts["c_call"]
        return Work(calls, c_calls, self._turns, counts["write"], counts["system_call"])


def in_cluster(scene: ClusterScene) -> Scene:
    """Run a scenario in a new in-memory cluster that has a topic with one queue."""

    def counted(directory: Path, count: int) -> Work:
        async def play(cluster: Cluster) -> Work:
            await cluster.make_topic("orders", queues=1)
            return await scene(cluster, count)

        with running_cluster(directory) as cluster:
            return cluster.run(play(cluster))

    return counted


async def fill(cluster: Cluster, count: int) -> None:
    messages = [Message("orders", BODY, tags="created") for _ in range(count)]
    async with Producer("filler", nameserver=cluster.nameserver) as producer:
        for batch in split_batch(messages, count_max=FEW):
            await producer.send_batch(batch)


@in_cluster
async def sends(cluster: Cluster, count: int) -> Work:
    async with Producer("shop", nameserver=cluster.nameserver) as producer:
        await producer.send(Message("orders", BODY))
        counter = Counter()
        with counter.counting():
            for _ in range(count):
                await producer.send(Message("orders", BODY))
    return counter.work


@in_cluster
async def batches(cluster: Cluster, count: int) -> Work:
    async with Producer("shop", nameserver=cluster.nameserver) as producer:
        await producer.send(Message("orders", BODY))
        counter = Counter()
        with counter.counting():
            for _ in range(count // 16):
                await producer.send_batch([Message("orders", BODY) for _ in range(16)])
    return counter.work


@in_cluster
async def pulls(cluster: Cluster, count: int) -> Work:
    await fill(cluster, count)
    async with PullConsumer("audit", nameserver=cluster.nameserver) as consumer:
        (queue,) = await consumer.queues("orders")
        await consumer.pull(queue, count)
        offset, bodies, counter = 0, 0, Counter()
        with counter.counting():
            while offset < count:
                found = await consumer.pull(queue, offset)
                bodies += sum(len(message.body) for message in getattr(found, "messages", ()))
                offset = found.next_offset
    assert bodies == count * len(BODY)
    return counter.work


@in_cluster
async def consumption(cluster: Cluster, count: int) -> Work:
    await fill(cluster, count)
    done, finished = itertools.count(1), asyncio.Event()

    async def listen(messages: Sequence[MessageView], _: ConsumeContext) -> ConsumeResult:
        for _message in messages:
            if next(done) == count:
                finished.set()
        return ConsumeResult.SUCCESS

    consumer = PushConsumer(
        "billing",
        listen,
        nameserver=cluster.nameserver,
        subscriptions={"orders": "*"},
        start_from="first",
        batch_size=1,
    )
    counter = Counter()
    with counter.counting():
        await consumer.start()
        await finished.wait()
    await consumer.close()
    return counter.work


def blocking_sends(_: Path, count: int) -> Work:
    with (
        scripted_broker(taken) as broker,
        turbopump.Producer("shop", nameserver=broker.address) as producer,
    ):
        producer.send(Message("orders", BODY))
        counter = Counter()
        with counter.profiling():
            for _number in range(count):
                producer.send(Message("orders", BODY))
    return counter.work


def by_column(scene: Scene) -> Scene:
    """Run a scenario with many times as many messages, and count for one of them.

    Small counts take other paths, some of which take more calls in total than thousands by the
    column: the difference would hide what a row costs.
    """

    def counted(directory: Path, count: int) -> Work:
        return scene(directory, BY_COLUMN_TIMES * count).for_each(BY_COLUMN_TIMES)

    return counted


def source_rows(_: Path, count: int) -> Work:
    data = b"".join(
        stored_record(number).encode(QueueOffset(number), PhysicalOffset(number), NOW_MS)
        for number in range(count)
    )
    columns, counter = RecordColumns(COLUMNS), Counter()
    with counter.profiling():
        run = scan_records(data)[0]
        assert next(columns.batches_of(run, broker="broker-a")).num_rows == count
    return counter.work


def sink_rows(_: Path, count: int) -> Work:
    rows = pa.RecordBatch.from_pydict(
        {
            "body": [BODY] * count,
            "tags": ["created"] * count,
            "keys": [[f"order-{number}"] for number in range(count)],
        }
    )
    options = SinkOptions(nameserver="127.0.0.1:9876", topic="orders")
    ids = UniqueIds(SYSTEM_CLOCK, b"\x0a\x00\x00\x01", 77, 99)
    names = frozenset(rows.schema.names)
    encoder = RowEncoder(names, options, Origin("query", "7", 3), ids)
    queues = {"orders": tuple(MessageQueue("orders", "broker-a", number) for number in range(4))}
    counter = Counter()
    with counter.profiling():
        encoded = encoder.rows(rows, 0)
        assert encoded is not None
        planned = list(planned_sends(encoded, queues, BatchLimits(512, 1 << 20, 4096), 0))
    assert sum(len(send.rows) for send in planned) == count
    return counter.work


def stored_record(number: int) -> Record:
    return Record(
        topic=b"orders",
        queue_id=0,
        body=BODY,
        born_timestamp_ms=NOW_MS,
        properties=f"UNIQ_KEY\x01{number:032X}\x02KEYS\x01order-{number}\x02".encode(),
        born_host=host("10.1.2.3", 40_000),
        store_host=host("10.1.2.4", 10_911),
    )


@dataclass(frozen=True, slots=True)
class Bound:
    """A scenario and the most work of a message in it; only the calls depend on the core."""

    scene: Scene
    compiled: tuple[float, float]
    """Calls of Python and of C functions."""
    plain: tuple[float, float]
    turns: float = 0
    writes: float = 0
    system_calls: float = 0

    def work(self, core: str) -> Work:
        calls = self.plain if core == "plain" else self.compiled
        return Work(*calls, self.turns, self.writes, self.system_calls)


BOUNDS = {
    "send": Bound(sends, (310, 150), (560, 375), turns=6, writes=2.1),
    "send in batches of 16": Bound(batches, (23, 17), (71, 102), turns=0.39, writes=0.15),
    "pull": Bound(pulls, (15, 7), (28, 30), turns=0.15, writes=0.07),
    "consume": Bound(consumption, (9, 12), (17, 31), turns=0.05, writes=0.01),
    "blocking send": Bound(blocking_sends, (80, 59), (136, 121), system_calls=2.1),
    # In the compiled core, records become columns, and columns messages, in one call each.
    "Spark source, a row": Bound(by_column(source_rows), (0.05, 0.05), (79, 121)),
    "Spark sink, a row": Bound(by_column(sink_rows), (0.05, 0.05), (38, 43)),
}


# Not slow, as only the quick tests are repeated with the plain core.
@pytest.mark.parametrize("name", BOUNDS)
def test_work_per_message_is_bounded(tmp_path: Path, name: str) -> None:
    bound = BOUNDS[name].work(CORE_NAME)
    _, few, many = (
        BOUNDS[name].scene(tmp_path / str(number), count)
        for number, count in enumerate((MANY, FEW, MANY))
    )
    found = (many - few).for_each(MANY - FEW)
    exceeded = [
        f"{field.name}: {value:.2f}, at most {most}"
        for field, value, most in zip(fields(Work), found.values, bound.values, strict=True)
        if value > most
    ]
    assert not exceeded, f"{name}, for each message: {'; '.join(exceeded)}"
