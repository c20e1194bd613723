"""Sending as fast as answers arrive, from threads or from tasks."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from turbopump.bench.sample import Gate, Quota, Sample, Stopwatch, Workload
from turbopump.client import blocking
from turbopump.client.producer import Producer
from turbopump.message import Message
from turbopump.net.loop import run

_GROUP = "turbopump-bench"


class Produce(Workload, frozen=True, kw_only=True):
    """How to send. With both ``seconds`` and ``count`` None, nothing is sent."""

    concurrency: int = 32
    batch: int = 1
    size_bytes: int = 128
    seconds: float | None = 10.0
    count: int | None = None

    def __call__(self, gate: Gate) -> Sample:
        return run(_on_loop(self, gate)) if self.asynchronous else _in_threads(self, gate)


async def _on_loop(work: Produce, gate: Gate) -> Sample:
    async with Producer(_GROUP, nameserver=work.nameserver) as producer:
        await producer.queues(work.topic)
        await _send_tasks(producer, work, Quota(work.batch, work.warm_up_s, None), [])
        await asyncio.to_thread(gate)
        latencies_s: list[float] = []
        watch = Stopwatch()
        quota = Quota(work.batch, work.seconds, work.count)
        sent = await _send_tasks(producer, work, quota, latencies_s)
        return watch.sample(sent, latencies_s)


async def _send_tasks(
    producer: Producer, work: Produce, quota: Quota, latencies_s: list[float]
) -> int:
    topic, body = work.topic, b"x" * work.size_bytes

    async def send() -> int:
        sent = 0
        while count := quota.take():
            began_s = time.monotonic()
            if work.batch == 1:
                await producer.send(Message(topic, body))
            else:
                await producer.send_batch([Message(topic, body) for _ in range(count)])
            latencies_s.append(time.monotonic() - began_s)
            sent += count
        return sent

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send()) for _ in range(work.concurrency)]
    except BaseExceptionGroup as errors:
        # One is enough: all sends in flight fail for the same reason.
        raise errors.exceptions[0] from None
    return sum(task.result() for task in tasks)


def _in_threads(work: Produce, gate: Gate) -> Sample:
    with (
        blocking.Producer(_GROUP, nameserver=work.nameserver) as producer,
        ThreadPoolExecutor(work.concurrency) as threads,
    ):
        producer.queues(work.topic)
        _send_threads(threads, producer, work, Quota(work.batch, work.warm_up_s, None), [])
        gate()
        latencies_s: list[float] = []
        watch = Stopwatch()
        quota = Quota(work.batch, work.seconds, work.count)
        sent = _send_threads(threads, producer, work, quota, latencies_s)
        return watch.sample(sent, latencies_s)


def _send_threads(
    threads: ThreadPoolExecutor,
    producer: blocking.Producer,
    work: Produce,
    quota: Quota,
    latencies_s: list[float],
) -> int:
    topic, body = work.topic, b"x" * work.size_bytes

    def send(_: int) -> int:
        sent = 0
        while count := quota.take():
            began_s = time.monotonic()
            if work.batch == 1:
                producer.send(Message(topic, body))
            else:
                producer.send_batch([Message(topic, body) for _ in range(count)])
            latencies_s.append(time.monotonic() - began_s)
            sent += count
        return sent

    return sum(threads.map(send, range(work.concurrency)))
