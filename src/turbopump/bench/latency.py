"""The time from a send to the listener, at a steady rate."""

from __future__ import annotations

import asyncio
import secrets
import struct
import time

from turbopump.bench.consume import Messages, assigned
from turbopump.bench.sample import Gate, Sample, Stopwatch, Workload
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.producer import Producer
from turbopump.client.push_consumer import PushConsumer
from turbopump.errors import TurbopumpError
from turbopump.message import Message
from turbopump.net.loop import run

_STAMP = struct.Struct(">8sd")
"""Run id, since others may send to the topic too, and send time."""
SIZE_BYTES_MIN = _STAMP.size
_ARRIVE_S = 10.0
_POLL_INTERVAL_S = 0.02


class Latency(Workload, frozen=True, kw_only=True):
    group: str
    queues: int
    rate: float = 200.0
    size_bytes: int = 128
    seconds: float = 10.0

    def __call__(self, gate: Gate) -> Sample:
        return run(_measure(self, gate))


class _Arrivals:
    """Listeners that record the latency of each message."""

    def __init__(self) -> None:
        self.mark = secrets.token_bytes(8)
        self.latencies_s: list[float] = []

    def on_thread(self, messages: Messages, _: ConsumeContext) -> ConsumeResult:
        now_s = time.monotonic()
        for message in messages:
            if message.body.startswith(self.mark):
                _, sent_s = _STAMP.unpack_from(message.body)
                self.latencies_s.append(now_s - sent_s)
        return ConsumeResult.SUCCESS

    async def on_loop(self, messages: Messages, context: ConsumeContext) -> ConsumeResult:
        return self.on_thread(messages, context)


async def _measure(work: Latency, gate: Gate) -> Sample:
    arrivals = _Arrivals()
    async with (
        Producer("turbopump-bench", nameserver=work.nameserver) as producer,
        PushConsumer(
            work.group,
            arrivals.on_loop if work.asynchronous else arrivals.on_thread,
            nameserver=work.nameserver,
            subscriptions={work.topic: "*"},
        ) as consumer,
    ):
        await assigned(consumer, work.topic, work.queues, work.queues)
        await _send(producer, work, arrivals, work.warm_up_s)
        arrivals.latencies_s.clear()
        gate()
        watch = Stopwatch()
        await _send(producer, work, arrivals, work.seconds)
        return watch.sample(len(arrivals.latencies_s), arrivals.latencies_s)


async def _send(producer: Producer, work: Latency, arrivals: _Arrivals, seconds: float) -> None:
    """Send at the rate, then wait until all have arrived."""
    started_s, sent = time.monotonic(), 0
    count = int(seconds * work.rate)
    padding = b"x" * (work.size_bytes - _STAMP.size)
    while sent < count:
        pause_s = started_s + sent / work.rate - time.monotonic()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        body = _STAMP.pack(arrivals.mark, time.monotonic()) + padding
        await producer.send(Message(work.topic, body))
        sent += 1
    end_s = time.monotonic() + _ARRIVE_S
    while len(arrivals.latencies_s) < sent:
        if time.monotonic() > end_s:
            got = len(arrivals.latencies_s)
            raise TurbopumpError(f"{got} of {sent} messages arrived within {_ARRIVE_S:.0f} s")
        await asyncio.sleep(_POLL_INTERVAL_S)
