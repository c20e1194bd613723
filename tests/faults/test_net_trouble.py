"""Cuts, partitions and hung peers together: each call ends exactly once, and nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from netkit import ECHO, NEVER, SMALL, World, body_bytes, slow, world
from turbopump.errors import NetworkError, RequestTimeout
from turbopump.net.pool import ConnectionPool
from turbopump.net.pool_config import PoolConfig
from turbopump.testing import LinkQuality, run_virtual, virtual_loop, virtual_time
from turbopump.wire.command import Command

pytestmark = pytest.mark.slow

CLIENTS = [f"client-{number}" for number in range(5)]
CALLERS_EACH = 4


class Trouble:
    """Clients that keep sending requests while the network is broken repeatedly."""

    def __init__(self, here: World, calls_each: int) -> None:
        self.here = here
        self.random = virtual_loop().random
        self.calls_each = calls_each
        self.answered = 0
        self.failed = 0

    async def run(self) -> None:
        breaking = asyncio.create_task(self.break_things())
        await asyncio.gather(*(self.client(name) for name in CLIENTS))
        breaking.cancel()
        self.heal_all()

    async def client(self, name: str) -> None:
        network, config = self.here.network.host(name), PoolConfig(limits=SMALL)
        async with (
            ConnectionPool(network, config, clock=self.here.clock, random=self.random) as pool,
            asyncio.TaskGroup() as group,
        ):
            for number in range(CALLERS_EACH):
                group.create_task(self.caller(pool, f"{name}-{number}"))

    async def caller(self, pool: ConnectionPool, name: str) -> None:
        for number in range(self.calls_each):
            body = f"{name}/{number}".encode() * self.random.randrange(1, 200)
            call = slow(self.random.randrange(100), body)
            try:
                answer = await pool.request(self.here.server.address, call, 1000)
                assert body_bytes(answer) == body, "an answer was matched to the wrong request"
                self.answered += 1
            except NetworkError:
                self.failed += 1
            await asyncio.sleep(self.random.uniform(0, 60))

    async def break_things(self) -> None:
        while True:
            await asyncio.sleep(self.random.expovariate(1 / 20))
            self.break_one(self.random.choice(CLIENTS))
            await asyncio.sleep(self.random.expovariate(1 / 5))
            self.heal_all()

    def break_one(self, host: str) -> None:
        network = self.here.network
        match self.random.randrange(5):
            case 0:
                network.cut(host)
            case 1:
                network.partition(host, "server")
            case 2:
                network.stop_reading(host)
            case 3:
                network.stop_reading("server")
            case _:
                network.lose(host, "server")

    def heal_all(self) -> None:
        network = self.here.network
        network.heal()
        network.stop_losing()
        for host in ("server", *CLIENTS):
            network.resume_reading(host)


async def hours_of_trouble(calls_each: int) -> Trouble:
    async with world(
        limits=SMALL, quality=LinkQuality(latency=0.002, jitter=0.03, cut_chance=0.3)
    ) as here:
        trouble = Trouble(here, calls_each)
        await trouble.run()
    assert here.network.open_connections == 0
    return trouble


@pytest.mark.parametrize("seed", range(3))
def test_every_call_ends_and_no_resource_leaks(seed: int) -> None:
    done = run_virtual(hours_of_trouble(40), seed)
    assert done.answered + done.failed == len(CLIENTS) * CALLERS_EACH * 40
    assert done.answered > done.failed > 0


@virtual_time()
async def test_a_peer_that_vanishes_costs_a_timeout_and_then_the_idle_limit() -> None:
    async with world() as here:
        connection = await here.connect()
        await connection.request(Command(ECHO), 1000)
        here.network.lose("client", "server")
        with pytest.raises(RequestTimeout):
            await connection.request(Command(NEVER), 3000)
        await connection.wait_closed()
        assert virtual_loop().time() == pytest.approx(123, abs=3.5)
