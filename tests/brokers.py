"""A broker in virtual time, and a client that sends it plain requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from store_work import sync_log
from turbopump.broker.broker import Broker
from turbopump.broker.config import BrokerConfig, IdentityConfig
from turbopump.broker.durability import Durability
from turbopump.client.subscriptions import subscription
from turbopump.filters.sql92 import Sql
from turbopump.machine.files import REAL_FILES, Files
from turbopump.net.pool import ConnectionPool
from turbopump.store.config import FlushConfig, FlushMode, StoreConfig
from turbopump.store.flush import Flusher
from turbopump.store.store import Store
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_machine
from turbopump.wire import properties
from turbopump.wire.bodies import ConsumerData, Heartbeat
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.headers import (
    OffsetAnswer,
    PullMessage,
    PullMessageAnswer,
    SendBack,
    SendMessage,
    SendMessageV2,
    UpdateConsumerOffset,
)
from turbopump.wire.record import MessageView, decode_records
from turbopump.wire.schema import Header
from turbopump.wire.sysflag import PULL_SUBSCRIPTION, PULL_SUSPEND

BROKER_HOST = "10.0.0.1"
TIMEOUT_MS = 3000

SMALL_STORE = StoreConfig(
    segment_bytes=8 * 1024 * 1024, queue_segment_units=1000, index_slots=1000, index_entries=10_000
)


SYNC_STORE = replace(SMALL_STORE, flush=FlushConfig(mode=FlushMode.SYNC))


class StuckDisk:
    """Flushes that block until a test releases them."""

    def __init__(self) -> None:
        self.flushes: list[Future[None]] = []

    def join(self, _flusher: Flusher) -> Future[None]:
        if not self.flushes or self.flushes[-1].done():
            self.flushes.append(Future())
        return self.flushes[-1]

    def flush(self, store: Store) -> None:
        """Force written data to disk, and notify all waiters."""
        sync_log(store)
        self.flushes[-1].set_result(None)


@contextmanager
def stuck_disk() -> Iterator[StuckDisk]:
    """Give a stuck disk to all stores used in the block."""
    stuck = StuckDisk()
    with patch.object(Flusher, "join", lambda flusher: stuck.join(flusher)):
        yield stuck


@contextmanager
def shut_gate() -> Iterator[None]:
    """Let the gate report nothing in the block, neither of single requests nor of bursts."""
    with (
        patch.object(Durability, "acknowledge", lambda *_, **__: None),
        patch.object(Durability, "acknowledge_all", lambda *_: None),
    ):
        yield


def config_at(directory: Path, **changes: Any) -> BrokerConfig:
    """Return a configuration for tests; ``changes`` replace whole sections."""
    identity = IdentityConfig(broker_name="broker-a", bind_host=BROKER_HOST, port=10911)
    plain = BrokerConfig(directory=directory, identity=identity, store=SMALL_STORE)
    return replace(plain, **changes)


@asynccontextmanager
async def running_broker(
    directory: Path,
    network: MemoryNetwork | None = None,
    files: Files | None = None,
    **changes: Any,
) -> AsyncIterator[tuple[Broker, Client]]:
    """Run a broker, and yield a client that is connected to it."""
    network = network or MemoryNetwork()
    machine = virtual_machine(files or REAL_FILES, seed=1)
    config = config_at(directory, **changes)
    async with (
        Broker(config, network.host(BROKER_HOST), machine) as broker,
        client_of(network, broker.address) as client,
    ):
        yield broker, client


@asynccontextmanager
async def client_of(
    network: MemoryNetwork, address: str, host: str = "10.0.0.9"
) -> AsyncIterator[Client]:
    async with ConnectionPool(network.host(host), clock=virtual_loop().clock) as pool:
        yield Client(pool, address)


def send_header(
    topic: str = "T", queue_id: int = 0, named: Mapping[str, str] | None = None, **fields: Any
) -> SendMessage:
    """Return the header of a send with properties; ``fields`` are additional header fields."""
    defaults = {
        "producer_group": "pg",
        "topic": topic,
        "default_topic": "TBW102",
        "default_topic_queue_nums": 4,
        "queue_id": queue_id,
        "sys_flag": 0,
        "born_timestamp": virtual_loop().clock.now_ms(),
        "flag": 0,
        "properties": properties.encode(named or {}),
    }
    return SendMessageV2(**{**defaults, **fields})


class Client:
    """Sends requests and reads answers, with defaults for irrelevant fields."""

    def __init__(self, pool: ConnectionPool, address: str) -> None:
        self.pool = pool
        self.address = address

    async def ask(
        self,
        code: int,
        header: Header | None = None,
        body: bytes = b"",
        timeout_ms: int = TIMEOUT_MS,
    ) -> Command:
        return await self.pool.request(self.address, request(code, header, body), timeout_ms)

    async def send(
        self,
        body: bytes = b"hello",
        topic: str = "T",
        queue_id: int = 0,
        named: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Command:
        """Send a message with properties; ``fields`` are additional header fields."""
        header = send_header(topic, queue_id, named, **fields)
        code = RequestCode.SEND_BATCH_MESSAGE if header.batch else RequestCode.SEND_MESSAGE_V2
        return await self.ask(code, header, body)

    async def send_oneway(self, body: bytes = b"hello", **named: str) -> None:
        """Send a one-way message."""
        command = request(RequestCode.SEND_MESSAGE_V2, send_header(named=named), body)
        connection = await self.pool.connection(self.address)
        connection.oneway(command)

    async def pull(
        self,
        offset: int = 0,
        topic: str = "T",
        queue_id: int = 0,
        tags: str = "*",
        hold_ms: int = 0,
        **fields: Any,
    ) -> Command:
        """Pull with the subscription in the request; ``hold_ms`` makes it a long poll."""
        sys_flag = PULL_SUBSCRIPTION | (PULL_SUSPEND if hold_ms else 0)
        header = PullMessage(
            **{
                "consumer_group": "g",
                "topic": topic,
                "queue_id": queue_id,
                "queue_offset": offset,
                "max_msg_nums": 32,
                "sys_flag": sys_flag,
                "commit_offset": 0,
                "suspend_timeout_millis": hold_ms,
                "subscription": tags,
                "sub_version": 0,
                **fields,
            }
        )
        return await self.ask(RequestCode.PULL_MESSAGE, header, timeout_ms=hold_ms + 20_000)

    async def messages(self, topic: str = "T", queue_id: int = 0) -> list[MessageView]:
        """Return all messages of a queue."""
        found: list[MessageView] = []
        offset = 0
        while True:
            answer = await self.pull(offset, topic, queue_id)
            if answer.code != ResponseCode.SUCCESS:
                return found
            found += views(answer)
            offset = pulled(answer).next_begin_offset

    async def send_back(self, message: MessageView, group: str = "g", **fields: Any) -> Command:
        header = SendBack(
            **{
                "offset": message.physical_offset,
                "group": group,
                "delay_level": 0,
                "origin_topic": message.topic,
                **fields,
            }
        )
        return await self.ask(RequestCode.CONSUMER_SEND_MSG_BACK, header)

    async def offset(self, code: int, header: Header) -> int:
        answer = await self.ask(code, header)
        assert answer.code == ResponseCode.SUCCESS, answer
        return OffsetAnswer.from_ext_fields(answer.ext_fields).offset


async def use_all_tables(client: Client) -> None:
    """Create a topic, a group with an SQL92 subscription, an offset and a delayed message."""
    wanted = subscription("T", Sql("n > 1"), 5)
    data = ConsumerData(group_name="g", subscription_data_set=[wanted])
    beat = Heartbeat(client_id="c", consumer_data_set=[data])
    await client.send(topic="T")
    await client.ask(RequestCode.HEART_BEAT, body=beat.encode())
    commit = UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=1)
    await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
    await client.send(topic="T", named={"DELAY": "1"})


def views(answer: Command) -> list[MessageView]:
    """Return the messages in a pull response."""
    return list(decode_records(whole_body(answer)))


def pulled(answer: Command) -> PullMessageAnswer:
    return PullMessageAnswer.from_ext_fields(answer.ext_fields)
