from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from administered import administered
from transaction_peers import COMMIT, ROLLBACK, producer_of
from turbopump.admin import PendingState, PendingTransaction
from turbopump.aio import Admin
from turbopump.errors import NotThere, RemoteError
from turbopump.testing import virtual_time
from turbopump.wire.names import HALF_OPERATIONS_TOPIC

INTERVAL_S = 60


async def listed(admin: Admin, **wanted: str) -> list[PendingTransaction]:
    return [pending async for pending in admin.transactions.list(**wanted)]


def summary(pending: PendingTransaction) -> tuple[bytes, str | None, int, PendingState]:
    return pending.message.body, pending.group, pending.checks, pending.state


@virtual_time()
async def test_open_transactions(tmp_path: Path) -> None:
    async with administered(tmp_path, "a") as (world, admin):
        assert await listed(admin) == []
        address = world.brokers["a"].address
        async with (
            producer_of(world.network, address, "p1") as first,
            producer_of(world.network, address, "p2", group="others") as other,
        ):
            await first.commit(b"committed")
            await first.end(await first.half(b"rolled back"), ROLLBACK)
            await first.half(b"x")
            await other.half(b"y")
            await asyncio.sleep(2 * INTERVAL_S + 10)
            for number in range(40):
                await first.half(b"%d" % number)
            found = await listed(admin)
            assert [summary(pending) for pending in found[:2]] == [
                (b"x", "pg", 2, PendingState.OPEN),
                (b"y", "others", 2, PendingState.OPEN),
            ]
            assert [pending.checks for pending in found[2:]] == [0] * 40
            assert {(pending.topic, pending.broker) for pending in found} == {("T", "a")}
            assert [pending.message.body for pending in await listed(admin, group="others")] == [
                b"y"
            ]
            with pytest.raises(NotThere):
                await listed(admin, broker="z")
            for message_id in found[1].ids:
                assert (await admin.transactions.find(message_id)).message.body == b"y"
            with pytest.raises(NotThere, match="nothing"):
                await admin.transactions.find("nothing")


@virtual_time()
async def test_operations_that_cannot_be_pulled_are_read_by_their_units(tmp_path: Path) -> None:
    """As with brokers of Apache RocketMQ, which have no topic for them."""
    async with administered(tmp_path, "a") as (world, admin):
        broker = world.brokers["a"]
        async with producer_of(world.network, broker.address) as producer:
            for number in range(5):
                await producer.commit(b"%d" % number)
            await producer.half(b"x")
            await producer.end(await producer.half(b"rolled back"), ROLLBACK)
            assert await broker.state.topics.delete(HALF_OPERATIONS_TOPIC)
            assert [pending.message.body for pending in await listed(admin)] == [b"x"]


@virtual_time()
async def test_abandoned_transactions_can_be_resumed(tmp_path: Path) -> None:
    async with (
        administered(tmp_path, "a") as (world, admin),
        producer_of(world.network, world.brokers["a"].address) as producer,
    ):
        for body in (b"x", b"y"):
            await producer.half(body)
        await asyncio.sleep(17 * INTERVAL_S)
        first, second = await listed(admin)
        assert summary(first) == (b"x", "pg", 15, PendingState.ABANDONED)
        await admin.transactions.resume(first)
        assert [summary(pending) for pending in await listed(admin)] == [
            (b"x", "pg", 0, PendingState.OPEN),
            (b"y", "pg", 15, PendingState.ABANDONED),
        ]
        producer.decide = lambda _: COMMIT
        await asyncio.sleep(INTERVAL_S + 1)
        assert [pending.message.body for pending in await listed(admin)] == [b"y"]
        with pytest.raises(RemoteError, match="already committed"):
            await admin.transactions.resume(first)
        await producer.end(producer.asked[1].place)
        assert await listed(admin) == []
        assert second.message.body == b"y"


@virtual_time()
async def test_resumed_and_rolled_back_transactions_are_not_listed(tmp_path: Path) -> None:
    async with (
        administered(tmp_path, "a") as (world, admin),
        producer_of(world.network, world.brokers["a"].address) as producer,
    ):
        await producer.half(b"x")
        await asyncio.sleep(17 * INTERVAL_S)
        [pending] = await listed(admin)
        await admin.transactions.resume(pending)
        producer.decide = lambda _: ROLLBACK
        await asyncio.sleep(INTERVAL_S + 10)
        assert await listed(admin) == []
