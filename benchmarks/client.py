"""How fast a producer is: 1 to 32 threads, many sends in flight, one-way, batches.

::

    python benchmarks/client.py [seconds] [nameserver]

Without a name server, a server is started as another process on the same machine; bodies have 100
bytes. The processor time is the client's, in microseconds per message.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext

import turbopump
from turbopump import aio
from turbopump.net.loop import run

BODY = b"x" * 100
TOPIC = "benchmark"
TASKS = 256
THREADS = (1, 4, 8, 32)
BATCH = 32
ONEWAY_RUN = 200
_READY = re.compile(r"ready nameserver=(\S+) broker=(\S+)\n")

Count = Callable[[float], int]
AsyncCount = Callable[[aio.Producer, float], Awaitable[int]]


@contextmanager
def server() -> Iterator[str]:
    """Run name server and broker; give the name server's address."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "turbopump", "standalone", "--dir", directory]
        ports = ["--nameserver-port", "0", "--broker-port", "0"]
        with subprocess.Popen(
            [*command, *ports],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                ready = _READY.fullmatch(process.stdout.readline())
                assert ready is not None
                yield ready[1]
            finally:
                process.terminate()


def report(name: str, seconds: float, measure: Count) -> None:
    measure(0.3)
    cpu, started = time.process_time(), time.perf_counter()
    count = measure(seconds)
    elapsed, used = time.perf_counter() - started, time.process_time() - cpu
    print(f"{name:<28} {count / elapsed:>10,.0f}/s {used / count * 1e6:>8.1f} us")


def one_thread(producer: turbopump.Producer, seconds: float) -> int:
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        producer.send(turbopump.Message(TOPIC, BODY))
        count += 1
    return count


def many_threads(producer: turbopump.Producer, count: int, seconds: float) -> int:
    counts = [0] * count

    def work(place: int) -> None:
        counts[place] = one_thread(producer, seconds)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def blocking_oneway(producer: turbopump.Producer, seconds: float) -> int:
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        for _ in range(ONEWAY_RUN):
            producer.send_oneway(turbopump.Message(TOPIC, BODY))
        producer.send(turbopump.Message(TOPIC, BODY))
        count += ONEWAY_RUN + 1
    return count


def blocking_batches(producer: turbopump.Producer, seconds: float) -> int:
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        producer.send_batch([turbopump.Message(TOPIC, BODY) for _ in range(BATCH)])
        count += BATCH
    return count


def promises(producer: turbopump.Producer, seconds: float) -> int:
    end, count = time.perf_counter() + seconds, 0
    last = None
    while time.perf_counter() < end:
        last = producer.submit(turbopump.Message(TOPIC, BODY))
        count += 1
    if last is not None:
        last.result()
    return count


async def pipelined(producer: aio.Producer, seconds: float) -> int:
    end, counts = time.perf_counter() + seconds, [0]

    async def work() -> None:
        while time.perf_counter() < end:
            await producer.send(aio.Message(TOPIC, BODY))
            counts[0] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(TASKS):
            group.create_task(work())
    return counts[0]


async def oneway(producer: aio.Producer, seconds: float) -> int:
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        for _ in range(ONEWAY_RUN):
            await producer.send_oneway(aio.Message(TOPIC, BODY))
        # One that is answered: nothing else would keep the client from overrunning the broker.
        await producer.send(aio.Message(TOPIC, BODY))
        count += ONEWAY_RUN + 1
    return count


async def batches(producer: aio.Producer, seconds: float) -> int:
    end, counts = time.perf_counter() + seconds, [0]

    async def work() -> None:
        while time.perf_counter() < end:
            await producer.send_batch([aio.Message(TOPIC, BODY) for _ in range(BATCH)])
            counts[0] += BATCH

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(work())
    return counts[0]


def in_loop(nameserver: str, measure: AsyncCount, seconds: float) -> int:
    async def main() -> int:
        async with aio.Producer("benchmark", nameserver=nameserver) as producer:
            return await measure(producer, seconds)

    return run(main())


def asynchronous(nameserver: str, seconds: float) -> None:
    for name, measure in (
        (f"async, {TASKS} at a time", pipelined),
        (f"async, one-way, by {ONEWAY_RUN}", oneway),
        (f"async, batches of {BATCH}", batches),
    ):
        report(name, seconds, functools.partial(in_loop, nameserver, measure))


def in_threads(nameserver: str, seconds: float) -> None:
    with turbopump.Producer("benchmark", nameserver=nameserver) as producer:
        for count in THREADS:
            measure = functools.partial(many_threads, producer, count)
            report(f"blocking, {count} threads", seconds, measure)
        for name, blocking in (
            (f"blocking, one-way, by {ONEWAY_RUN}", blocking_oneway),
            (f"blocking, batches of {BATCH}", blocking_batches),
            ("blocking, promises", promises),
        ):
            report(name, seconds, functools.partial(blocking, producer))


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    print(f"{os.cpu_count()} processors; messages a second, client's processor time for each")
    with nullcontext(sys.argv[2]) if len(sys.argv) > 2 else server() as nameserver:
        in_threads(nameserver, seconds)
        asynchronous(nameserver, seconds)


if __name__ == "__main__":
    main()
