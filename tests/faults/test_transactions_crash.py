"""Brokers that die in the midst of transactions: each message is visible once, or never."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from brokers import BROKER_HOST, SMALL_STORE, SYNC_STORE, client_of, config_at
from transaction_peers import COMMIT, ROLLBACK, Asked, Producer, producer_of
from turbopump.broker.broker import Broker
from turbopump.errors import NetworkError
from turbopump.store.config import StoreConfig
from turbopump.testing import Disk, MemoryNetwork, virtual_loop, virtual_time
from turbopump.testing.loop import VirtualTimeLoop

INTERVAL_S = 60


class DoomedDisk(Disk):
    """A disk whose machine dies at a certain write of the broker's own thread."""

    def __init__(self, loop: VirtualTimeLoop, on_death: Callable[[], None]) -> None:
        super().__init__(loop)
        self.writes_left: int | None = None
        self._on_death = on_death
        self._owner = threading.get_ident()

    def write(self, fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
        if self.writes_left is not None and threading.get_ident() == self._owner:
            self.writes_left -= 1
            if self.writes_left < 0:
                self.crash()
        super().write(fd, data, at)

    def crash(self) -> None:
        self.writes_left = None
        self.die()
        self._on_death()


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


async def run_until_death(directory: Path, store: StoreConfig, writes: int, work: Work) -> Disk:
    network = MemoryNetwork()
    host = network.host(BROKER_HOST)
    disk = DoomedDisk(virtual_loop(), lambda: network.kill(host))
    config = config_at(directory, store=store)
    broker = Broker(config, host, virtual_loop().clock, seed=1, files=disk)
    await broker.start()
    disk.writes_left = writes
    with virtual_loop().waiting_for(lambda: broker.store.is_flushing):
        with suppress(NetworkError):
            async with producer_of(network, broker.address, decide=work.decide) as producer:
                await work.run(producer)
                work.acknowledged = True
        if work.acknowledged:
            disk.crash()
        await broker.close()
    return disk


async def visible_after_restart(directory: Path, store: StoreConfig, work: Work) -> Counter[bytes]:
    """Return what consumers see once the producers were asked."""
    network, disk = MemoryNetwork(), Disk(virtual_loop())
    config = config_at(directory, store=store)
    async with (
        Broker(config, network.host(BROKER_HOST), virtual_loop().clock, files=disk) as broker,
        client_of(network, broker.address) as client,
        producer_of(network, broker.address, decide=work.decide),
    ):
        with virtual_loop().waiting_for(lambda: broker.store.is_flushing):
            await asyncio.sleep(3 * INTERVAL_S)
        found = Counter(message.body for message in await client.messages())
        assert not broker.path.transactions.ledger.open
    disk.close_all()
    return found


async def crash_at(
    directory: Path, store: StoreConfig, writes: int, *, power_fails: bool
) -> tuple[Work, Counter[bytes]]:
    work = Work()
    disk = await run_until_death(directory, store, writes, work)
    if power_fails:
        disk.lose_unsynced()
    disk.close_all()
    return work, await visible_after_restart(directory, store, work)


@pytest.mark.slow
@pytest.mark.parametrize("power_fails", [False, True])
@pytest.mark.parametrize("store", [SMALL_STORE, SYNC_STORE], ids=["async", "sync"])
@virtual_time()
async def test_a_broker_killed_at_any_write(
    tmp_path: Path, store: StoreConfig, power_fails: bool
) -> None:
    writes = 0
    while True:
        directory = tmp_path / str(writes)
        work, found = await crash_at(directory, store, writes, power_fails=power_fails)
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
