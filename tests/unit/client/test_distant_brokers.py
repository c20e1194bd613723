"""Consumers of many queues whose broker answers after 40 ms: nothing is asked queue by queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clusters import Cluster, cluster
from consumers import Seen, consuming
from turbopump.aio import Admin
from turbopump.client.lite_pull_consumer import LitePullConsumer
from turbopump.client.producer import Producer
from turbopump.client.push_consumer import PushConsumer
from turbopump.message import Message, MessageQueue
from turbopump.testing import LinkQuality, virtual_time, wait_until

QUEUES = 256
FAR = LinkQuality(latency=0.02, jitter=0, cut_chance=0)
FEW_ROUND_TRIPS_S = 1.0
"""25 of them; one for each queue would take more than 10 s."""


@asynccontextmanager
async def far(directory: Path) -> AsyncIterator[Cluster]:
    """Run a cluster with a topic of many queues, and move it away."""
    async with cluster(directory) as world:
        async with Admin(session=world.session("10.0.9.9")) as admin:
            await admin.topics.create("T", queues=QUEUES)
        world.network.quality = FAR
        yield world


async def fill(world: Cluster) -> None:
    """Send one message to each queue."""
    async with Producer("pg", session=world.session("10.0.9.8")) as producer:
        queues = (MessageQueue("T", "a", number) for number in range(QUEUES))
        await asyncio.gather(*(producer.send(Message("T", b"x"), to=queue) for queue in queues))


def now_s() -> float:
    return asyncio.get_running_loop().time()


@virtual_time()
async def test_a_push_consumer_starts_and_resumes_in_a_few_round_trips(tmp_path: Path) -> None:
    async with far(tmp_path) as world:
        for expected in (QUEUES, 2 * QUEUES):
            seen, start_s = Seen(), now_s()
            async with consuming(world, seen, start_from="last"):
                assert now_s() - start_s < FEW_ROUND_TRIPS_S
                # The second time, there are messages that arrived while no consumer was running.
                await fill(world)
                await wait_until(lambda: seen.count == expected)  # noqa: B023
            await fill(world)


@virtual_time()
async def test_a_lite_pull_consumer_starts_and_resumes_in_a_few_round_trips(tmp_path: Path) -> None:
    async with far(tmp_path) as world:
        await fill(world)
        for _ in range(2):
            start_s, count = now_s(), 0
            session = world.session("10.0.1.1")
            async with LitePullConsumer(
                "g", session=session, subscriptions={"T": "*"}, start_from="first"
            ) as consumer:
                while count < QUEUES:
                    count += len(await consumer.poll())
                assert now_s() - start_s < FEW_ROUND_TRIPS_S
            await fill(world)


TOPICS = dict.fromkeys((f"T{number}" for number in range(64)), "*")


@asynccontextmanager
async def far_topics(directory: Path) -> AsyncIterator[Cluster]:
    """Run a cluster with the same number of queues in many topics, and move it away."""
    async with cluster(directory) as world:
        async with Admin(session=world.session("10.0.9.9")) as admin:
            for topic in TOPICS:
                await admin.topics.create(topic, queues=QUEUES // len(TOPICS))
        world.network.quality = FAR
        yield world


@pytest.mark.parametrize("orderly", [False, True])
@virtual_time()
async def test_a_push_consumer_of_many_topics_starts_in_a_few_round_trips(
    tmp_path: Path, orderly: bool
) -> None:
    async with far_topics(tmp_path) as world:
        start_s, session = now_s(), world.session("10.0.1.1")
        async with PushConsumer(
            "g", Seen(), subscriptions=TOPICS, orderly=orderly, session=session
        ) as consumer:
            assert now_s() - start_s < FEW_ROUND_TRIPS_S
            assert len([each for each in consumer.assignment() if each.topic in TOPICS]) == QUEUES


@virtual_time()
async def test_a_lite_pull_consumer_of_many_topics_starts_in_a_few_round_trips(
    tmp_path: Path,
) -> None:
    async with far_topics(tmp_path) as world:
        start_s, session = now_s(), world.session("10.0.1.1")
        async with LitePullConsumer("g", session=session, subscriptions=TOPICS) as consumer:
            await wait_until(lambda: len(consumer.assignment()) == QUEUES)
            assert now_s() - start_s < FEW_ROUND_TRIPS_S
