"""Transactions against a broker in virtual time: consumers see each committed message once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from turbopump.aio import (
    ConsumeContext,
    ConsumeResult,
    Message,
    MessageView,
    PushConsumer,
    Transaction,
    TransactionProducer,
    TransactionState,
    by_hash,
)
from turbopump.testing import Cluster, broker_config, virtual_time

COMMIT, ROLLBACK, UNKNOWN = TransactionState


class Database:
    """Which transactions have committed; read by every process of a group."""

    def __init__(self) -> None:
        self.committed: set[str] = set()
        self.asked: list[str] = []
        self.missing = ROLLBACK
        """The result of a check for an unknown transaction."""

    async def check(self, message: MessageView) -> TransactionState:
        self.asked.append(message.message_id)
        return COMMIT if message.message_id in self.committed else self.missing


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Database]]:
    # Brokers delete old messages, but not within the time that a test waits.
    config = broker_config({"fileReservedTime": "200"})
    async with Cluster(tmp_path, config=config) as cluster:
        await cluster.make_topic("orders")
        yield cluster, Database()


def producer_of(
    cluster: Cluster, database: Database, host: str = "10.0.1.1"
) -> TransactionProducer:
    return TransactionProducer("pg", check=database.check, session=cluster.session(host))


def bodies(cluster: Cluster) -> list[bytes]:
    return [message.body for message in cluster.messages("orders")]


async def killed_in_block(cluster: Cluster, database: Database) -> Transaction:
    """Start a transaction in a process that dies in its block."""
    host = "10.0.1.1"
    producer = producer_of(cluster, database, host)
    await producer.start()
    transaction = producer.transaction(Message("orders", b"hello"))
    await transaction.begin()
    # Nothing that it sends at the end arrives.
    cluster.isolate(host)
    await producer.close()
    cluster.cut(host)
    cluster.heal()
    return transaction


@virtual_time()
async def test_consumers_see_what_was_committed_and_nothing_else(tmp_path: Path) -> None:
    seen: list[MessageView] = []

    async def listen(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        seen.extend(messages)
        return ConsumeResult.SUCCESS

    async with running(tmp_path) as (cluster, database), AsyncExitStack() as stack:
        producer = await stack.enter_async_context(producer_of(cluster, database))
        consumer = PushConsumer(
            "g",
            listen,
            subscriptions={"orders": "paid"},
            start_from="first",
            nameserver=cluster.nameserver,
        )
        await stack.enter_async_context(consumer)
        message = Message("orders", b"1", tags="paid", keys=["42"], properties={"who": "me"})
        async with producer.transaction(message, to=by_hash("customer")) as transaction:
            await cluster.advance(seconds=3)
            assert seen == []
        with pytest.raises(ValueError, match="no stock"):
            async with producer.transaction(Message("orders", b"2", tags="paid")):
                raise ValueError("no stock")
        await cluster.until(lambda: seen)
        await cluster.advance(hours=2)
        (view,) = seen
        assert (view.body, view.tags, view.keys) == (b"1", "paid", ["42"])
        assert (view.message_id, view.properties["who"]) == (transaction.id, "me")
        assert view.queue_id == transaction.receipt.queue.queue_id
        assert database.asked == []
        assert bodies(cluster) == [b"1"]


@pytest.mark.slow
@virtual_time()
async def test_many_at_the_same_time(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, database):
        producer = producer_of(cluster, database)

        async def one(number: int) -> None:
            async with producer.transaction(Message("orders", b"%d" % number)) as transaction:
                await asyncio.sleep(number % 7)
                if number % 3 == 0:
                    await transaction.rollback()
                elif number % 3 == 1:
                    database.committed.add(transaction.id)
                    await transaction.unknown()

        async with producer:
            await asyncio.gather(*map(one, range(300)))
            await cluster.advance(hours=1)
        expected = sorted(b"%d" % number for number in range(300) if number % 3)
        assert sorted(bodies(cluster)) == expected


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("starts_later", [False, True])
@virtual_time()
async def test_another_producer_answers_for_one_that_was_killed(
    tmp_path: Path, is_committed: bool, starts_later: bool
) -> None:
    """Even one that has never sent anything: brokers know it from its start."""
    async with running(tmp_path) as (cluster, database), AsyncExitStack() as stack:
        if not starts_later:
            await stack.enter_async_context(producer_of(cluster, database, "10.0.1.9"))
        transaction = await killed_in_block(cluster, database)
        if is_committed:
            database.committed.add(transaction.id)
        await cluster.advance(minutes=2)
        if starts_later:
            await cluster.advance(hours=3)
            assert bodies(cluster) == []
            await stack.enter_async_context(producer_of(cluster, database, "10.0.1.9"))
        await cluster.advance(minutes=10)
        assert bodies(cluster) == [b"hello"] * is_committed
        assert set(database.asked) == {transaction.id}
        asked = len(database.asked)
        await cluster.advance(hours=24)
        assert bodies(cluster) == [b"hello"] * is_committed
        assert len(database.asked) == asked


@virtual_time()
async def test_an_end_that_was_lost_is_repaired_by_a_check(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, database):
        async with producer_of(cluster, database) as producer:
            async with producer.transaction(Message("orders", b"hello")) as transaction:
                database.committed.add(transaction.id)
                # The connection is lost, but no side knows yet: written data is lost.
                cluster.cut("pg")
            assert transaction.state is COMMIT
            assert bodies(cluster) == []
            await cluster.until(lambda: bodies(cluster), minutes=5)
            await cluster.advance(hours=24)
        assert bodies(cluster) == [b"hello"]
        assert database.asked == [transaction.id]


@virtual_time()
async def test_a_block_that_outlasts_many_checks_commits_once(tmp_path: Path) -> None:
    """Its process does not query the database, which would not know the transaction yet."""
    async with running(tmp_path) as (cluster, database), producer_of(cluster, database) as producer:
        async with producer.transaction(Message("orders", b"hello")) as transaction:
            await cluster.advance(minutes=10)
            assert database.asked == []
            database.committed.add(transaction.id)
        await cluster.advance(hours=24)
        assert bodies(cluster) == [b"hello"]
        assert database.asked == []


@pytest.mark.parametrize("is_committed", [False, True])
@virtual_time()
async def test_a_late_end_and_checks_of_another_producer_make_one_message(
    tmp_path: Path, is_committed: bool
) -> None:
    async with (
        running(tmp_path) as (cluster, database),
        producer_of(cluster, database) as producer,
        producer_of(cluster, database, "10.0.1.9"),
    ):
        # The other producer cannot know that the block still runs.
        database.missing = UNKNOWN
        async with producer.transaction(Message("orders", b"hello")) as transaction:
            await cluster.until(lambda: len(database.asked) >= 2, minutes=10)
            if is_committed:
                database.committed.add(transaction.id)
                await cluster.until(lambda: bodies(cluster), minutes=10)
        await cluster.until(lambda: bodies(cluster), minutes=1)
        database.committed.add(transaction.id)
        await cluster.advance(hours=24)
        assert bodies(cluster) == [b"hello"]


@virtual_time()
async def test_a_transaction_that_stays_unknown_is_never_visible(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, database), producer_of(cluster, database) as producer:
        database.missing = UNKNOWN
        async with producer.transaction(Message("orders", b"hello")) as transaction:
            await transaction.unknown()
        await cluster.advance(hours=24)
        assert bodies(cluster) == []
        assert database.asked == [transaction.id] * 15


@pytest.mark.parametrize("lose_unflushed", [False, True])
@virtual_time()
async def test_a_broker_that_crashes_inside_the_block(tmp_path: Path, lose_unflushed: bool) -> None:
    config = broker_config({"flushDiskType": "SYNC_FLUSH", "fileReservedTime": "200"})
    async with Cluster(tmp_path, config=config) as cluster:
        database = Database()
        await cluster.make_topic("orders")
        async with producer_of(cluster, database) as producer:
            async with producer.transaction(Message("orders", b"hello")) as transaction:
                database.committed.add(transaction.id)
                await cluster.crash(lose_unflushed=lose_unflushed)
                await cluster.advance(seconds=2)
                await cluster.start_broker()
            await cluster.until(lambda: bodies(cluster), minutes=5)
            await cluster.advance(hours=24)
        assert bodies(cluster) == [b"hello"]


@virtual_time()
async def test_namespaces(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, database):
        await cluster.make_topic("ns%orders")
        session = cluster.session(namespace="ns")
        async with TransactionProducer("pg", check=database.check, session=session) as producer:
            async with producer.transaction(Message("orders", b"hello")):
                pass
            async with producer.transaction(Message("orders", b"hello")) as transaction:
                database.committed.add(transaction.id)
                await transaction.unknown()
            await cluster.advance(minutes=5)
        assert len(cluster.messages("ns%orders")) == 2
        assert database.asked == [transaction.id]
