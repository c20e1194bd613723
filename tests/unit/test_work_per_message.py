"""How much is done for each message, counted and not timed: the same on any machine.

Counted are calls of Python functions, calls of C functions from Python, turns of the event loop and
writes to connections, on both sides together, in a cluster in memory. What a cluster does once is
left out: each count is the difference between many messages and few. The bounds leave room for
other versions of Python; who makes a path cheaper lowers its bound, and who raises one says why.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType

import pytest

from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.outgoing import split_batch
from turbopump.client.producer import Producer
from turbopump.client.pull_consumer import PullConsumer
from turbopump.client.push_config import Listening
from turbopump.client.push_consumer import PushConsumer
from turbopump.message import Message, PhysicalOffset, QueueOffset
from turbopump.spark.records.record_columns import RecordColumns
from turbopump.spark.records.schema import COLUMNS
from turbopump.testing import Cluster, running_cluster, virtual_loop
from turbopump.testing.memory_transport import Pipe
from turbopump.wire.hosts import host
from turbopump.wire.record import MessageView, Record

FEW, MANY = 64, 576
BODY = b"x" * 128

Scene = Callable[[Cluster, int], Awaitable["Work"]]


@dataclass(frozen=True, slots=True)
class Work:
    """What was done, or what may be done at most, for each message."""

    calls: float
    c_calls: float
    turns: float
    writes: float

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
        self.counts = dict.fromkeys(("call", "c_call", "write"), 0)
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

        def profile(_: FrameType, event: str, __: object) -> None:
            if event in counts:
                counts[event] += 1

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
        return Work(self.counts["call"], self.counts["c_call"], self._turns, self.counts["write"])


async def fill(cluster: Cluster, count: int) -> None:
    messages = [Message("orders", BODY, tags="created") for _ in range(count)]
    async with Producer("filler", nameserver=cluster.nameserver) as producer:
        for batch in split_batch(messages, count_max=FEW):
            await producer.send_batch(batch)


def sends(in_flight: int) -> Scene:
    async def scene(cluster: Cluster, count: int) -> Work:
        async with Producer("shop", nameserver=cluster.nameserver) as producer:
            await producer.send(Message("orders", BODY))
            left, counter = iter(range(count)), Counter()

            async def send() -> None:
                for _ in left:
                    await producer.send(Message("orders", BODY))

            with counter.counting():
                await asyncio.gather(*(send() for _ in range(in_flight)))
        return counter.work

    return scene


async def batches(cluster: Cluster, count: int) -> Work:
    async with Producer("shop", nameserver=cluster.nameserver) as producer:
        await producer.send(Message("orders", BODY))
        counter = Counter()
        with counter.counting():
            for _ in range(count // 16):
                await producer.send_batch([Message("orders", BODY) for _ in range(16)])
    return counter.work


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


def consumption(batch_max: int) -> Scene:
    async def scene(cluster: Cluster, count: int) -> Work:
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
            listening=Listening(batch_max=batch_max),
        )
        counter = Counter()
        with counter.counting():
            await consumer.start()
            await finished.wait()
        await consumer.close()
        return counter.work

    return scene


BOUNDS: dict[str, tuple[Scene, Work]] = {
    "send, 1 in flight": (sends(1), Work(305, 165, 3.5, 2.1)),
    "send, 32 in flight": (sends(32), Work(156, 120, 0.2, 0.35)),
    "send in batches of 16": (batches, Work(36, 52, 0.25, 0.15)),
    "pull": (pulls, Work(20, 15.5, 0.12, 0.07)),
    "consume, batch 1": (consumption(1), Work(49, 40, 0.25, 0.08)),
    "consume, batch 32": (consumption(32), Work(18.5, 19, 0.22, 0.08)),
}


def counted(directory: Path, scene: Scene, count: int) -> Work:
    async def play(cluster: Cluster) -> Work:
        await cluster.make_topic("orders", queues=1)
        return await scene(cluster, count)

    with running_cluster(directory) as cluster:
        return cluster.run(play(cluster))


@pytest.mark.parametrize("name", BOUNDS)
def test_work_per_message_is_bounded(tmp_path: Path, name: str) -> None:
    scene, bound = BOUNDS[name]
    few, many = (counted(tmp_path / str(count), scene, count) for count in (FEW, MANY))
    found = (many - few).for_each(MANY - FEW)
    exceeded = [
        f"{field.name}: {value:.2f}, at most {most}"
        for field, value, most in zip(fields(Work), found.values, bound.values, strict=True)
        if value > most
    ]
    assert not exceeded, f"{name}, for each message: {'; '.join(exceeded)}"


def columns_work(rows: int) -> Work:
    data = b"".join(
        Record(
            topic=b"orders",
            queue_id=0,
            body=BODY,
            born_timestamp_ms=1_700_000_000_000,
            properties=f"UNIQ_KEY\x01{number:032X}\x02KEYS\x01order-{number}\x02".encode(),
            born_host=host("10.1.2.3", 40_000),
            store_host=host("10.1.2.4", 10_911),
        ).encode(QueueOffset(number), PhysicalOffset(number), 1_700_000_000_000)
        for number in range(rows)
    )
    columns, counts = RecordColumns(COLUMNS), Counter()
    with counts.profiling():
        assert columns.batch(data, broker="broker-a").num_rows == rows
    return counts.work


def test_work_per_row_of_spark_is_bounded() -> None:
    """Records become columns by the column: hardly anything is called for each row."""
    columns_work(FEW)
    found = (columns_work(10 * MANY) - columns_work(MANY)).for_each(9 * MANY)
    assert found.calls < 0.05
    # One checksum of each body, over one slice.
    assert found.c_calls < 2.2


def test_counts_are_the_same_each_time(tmp_path: Path) -> None:
    one, other = (counted(tmp_path / place, sends(32), MANY) for place in "ab")
    assert one == other
