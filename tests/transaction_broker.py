"""A scripted broker that accepts half messages, records how they end, and checks back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from scripted_broker import Batch, Decide, ScriptedBroker
from turbopump.client.config import ClientConfig
from turbopump.client.session import Session
from turbopump.message import PhysicalOffset, QueueOffset
from turbopump.net.connection import Connection
from turbopump.net.request_protocol import RequestHook
from turbopump.net.router import Router
from turbopump.net.server import Server, ServerConfig
from turbopump.testing import LinkQuality, MemoryNetwork, virtual_loop, virtual_machine
from turbopump.wire import properties
from turbopump.wire.bodies import Heartbeat
from turbopump.wire.codes import RequestCode, ResponseCode
from turbopump.wire.command import Command, request, whole_body
from turbopump.wire.headers import CheckTransactionState, EndTransaction, SendMessageAnswer
from turbopump.wire.hosts import host
from turbopump.wire.ids import offset_id
from turbopump.wire.record import Record

HOST = host("10.0.0.1", 10911)
RECORD_BYTES = 300


def half_stored(batch: Batch, code: int = ResponseCode.SUCCESS) -> Command:
    """Return the answer to a stored half message."""
    answer = SendMessageAnswer(
        msg_id=offset_id(HOST, physical_offset(batch)),
        queue_id=batch.queue_id,
        queue_offset=batch.number,
    )
    return batch.request.answer(code, answer)


def physical_offset(batch: Batch) -> PhysicalOffset:
    return PhysicalOffset(batch.number * RECORD_BYTES)


def named(batch: Batch) -> dict[str, str]:
    """Return the properties of a sent message."""
    return properties.decode((batch.request.ext_fields or {})["i"])


@dataclass
class TransactionBroker(ScriptedBroker):
    """Stores nothing, but records the requests it receives."""

    decide: Decide = half_stored
    ends: list[Command] = field(default_factory=list)
    peers: dict[str, Connection] = field(default_factory=dict)
    """The connection of each producer group, from heartbeats."""

    @property
    def ended(self) -> list[tuple[int, bool | None]]:
        """The decisions, and whether each followed a check."""
        headers = [EndTransaction.from_ext_fields(each.ext_fields) for each in self.ends]
        return [(each.commit_or_rollback, each.from_transaction_check) for each in headers]

    def router(self) -> Router:
        router = super().router()
        router.add(RequestCode.END_TRANSACTION, self.end)
        return router

    def heartbeat(self, request: Command, peer: Connection) -> Command:
        for producer in Heartbeat.decode(whole_body(request)).producer_data_set:
            self.peers[producer.group_name] = peer
        return request.answer(ResponseCode.SUCCESS)

    def end(self, request: Command, _: Connection) -> None:
        self.ends.append(request)

    def check(self, batch: Batch, group: str = "pg", moved_by: int = 0) -> None:
        """Check back on a half message with a group, after moving it by ``moved_by`` places."""
        text = properties.encode({**named(batch), "TRANSACTION_CHECK_TIMES": "1"})
        record = Record(
            topic=(batch.request.ext_fields or {})["b"].encode(),
            queue_id=batch.queue_id,
            body=batch.bodies[0],
            properties=text.encode(),
            born_timestamp_ms=1,
            born_host=HOST,
            store_host=HOST,
        )
        queue_offset = batch.number + moved_by
        position = PhysicalOffset(queue_offset * RECORD_BYTES)
        header = CheckTransactionState(
            tran_state_table_offset=queue_offset,
            commit_log_offset=position,
            msg_id=named(batch)["UNIQ_KEY"],
            transaction_id=named(batch)["UNIQ_KEY"],
            offset_msg_id=offset_id(HOST, position),
        )
        self.ask(header, record.encode(QueueOffset(queue_offset), position, 2), group)

    def ask(self, header: CheckTransactionState | None, body: bytes, group: str = "pg") -> None:
        """Send the given check."""
        command = request(RequestCode.CHECK_TRANSACTION_STATE, header, body)
        self.post(lambda: self.peers[group].oneway(command))


@dataclass
class World:
    """A broker in virtual time, and its network."""

    broker: TransactionBroker
    network: MemoryNetwork
    server: Server

    def session(
        self, host: str = "10.0.1.1", hooks: tuple[RequestHook, ...] = (), namespace: str = ""
    ) -> Session:
        config = ClientConfig(self.broker.address, host=host, instance="test", namespace=namespace)
        return Session(
            config,
            self.network.host(host),
            virtual_machine(seed=1),
            hooks=hooks,
        )


@asynccontextmanager
async def transaction_world(decide: Decide = half_stored) -> AsyncIterator[World]:
    """Run a broker in virtual time, which is its own name server."""
    network = MemoryNetwork(LinkQuality(jitter=0, cut_chance=0))
    broker = TransactionBroker(decide)
    config = ServerConfig("10.0.0.1", 10911)
    clock = virtual_loop().clock
    server = Server(network.host("10.0.0.1"), broker.router(), config, clock=clock)
    async with server:
        broker.address = server.address
        yield World(broker, network, server)


async def settled() -> None:
    """Wait for pending work to complete."""
    await asyncio.sleep(1)
