"""The same seed gives the same run, event by event, whatever the load of the machine."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from netkit import ECHO, slow, world
from turbopump.aio import ConsumeContext, ConsumeResult, Message, Producer, PushConsumer
from turbopump.errors import NetworkError, TurbopumpError
from turbopump.net.pool import ConnectionPool
from turbopump.testing import Cluster, LinkQuality, run_virtual, running_cluster, virtual_loop
from turbopump.testing.disk_faults import Chances
from turbopump.wire.command import Command
from turbopump.wire.record import MessageView


async def scenario() -> list[str]:
    """Several clients, slow and fast requests, cuts, partitions, half a minute."""
    loop = virtual_loop()
    outcomes: list[str] = []
    async with world(quality=LinkQuality(latency=0.005, jitter=0.02, cut_chance=0.5)) as here:
        here.network.trace = []

        async def client(name: str) -> None:
            host = here.network.host(name)
            async with ConnectionPool(host, clock=loop.clock, random=loop.random) as pool:
                for number in range(60):
                    call = slow(loop.random.randrange(200)) if number % 3 else Command(ECHO)
                    try:
                        await pool.request(here.server.address, call, 150)
                    except NetworkError as error:
                        outcomes.append(f"{name} {number} {type(error).__name__}")
                    await asyncio.sleep(loop.random.uniform(0, 0.5))

        async def trouble() -> None:
            names = [f"client-{number}" for number in range(6)]
            while True:
                await asyncio.sleep(loop.random.uniform(0.2, 2))
                here.network.cut(loop.random.choice(names))
                here.network.partition(loop.random.choice(names), "server")
                await asyncio.sleep(loop.random.uniform(0.1, 0.5))
                here.network.heal()

        troubling = asyncio.create_task(trouble())
        await asyncio.gather(*(client(f"client-{number}") for number in range(6)))
        troubling.cancel()
        return [*here.network.trace, *outcomes]


def digest(seed: int) -> str:
    return hashlib.sha256("\n".join(run_virtual(scenario(), seed)).encode()).hexdigest()


def test_the_same_seed_gives_the_same_trace() -> None:
    first, second = run_virtual(scenario(), 3), run_virtual(scenario(), 3)
    assert len(first) > 500
    assert any("RequestTimeout" in event for event in first)
    assert any("ConnectionLost" in event for event in first)
    assert first == second


def test_another_seed_gives_another_trace() -> None:
    assert digest(3) != digest(4)


class Cost(NamedTuple):
    """What a run has cost."""

    turns: int
    timers: int
    operations: dict[str, int]
    seconds: float


def shop(seed: int) -> Cost:
    """Send, fail, retry, crash and restart on a disk that is slow and fails by chance."""
    settings = {"flushDiskType": "SYNC_FLUSH"}
    with running_cluster(Path("/cluster"), settings=settings, seed=seed) as cluster:

        async def work() -> Cost:
            loop, disk = virtual_loop(), cluster.disk()
            disk.random = Random(seed)
            disk.chances = Chances(sync_ms_max=30, sync_fails=0.02)
            await cluster.make_topic("orders")
            async with listening(cluster):
                await send_some(cluster, range(8))
                await cluster.crash(lose_unflushed=True)
                await cluster.start_broker()
                disk.chances = Chances(sync_ms_max=30, sync_fails=0.02)
                await send_some(cluster, range(8, 16))
                await cluster.until_consumed("billing")
            return Cost(loop.turns, loop.timers_set, dict(disk.operations), loop.time())

        return cluster.run(work())


def listening(cluster: Cluster) -> PushConsumer:
    """Return a consumer that fails every third message the first time."""

    async def handle(messages: Sequence[MessageView], _: ConsumeContext) -> ConsumeResult:
        is_failing = messages[0].reconsume_times == 0 and int(messages[0].body) % 3 == 0
        return ConsumeResult.RETRY_LATER if is_failing else ConsumeResult.SUCCESS

    return PushConsumer(
        "billing",
        handle,
        nameserver=cluster.nameserver,
        subscriptions={"orders": "*"},
        start_from="first",
    )


async def send_some(cluster: Cluster, numbers: range) -> None:
    async with Producer("shop", nameserver=cluster.nameserver) as producer:
        for number in numbers:
            with suppress(TurbopumpError):
                await producer.send(Message("orders", b"%d" % number))


@contextmanager
def busy_machine() -> Iterator[None]:
    """Run threads that use the processor continuously, preempting at any time."""
    is_over, interval_s = threading.Event(), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)

    def burn() -> None:
        while not is_over.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=burn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        sys.setswitchinterval(interval_s)
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_a_run_costs_the_same_on_a_busy_machine() -> None:
    idle = shop(5)
    assert idle.operations["sync"] > 50
    assert idle.turns > 500
    with busy_machine():
        assert shop(5) == idle
    assert shop(6) != idle


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_the_trace_does_not_depend_on_how_texts_are_hashed(hash_seed: str) -> None:
    here = Path(__file__).parent
    program = "import test_determinism; print(test_determinism.digest(3))"
    paths = [str(here), str(here.parents[1]), *sys.path]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == digest(3)
