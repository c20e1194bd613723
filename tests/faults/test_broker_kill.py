"""A broker under load is killed repeatedly: everything it has acknowledged survives.

Messages are numbered and never resent, and their content follows from the number. So a reader can
detect missing, duplicate and damaged messages.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from brokers import Client, pulled, views
from servers import Standalone, launched, standalone
from turbopump.errors import NetworkError
from turbopump.net.loop import run
from turbopump.net.pool import ConnectionPool
from turbopump.net.sockets import SocketNetwork
from turbopump.testing import wait_until
from turbopump.wire import properties
from turbopump.wire.batch import BatchEntry, encode_batch
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.headers import (
    QueryConsumerOffset,
    SendMessage,
    SendMessageAnswer,
    SendMessageV2,
    UpdateConsumerOffset,
)
from turbopump.wire.record import MessageView

pytestmark = pytest.mark.slow

TOPIC = "Killed"
DELAYED = "KilledLater"
GROUP = "survivors"
QUEUES = 4
SENDERS = 8
SENDS_MIN = 10
"""Messages to be acknowledged under load before a broker is killed."""
DEADLINE_S = 60.0

SETTINGS = {
    # Small files, so that they fill up and kills hit the creation of new ones.
    "mappedFileSizeCommitLog": "1048576",
    "mappedFileSizeConsumeQueue": "20000",
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    "maxMessageSize": "65536",
    # Short intervals, so that kills hit these writes.
    "flushConsumerOffsetInterval": "20",
    "flushDelayOffsetInterval": "20",
    "flushIntervalConsumeQueue": "50",
    "defaultTopicQueueNums": str(QUEUES),
}


def body_of(number: int) -> bytes:
    chosen = random.Random(number)
    return b"%d:" % number + chosen.randbytes(chosen.choice((0, 10, 300, 5000)))


def number_of(message: MessageView) -> int:
    return int(message.stored_body.partition(b":")[0])


def named(number: int, **more: str) -> dict[str, str]:
    return {"UNIQ_KEY": f"{number:032d}", "KEYS": f"k{number}", "TAGS": f"t{number % 7}", **more}


@dataclass
class Ledger:
    """What the broker has acknowledged."""

    sent: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """By number of each acknowledged message: topic, queue and offset from the answer."""
    delayed: set[int] = field(default_factory=set)
    """Numbers of acknowledged delayed messages."""
    committed: dict[int, int] = field(default_factory=dict)
    """The highest offset that the consumer tried to commit, by queue."""
    topics: dict[str, int] = field(default_factory=lambda: {TOPIC: QUEUES, DELAYED: 1})
    """Topics that were sent to, with their queues."""
    numbers: Iterator[int] = field(default_factory=itertools.count)


# --- the load -------------------------------------------------------------------------------------


def header(topic: str, queue_id: int, text: str, *, batch: bool = False) -> SendMessage:
    return SendMessageV2(
        producer_group="pg",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=QUEUES,
        queue_id=queue_id,
        sys_flag=0,
        born_timestamp=int(time.time() * 1000),
        flag=0,
        properties=text,
        batch=batch,
    )


async def send(client: Client, ledger: Ledger, topic: str, chosen: random.Random) -> None:
    """Send one message, or a batch."""
    queue_id = chosen.randrange(QUEUES)
    count = chosen.choice((1, 1, 1, 5))
    numbers = list(itertools.islice(ledger.numbers, count))
    if count == 1:
        [number] = numbers
        asked = header(topic, queue_id, properties.encode(named(number)))
        answer = await client.ask(RequestCode.SEND_MESSAGE_V2, asked, body_of(number))
    else:
        entries = [
            BatchEntry(body_of(number), properties.encode(named(number)).encode())
            for number in numbers
        ]
        asked = header(topic, queue_id, "", batch=True)
        body = encode_batch(entries)
        answer = await client.ask(RequestCode.SEND_BATCH_MESSAGE, asked, body)
    if answer.code == ResponseCode.SUCCESS:
        stored = SendMessageAnswer.from_ext_fields(answer.ext_fields)
        for place, number in enumerate(numbers):
            ledger.sent[number] = (topic, stored.queue_id, stored.queue_offset + place)


async def send_later(client: Client, ledger: Ledger) -> None:
    number = next(ledger.numbers)
    text = properties.encode(named(number, DELAY="1"))
    answer = await client.ask(
        RequestCode.SEND_MESSAGE_V2, header(DELAYED, 0, text), body_of(number)
    )
    if answer.code == ResponseCode.SUCCESS:
        ledger.delayed.add(number)


async def keep_sending(client: Client, ledger: Ledger, topic: str, chosen: random.Random) -> None:
    while True:
        if chosen.random() < 0.05:
            await send_later(client, ledger)
        else:
            await send(client, ledger, topic, chosen)


async def keep_consuming(client: Client, ledger: Ledger, queue_id: int) -> None:
    """Read a queue from the group's committed offset, and commit what was read."""
    query = QueryConsumerOffset(consumer_group=GROUP, topic=TOPIC, queue_id=queue_id)
    offset = await client.offset(RequestCode.QUERY_CONSUMER_OFFSET, query)
    while True:
        answer = await client.pull(offset, TOPIC, queue_id, hold_ms=1000)
        if answer.code == ResponseCode.SUCCESS:
            offset = pulled(answer).next_begin_offset
            ledger.committed[queue_id] = max(offset, ledger.committed.get(queue_id, 0))
            update = UpdateConsumerOffset(
                consumer_group=GROUP, topic=TOPIC, queue_id=queue_id, commit_offset=offset
            )
            await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, update)


