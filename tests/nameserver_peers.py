"""A name server in virtual time, and peers that talk to it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from turbopump.machine.files import REAL_FILES
from turbopump.nameserver import NameServer, NameServerConfig
from turbopump.nameserver.routes import RouteTable
from turbopump.net.pool import ConnectionPool
from turbopump.testing import MemoryNetwork, virtual_loop, virtual_machine
from turbopump.wire import headers
from turbopump.wire.bodies import BrokerRegistration, DataVersion, TopicConfig, TopicConfigTable
from turbopump.wire.codes import RequestCode
from turbopump.wire.command import Command, request
from turbopump.wire.schema import Header

TIMEOUT_MS = 3000
_hosts = itertools.count(1)


def config_at(directory: Path, host: str = "ns", *, is_ordered: bool = False) -> NameServerConfig:
    return NameServerConfig(
        host=host,
        kv_config_path=directory / host / "kvConfig.json",
        order_message_enable=is_ordered,
    )


@dataclass
class Peer:
    """A host with its connections."""

    host: str
    pool: ConnectionPool

    async def ask(
        self,
        server: NameServer,
        code: int,
        header: Header | None = None,
        body: bytes = b"",
    ) -> Command:
        return await self.pool.request(server.address, request(code, header, body), TIMEOUT_MS)

    async def topics(self, server: NameServer) -> bytes:
        answer = await self.ask(server, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        assert isinstance(answer.body, bytes)
        return answer.body

    async def has_route(self, server: NameServer, topic: str = "T") -> bool:
        header = headers.RouteOf(topic=topic)
        return (await self.ask(server, RequestCode.GET_ROUTEINFO_BY_TOPIC, header)).code == 0

    async def register(
        self, server: NameServer, name: str = "a", broker_id: int = 0, **topics: int
    ) -> Command:
        body = registration_body(**topics or {"T": 6})
        return await self.ask(
            server, RequestCode.REGISTER_BROKER, self.registration(name, broker_id), body
        )

    def registration(
        self,
        name: str = "a",
        broker_id: int = 0,
        *,
        crc: int | None = None,
        compressed: bool | None = None,
    ) -> headers.RegisterBroker:
        return headers.RegisterBroker(
            broker_name=name,
            broker_addr=f"{self.host}:10911",
            cluster_name="c",
            broker_id=broker_id,
            ha_server_addr=f"{self.host}:10912",
            body_crc32=crc,
            compressed=compressed,
        )


def registration(counter: int = 1, **topics: int) -> BrokerRegistration:
    """Return a registration of topics, with their permissions."""
    table = {name: TopicConfig(topic_name=name, perm=perm) for name, perm in topics.items()}
    return BrokerRegistration(
        topic_config_serialize_wrapper=TopicConfigTable(
            data_version=DataVersion(counter=counter), topic_config_table=table
        )
    )


def registration_body(counter: int = 1, **topics: int) -> bytes:
    return registration(counter, **topics).encode()


@asynccontextmanager
async def peer_on(network: MemoryNetwork, host: str | None = None) -> AsyncIterator[Peer]:
    """Create a peer on its own host, so that its connections can be cut separately."""
    host = host or f"host{next(_hosts)}"
    async with ConnectionPool(network.host(host), clock=virtual_loop().clock) as pool:
        yield Peer(host, pool)


@asynccontextmanager
async def name_server_on(
    network: MemoryNetwork, config: NameServerConfig
) -> AsyncIterator[NameServer]:
    machine = virtual_machine(REAL_FILES)
    async with NameServer(config, network.host(config.host), machine) as server:
        yield server


def validate(routes: RouteTable) -> None:
    """Assert the invariants of a table."""
    placed = {
        address: (name, broker_id)
        for name, replicas in routes._brokers.items()
        for broker_id, address in replicas.addresses.items()
    }
    assert placed == {a: (live.name, live.broker_id) for a, live in routes._live.items()}
    assert all(replicas.addresses for replicas in routes._brokers.values())
    assert all(queues for queues in routes._queues.values())
    assert routes._queues_count == sum(map(len, routes._queues.values()))
    assert all(queues.keys() <= routes._brokers.keys() for queues in routes._queues.values())
