"""Brokers that die in the midst of transactions: each message is visible once, or never."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from brokers import BROKER_HOST, SMALL_STORE, SYNC_STORE, client_of, config_at
from transaction_peers import COMMIT, ROLLBACK, Asked, Producer, producer_of
from turbopump.broker.broker import Broker
from turbopump.errors import NetworkError
from turbopump.store.config import StoreConfig
from turbopump.testing import (
    Disk,
    MemoryHost,
    MemoryNetwork,
    virtual_loop,
    virtual_machine,
    virtual_time,
)

pytestmark = pytest.mark.slow

INTERVAL_S = 60
DIRECTORY = Path("/store")


class Death:
    """The end of a broker's machine, at a certain write."""

    def __init__(self, disk: Disk, network: MemoryNetwork, host: MemoryHost, writes: int) -> None:
        self._disk = disk
        self._network = network
        self._host = host
        self._writes_left = writes
        disk.on_operation = self._look

    def _look(self, operation: str, _: Path) -> None:
        if operation == "write":
            self._writes_left -= 1
            if self._writes_left < 0:
                self.come()

    def come(self) -> None:
        self._disk.on_operation = None
        self._disk.die()
        self._network.kill(self._host)


class Work:
    """What a producer does, and what its database says of it."""

    def __init__(self) -> None:
        self.committed: list[bytes] = []
        self.acknowledged = False

    def decide(self, asked: Asked) -> int:
        return COMMIT if asked.message.body in self.committed else ROLLBACK

    async def run(self, producer: Producer) -> None:
        await producer.half(b"nothing came of it")
        await self.transaction(producer, b"committed")
        await producer.end(await producer.half(b"rolled back"), ROLLBACK)
        await self.transaction(producer, b"delayed", DELAY="1")
        await self.transaction(producer, b"unsaid", says=False)
        await asyncio.sleep(INTERVAL_S + 1)
        await self.transaction(producer, b"later")

    async def transaction(
        self, producer: Producer, body: bytes, *, says: bool = True, **named: str
    ) -> None:
        place = await producer.half(body, **named)
        self.committed.append(body)
        if says:
            await producer.end(place)


async def run_until_death(store: StoreConfig, writes: int, work: Work) -> Disk:
    network, disk = MemoryNetwork(), Disk(virtual_loop())
    host = network.host(BROKER_HOST)
    broker = Broker(config_at(DIRECTORY, store=store), host, virtual_machine(disk, seed=1))
    await broker.start()
    death = Death(disk, network, host, writes)
    with suppress(NetworkError):
        async with producer_of(network, broker.address, decide=work.decide) as producer:
            await work.run(producer)
            work.acknowledged = True
    if work.acknowledged:
        death.come()
    await broker.close()
    return disk


async def visible_after_restart(disk: Disk, store: StoreConfig, work: Work) -> Counter[bytes]:
    """Return what consumers see once the producers were asked."""
    network, config = MemoryNetwork(), config_at(DIRECTORY, store=store)
    async with (
        Broker(config, network.host(BROKER_HOST), virtual_machine(disk)) as broker,
        client_of(network, broker.address) as client,
        producer_of(network, broker.address, decide=work.decide),
    ):
        await asyncio.sleep(3 * INTERVAL_S)
        found = Counter(message.body for message in await client.messages())
        assert not broker.path.transactions.ledger.open
    return found


async def crash_at(
    store: StoreConfig, writes: int, *, power_fails: bool
) -> tuple[Work, Counter[bytes]]:
    work = Work()
    disk = await run_until_death(store, writes, work)
    if power_fails:
        disk.lose_unsynced()
    disk.close_all()
    return work, await visible_after_restart(disk, store, work)


@pytest.mark.parametrize("power_fails", [False, True])
@pytest.mark.parametrize("store", [SMALL_STORE, SYNC_STORE], ids=["async", "sync"])
@virtual_time()
async def test_a_broker_killed_at_any_write(store: StoreConfig, power_fails: bool) -> None:
    writes = 0
    while True:
        work, found = await crash_at(store, writes, power_fails=power_fails)
        expected = Counter(work.committed)
        if store is SMALL_STORE and power_fails:
            # What was not flushed may be lost; but nothing is there twice.
            assert found <= expected, writes
        else:
            assert found == expected, writes
        if work.acknowledged:
            break
        writes += 1
    assert writes > 15
