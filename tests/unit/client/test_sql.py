"""SQL92 subscriptions of every kind of consumer, through a broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusters import cluster
from consumers import Seen, consuming, make_topic
from turbopump.aio import (
    Found,
    LitePullConsumer,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    Sql,
)
from turbopump.broker.config import FiltersConfig
from turbopump.client.calls import NothingMatched
from turbopump.errors import InvalidArgument, InvalidExpression, RemoteError
from turbopump.testing import Cluster, virtual_time, wait_until
from turbopump.wire.codes import ResponseCode

BIG = Sql("amount > 100 AND region IN ('eu', 'us')")


async def send_orders(world: Cluster) -> None:
    async with Producer("pg", session=world.session()) as producer:
        for amount, region in [(50, "eu"), (150, "eu"), (250, "asia"), (350, "us")]:
            properties = {"amount": str(amount), "region": region}
            await producer.send(Message("T", b"%d" % amount, properties=properties))


@virtual_time()
async def test_a_push_consumer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        seen = Seen()
        session = world.session()
        async with consuming(world, seen, session=session, subscriptions={"T": BIG}) as consumer:
            await send_orders(world)
            await wait_until(lambda: seen.count == 2)
            # Change the expression while it runs; the waiting pull has not passed the first 250.
            await consumer.subscribe("T", Sql("region = 'asia'"))
            await send_orders(world)
            await wait_until(lambda: seen.count == 4)
        assert sorted(seen.bodies) == [b"150", b"250", b"250", b"350"]


@virtual_time()
async def test_a_lite_pull_consumer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        await send_orders(world)
        async with LitePullConsumer(
            "g", session=world.session(), subscriptions={"T": BIG}, start_from="first"
        ) as consumer:
            bodies: list[bytes] = []
            while len(bodies) < 2:
                bodies += [message.body for message in await consumer.poll(timeout=5)]
        assert sorted(bodies) == [b"150", b"350"]


@virtual_time()
async def test_a_pull_consumer(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await make_topic(world)
        await send_orders(world)
        async with PullConsumer("g", session=world.session()) as consumer:
            bodies = []
            for queue in await consumer.queues("T"):
                outcome = await consumer.pull(queue, 0, tags=BIG)
                if isinstance(outcome, Found):
                    bodies += [message.body for message in outcome.messages]
                else:
                    assert isinstance(outcome, NothingMatched) or outcome.max_offset == 0
        assert sorted(bodies) == [b"150", b"350"]


@virtual_time()
async def test_a_topic_that_does_not_exist_yet_can_be_subscribed_to(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        seen = Seen()
        async with consuming(
            world, seen, session=world.session(), subscriptions={"T": BIG}, start_from="first"
        ):
            await send_orders(world)
            await wait_until(lambda: seen.count == 2)


@virtual_time()
async def test_a_broker_without_sql_rejects_at_the_start(tmp_path: Path) -> None:
    async with cluster(tmp_path, filters=FiltersConfig(sql_enabled=False)) as world:
        await make_topic(world)
        for consumer in (
            PushConsumer("p", Seen(), session=world.session(), subscriptions={"T": BIG}),
            LitePullConsumer("l", session=world.session(), subscriptions={"T": BIG}),
        ):
            with pytest.raises(RemoteError, match="by SQL92") as raised:
                await consumer.start()
            assert raised.value.code == ResponseCode.SYSTEM_ERROR


def test_invalid_expressions_are_rejected_on_subscribe() -> None:
    with pytest.raises(InvalidExpression, match="at character 8"):
        Sql("amount ! 5")
    with pytest.raises(InvalidArgument, match="expects a string, got 5"):
        Sql(5)  # type: ignore[arg-type]
