"""A broker in a process of its own, and a push consumer in this one: backlog, memory, latency.

    python benchmarks/consume.py [--messages 300000] [--only backlog,latency]

A backlog is stored first and then consumed by one consumer with a trivial listener. Beside it stand
the Java client's figures on a machine of this size.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from measure import print_table
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.outgoing import split_batch
from turbopump.client.producer import Producer
from turbopump.client.push_config import Listening
from turbopump.client.push_consumer import PushConsumer
from turbopump.message import Message
from turbopump.net.loop import run
from turbopump.wire.record import MessageView

BODY = b"x" * 128
SENDS_IN_FLIGHT = 8
LATENCY_MESSAGES = 2000
LATENCY_PAUSE_S = 0.001
STUCK_S = 3
JAVA = {
    "concurrent, batch 1": "101–115k",
    "concurrent, batch 32": "133–151k",
    "orderly, batch 1": "112–121k",
}

Messages = Sequence[MessageView]


@contextmanager
def standalone(directory: Path) -> Iterator[str]:
    """Run name server and broker; give the name server's address."""
    ports = ["--nameserver-port", "0", "--broker-port", "0"]
    command = [sys.executable, "-m", "turbopump", "standalone", "--dir", str(directory), *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline().split()
            yield ready[1].removeprefix("nameserver=")
        finally:
            process.terminate()


@dataclass
class Count:
    """Listeners that only count."""

    wanted: int
    done: int = 0
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def plain(self, messages: Messages, _: ConsumeContext) -> ConsumeResult:
        self.done += len(messages)
        if self.done >= self.wanted:
            self.loop.call_soon_threadsafe(self.finished.set)
        return ConsumeResult.SUCCESS

    async def on_loop(self, messages: Messages, context: ConsumeContext) -> ConsumeResult:
        return self.plain(messages, context)


async def fill(nameserver: str, count: int) -> None:
    """Store a backlog, spread over the topic's queues."""
    messages = (Message("Bench", BODY, tags="TagA") for _ in range(count))
    async with Producer("filler", nameserver=nameserver) as producer:
        pending: set[asyncio.Task[object]] = set()
        for batch in split_batch(messages, count_max=200):
            pending.add(asyncio.create_task(producer.send_batch(batch, timeout_ms=30_000)))
            if len(pending) >= SENDS_IN_FLIGHT:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*pending)


async def backlog(
    nameserver: str, group: str, count: int, batch_max: int, *, orderly: bool, on_loop: bool
) -> tuple[float, float]:
    """Return messages a second, and CPU microseconds of each in this process."""
    counter = Count(count)
    consumer = PushConsumer(
        group,
        counter.on_loop if on_loop else counter.plain,
        nameserver=nameserver,
        subscriptions={"Bench": "*"},
        start_from="first",
        orderly=orderly,
        listening=Listening(batch_max=batch_max),
    )
    start, cpu = time.perf_counter(), time.process_time()
    async with consumer:
        await counter.finished.wait()
        elapsed, used = time.perf_counter() - start, time.process_time() - cpu
    return count / elapsed, used / count * 1e6


async def backlogs(nameserver: str, count: int) -> None:
    started = time.perf_counter()
    await fill(nameserver, count)
    print(f"{count} messages stored in {time.perf_counter() - started:.1f} s\n")
    rows = []
    cases = [
        (f"{'orderly' if orderly else 'concurrent'}, batch {batch_max}", batch_max, orderly)
        for orderly in (False, True)
        for batch_max in (1, 32)
    ]
    for on_loop in (False, True):
        for name, batch_max, orderly in cases:
            group = f"g-{batch_max}-{orderly}-{on_loop}"
            rate, micros = await backlog(
                nameserver, group, count, batch_max, orderly=orderly, on_loop=on_loop
            )
            kind = "async def" if on_loop else "threads"
            rows.append([f"{name}, {kind}", f"{rate:,.0f}", f"{micros:.1f}", JAVA.get(name, "")])
    print_table(["backlog", "messages/s", "CPU µs each", "Java messages/s"], rows)


async def latency(nameserver: str, *, on_loop: bool) -> tuple[float, float]:
    """Return median and 99th percentile of the time from send to listener, in milliseconds."""
    times: list[float] = []

    def plain(messages: Messages, _: ConsumeContext) -> ConsumeResult:
        now = time.perf_counter()
        times.extend(now - float(message.body) for message in messages)
        return ConsumeResult.SUCCESS

    async def listen(messages: Messages, context: ConsumeContext) -> ConsumeResult:
        return plain(messages, context)

    async with Producer("latency", nameserver=nameserver) as producer:
        await producer.send(Message("Latency", b"0"))
        async with PushConsumer(
            f"latency-{on_loop}",
            listen if on_loop else plain,
            nameserver=nameserver,
            subscriptions={"Latency": "*"},
        ):
            await asyncio.sleep(1)
            times.clear()
            for _ in range(LATENCY_MESSAGES):
                await producer.send(Message("Latency", b"%.9f" % time.perf_counter()))
                await asyncio.sleep(LATENCY_PAUSE_S)
            await asyncio.sleep(1)
    cuts = statistics.quantiles(times, n=100)
    return cuts[49] * 1000, cuts[98] * 1000


async def latencies(nameserver: str) -> None:
    rows = []
    for on_loop in (False, True):
        median, worst = await latency(nameserver, on_loop=on_loop)
        rows.append(["async def" if on_loop else "threads", f"{median:.2f}", f"{worst:.2f}"])
    print_table(["send to listener, ms (Java: 1.2–1.6)", "p50", "p99"], rows)


def resident_mib() -> float:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


async def memory(nameserver: str) -> None:
    """Print what a consumer holds whose listener is stuck while there is a backlog."""
    stuck = asyncio.Event()

    async def listen(_: Messages, __: ConsumeContext) -> ConsumeResult:
        await stuck.wait()
        return ConsumeResult.SUCCESS

    before = resident_mib()
    async with PushConsumer(
        "stuck",
        listen,
        nameserver=nameserver,
        subscriptions={"Bench": "*"},
        start_from="first",
        listening=Listening(close_wait_ms=0),
    ) as consumer:
        await asyncio.sleep(STUCK_S)
        info = await consumer.running_info(with_stacks=False)
        held = sum(each.cached_msg_count for each in info.mq_table.values())
        print(
            f"stuck for {STUCK_S} s: {held} messages held, {resident_mib() - before:.1f} MiB more"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--only", default="backlog,latency")
    options = parser.parse_args()
    wanted = options.only.split(",")
    with tempfile.TemporaryDirectory() as directory, standalone(Path(directory)) as nameserver:
        if "backlog" in wanted:
            await backlogs(nameserver, options.messages)
            print()
            await memory(nameserver)
            print()
        if "latency" in wanted:
            await latencies(nameserver)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "error")
    run(main())
