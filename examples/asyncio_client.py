"""The asyncio client: thousands of concurrent sends, and a loop over received messages."""

from __future__ import annotations

import asyncio
import sys

from embedded import cluster
from turbopump.aio import LitePullConsumer, Message, Producer

COUNT = 2000


async def produce(nameserver: str) -> int:
    async with Producer("orders-producer", nameserver=nameserver) as producer:
        messages = [Message("async", b"%d" % number) for number in range(COUNT)]
        receipts = await asyncio.gather(*map(producer.send, messages))
        return len({receipt.message_id for receipt in receipts})


async def consume(nameserver: str) -> int:
    total = 0
    async with LitePullConsumer("sums", nameserver=nameserver, start_from="first") as consumer:
        await consumer.assign(await consumer.queues("async"))
        count = 0
        async for message in consumer:
            total += int(message.body)
            count += 1
            if count == COUNT:
                break
    return total


async def main(nameserver: str) -> int:
    sent, total = await produce(nameserver), await consume(nameserver)
    print(f"{sent} messages sent, received messages add up to {total}")
    return 0 if (sent, total) == (COUNT, sum(range(COUNT))) else 1


if __name__ == "__main__":
    with cluster() as address:
        code = asyncio.run(main(address))
    sys.exit(code)
