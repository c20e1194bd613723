"""Other messaging systems through their Python clients, as `benchmarks/run` compares them.

    python benchmarks/peers.py nats produce --server HOST:PORT --concurrency 32
    python benchmarks/peers.py nats consume --server HOST:PORT --count 100000

A peer needs its server and its Python package; see benchmarks/README.md for both. Every send waits
for its acknowledgement, every consumed message is acknowledged, and acknowledged messages are in
files that are flushed in the background. The C++ client sends to our broker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import threading
from importlib import import_module
from typing import Any

from turbopump.bench.sample import Quota, Stopwatch, WatchedProcesses, summary
from turbopump.net.loop import run

FETCH = 256
FILL_IN_FLIGHT = 256
CONNECTIONS_MAX = 1024


class Nats:
    """JetStream with file storage; a durable pull consumer."""

    async def connect(self, server: str) -> None:
        self._client = await import_module("nats").connect(f"nats://{server}")
        self._stream = self._client.jetstream()
        self._name = f"bench{secrets.token_hex(4)}"
        await self._stream.add_stream(name=self._name, subjects=[self._name], storage="file")

    async def publish(self, body: bytes) -> None:
        await self._stream.publish(self._name, body)

    async def drain(self, count: int) -> None:
        consumer = await self._stream.pull_subscribe(self._name, durable="bench")
        while count > 0:
            messages = await consumer.fetch(min(FETCH, count), timeout=10)
            for message in messages:
                await message.ack()
            count -= len(messages)

    async def close(self) -> None:
        await self._stream.delete_stream(self._name)
        await self._client.close()


class Redis:
    """A stream; one consumer in a group."""

    async def connect(self, server: str) -> None:
        # Each send in flight uses its own connection.
        self._client = import_module("redis.asyncio").Redis.from_url(
            f"redis://{server}", max_connections=CONNECTIONS_MAX
        )
        self._name = f"bench{secrets.token_hex(4)}"
        await self._client.xgroup_create(self._name, "bench", id="0", mkstream=True)

    async def publish(self, body: bytes) -> None:
        await self._client.xadd(self._name, {b"b": body})

    async def drain(self, count: int) -> None:
        while count > 0:
            ((_, entries),) = await self._client.xreadgroup(
                "bench", "one", {self._name: ">"}, count=min(FETCH, count), block=10_000
            )
            await self._client.xack(self._name, "bench", *(entry_id for entry_id, _ in entries))
            count -= len(entries)

    async def close(self) -> None:
        await self._client.delete(self._name)
        await self._client.aclose()


class RabbitMq:
    """A durable queue, persistent messages, publisher confirms."""

    async def connect(self, server: str) -> None:
        self._pika = import_module("aio_pika")
        self._client = await self._pika.connect(f"amqp://guest:guest@{server}/")
        self._channel = await self._client.channel(publisher_confirms=True)
        await self._channel.set_qos(prefetch_count=FETCH)
        self._name = f"bench{secrets.token_hex(4)}"
        self._queue = await self._channel.declare_queue(self._name, durable=True)

    async def publish(self, body: bytes) -> None:
        message = self._pika.Message(body, delivery_mode=self._pika.DeliveryMode.PERSISTENT)
        await self._channel.default_exchange.publish(message, routing_key=self._name)

    async def drain(self, count: int) -> None:
        async with self._queue.iterator() as messages:
            async for message in messages:
                await message.ack()
                count -= 1
                if not count:
                    return

    async def close(self) -> None:
        await self._queue.delete(if_unused=False, if_empty=False)
        await self._client.close()


Peer = Nats | Redis | RabbitMq
PEERS: dict[str, type[Peer]] = {"nats": Nats, "redis": Redis, "rabbitmq": RabbitMq}


async def flood(peer: Peer, quota: Quota, concurrency: int, body: bytes) -> int:
    """Keep sends in flight until the quota is used up; return the number acknowledged."""

    async def send() -> int:
        sent = 0
        while quota.take():
            await peer.publish(body)
            sent += 1
        return sent

    return sum(await asyncio.gather(*(send() for _ in range(concurrency))))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    peer, body = PEERS[options.peer](), b"x" * options.size
    await peer.connect(options.server)
    if options.work == "produce":
        await flood(peer, Quota(1, options.warm_up, None), options.concurrency, body)
        watched, watch = WatchedProcesses(options.cpu_of), Stopwatch()
        quota = Quota(1, options.seconds, None)
        sample = watch.sample(await flood(peer, quota, options.concurrency, body))
    else:
        await flood(peer, Quota(1, None, options.count), FILL_IN_FLIGHT, body)
        watched, watch = WatchedProcesses(options.cpu_of), Stopwatch()
        await peer.drain(options.count)
        sample = watch.sample(options.count)
    found = summary([sample], options.size, watched.used_s())
    await peer.close()
    return found


def measure_cpp(options: argparse.Namespace) -> dict[str, Any]:
    """Send from threads with the C++ client's Python binding."""
    client = import_module("rocketmq.client")
    producer = client.Producer("bench")
    producer.set_namesrv_addr(options.server)
    producer.start()

    def flood_threads(quota: Quota) -> int:
        counts = [0] * options.concurrency

        def send(place: int) -> None:
            while quota.take():
                message = client.Message("Bench")
                message.set_body(b"x" * options.size)
                producer.send_sync(message)
                counts[place] += 1

        threads = [threading.Thread(target=send, args=(place,)) for place in range(len(counts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)

    flood_threads(Quota(1, options.warm_up, None))
    watched, watch = WatchedProcesses(options.cpu_of), Stopwatch()
    sample = watch.sample(flood_threads(Quota(1, options.seconds, None)))
    return summary([sample], options.size, watched.used_s())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=[*PEERS, "cpp"])
    parser.add_argument("work", choices=["produce", "consume"])
    parser.add_argument("--server", required=True)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--warm-up", type=float, default=0.5)
    parser.add_argument("--cpu-of", type=int, action="append", default=[])
    options = parser.parse_args()
    found = measure_cpp(options) if options.peer == "cpp" else run(measure(options))
    print(json.dumps(found), flush=True)
    if options.peer == "cpp":
        # Its library may crash during interpreter shutdown.
        os._exit(0)


if __name__ == "__main__":
    main()
