"""The part ``queues`` of `spark.py`: the cost of thousands of queues, in CPU time.

Runs what Spark's driver and a task run, in this process and without Spark: the calls that look up
the ends of all queues, and reading one partition with a small range of each queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path

from turbopump.aio import Admin
from turbopump.client.producer import Producer
from turbopump.message import Message, MessageQueue
from turbopump.net.loop import run
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import Partition, QueueRange, plan
from turbopump.spark.reading.partition_reader import PartitionReader
from turbopump.spark.source import DefaultSource, StreamReader

BROKER = "broker-a"
ROUNDS = 5
EACH = 2
FILTERS: dict[str, dict[str, str]] = {
    "": {},
    ", by tag": {"tags": "TagA"},
    ", by SQL": {"sql": "TAGS = 'TagA'"},
}
SETTLED_S = 0.01
"""The most CPU time that an idle broker uses in half a second."""


async def create_topic(nameserver: str, topic: str, queues: int) -> None:
    async with Admin(nameserver) as admin:
        await admin.topics.create(topic, queues=queues)


async def send_to_each(nameserver: str, topic: str, queues: Iterable[int], each: int) -> None:
    """Store messages in each of the given queues."""
    async with Producer("benchmark", nameserver=nameserver) as producer:
        batch = [Message(topic, b"x" * 128, tags="TagA", keys="order") for _ in range(each)]
        for number in queues:
            await producer.send_batch(batch, to=MessageQueue(topic, BROKER, number))


def look_results(
    nameserver: str, broker_pid: int, topic: str, queues: int, numbers: Iterable[int]
) -> Iterator[list[str]]:
    """Yield rows: what was measured, ms of this process, and of the broker.

    ``numbers`` are the numbers of queues with new messages.
    """
    meter = _Meter(broker_pid)
    stream = _stream(nameserver, topic)
    limit = stream.getDefaultReadLimit()
    at = stream.latestOffset({}, limit)

    def send(news: int) -> None:
        nonlocal at
        # A new object, as when offsets come from the JVM.
        at = deepcopy(at)
        run(send_to_each(nameserver, topic, range(news), 1))

    def look() -> None:
        nonlocal at
        at = stream.latestOffset(at, limit)

    for news in numbers:
        here, there = meter.least(look, partial(send, news))
        what = f"look at {queues:,} queues, {news:,} with new messages, ms"
        yield [what, f"{here * 1e3:.1f}", f"{there * 1e3:.1f}"]
    stream.stop()


def read_results(nameserver: str, broker_pid: int, topic: str, queues: int) -> Iterator[list[str]]:
    """Yield rows: what was measured, µs of this process, and of the broker."""
    ranges = [QueueRange(topic, BROKER, number, 0, EACH) for number in range(queues)]
    rows = queues * EACH
    for what, given in FILTERS.items():
        options = SourceOptions.for_batch({"nameserver": nameserver, "topic": topic, **given})
        tasks = plan(ranges, options.plan, queues=queues)
        read = partial(_read, PartitionReader(options), tasks)
        here, there = _Meter(broker_pid).least(read)
        yield [
            f"{queues:,} ranges of {EACH} messages in {len(tasks)} tasks{what}, µs a row",
            f"{here / rows * 1e6:.1f}",
            f"{there / rows * 1e6:.1f}",
        ]


def _read(reader: PartitionReader, tasks: list[Partition]) -> None:
    """Read all messages; all of them match."""
    found = sum(batch.num_rows for task in tasks for batch in reader.read(task))
    assert found == EACH * sum(map(len, tasks))


def _stream(nameserver: str, topic: str) -> StreamReader:
    given = {"nameserver": nameserver, "topic": topic, "group": "benchmark", "idleWait": "10ms"}
    found = DefaultSource(given)
    reader = found.streamReader(found.schema())
    assert isinstance(reader, StreamReader)
    return reader


class _Meter:
    """Measures the CPU time of this process and of the broker."""

    def __init__(self, broker_pid: int) -> None:
        self._threads = Path(f"/proc/{broker_pid}/task")

    def least(
        self, action: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> tuple[float, float]:
        """Return the seconds of the best of several rounds; the first is a warm-up."""
        before()
        action()
        rounds = []
        for _ in range(ROUNDS):
            before()
            self._settle()
            here, there = time.process_time(), self._broker_s()
            action()
            rounds.append((time.process_time() - here, self._broker_s() - there))
        return min(each[0] for each in rounds), min(each[1] for each in rounds)

    def _settle(self) -> None:
        """Wait until the broker has written earlier messages, which is not measured."""
        spent = -1.0
        while self._broker_s() - spent > SETTLED_S:
            spent = self._broker_s()
            time.sleep(0.5)

    def _broker_s(self) -> float:
        spent = (each.read_text().split()[0] for each in self._threads.glob("*/schedstat"))
        return sum(map(int, spent)) / 1e9
