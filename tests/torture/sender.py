"""A producer as a process: ``python -m torture.sender NAMESERVER JOURNAL NAME RATE``.

Records each message before it is sent and after it is acknowledged. SIGTERM ends it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from torture.journal import Journal
from torture.messages import DELAYED, ORDERED, WORK, body_of, delay_level_of, message_id
from turbopump.aio import Message, Producer, SendReceipt, SendStatus, TurbopumpError, by_hash
from turbopump.net.loop import run

BATCH = 5
_SHARES = {WORK: 0.6, ORDERED: 0.3, DELAYED: 0.1}
_ORDER_KEYS = 16


class Sender:
    """Sends numbered messages at a rate, and never resends one."""

    def __init__(self, producer: Producer, journal: Journal, name: str, rate: float) -> None:
        self._producer = producer
        self._journal = journal
        self._name = name
        self._rate = rate
        self.stopping = asyncio.Event()

    async def run(self) -> None:
        """Send until stopped."""
        async with asyncio.TaskGroup() as group:
            for flow, share in _SHARES.items():
                group.create_task(self._flow(flow, 1 / (self._rate * share)))

    async def _flow(self, flow: str, interval_s: float) -> None:
        number = 0
        while not self.stopping.is_set():
            count = BATCH if flow == WORK and number % 50 == 10 else 1
            await self._send([message_id(flow, self._name, number + each) for each in range(count)])
            number += count
            await asyncio.sleep(interval_s)

    async def _send(self, identities: list[str]) -> None:
        for identity in identities:
            self._journal.note("try", identity)
        try:
            receipt = await self._sent(identities)
        except TurbopumpError as error:
            for identity in identities:
                text = " ".join(str(error).split())
                self._journal.note("error", identity, type(error).__name__, text)
            return
        event = "ack" if receipt.status is SendStatus.OK else "unsure"
        for place, identity in enumerate(identities):
            offset = receipt.queue_offset + place
            self._journal.note(event, identity, receipt.queue.queue_id, offset)

    async def _sent(self, identities: list[str]) -> SendReceipt:
        messages = [
            Message(
                identity.partition("/")[0],
                body_of(identity),
                keys=[identity],
                delay_level=delay_level_of(identity),
            )
            for identity in identities
        ]
        if len(messages) > 1:
            return await self._producer.send_batch(messages)
        [message] = messages
        if message.topic == ORDERED:
            key = int(identities[0].rpartition("/")[2]) % _ORDER_KEYS
            return await self._producer.send(message, to=by_hash(f"{self._name}-{key}"))
        return await self._producer.send(message)


async def main(nameserver: str, path: str, name: str, rate: str) -> None:
    journal = Journal(Path(path))
    async with Producer(f"senders-{name}", nameserver=nameserver) as producer:
        sender = Sender(producer, journal, name, float(rate))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sender.stopping.set)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await sender.run()


if __name__ == "__main__":
    run(main(*sys.argv[1:]))
