"""Topics with records that cannot be decoded, in the store of a running broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

from source_topics import made_topic
from turbopump.client import calls
from turbopump.client.blocking import Producer
from turbopump.client.config import ClientConfig
from turbopump.client.outgoing import Outgoing
from turbopump.client.session import Session
from turbopump.message import Message, MessageQueue
from turbopump.wire.ids import parse_offset_id
from turbopump.wire.properties import UNIQUE_KEY
from turbopump.wire.sysflag import Compression, with_compression

NOT_INFLATING = 3
DAMAGED = 5
COUNT = 8
GOOD = [number for number in range(COUNT) if number not in (NOT_INFLATING, DAMAGED)]


def fill_with_bad(nameserver: str, store: Path, topic: str) -> str:
    """Fill a one-queue topic: one body does not inflate, another does not match its checksum."""
    made_topic(nameserver, topic, queues=1)
    with Producer("tests", nameserver=nameserver) as producer:
        for number in range(COUNT):
            if number == NOT_INFLATING:
                send_not_inflating(nameserver, topic)
                continue
            receipt = producer.send(Message(topic, b"%d" % number, keys=[f"k{number}"]))
            if number == DAMAGED:
                _damage(store, parse_offset_id(receipt.offset_id)[1])
    return topic


def send_not_inflating(nameserver: str, topic: str) -> None:
    """Send a message whose body is flagged as compressed but is not."""
    asyncio.run(_send_not_inflating(nameserver, topic))


async def _send_not_inflating(nameserver: str, topic: str) -> None:
    async with Session(ClientConfig(nameserver)) as session:
        route = await session.route(topic)
        queue: MessageQueue = route.writable[0]
        flag = with_compression(0, Compression.ZLIB)
        text = f"{UNIQUE_KEY}\x01{topic}-bad"
        message = Outgoing(topic, f"{topic}-bad", b"not compressed", text, 0, flag)
        header = message.header("tests", queue, session.clock.now_ms(), 1)
        address = session.address_to_write(queue.broker)
        await calls.send(session, address, header, message.body, 5000)


def _damage(store: Path, position: int) -> None:
    """Change the first byte of a record's body, on disk and in the broker's mapping."""
    (segment,) = (store / "commitlog").glob("[0-9]*")
    with segment.open("r+b") as file:
        file.seek(position + 88)
        (byte,) = file.read(1)
        file.seek(position + 88)
        file.write(bytes([byte ^ 0x55]))
