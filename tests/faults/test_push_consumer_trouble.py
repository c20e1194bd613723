"""Push consumers while brokers restart, connections break and name servers are down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusters import Cluster, cluster
from consumers import Seen, committed, consuming, send, sleep_ms
from turbopump.client.delivery.results import ConsumeContext, ConsumeResult
from turbopump.client.producer import Producer
from turbopump.client.push_consumer import PushConsumer
from turbopump.errors import ConnectFailed
from turbopump.message import Message, MessageQueue
from turbopump.testing import virtual_time, wait_until
from turbopump.wire.record import MessageView

pytestmark = pytest.mark.slow

QUEUE = MessageQueue("T", "a", 0)


def bodies(start: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


async def restart_broker(world: Cluster, down_ms: int) -> None:
    """Stop the only broker, and later run another one on its store."""
    await world.stop_broker("a")
    await sleep_ms(down_ms)
    await world.start_broker("a")


@pytest.mark.parametrize("orderly", [False, True])
@virtual_time()
async def test_a_broker_restarts(tmp_path: Path, orderly: bool) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(0, 20), to=QUEUE)
        seen = Seen()
        async with consuming(world, seen, orderly=orderly):
            await wait_until(lambda: seen.count == 20)
            await sleep_ms(10_000)
            await restart_broker(world, 40_000)
            await send(world, bodies(20, 20), to=QUEUE)
            await wait_until(lambda: seen.count >= 40, 120)
        assert seen.bodies == bodies(0, 40), "in order, without duplicates"
        assert await committed(world) == 40


@virtual_time()
async def test_connections_break_again_and_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(0, 4))
        seen = Seen()
        async with consuming(world, seen, "10.0.1.1"), consuming(world, seen, "10.0.1.2"):
            for number in range(10):
                await send(world, bodies(4 + 10 * number, 10))
                world.network.cut(f"10.0.1.{number % 2 + 1}", "10.0.0.1")
                await sleep_ms(500)
            await wait_until(lambda: len(set(seen.bodies)) == 104, 120)
            await sleep_ms(30_000)
        # All this happens between two commits, so a queue that moves repeats everything consumed.
        assert max(Counter(seen.bodies).values()) <= 10
        assert sum([await committed(world, number) or 0 for number in range(4)]) == 104


@virtual_time()
async def test_name_servers_are_unavailable_while_consuming(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(0, 4))
        seen = Seen()
        session = world.session("10.0.9.9", instance="producer")
        async with Producer("pg", session=session) as producer, consuming(world, seen):
            await producer.send(Message("T", b"before"))
            world.network.refuse("ns0")
            world.network.cut("ns0")
            await sleep_ms(300_000)
            await producer.send(Message("T", b"during"))
            await wait_until(lambda: seen.count == 6, 5)
            world.network.accept("ns0")
            await sleep_ms(60_000)
            await send(world, bodies(4, 4))
            await wait_until(lambda: seen.count == 10, 60)


@virtual_time()
async def test_a_failed_start_raises_and_can_be_retried(tmp_path: Path) -> None:
    async with cluster(tmp_path) as world:
        await send(world, bodies(0, 4))
        world.network.refuse("ns0")
        seen, session = Seen(), world.session()
        consumer = PushConsumer(
            "g", seen, session=session, subscriptions={"T": "*"}, start_from="first"
        )
        with pytest.raises(ConnectFailed, match="ns0:9876"):
            await consumer.start()
        assert not session.is_running
        world.network.accept("ns0")
        await sleep_ms(1000)
        async with consumer:
            await wait_until(lambda: seen.count == 4, 60)


@virtual_time()
async def test_failures_while_the_broker_is_down_are_not_lost(tmp_path: Path) -> None:
    """A failed send-back is queued locally, retried, and blocks the commit."""

    def decide(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        tried = messages[0].reconsume_times
        return ConsumeResult.SUCCESS if tried >= 2 else ConsumeResult.RETRY_LATER

    async with cluster(tmp_path) as world:
        await send(world, bodies(0, 1), to=QUEUE)
        seen = Seen(decide)
        seen.hold.clear()
        async with consuming(world, seen):
            await wait_until(lambda: seen.running == 1)
            world.network.refuse("10.0.0.1")
            world.network.cut("10.0.1.1", "10.0.0.1")
            seen.hold.set()
            await wait_until(lambda: seen.count == 3, 120)
            world.network.accept("10.0.0.1")
            await sleep_ms(30_000)
        assert await committed(world) == 1