async def until_lost(work: Iterable[asyncio.Task[None]]) -> None:
    """Wait until all tasks have failed because the broker is gone."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if not isinstance(outcome, NetworkError):
            raise outcome or AssertionError("the broker is still running")


async def load_and_kill(server: Standalone, ledger: Ledger, chosen: random.Random) -> None:
    """Let senders and consumers work briefly, then kill the broker."""
    # A topic created shortly before the kill must survive with its messages.
    new = f"Killed-{next(ledger.numbers)}"
    ledger.topics[new] = QUEUES
    async with ConnectionPool(SocketNetwork()) as senders, ConnectionPool(SocketNetwork()) as own:
        sender, consumer = Client(senders, server.broker), Client(own, server.broker)
        await send(sender, ledger, TOPIC, chosen)
        enough = len(ledger.sent) + SENDS_MIN
        work = [
            asyncio.create_task(keep_sending(sender, ledger, topic, chosen))
            for topic in [TOPIC] * (SENDERS - 1) + [new]
        ]
        work += [
            asyncio.create_task(keep_consuming(consumer, ledger, queue_id))
            for queue_id in range(QUEUES)
        ]
        await asyncio.sleep(chosen.uniform(0.0, 0.4))
        # Even on a slow machine.
        await wait_until(lambda: len(ledger.sent) >= enough, DEADLINE_S)
        server.kill()
        await until_lost(work)


def kill_while_it_starts(directory: Path, settings: dict[str, str], chosen: random.Random) -> None:
    with launched(directory, settings) as process:
        time.sleep(chosen.uniform(0.1, 0.5))
        process.kill()


# --- what must have survived ----------------------------------------------------------------------


async def check(server: Standalone, ledger: Ledger) -> None:
    async with ConnectionPool(SocketNetwork()) as pool:
        client = Client(pool, server.broker)
        found: dict[int, tuple[str, int, int]] = {}
        for topic, queues in ledger.topics.items():
            for queue_id in range(queues if topic != DELAYED else 0):
                for message in await row(client, topic, queue_id):
                    number = number_of(message)
                    assert number not in found, "stored twice"
                    found[number] = (topic, queue_id, message.queue_offset)
        lost = ledger.sent.items() - found.items()
        assert not lost, f"{len(lost)} lost, such as {min(lost)}"
        await check_offsets(client, ledger, found)


async def row(client: Client, topic: str, queue_id: int) -> list[MessageView]:
    """Return the messages of a queue; each must be as sent."""
    messages = await client.messages(topic, queue_id)
    assert [message.queue_offset for message in messages] == list(range(len(messages)))
    for message in messages:
        number = number_of(message)
        assert message.stored_body == body_of(number)
        assert message.properties.items() >= named(number).items()
    return messages


async def check_offsets(
    client: Client, ledger: Ledger, found: dict[int, tuple[str, int, int]]
) -> None:
    """Check that the group's offsets are beyond neither the messages nor what it committed."""
    counts = Counter(queue_id for topic, queue_id, _ in found.values() if topic == TOPIC)
    for queue_id in range(QUEUES):
        query = QueryConsumerOffset(consumer_group=GROUP, topic=TOPIC, queue_id=queue_id)
        offset = await client.offset(RequestCode.QUERY_CONSUMER_OFFSET, query)
        assert offset <= ledger.committed.get(queue_id, 0)
        assert offset <= counts[queue_id]


async def check_delayed(server: Standalone, ledger: Ledger) -> int:
    """Wait for all delayed messages, none of them early; return the number of duplicates."""
    came: Counter[int] = Counter()
    deadline_s = time.monotonic() + DEADLINE_S
    async with ConnectionPool(SocketNetwork()) as pool:
        client = Client(pool, server.broker)
        offset = 0
        while missing := ledger.delayed - came.keys():
            answer = await client.pull(offset, DELAYED, hold_ms=1000)
            assert time.monotonic() < deadline_s, f"{missing} not delivered: {answer}"
            if answer.code == ResponseCode.SUCCESS:
                offset = pulled(answer).next_begin_offset
                for message in views(answer):
                    number = number_of(message)
                    came[number] += 1
                    assert message.stored_body == body_of(number)
                    assert message.store_timestamp_ms - message.born_timestamp_ms >= 1000
    return came.total() - len(came)


@dataclass(frozen=True)
class Outcome:
    kills: int
    acknowledged: int
    delayed: int
    repeated: int
    """Delayed messages delivered more than once; a crash may repeat, never skip."""


def kill_loop(directory: Path, flush: str, kills: int, seed: int) -> Outcome:
    chosen = random.Random(seed)
    ledger = Ledger()
    settings = {**SETTINGS, "flushDiskType": flush}
    for kill in range(kills):
        if kill and chosen.random() < 0.2:
            kill_while_it_starts(directory, settings, chosen)
            continue
        with standalone(directory, settings) as server:
            if kill % 5 == 4:
                run(check(server, ledger))
            run(load_and_kill(server, ledger, chosen))
    with standalone(directory, settings) as server:
        run(check(server, ledger))
        repeated = run(check_delayed(server, ledger))
    assert server.process.returncode == 0
    with standalone(directory, settings) as server:
        run(check(server, ledger))
        assert "Traceback" not in server.log.read_text()
    return Outcome(kills, len(ledger.sent), len(ledger.delayed), repeated)


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_broker_killed_under_load(tmp_path: Path, flush: str) -> None:
    kill_loop(tmp_path, flush, kills=3, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_broker_killed_often_under_load(
    tmp_path: Path, flush: str, record_property: Callable[[str, object], None]
) -> None:
    outcome = kill_loop(tmp_path, flush, kills=40, seed=2)
    record_property("outcome", str(outcome))
    assert outcome.acknowledged > 1000
