"""Brokers that die in the middle of transactions: each message is visible once, or never."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from brokers import BROKER_HOST, SMALL_STORE, SYNC_STORE, client_of, config_at
from transaction_peers import COMMIT, ROLLBACK, UNKNOWN, Asked, Place, Producer, producer_of
from turbopump.broker.broker import Broker
from turbopump.broker.config import TransactionsConfig
from turbopump.errors import NetworkError, StoreError
from turbopump.store.config import StoreConfig
from turbopump.testing import (
    Disk,
    MemoryHost,
    MemoryNetwork,
    virtual_loop,
    virtual_machine,
    virtual_time,
)
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.headers import ResumeCheck
from turbopump.wire.names import CHECKED_TOO_OFTEN_TOPIC

pytestmark = pytest.mark.slow

INTERVAL_S = 60
DIRECTORY = Path("/store")


class Death:
    """Kills a broker's machine at the nth write."""

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
                self.strike()

    def strike(self) -> None:
        self._disk.on_operation = None
        self._disk.die()
        self._network.kill(self._host)


class Work:
    """What a producer does, and the outcome in its database."""

    checks_max = 15

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

    async def complete(self, producer: Producer) -> None:
        """Finish the work after a restart; check-backs resolve all other transactions."""

    async def transaction(
        self, producer: Producer, body: bytes, *, says: bool = True, **named: str
    ) -> None:
        place = await producer.half(body, **named)
        self.committed.append(body)
        if says:
            await producer.end(place)


class Abandoned(Work):
    """Transactions that exhaust their checks; one is committed late, and one is resumed."""

    checks_max = 2
    rounds = 5
    """Enough to exhaust all checks."""

    def __init__(self) -> None:
        super().__init__()
        self.late: Place | None = None

    def decide(self, asked: Asked) -> int:
        return COMMIT if asked.message.body in self.committed else UNKNOWN

    async def run(self, producer: Producer) -> None:
        await producer.half(b"given up")
        late = await producer.half(b"late")
        await producer.half(b"resumed")
        await asyncio.sleep(self.rounds * INTERVAL_S)
        self.committed.append(b"late")
        self.late = late
        assert (await producer.end(late)).code == ResponseCode.SUCCESS
        letters = await producer.client.messages(CHECKED_TOO_OFTEN_TOPIC)
        header = ResumeCheck(msg_id=letters[2].offset_id)
        answer = await producer.client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, header)
        assert answer.code == ResponseCode.SUCCESS, answer
        self.committed.append(b"resumed")
        await asyncio.sleep(2 * INTERVAL_S)

    async def complete(self, producer: Producer) -> None:
        await asyncio.sleep(self.rounds * INTERVAL_S)
        if self.late is not None:
            # Rejected only if the power loss lost the half message.
            await producer.end(self.late)


def broker_of(disk: Disk, network: MemoryNetwork, store: StoreConfig, work: Work) -> Broker:
    checks = TransactionsConfig(checks_max=work.checks_max)
    config = config_at(DIRECTORY, store=store, transactions=checks)
    return Broker(config, network.host(BROKER_HOST), virtual_machine(disk, seed=1))


async def run_until_death(store: StoreConfig, writes: int, work: Work) -> Disk:
    network, disk = MemoryNetwork(), Disk(virtual_loop())
    broker = broker_of(disk, network, store, work)
    await broker.start()
    death = Death(disk, network, network.host(BROKER_HOST), writes)
    with suppress(NetworkError):
        async with producer_of(network, broker.address, decide=work.decide) as producer:
            await work.run(producer)
            work.acknowledged = True
    if work.acknowledged:
        death.strike()
    await broker.close()
    return disk


async def die_in_recovery(disk: Disk, store: StoreConfig, writes: int, work: Work) -> bool:
    """Restart, and die again at the nth write; return whether that write was reached."""
    network = MemoryNetwork()
    broker = broker_of(disk, network, store, work)
    death = Death(disk, network, network.host(BROKER_HOST), writes)
    with suppress(NetworkError, OSError, StoreError):
        await broker.start()
        async with producer_of(network, broker.address, decide=work.decide) as producer:
            await asyncio.sleep(2 * INTERVAL_S)
            await work.complete(producer)
    has_died = disk.on_operation is None
    if not has_died:
        death.strike()
    await broker.close()
    return has_died


async def visible_after_restart(disk: Disk, store: StoreConfig, work: Work) -> Counter[bytes]:
    """Return what consumers see after the check-backs."""
    network = MemoryNetwork()
    async with (
        broker_of(disk, network, store, work) as broker,
        client_of(network, broker.address) as client,
        producer_of(network, broker.address, decide=work.decide) as producer,
    ):
        await asyncio.sleep(3 * INTERVAL_S)
        await work.complete(producer)
        found = Counter(message.body for message in await client.messages())
        assert not broker.path.transactions.ledger.open
    return found


def cut_off(disk: Disk, *, power_fails: bool) -> None:
    if power_fails:
        disk.lose_unsynced()
    disk.close_all()


def check(work: Work, found: Counter[bytes], *, may_lose: bool, where: object) -> None:
    expected = Counter(work.committed)
    if may_lose:
        # Unflushed messages may be lost, but none is stored twice.
        assert found <= expected, where
    else:
        assert found == expected, where


STORES = pytest.mark.parametrize("store", [SMALL_STORE, SYNC_STORE], ids=["async", "sync"])
POWER = pytest.mark.parametrize("power_fails", [False, True], ids=["killed", "power lost"])


@pytest.mark.parametrize("kind", [Work, Abandoned])
@POWER
@STORES
@virtual_time()
async def test_a_broker_killed_at_any_write(
    store: StoreConfig, power_fails: bool, kind: type[Work]
) -> None:
    may_lose = store is SMALL_STORE and power_fails
    writes = 0
    while True:
        work = kind()
        disk = await run_until_death(store, writes, work)
        cut_off(disk, power_fails=power_fails)
        found = await visible_after_restart(disk, store, work)
        check(work, found, may_lose=may_lose, where=writes)
        if work.acknowledged:
            break
        writes += 1
    assert writes > 15


@pytest.mark.parametrize("kind", [Work, Abandoned])
@POWER
@STORES
@virtual_time()
async def test_a_broker_killed_again_while_it_recovers(
    store: StoreConfig, power_fails: bool, kind: type[Work]
) -> None:
    may_lose = store is SMALL_STORE and power_fails
    # A crash early or late in the work, then one at every fifth write of the next run.
    deaths = 0
    for first in (9, 22):
        second = 0
        while True:
            work = kind()
            disk = await run_until_death(store, first, work)
            cut_off(disk, power_fails=power_fails)
            has_died = await die_in_recovery(disk, store, second, work)
            cut_off(disk, power_fails=power_fails)
            found = await visible_after_restart(disk, store, work)
            check(work, found, may_lose=may_lose, where=(first, second))
            if not has_died:
                break
            second += 5
            deaths += 1
    assert deaths >= (2 if may_lose else 6)
