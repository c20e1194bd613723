"""The same seed gives the same run, event by event."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from netkit import ECHO, slow, world
from turbopump.errors import NetworkError
from turbopump.net.pool import ConnectionPool
from turbopump.testing import LinkQuality, run_virtual, virtual_loop
from turbopump.wire.command import Command


async def scenario() -> list[str]:
    """Several clients, slow and fast requests, cuts, partitions, half a minute."""
    loop = virtual_loop()
    outcomes: list[str] = []
    async with world(quality=LinkQuality(5, 20, 0.5)) as here:
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
