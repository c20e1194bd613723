"""Consuming a backlog with a listener that only counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from turbopump.bench.sample import Gate, Sample, Stopwatch, Workload
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.push_consumer import PushConsumer
from turbopump.errors import TurbopumpError
from turbopump.net.loop import run
from turbopump.wire.record import MessageView

_IDLE_S = 2.0
"""A backlog shared by several processes counts as consumed after this time without a message."""
_POLL_INTERVAL_S = 0.02
_JOIN_S = 60.0
Messages = Sequence[MessageView]


class Consume(Workload, frozen=True, kw_only=True):
    """How to consume: until ``count`` messages, ``seconds``, or messages stop arriving."""

    group: str
    queues: tuple[int, int]
    """Fewest and most queues that one process owns once all have joined."""
    concurrency: int = 20
    batch: int = 1
    orderly: bool = False
    seconds: float | None = None
    count: int | None = None

    def __call__(self, gate: Gate) -> Sample:
        """Join the group, wait at the gate, warm up, and measure."""
        return run(_consume(self, gate))


class _Counter:
    """Listeners that only count."""

    def __init__(self, count: int | None) -> None:
        self.done = 0
        self.last_s = time.monotonic()
        self.finished = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._count = count

    def on_thread(self, messages: Messages, _: ConsumeContext) -> ConsumeResult:
        self.done += len(messages)
        self.last_s = time.monotonic()
        if self._count is not None and self.done >= self._count:
            self._loop.call_soon_threadsafe(self.finished.set)
        return ConsumeResult.SUCCESS

    async def on_loop(self, messages: Messages, context: ConsumeContext) -> ConsumeResult:
        return self.on_thread(messages, context)


async def _consume(work: Consume, gate: Gate) -> Sample:
    counter = _Counter(work.count)
    async with PushConsumer(
        work.group,
        counter.on_loop if work.asynchronous else counter.on_thread,
        nameserver=work.nameserver,
        subscriptions={work.topic: "*"},
        start_from="first",
        orderly=work.orderly,
        concurrency=work.concurrency,
        batch_size=work.batch,
    ) as consumer:
        consumer.suspend()
        await assigned(consumer, work.topic, *work.queues)
        await asyncio.to_thread(gate)
        counter.last_s = time.monotonic()
        consumer.resume()
        await _wait(counter, work.warm_up_s)
        before, watch = counter.done, Stopwatch()
        await _wait(counter, work.seconds)
        return watch.sample(counter.done - before, ended_s=counter.last_s)


async def assigned(consumer: PushConsumer, topic: str, least: int, most: int) -> None:
    """Wait until a consumer has its share of a topic's queues."""
    end_s = time.monotonic() + _JOIN_S
    while not least <= sum(queue.topic == topic for queue in consumer.assignment()) <= most:
        if time.monotonic() > end_s:
            raise TurbopumpError(f"got no queues of topic {topic} within {_JOIN_S:.0f} s")
        await asyncio.sleep(_POLL_INTERVAL_S)


async def _wait(counter: _Counter, seconds: float | None) -> None:
    """Wait until everything is consumed, messages stop arriving, or the time is up."""
    end_s = None if seconds is None else time.monotonic() + seconds
    while not counter.finished.is_set():
        now_s = time.monotonic()
        if now_s - counter.last_s > _IDLE_S or (end_s is not None and now_s >= end_s):
            return
        pause_s = _POLL_INTERVAL_S if end_s is None else min(_POLL_INTERVAL_S, end_s - now_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await counter.finished.wait()
