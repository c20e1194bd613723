"""The part ``queues`` of `spark.py`: what thousands of queues cost, by processor time.

Runs what Spark's driver and a task run, in this process and without Spark: the calls for a look
at the ends of all queues, and the reading of one partition that has a small range of each queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from turbopump.admin import Admin
from turbopump.client.producer import Producer
from turbopump.message import Message, MessageQueue
from turbopump.spark.reading.options import SourceOptions
from turbopump.spark.reading.partition_planner import QueueRange
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


async def fill_queues(nameserver: str, topic: str, queues: int) -> None:
    """Create a topic and store a few messages in each queue."""
    async with Admin(nameserver) as admin:
        await admin.topics.create(topic, queues=queues)
    async with Producer("benchmark", nameserver=nameserver) as producer:
        for number in range(queues):
            batch = [Message(topic, b"x" * 128, tags="TagA", keys="order") for _ in range(EACH)]
            await producer.send_batch(batch, to=MessageQueue(topic, BROKER, number))


def queue_results(nameserver: str, broker_pid: int, topic: str, queues: int) -> Iterator[list[str]]:
    """Yield rows: what was measured, ms or µs of this process, and of the broker."""
    meter = _Meter(broker_pid)
    stream = _stream(nameserver, topic)
    at = stream.latestOffset({}, stream.getDefaultReadLimit())
    for what, start in (("look, nothing new", at), ("look, new messages in all", _behind(at))):
        look = partial(stream.latestOffset, start, stream.getDefaultReadLimit())
        here, there = meter.least(look)
        yield [f"{what}, {queues:,} queues, ms", f"{here * 1e3:.1f}", f"{there * 1e3:.1f}"]
    stream.stop()
    ranges = tuple(QueueRange(topic, BROKER, number, 0, EACH) for number in range(queues))
    rows = queues * EACH
    for what, given in FILTERS.items():
        options = SourceOptions.for_batch({"nameserver": nameserver, "topic": topic, **given})
        here, there = meter.least(partial(_read, PartitionReader.of(options), ranges))
        yield [
            f"{queues:,} ranges of {EACH} messages{what}, µs a row",
            f"{here / rows * 1e6:.1f}",
            f"{there / rows * 1e6:.1f}",
        ]


def _read(reader: PartitionReader, ranges: tuple[QueueRange, ...]) -> None:
    """Read all messages, which all match."""
    assert sum(batch.num_rows for batch in reader.read(ranges)) == len(ranges) * EACH


def _stream(nameserver: str, topic: str) -> StreamReader:
    given = {"nameserver": nameserver, "topic": topic, "group": "benchmark", "idleWait": "10ms"}
    found = DefaultSource(given)
    reader = found.streamReader(found.schema())
    assert isinstance(reader, StreamReader)
    return reader


def _behind(at: dict[str, Any]) -> dict[str, Any]:
    """Return a position one message before another in each queue."""
    return {
        topic: {
            broker: {number: offset - 1 for number, offset in queues.items()}
            for broker, queues in brokers.items()
        }
        for topic, brokers in at.items()
        if topic
    }


class _Meter:
    """Measures the processor time of this process and of the broker."""

    def __init__(self, broker_pid: int) -> None:
        self._stat = Path(f"/proc/{broker_pid}/stat")

    def least(self, action: Callable[[], object]) -> tuple[float, float]:
        """Return the seconds of the best of several rounds; the first one only warms up."""
        action()
        rounds = []
        for _ in range(ROUNDS):
            here, there = time.process_time(), self._broker_s()
            action()
            rounds.append((time.process_time() - here, self._broker_s() - there))
        return min(each[0] for each in rounds), min(each[1] for each in rounds)

    def _broker_s(self) -> float:
        fields = self._stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100
