"""The producer side of transactions, in plain requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from brokers import Client, StuckDisk, running_broker
from turbopump.broker.broker import Broker
from turbopump.net.connection import Connection
from turbopump.net.pool import ConnectionPool
from turbopump.net.router import Router
from turbopump.testing import Disk, MemoryNetwork, VirtualTimeLoop, virtual_loop
from turbopump.wire.bodies import Heartbeat, ProducerData
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.headers import CheckTransactionState, EndTransaction, SendMessageAnswer
from turbopump.wire.ids import parse_offset_id
from turbopump.wire.record import MessageView, decode_record

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
GROUP = "pg"
PREPARED = 4
HEARTBEAT_S = 30
INTERVAL_S = 60
"""Between two rounds of checks, by default."""
TIMEOUT_S = 6
"""Half messages younger than this are not checked, by default."""

_keys = count(1)


@dataclass(frozen=True)
class Place:
    """Where a half message is stored."""

    queue_offset: int
    physical_offset: int


@dataclass
class Asked:
    """A check-back."""

    place: Place
    header: CheckTransactionState
    message: MessageView
    at_ms: int


@dataclass
class Producer:
    """A producer group member that records check-backs, and answers them if given an answer."""

    client: Client
    group: str = GROUP
    client_id: str = "p1"
    decide: Callable[[Asked], int] | None = None
    queue_id: int = 0
    asked: list[Asked] = field(default_factory=list)

    async def heartbeat(self) -> None:
        producers = [ProducerData(group_name=self.group)]
        beat = Heartbeat(client_id=self.client_id, producer_data_set=producers)
        await self.client.ask(RequestCode.HEART_BEAT, body=beat.encode())

    def check(self, command: Command, peer: Connection) -> None:
        header = CheckTransactionState.from_ext_fields(command.ext_fields)
        place = Place(header.tran_state_table_offset, header.commit_log_offset)
        message = decode_record(whole_body(command))
        asked = Asked(place, header, message, virtual_loop().clock.now_ms())
        self.asked.append(asked)
        if self.decide is not None:
            end = self.end_header(place, self.decide(asked))
            peer.oneway(request(RequestCode.END_TRANSACTION, end))

    async def half(self, body: bytes = b"half", topic: str = "T", **named: str) -> Place:
        """Send a half message."""
        properties = {
            "TRAN_MSG": "true",
            "PGROUP": self.group,
            "UNIQ_KEY": f"{next(_keys):032X}",
            "WAIT": "true",
            **named,
        }
        answer = await self.client.send(
            body,
            topic,
            self.queue_id,
            named=properties,
            sys_flag=PREPARED,
            producer_group=self.group,
        )
        assert answer.code == ResponseCode.SUCCESS, answer
        return place_of(answer)

    def end_header(
        self, place: Place, decision: int, group: str | None = None, message_id: str = "x"
    ) -> EndTransaction:
        return EndTransaction(
            producer_group=self.group if group is None else group,
            tran_state_table_offset=place.queue_offset,
            commit_log_offset=place.physical_offset,
            commit_or_rollback=decision,
            msg_id=message_id,
        )

    async def end(
        self,
        place: Place,
        decision: int = COMMIT,
        group: str | None = None,
        message_id: str = "x",
    ) -> Command:
        """End a transaction, and wait for the answer."""
        header = self.end_header(place, decision, group, message_id)
        return await self.client.ask(RequestCode.END_TRANSACTION, header, timeout_ms=20_000)

    async def commit(self, body: bytes = b"half", topic: str = "T", **named: str) -> None:
        """Send a message in a transaction that commits."""
        answer = await self.end(await self.half(body, topic, **named))
        assert answer.code == ResponseCode.SUCCESS, answer


def place_of(answer: Command) -> Place:
    """Return where a half message was stored."""
    sent = SendMessageAnswer.from_ext_fields(answer.ext_fields)
    return Place(sent.queue_offset, parse_offset_id(sent.msg_id)[1])


@asynccontextmanager
async def producer_of(
    network: MemoryNetwork,
    address: str,
    client_id: str = "p1",
    group: str = GROUP,
    decide: Callable[[Asked], int] | None = None,
) -> AsyncIterator[Producer]:
    """Yield a producer that stays a member of its group."""
    router = Router()
    host = network.host(f"10.0.8.{client_id[1:]}")
    async with ConnectionPool(host, router=router, clock=virtual_loop().clock) as pool:
        producer = Producer(Client(pool, address), group, client_id, decide)
        router.add(RequestCode.CHECK_TRANSACTION_STATE, producer.check)
        await producer.heartbeat()
        beating = asyncio.create_task(_beat(producer))
        try:
            yield producer
        finally:
            beating.cancel()


async def _beat(producer: Producer) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await producer.heartbeat()


@lru_cache(maxsize=1)
def disk_at(loop: VirtualTimeLoop, _: Path) -> Disk:
    """Return the same disk for the same path, as a broker may be restarted on it."""
    return Disk(loop)


@asynccontextmanager
async def world(
    directory: Path, decide: Any = None, **changes: Any
) -> AsyncIterator[tuple[Broker, Client, Producer]]:
    """Run a broker with a client and a producer."""
    network = MemoryNetwork()
    async with (
        running_broker(directory, network, disk_at(virtual_loop(), directory), **changes) as (
            broker,
            client,
        ),
        producer_of(network, broker.address, decide=decide) as producer,
    ):
        yield broker, client, producer


async def bodies(client: Client, topic: str = "T", queue_id: int = 0) -> list[bytes]:
    return [message.body for message in await client.messages(topic, queue_id)]


async def half_on(disk: StuckDisk, broker: Broker, producer: Producer) -> Place:
    """Send a half message, and flush it to disk."""
    sending = asyncio.create_task(producer.half(b"x"))
    await asyncio.sleep(0.1)
    disk.flush(broker.store)
    return await sending
